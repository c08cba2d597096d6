"""The public interface of the Raft core: events in, one `Output` each.

`Raft` decides nothing itself: it applies the rules about terms that hold for every message (§5.1), then
passes the event to the module that handles it. It does no input or output, reads no clock, and draws
randomness only from the `Rng` it was given, so the same events always give the same outputs.

Contract: one thread; `now_ms` never goes back; each output is carried out as `Output` says, before or
while further events come in. After a stall a driver should deliver what has arrived before it ticks. A
method that raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

from quiver.clock import Rng
from quiver.errors import invariant
from quiver.model import TERM_MAX, Index, NodeId, Term
from quiver.raft import (
    commitment,
    election,
    follower,
    hibernation,
    leader,
    membership,
    sending,
    snapshots,
)
from quiver.raft.configuration import Configuration
from quiver.raft.log import InitialState
from quiver.raft.messages import (
    Append,
    AppendResponse,
    Entry,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    RaftMessage,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)
from quiver.raft.output import Output, Role
from quiver.raft.progress import LOST, SNAPSHOT
from quiver.raft.state import Campaign, RaftConfig, RaftState, RaftStatus, describe_member

TERM_FREE_MAX = 1 << 48
"""Up to here any later term is believed: a cluster that elects a leader each millisecond needs 8,900 years for it."""
TERM_STEP_MAX = 1 << 24
"""Beyond it, how far a message's term may exceed one's own: to use up the rest of the terms takes 2²⁹ saved steps."""

Knows = Callable[[NodeId], bool]
"""Return whether a node belongs to the cluster, for all that this node knows."""


def know_everyone(_: NodeId) -> bool:
    """Know every node: for groups whose network has no strangers."""
    return True


class Raft:
    """One member of one Raft group."""

    __slots__ = ("_knows", "_state")

    def __init__(
        self, config: RaftConfig, initial: InitialState, *, rng: Rng, now_ms: int, knows: Knows = know_everyone
    ) -> None:
        self._state = RaftState(config, initial, rng=rng, now_ms=now_ms)
        self._knows = knows

    # Questions

    @property
    def id(self) -> NodeId:
        """Return this member's node."""
        return self._state.id

    @property
    def term(self) -> Term:
        """Return the current term."""
        return self._state.term

    @property
    def role(self) -> Role:
        """Return what this member is."""
        return self._state.role

    @property
    def leader(self) -> NodeId | None:
        """Return the leader of the current term, as far as known: where refused callers should go."""
        return self._state.leader

    @property
    def is_leader(self) -> bool:
        """Return whether this member leads."""
        return self._state.leadership is not None

    @property
    def is_ready(self) -> bool:
        """Return whether this member leads and has committed in its own term, so that it knows all that is (R10)."""
        leadership = self._state.leadership
        return leadership is not None and commitment.is_ready(self._state, leadership)

    def leader_silence_ms(self, now_ms: int) -> int:
        """Return how long ago this member last knew that there is a leader; also learners, who never ask for votes.

        A leader knows it by its quorum, a sleeping member by its driver, who wakes it when the leader's node is silent.
        """
        state = self._state
        return 0 if state.leadership is not None or state.hibernating else now_ms - state.leader_contact_ms

    @property
    def first_index(self) -> Index:
        """Return the first index in the log."""
        return self._state.log.terms.first_index

    @property
    def last_index(self) -> Index:
        """Return the last index in the log."""
        return self._state.log.terms.last_index

    @property
    def durable_index(self) -> Index:
        """Return up to where this member's own log is durable."""
        return self._state.log.durable

    @property
    def commit_index(self) -> Index:
        """Return up to where entries are committed, as far as this member knows."""
        return self._state.log.commit

    @property
    def applicable_index(self) -> Index:
        """Return up to where a *durable* state machine may apply: committed, and durable here too (R4)."""
        return min(self._state.log.commit, self._state.log.durable)

    @property
    def configuration(self) -> Configuration:
        """Return the members in force."""
        return self._state.configuration

    @property
    def committed_configuration(self) -> Configuration:
        """Return the members by the last configuration that is known here to be committed."""
        return self._state.log.configurations.at(self._state.log.commit)

    @property
    def next_deadline_ms(self) -> int | None:
        """Return when `tick` must be called at the latest; None: no need."""
        return self._state.next_deadline_ms()

    def term_at(self, index: Index) -> Term | None:
        """Return the term of an entry, None if it is not in the log."""
        return self._state.log.terms.term_at(index)

    def is_caught_up(self, node: NodeId) -> bool:
        """Return whether this leader knows that another member has almost everything: it may become a voter."""
        leadership = self._state.leadership
        return leadership is not None and membership.is_caught_up(self._state, leadership, node)

    def status(self) -> RaftStatus:
        """Return an immutable snapshot for people, metrics and tests."""
        return describe_member(self._state)

    # Time and messages

    def tick(self, now_ms: int) -> Output:
        """Let time pass: heartbeats, election timeouts, check-quorum."""
        state = self._state
        state.begin(now_ms)
        if state.hibernating:
            return state.finish()
        if state.leadership is not None:
            leader.tick(state, state.leadership)
        elif now_ms >= state.election_deadline_ms:
            election.campaign(state)
        return state.finish()

    def receive(self, from_: NodeId, message: RaftMessage, now_ms: int) -> Output:
        """Handle a message; one of a stranger, or of a term that no election can have reached, changes nothing."""
        state = self._state
        state.begin(now_ms)
        if not (self._heeds(from_) and self._is_plausible(from_, message)):
            state.output.is_refused = True
            return state.finish()
        if state.hibernating and hibernation.stirs(state, message):
            self._wake(from_)
        if message.term == state.term or self._meet_other_term(from_, message):
            self._dispatch(from_, message)
        return state.finish()

    def set_room(self, *, is_low: bool, is_full: bool) -> None:
        """Set what this member's answers say of its disk.

        `is_low`: no more records should be accepted for it; `is_full`: the driver drops the entries of every append.
        """
        self._state.disk_low, self._state.disk_full = is_low or is_full, is_full

    @property
    def is_short_of_room(self) -> bool:
        """Return whether this member leads and the disks of so many others are low that no majority has room."""
        leadership = self._state.leadership
        return leadership is not None and not leadership.has_roomy_quorum()

    def wake(self, now_ms: int) -> Output:
        """Start the timers of a hibernating member: a member's node stopped answering or was restarted."""
        self._state.begin(now_ms)
        if self._state.hibernating:
            self._wake(None)
        return self._state.finish()

    def peer_unreachable(self, to: NodeId) -> Output:
        """Record that the connection to a member broke: what was in flight may be lost."""
        state = self._state
        state.begin()
        progress = state.leadership.progress.get(to) if state.leadership is not None else None
        if progress is not None and progress.state is not LOST:
            progress.begin_probe(Index(progress.received + 1), wait=True)
        return state.finish()

    def suspect(self, node: NodeId, now_ms: int) -> Output:
        """Record that a member's process seems to have ended: if it led, campaign before the full timeout.

        Only a hint: members that still hear the leader refuse their pre-votes, so a false one unseats no leader.
        """
        self._state.begin(now_ms)
        if self._state.leader == node and self._state.leadership is None:
            election.doubt_leader(self._state)
        return self._state.finish()

    def campaign(self, now_ms: int) -> Output:
        """Ask for votes now instead of after a random wait, unless a leader is known or votes are being counted.

        Asking again while pre-votes are counted asks those, too, who could not hear the first time.
        Only a hint, safe at any time: pre-votes come first, so that it costs no leader that others still hear. In term
        0, where there is none, votes are asked for at once.
        """
        state = self._state
        state.begin(now_ms)
        if state.leadership is None and _is_open(state.campaign) and not state.leader_is_fresh():
            hibernation.wake(state)
            election.campaign(state)
        return state.finish()

    # Work for a leader

    def next_slot(self) -> tuple[Term, Index]:
        """Return the term and index that the next proposed entry must carry.

        Raises:
            UnavailableError: not done; not the leader, or a transfer is running. `leader` is a hint.
            OverloadedError: not done; too many bytes are uncommitted.
        """
        leader.require_proposable(self._state)
        return self._state.term, Index(self._state.log.terms.last_index + 1)

    def propose(self, entries: Sequence[Entry], now_ms: int) -> Output:
        """Append entries that carry the next slots in order; the sequence is passed on to `Output.append`, not copied.

        Raises:
            UnavailableError: not done; as for `next_slot`.
            OverloadedError: not done; the entries would exceed `uncommitted_bytes_max`.
        """
        self._state.begin(now_ms)
        leader.propose(self._state, entries)
        return self._state.finish()

    def read(self, context: int, now_ms: int) -> Output:
        """Ask when a linearizable read may be answered; `context` comes back in `reads` or `reads_failed`.

        Raises:
            UnavailableError: not done; not the leader.
            OverloadedError: not done; too many reads are waiting.
        """
        self._state.begin(now_ms)
        leader.read(self._state, context)
        return self._state.finish()

    def transfer_leadership(self, to: NodeId, now_ms: int) -> Output:
        """Transfer leadership to another voter; `became` reports success, and a timeout ends the attempt.

        Raises:
            UnavailableError: not done; not the leader, or the transfer cannot begin now.
            RequestError: not done; the target is not another voter.
        """
        state = self._state
        leadership = leader.require_leadership(state)
        state.begin(now_ms)
        leader.begin_transfer(state, leadership, to)
        hibernation.wake(state)
        return state.finish()

    def resign(self, now_ms: int) -> Output:
        """Lead no more until `stand`: this member cannot apply what is committed. It still votes and acknowledges.

        A leader asks the voter with the most of the log to campaign (dissertation §3.10), and follows.
        """
        state = self._state
        state.begin(now_ms)
        state.is_electable = False
        hibernation.wake(state)
        if state.leadership is not None:
            others = tuple(node for node in state.configuration.voters if node != state.id)
            if others:
                state.send(state.leadership.successor(others), TimeoutNow(state.term))
        if state.role is not Role.FOLLOWER:
            state.become_follower(state.term, None)
        return state.finish()

    def stand(self, now_ms: int) -> Output:
        """Undo `resign`: this member may be elected again."""
        state = self._state
        state.begin(now_ms)
        state.is_electable = True
        return state.finish()

    def change_membership(
        self, *, voters: tuple[NodeId, ...], learners: tuple[NodeId, ...] = (), now_ms: int
    ) -> Output:
        """Move to these voters and learners; done when `configuration` equals them and is committed.

        Asking for the configuration in force changes nothing, except that a bootstrap one is then written to the log.

        Raises:
            UnavailableError: not done; not the leader, another change is pending, or a learner lags.
            RequestError: not done; the target can never be reached in one change from here.
        """
        state = self._state
        leadership = leader.require_leadership(state)
        state.begin(now_ms)
        membership.change(state, leadership, voters=voters, learners=learners)
        hibernation.wake(state)
        return state.finish()

    # Reports of the driver

    def durable(self, index: Index, term: Term) -> Output:
        """Record that the log is durable up to `index`.

        `term` is that of the output that carried the write, so that a late report about an overwritten
        entry does not count for its successor. Reports come in the order of the writes.
        """
        state = self._state
        state.begin()
        if state.log.mark_durable(index, term):
            self._note_durable()
        return state.finish()

    def applied(self, index: Index) -> None:
        """Record how far the driver has applied committed entries."""
        log = self._state.log
        invariant(log.applied <= index <= log.commit, "only committed entries are applied", index=index)
        log.applied = index

    def sent(self, to: NodeId, *, ticket: int, end_index: Index, size_bytes: int) -> Output:
        """Record an append sent under a permission, with entries up to `end_index` (exclusive).

        `end_index` equal to the permission's `first_index` says that nothing could be read. A ticket that
        is no longer valid is ignored.
        """
        state = self._state
        state.begin()
        progress = state.leadership.progress.get(to) if state.leadership is not None else None
        if progress is not None and progress.ticket == ticket and progress.state is not SNAPSHOT:
            sending.record_sent(state, progress, end_index=end_index, size_bytes=size_bytes)
        return state.finish()

    def snapshot_sent(self, to: NodeId, *, ticket: int) -> Output:
        """Record that a snapshot and its `InstallSnapshot` have left."""
        self._state.begin()
        if self._state.leadership is not None:
            snapshots.note_sent(self._state, self._state.leadership, to, ticket)
        return self._state.finish()

    def snapshot_failed(self, to: NodeId, *, ticket: int) -> Output:
        """Record that a snapshot could not be sent; the member is probed again when it answers."""
        self._state.begin()
        if self._state.leadership is not None:
            snapshots.note_failed(self._state.leadership, to, ticket)
        return self._state.finish()

    def snapshot_restored(self, index: Index) -> Output:
        """Record that the snapshot of `Output.restore` is durable and in place."""
        self._state.begin()
        if snapshots.note_restored(self._state, index):
            self._note_durable()
        return self._state.finish()

    def compacted(self, first_index: Index) -> None:
        """Record that the log now starts at `first_index`: the entries before it are committed and removed."""
        self._state.log.compact(first_index)

    # Rules for every message

    def _heeds(self, from_: NodeId) -> bool:
        """Return whether the sender may say anything about this group (R23).

        Members, and nodes that the owner knows, always may: a member that lags behind may not know the current
        members. Others may while no leader is alive: they may be newer than all that the owner knows, and the only
        ones who can tell it (§6). The network lets only nodes of the cluster in; this rule limits what one of them
        can do with a false id.
        """
        state = self._state
        if state.configuration.includes(from_) or from_ == state.leader or self._knows(from_):
            return True
        return not state.leader_is_fresh() or any(known.includes(from_) for known in state.relevant_configurations())

    def _is_plausible(self, from_: NodeId, message: RaftMessage) -> bool:
        """Return whether elections can have reached a message's term (R23); else it would only use up all terms.

        A blank member believes nodes that its owner knows: it has no term of its own to compare with.
        """
        state = self._state
        if message.term <= TERM_FREE_MAX or message.term <= state.term + TERM_STEP_MAX:
            return True
        return message.term <= TERM_MAX and state.is_blank and self._knows(from_)

    def _wake(self, by: NodeId | None) -> None:
        """Wake, and wake the leader too if another member caused it: the leader's silence would look like a failure."""
        state = self._state
        hibernation.wake(state)
        if state.leadership is None and state.leader is not None and state.leader != by:
            follower.report(state, state.leader)

    def _note_durable(self) -> None:
        state = self._state
        if state.leadership is not None:
            leader.note_durable(state, state.leadership)
        else:
            follower.note_durable(state)

    def _meet_other_term(self, from_: NodeId, message: RaftMessage) -> bool:
        """Apply §5.1 to a message of another term; return whether to process it."""
        if message.term > self._state.term:
            return self._meet_later_term(from_, message)
        return self._meet_earlier_term(from_, message)

    def _meet_later_term(self, from_: NodeId, message: RaftMessage) -> bool:
        state = self._state
        match message:
            case VoteRequest():
                if not message.transfer and state.leader_is_fresh():
                    if message.pre:
                        election.refuse_pre_vote(state, from_)
                    return False
                if message.pre:
                    return True  # a pre-vote changes no term
            case VoteResponse(granted=True, pre=True):
                return True  # it carries the term we asked for
            case _:
                pass
        return self._enter_later_term(from_, message)

    def _enter_later_term(self, from_: NodeId, message: RaftMessage) -> bool:
        """Follow in a later term, whatever this member's role was (§5.1)."""
        state = self._state
        is_from_leader = isinstance(message, Append | Heartbeat | InstallSnapshot)
        state.become_follower(message.term, from_ if is_from_leader else None)
        return True

    def _meet_earlier_term(self, from_: NodeId, message: RaftMessage) -> bool:
        state = self._state
        match message:
            case Append() | Heartbeat() | InstallSnapshot():
                follower.refuse(state, from_)
            case VoteRequest():
                state.send(from_, VoteResponse(state.term, granted=False, pre=message.pre))
            case _:
                pass  # a response, which counts for nothing in this term (R7), or a transfer that is over
        return False

    def _dispatch(self, from_: NodeId, message: RaftMessage) -> None:
        state, leadership = self._state, self._state.leadership
        match message:
            case Append():
                follower.handle_append(state, from_, message)
            case AppendResponse():
                if leadership is not None:
                    leader.handle_append_response(state, leadership, from_, message)
            case Heartbeat():
                follower.handle_heartbeat(state, from_, message)
            case HeartbeatResponse():
                if leadership is not None:
                    leader.handle_heartbeat_response(state, leadership, from_, message)
            case VoteRequest():
                election.handle_vote_request(state, from_, message)
            case VoteResponse():
                election.handle_vote_response(state, from_, message)
            case InstallSnapshot():
                snapshots.handle_install(state, from_, message)
            case TimeoutNow():
                if leadership is None:
                    election.campaign(state, transfer=True)
            case _:
                assert_never(message)


def _is_open(campaign: Campaign | None) -> bool:
    """Return whether an election may be started, or restarted, without losing a vote."""
    return campaign is None or campaign.pre
