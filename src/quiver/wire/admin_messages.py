"""What a node tells of itself: who it is, how far it has come, its replicas, who lags behind what it leads. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from quiver.model import GroupId, Index, NodeId, Offset, PartitionId, TopicId
from quiver.wire.requests import RESULTS_MAX, Count, Done, Name, Request, Response

LAGS_MAX = 200
"""How many lags a node tells of at most: they become labels of metrics."""


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica on the node that was asked; the last three are known to the leader alone."""

    topic_id: TopicId
    partition_id: PartitionId
    group: GroupId
    role: str
    epoch: int
    leader: NodeId | None = None
    first_offset: Offset = Offset(0)
    end_offset: Offset = Offset(0)
    """The high watermark."""
    bytes: int = 0
    is_ready: bool = True
    in_sync: tuple[NodeId, ...] = ()
    voters: tuple[NodeId, ...] = ()
    learners: tuple[NodeId, ...] = ()


class LagInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How many records a consumer has yet to consume, in those partitions of a topic that the asked node leads."""

    consumer: str
    """Its name, or its id if it has none."""
    topic: str
    records: int


class NodeDescribed(Response, frozen=True):
    """A node as it is now."""

    node: NodeId
    version: str
    pid: int
    roles: tuple[str, ...]
    started_ms: int
    is_ready: bool
    primary: NodeId | None = None
    applied_index: Index = Index(0)
    stored_index: Index = Index(0)
    commit_index: Index = Index(0)
    digest: str = ""
    """Of the metadata at `applied_index`, if it was asked for."""
    replicas: tuple[ReplicaInfo, ...] = ()
    lags: tuple[LagInfo, ...] = ()
    """Of those who lag most, at most `LAGS_MAX`, the greatest lag first."""
    holds: int = 0
    """How many holds there are in the cluster."""


class DescribeNode(Request[NodeDescribed], frozen=True, tag="describe_node"):
    """Ask the node that is reached about itself; never handed on."""

    response = NodeDescribed
    is_read = True

    with_replicas: bool = False
    with_digest: bool = False
    with_lags: bool = False
    topic: Name | None = None
    """Only replicas of this topic."""


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
