"""One member's state, and the transitions that every module needs: a new term, becoming a follower.

The modules around this one are verbs on a `RaftState`; it is their only common ground. They write what they
want done into `state.output`. Nothing here reads a clock: `now_ms` is what the last event said. `RaftConfig` holds the
settings of a member, `RaftStatus` describes one for people, metrics and tests.

Invariants: `leadership` is set exactly while the role is leader, `campaign` exactly while a candidate
of either kind; `matched` is reset whenever the term changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from quiver.clock import Rng
from quiver.errors import ConfigError, invariant
from quiver.model import Index, NodeId, Term
from quiver.raft.configuration import Configuration
from quiver.raft.leadership import Leadership
from quiver.raft.log import InitialState, RaftLog
from quiver.raft.messages import Entry, Outgoing, RaftMessage
from quiver.raft.output import HardState, Output, Role, RoleChange
from quiver.raft.progress import RaftPeerStatus


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
    idle_ticks_before_hibernation: int = 3
    """Number of idle heartbeats before a group hibernates."""
    trace: bool = False
    """Fill `Output.trace` with one line per decision."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_interval_ms < self.election_timeout_ms:
            raise ConfigError("heartbeat_interval_ms must be positive and below election_timeout_ms")
        bounds = (self.append_bytes_max, self.inflight_messages_max, self.inflight_bytes_max)
        if min(*bounds, self.uncommitted_bytes_max, self.reads_pending_max) <= 0:
            raise ConfigError("every bound of a Raft group must be positive")


class Campaign:
    """A count of votes, or of pre-votes."""

    __slots__ = ("granted", "pre", "refused")

    def __init__(self, *, pre: bool) -> None:
        self.pre = pre
        self.granted: set[NodeId] = set()
        self.refused: set[NodeId] = set()


class RaftState:
    """Everything a member knows."""

    __slots__ = (
        "acknowledged",
        "campaign",
        "config",
        "configuration",
        "disk_full",
        "disk_low",
        "election_deadline_ms",
        "election_timeout_ms",
        "hibernating",
        "id",
        "is_electable",
        "is_joining",
        "is_voter",
        "join_index",
        "leader",
        "leader_contact_ms",
        "leadership",
        "log",
        "matched",
        "now_ms",
        "output",
        "recover_until",
        "restoring",
        "rng",
        "role",
        "round",
        "round_heard",
        "term",
        "ticket",
        "tracing",
        "vote",
    )

    def __init__(self, config: RaftConfig, initial: InitialState, *, rng: Rng, now_ms: int) -> None:
        self.config = config
        self.id = config.id
        self.tracing = config.trace
        self.rng = rng
        self.now_ms = now_ms
        self.log = RaftLog(initial)
        self.configuration = self.log.configurations.active
        self.is_voter = self.configuration.is_voter(self.id)
        self.is_electable = True
        is_saved = initial.term >= self.log.terms.last_term  # else the crash fell between the two writes (R4)
        self.term = initial.term if is_saved else self.log.terms.last_term
        self.vote = initial.vote if is_saved else None
        self.role = Role.FOLLOWER
        self.leader: NodeId | None = None
        self.leader_contact_ms = now_ms
        self.leadership: Leadership | None = None
        self.campaign: Campaign | None = None
        self.matched = self.log.commit
        self.acknowledged = Index(0)
        self.round_heard = 0
        self.round = 0
        self.ticket = 0
        self.hibernating = False
        self.recover_until = initial.recover_until
        self.is_joining = initial.is_joining
        self.join_index: Index | None = None
        """How far a joining member must catch up: an index that the leader of this term said to be committed."""
        self.restoring: Index | None = None
        self.disk_low = self.disk_full = False
        """What this member says of its disk; see `Raft.set_room`."""
        self.election_timeout_ms = 0
        self.election_deadline_ms = 0
        self.output = Output(self.term, None)
        self.reset_election_timer()

    # The frame of every event

    def begin(self, now_ms: int | None = None) -> None:
        """Start an event with an empty output."""
        if now_ms is not None:
            self.now_ms = now_ms
        self.output = Output(self.term, None)

    def finish(self) -> Output:
        """End an event: no message may overtake an unsaved hard state (R2)."""
        output = self.output
        output.term = self.term
        leadership = self.leadership
        if leadership is not None and not self.hibernating:
            output.next_deadline_ms = leadership.heartbeat_deadline_ms
        else:
            output.next_deadline_ms = self.next_deadline_ms()
        if output.hard_state is not None:
            output.messages_after_save = output.messages
            output.messages = []
        return output

    def next_deadline_ms(self) -> int | None:
        """Return when a tick is due at the latest."""
        if self.hibernating:
            return None
        if self.leadership is not None:
            return self.leadership.heartbeat_deadline_ms
        return self.election_deadline_ms if self.may_campaign() else None

    # Small questions

    def may_vote(self) -> bool:
        """Return whether this member may grant votes (R18, R22, R24).

        A recovering member has lost entries that it acknowledged. A member that no configuration of its own log names
        may have lost all of them. A joining one may have been a member before: as it receives the log from its
        beginning it passes configurations that name it, perhaps as the only voter, and that ended long ago.
        """
        return self.recover_until is None and not self.is_joining and self.is_named()

    def is_named(self) -> bool:
        """Return whether a configuration of this member's own log, in force or still possible, includes it."""
        if self.configuration.includes(self.id):
            return True
        return any(known.includes(self.id) for known in self.relevant_configurations())

    def may_campaign(self) -> bool:
        """Return whether this member may ask for votes: it may vote, and it is a voter itself.

        It is one until its removal is known to be committed: until then it may be the only one whose log is
        long enough to be elected (dissertation §4.2.2). A member that has resigned does not.
        """
        if not self.is_electable:
            return False
        if self.is_voter and self.recover_until is None and not self.is_joining:
            return True
        return self.may_vote() and any(known.is_voter(self.id) for known in self.relevant_configurations())

    @property
    def is_blank(self) -> bool:
        """Return whether no configuration is known: the leader's first messages bring one."""
        return not self.configuration.members

    def relevant_configurations(self) -> Iterator[Configuration]:
        """Return, latest first, the configurations that may be in force for someone."""
        return self.log.configurations.since(self.log.commit)

    def leader_is_fresh(self) -> bool:
        """Return whether a leader was heard from within the shortest election timeout (dissertation §4.2.3).

        A leader is always fresh to itself: check-quorum ends its role otherwise. While hibernating the
        driver's node-level heartbeats stand in for the leader's.
        """
        if self.role is Role.LEADER:
            return True
        if self.leader is None:
            return False
        return self.hibernating or self.now_ms - self.leader_contact_ms < self.config.election_timeout_ms

    def acknowledgeable(self) -> Index:
        """Return the last index this member may acknowledge: equal to the leader's log, and durable here (R3)."""
        return min(self.matched, self.log.durable)

    # Effects

    def send(self, to: NodeId, message: RaftMessage) -> None:
        """Queue a message."""
        self.output.messages.append(Outgoing(to, message))

    def trace(self, text: str) -> None:
        """Add a line for people; call it only while `tracing`."""
        self.output.trace = (*self.output.trace, text)

    def append(self, entries: Sequence[Entry]) -> None:
        """Append entries to the log, and put their configurations in force (§6)."""
        brought_configuration = self.log.append(entries)
        output = self.output
        output.append = entries if not output.append else (*output.append, *entries)
        if brought_configuration:
            self.refresh_configuration()

    def mark_matched(self, index: Index) -> None:
        """Record that this log equals the leader's up to `index`: the last entry of an accepted append (R7).

        Not the log's end: a tail beyond the append may be another leader's.
        """
        self.matched = max(self.matched, index)

    def truncate(self, first_index: Index) -> None:
        """Truncate the log from `first_index` on, and revert its configurations."""
        invariant(self.leadership is None, "a leader never overwrites its log")  # Leader Append-Only, Figure 3
        self.log.truncate(first_index, term=self.term)
        self.output.truncate_from = first_index
        self.refresh_configuration()
        if self.tracing:
            self.trace(f"truncate from {first_index}")

    def commit_to(self, index: Index) -> bool:
        """Raise the commit index; return whether it moved."""
        newly = self.log.advance_commit(index)
        if not newly:
            return False
        self.output.committed = newly
        if self.tracing:
            self.trace(f"commit {index}")
        return True

    def latest_configuration(self) -> Configuration:
        """Return the configuration that must be in force: the latest in the log, committed or not (§6)."""
        return self.log.configurations.active

    def electorates(self) -> tuple[tuple[NodeId, ...], ...]:
        """Return the sets of voters of which each must agree: two in a joint configuration (§6)."""
        return self.configuration.electorates

    def refresh_configuration(self) -> None:
        """Put the latest configuration of the log in force."""
        configuration = self.latest_configuration()
        if configuration is self.configuration:
            return
        self.configuration = configuration
        self.is_voter = configuration.is_voter(self.id)
        if self.tracing:
            self.trace(f"configuration {configuration}")
        if self.leadership is not None:
            self.reconfigure(self.leadership, next_index=self.log.terms.last_index)

    def reconfigure(self, leadership: Leadership, *, next_index: Index) -> None:
        """Let the leadership count and serve the members of the active configuration, new ones from `next_index`."""
        leadership.reconfigure(
            self.configuration, electorates=self.electorates(), next_index=next_index, now_ms=self.now_ms
        )

    def save_hard_state(self) -> None:
        """Ask for term and vote to be made durable before any message of this output leaves (R2)."""
        self.output.hard_state = HardState(self.term, self.vote)

    def enter_term(self, term: Term, *, vote: NodeId | None) -> None:
        """Begin a later term; what was matched to the last leader's log no longer counts.

        Committed entries are in every later leader's log (Leader Completeness, §5.4), so they match.
        """
        self.term = term
        self.vote = vote
        self.matched = self.log.commit
        self.acknowledged = Index(0)
        self.round_heard = 0
        self.join_index = None
        self.save_hard_state()

    def become_follower(self, term: Term, leader: NodeId | None) -> None:
        """Follow `leader`, if one is known, in `term` (§5.1)."""
        if term > self.term:
            self.enter_term(term, vote=None)
        if self.leadership is not None:
            self._end_leadership(self.leadership)
        self.role = Role.FOLLOWER
        self.leadership = None
        self.campaign = None
        self.hibernating = False
        self.leader = leader
        self.reset_election_timer()
        self.announce()

    def announce(self) -> None:
        """Report the new role to the driver."""
        self.output.became = RoleChange(self.role, self.term, self.leader)
        if self.tracing:
            leader = "" if self.leader is None else f", leader n{self.leader}"
            self.trace(f"{self.role} in term {self.term}{leader}")

    def reset_election_timer(self) -> None:
        """Draw a new election timeout and start it (§5.2); until the next draw a heartbeat only restarts it."""
        timeout_ms = self.config.election_timeout_ms
        self.election_timeout_ms = timeout_ms + int(self.rng.random() * timeout_ms)
        self.election_deadline_ms = self.now_ms + self.election_timeout_ms

    def next_ticket(self) -> int:
        """Return a number that no other permission to send has."""
        self.ticket += 1
        return self.ticket

    def _end_leadership(self, leadership: Leadership) -> None:
        self.leader_contact_ms = self.now_ms  # until now there was a leader: this member itself
        log = self.log
        if log.terms.last_index > log.commit:
            self.output.proposals_lost = Index(log.commit + 1)
        self.output.reads_failed = leadership.reads.contexts()


class RaftStatus(Struct, frozen=True, kw_only=True):
    """A member at one moment; `peers` is empty unless it leads."""

    id: NodeId
    role: Role
    term: Term
    vote: NodeId | None
    leader: NodeId | None
    first_index: Index
    last_index: Index
    durable_index: Index
    commit_index: Index
    applied_index: Index
    configuration: Configuration
    peers: tuple[RaftPeerStatus, ...]
    transfer_to: NodeId | None
    uncommitted_bytes: int
    reads_pending: int
    hibernating: bool
    recovering: bool


def describe_member(state: RaftState) -> RaftStatus:
    """Return a member's status."""
    log, leadership = state.log, state.leadership
    transfer = leadership.transfer if leadership is not None else None
    return RaftStatus(
        id=state.id,
        role=state.role,
        term=state.term,
        vote=state.vote,
        leader=state.leader,
        first_index=log.terms.first_index,
        last_index=log.terms.last_index,
        durable_index=log.durable,
        commit_index=log.commit,
        applied_index=log.applied,
        configuration=state.configuration,
        peers=tuple(peer.status() for peer in leadership.peers) if leadership is not None else (),
        transfer_to=transfer.to if transfer is not None else None,
        uncommitted_bytes=leadership.uncommitted_bytes if leadership is not None else 0,
        reads_pending=len(leadership.reads) if leadership is not None else 0,
        hibernating=state.hibernating,
        recovering=state.recover_until is not None,
    )
