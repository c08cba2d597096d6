"""Taking one record for each of many consumers: the request, and the payload of its answer. Pure.

Only the records that are taken travel, not the batches that hold them: whoever takes one message at a time would
otherwise move a thousand for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from quiver.errors import DecodeError
from quiver.model import Buffer, ConsumerId, PartitionId, TopicId
from quiver.record import Record
from quiver.wire.requests import Request, Response

CONSUMERS_MAX = 1_000

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[Record | None])


class ManyConsumed(Response, frozen=True):
    """A record or nothing for each who asked, in that order, as the payload.

    It may end before all were served, but not before the first was: nothing was done for the others.
    """


class ConsumeMany(Request[ManyConsumed], frozen=True, tag="take_each"):
    """Take a record for each of these consumers at its cursor, in one replicated step; who is named twice gets two."""

    response = ManyConsumed
    _repeatable = False
    waits_for_index = True

    topic_id: TopicId
    partition_id: PartitionId
    consumer_ids: Annotated[tuple[ConsumerId, ...], Meta(min_length=1, max_length=CONSUMERS_MAX)]


def encode_consumed(records: Sequence[Record | None]) -> bytes:
    """Return the payload of an answer."""
    return _encode(records)


def decode_consumed(payload: Buffer) -> list[Record | None]:
    """Return what `encode_consumed` was given; raises `DecodeError`."""
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise DecodeError(f"no records that were taken: {error}") from None
