"""The request behind `quiver explain`: one replica, in full, as its own node sees it. Pure."""

from __future__ import annotations

import msgspec

from quiver.model import GroupId, Index, NodeId, Offset, TopicId
from quiver.wire.requests import PartitionNumber, Request, Response


class ObstacleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Why a replica does not accept or deliver records just now."""

    code: str
    """The code of the error that clients get, where there is one."""
    sentence: str


class ReplicaEventInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An election or a change of members that a replica has seen since its process started."""

    at_ms: int
    kind: str
    """leader, follower, candidate, pre_candidate, members, or transfer."""
    epoch: int
    leader: NodeId | None = None
    members: tuple[NodeId, ...] = ()
    learners: tuple[NodeId, ...] = ()


class FollowerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Another replica as the leader sees it."""

    node: NodeId
    state: str
    """probe, replicate, snapshot or lost: how the leader sends to it; full: its disk has no room for entries."""
    match_index: Index
    silent_ms: int


class CursorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer's cursor, which keeps records of a topic that keeps them until they are consumed."""

    consumer: str
    """Its name, or its id if it has none."""
    cursor: Offset | None
    """None: it has no cursor yet and keeps everything."""


class ReplicaExplained(Response, frozen=True):
    """One replica. Indexes count entries, which include internal ones; offsets count records."""

    node: NodeId
    state: str
    """missing, opening, open, closing, unusable, or another state that the node gives it."""
    problem: str = ""
    """Why it is not open."""
    group: GroupId = GroupId(0)
    role: str = ""
    epoch: int = 0
    leader: NodeId | None = None
    since_ms: int = 0
    """When its role or leader changed last, or it was opened; wall clock."""
    is_ready: bool = False
    """Whether it leads and knows everything that is committed."""
    is_hibernating: bool = False
    transfer_to: NodeId | None = None
    first_index: Index = Index(0)
    end_index: Index = Index(0)
    durable_index: Index = Index(0)
    commit_index: Index = Index(0)
    applied_index: Index = Index(0)
    first_offset: Offset = Offset(0)
    log_end_offset: Offset = Offset(0)
    """The offset after its last record, committed or not."""
    high_watermark: Offset = Offset(0)
    bytes: int = 0
    voters: tuple[NodeId, ...] = ()
    learners: tuple[NodeId, ...] = ()
    in_sync: tuple[NodeId, ...] = ()
    followers: tuple[FollowerInfo, ...] = ()
    held_offset: Offset | None = None
    slowest: tuple[CursorInfo, ...] = ()
    """With retention until consumed: the cursors furthest behind."""
    free_bytes: int | None = None
    obstacles: tuple[ObstacleInfo, ...] = ()
    """Why a leader does not accept records now, or a follower does not store them; empty if it does."""
    events: tuple[ReplicaEventInfo, ...] = ()
    """Oldest first, a bounded number."""
    now_ms: int = 0


class ExplainReplica(Request[ReplicaExplained], frozen=True, tag="explain_replica"):
    """Return the replica of a partition on the node that receives it; never forwarded."""

    response = ReplicaExplained
    is_read = True

    topic_id: TopicId
    partition_id: PartitionNumber
