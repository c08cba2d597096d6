"""What can be asked about holds: records that retention leaves alone for somebody who has yet to read them. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from quiver.model import Offset, PartitionId, TopicId
from quiver.wire.requests import RESULTS_MAX, Count, Done, Name, Request, Response

HeldOffsets = Annotated[tuple[tuple[PartitionId, Offset], ...], Meta(max_length=RESULTS_MAX)]
"""From where on records are held, by partition."""


class HoldInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A hold on a topic's records; times are the primary's."""

    name: str
    topic: str
    topic_id: TopicId
    offsets: HeldOffsets
    owner: str = ""
    placed_ms: int = 0
    expires_ms: int = 0


class HoldsFound(Response, frozen=True):
    """The holds that there are, by topic and name."""

    holds: tuple[HoldInfo, ...] = ()


class ListHolds(Request[HoldsFound], frozen=True, tag="list_holds"):
    """Ask who holds records."""

    response = HoldsFound
    waits_for_index = True
    is_read = True


class PlaceHoldRequest(Request[Done], frozen=True, tag="place_hold"):
    """Keep a topic's records from these offsets on for `lasting_ms`; asked again, it is renewed and moved."""

    response = Done
    _idempotent = True

    topic_id: TopicId
    name: Name
    offsets: HeldOffsets
    lasting_ms: Count
    owner: Name = ""


class ReleaseHoldRequest(Request[Done], frozen=True, tag="release_hold"):
    """Let a hold go, on one topic or on all; one that is gone already is no error."""

    response = Done
    _idempotent = True

    name: Name
    topic_id: TopicId | None = None
