"""Settings and initial state of a core.

Both are plain values. The driver reads them from the node's settings and from storage; the core trusts
them, except that a term older than the log's is raised (see `InitialState`).
"""

from __future__ import annotations

from msgspec import Struct

from quiver.errors import ConfigError
from quiver.model import Index, NodeId, Term
from quiver.raft.configuration import Configuration
from quiver.raft.messages import SnapshotMetadata


class RaftConfig(Struct, frozen=True, kw_only=True):
    """Settings of one member of one group. Every bound is here.

    Election timeouts are drawn from [election_timeout_ms, 2 × election_timeout_ms).
    """

    id: NodeId
    election_timeout_ms: int = 500
    heartbeat_interval_ms: int = 100
    append_bytes_max: int = 1 << 20
    """Most bytes of entries in one append (one entry may exceed it)."""
    inflight_messages_max: int = 64
    """Most unacknowledged appends per follower."""
    inflight_bytes_max: int = 16 << 20
    """Most unacknowledged bytes per follower."""
    uncommitted_bytes_max: int = 64 << 20
    """Most proposed but uncommitted bytes; beyond it proposals are refused."""
    reads_pending_max: int = 10_000
    """Most reads that wait for a round; beyond it reads are refused."""
    promotion_lag_max: int = 1_000
    """A learner may become a voter when it misses at most this many entries."""
    hibernation: bool = False
    idle_ticks_before_hibernation: int = 10
    """Number of idle heartbeats before a group hibernates."""
    trace: bool = False
    """Fill `Output.trace` with one line per decision."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_interval_ms < self.election_timeout_ms:
            raise ConfigError("heartbeat_interval_ms must be positive and below election_timeout_ms")
        bounds = (self.append_bytes_max, self.inflight_messages_max, self.inflight_bytes_max)
        if min(*bounds, self.uncommitted_bytes_max, self.reads_pending_max) <= 0:
            raise ConfigError("every bound of a Raft group must be positive")


class InitialState(Struct, frozen=True, kw_only=True):
    """The content of the disk when a member starts; all of it is durable.

    A new group is bootstrapped by giving each first member the same configuration at index 0, once in
    the member's life: a node whose disk was lost must come back under a new id (R22). A member without
    any configuration that names it is *blank*: it accepts entries but neither votes nor campaigns.

    `term` may be older than the last entry's if the crash fell between the two writes: it is then raised,
    with no vote, which is right because a vote or answer of that term cannot have been sent (R4).
    """

    term: Term = Term(0)
    vote: NodeId | None = None
    first_index: Index = Index(1)
    """Where the log starts."""
    last_index: Index = Index(0)
    base_term: Term = Term(0)
    """Term of the entry before `first_index`; 0 if there never was one."""
    terms: tuple[tuple[Index, Term], ...] = ()
    """`(first index, term)` of each run of entries from `first_index` on."""
    commit: Index = Index(0)
    """A lower bound of the commit index, if known, such as the applied index."""
    configurations: tuple[tuple[Index, Configuration], ...] = ()
    snapshot: SnapshotMetadata | None = None
    recover_until: Index | None = None
    """Set when the log lost entries that this member may have acknowledged: the last such index (R18)."""
