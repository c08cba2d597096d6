"""A leader's work: take over, accept proposals, send heartbeats, handle responses, transfer leadership, step down.

`sending` sends; `commitment` commits entries and confirms reads.

Responses may be late, duplicated or out of order: everything derived from them is a maximum, or is checked against the
round or the index that the response is about (R7). Responses of earlier terms never get here.

During a transfer of leadership to a chosen voter (dissertation §3.10, R15) the leader refuses proposals. It waits until
the target has the whole log, then asks it to campaign immediately. If the target has not won within an election
timeout, the leader aborts the transfer and keeps leading. It refuses to transfer leadership to the same voter for a
while: otherwise callers that retry at once would let the group accept hardly any proposals.
"""

from __future__ import annotations

from collections.abc import Sequence

from quiver.errors import OverloadedError, RequestError, UnavailableError, invariant
from quiver.model import Index, NodeId
from quiver.raft import commitment, hibernation, sending
from quiver.raft.leadership import Leadership, Transfer
from quiver.raft.messages import AppendResponse, Entry, EntryKind, HeartbeatResponse, TimeoutNow
from quiver.raft.output import Role
from quiver.raft.progress import LOST, PROBE, SNAPSHOT, PeerProgress
from quiver.raft.state import RaftState

TRANSFER_PAUSE = 10
"""Election timeouts after a failed transfer before the same voter can be asked again: at most a tenth of the time is
lost to a voter that does not take over, for example because its disk is full."""


def become_leader(state: RaftState) -> None:
    """Take over a won term: probe every member with an entry of this term (§5.2, §5.4.2, §8)."""
    next_index = Index(state.log.terms.last_index + 1)
    leadership = Leadership(state.id, first_own_index=next_index, now_ms=state.now_ms)
    leadership.own.match = state.log.durable
    leadership.heartbeat_deadline_ms = state.now_ms + state.config.heartbeat_interval_ms
    state.role = Role.LEADER
    state.leader = state.id
    state.campaign = None
    state.leadership = leadership
    state.reconfigure(leadership, next_index=next_index)
    state.announce()
    _begin_term(state, leadership)


def _begin_term(state: RaftState, leadership: Leadership) -> None:
    """Append a no-op: with it the leader commits the entries of earlier terms, without waiting for a proposal (§8).

    A group's first leader writes down the configuration that the first members were given instead, so that a member
    that joins without it learns from the log that it is one. It changes nothing that is in force.
    """
    if state.log.configurations.active_index:
        sending.append_own(state, leadership, EntryKind.NOOP)
    else:
        sending.append_own(state, leadership, EntryKind.CONFIG, state.configuration)


def require_leadership(state: RaftState) -> Leadership:
    """Return the leadership, or refuse: nothing was done."""
    if state.leadership is None:
        raise UnavailableError("this member is not the leader")
    return state.leadership


def require_proposable(state: RaftState) -> Leadership:
    """Return the leadership if it takes proposals now, or refuse: nothing was done."""
    leadership = require_leadership(state)
    _check_no_transfer(leadership)
    if leadership.uncommitted_bytes >= state.config.uncommitted_bytes_max:
        raise OverloadedError("too many bytes are uncommitted; retry later (uncommitted_bytes_max is reached)")
    return leadership


def _check_no_transfer(leadership: Leadership) -> None:
    """Refuse proposals during a transfer: under load the target would never catch up (R15)."""
    if leadership.transfer is not None:
        raise UnavailableError(f"leadership is being transferred to node {leadership.transfer.to}; retry there")


def propose(state: RaftState, entries: Sequence[Entry]) -> None:
    """Append proposed entries, which carry the slots that come next (§5.3)."""
    leadership = require_proposable(state)
    size_bytes = sum([len(entry.data) for entry in entries])
    if leadership.uncommitted_bytes and leadership.uncommitted_bytes + size_bytes > state.config.uncommitted_bytes_max:
        raise OverloadedError("too many bytes are uncommitted; retry later (uncommitted_bytes_max would be exceeded)")
    first, last = entries[0], entries[-1]
    in_order = first.term == last.term == state.term and last.index - first.index == len(entries) - 1
    invariant(in_order, "proposals carry consecutive slots of the current term")
    hibernation.wake(state)
    sending.append(state, leadership, entries)
    leadership.admit(last.index, size_bytes)


def read(state: RaftState, context: int) -> None:
    """Accept a read, within the bound."""
    leadership = require_leadership(state)
    if len(leadership.reads) >= state.config.reads_pending_max:
        raise OverloadedError("too many reads are pending; retry later (reads_pending_max is reached)")
    hibernation.wake(state)
    commitment.read(state, leadership, context)


def note_durable(state: RaftState, leadership: Leadership) -> None:
    """Count the leader's own copy, now that its disk holds it (R3)."""
    leadership.own.match = max(leadership.own.match, state.log.durable)
    if leadership.own.match > state.log.commit:
        commitment.advance(state, leadership)


def tick(state: RaftState, leadership: Leadership) -> None:
    """Do the periodic work when a heartbeat is due; rounds begun for reads in between do not delay it."""
    if state.now_ms < leadership.heartbeat_deadline_ms:
        return
    leadership.heartbeat_deadline_ms = state.now_ms + state.config.heartbeat_interval_ms
    if not _has_quorum(state, leadership):
        if state.tracing:
            state.trace("no quorum heard from: stepping down")
        state.become_follower(state.term, None)
        return
    if leadership.transfer is not None:
        _expire_transfer(state, leadership, leadership.transfer)
    timeout_ms = state.config.election_timeout_ms
    for progress in leadership.peers:
        if progress.is_stalled(now_ms=state.now_ms, timeout_ms=timeout_ms):
            progress.begin_probe(Index(progress.received + 1), wait=True)
    if hibernation.try_sleep(state, leadership):
        return
    sending.broadcast_heartbeat(state, leadership)
    commitment.release_reads(state, leadership)
    sending.send_to_all(state, leadership)


def _has_quorum(state: RaftState, leadership: Leadership) -> bool:
    """Return whether a quorum was heard from within an election timeout (dissertation §6.2)."""
    leadership.own.heard_ms = state.now_ms
    silence_ms = state.now_ms - leadership.quorum_heard_ms()
    return silence_ms <= state.config.election_timeout_ms


def handle_append_response(state: RaftState, leadership: Leadership, from_: NodeId, message: AppendResponse) -> None:
    """Handle the response to an append or a snapshot."""
    progress = leadership.progress.get(from_)
    if progress is None or not _hear(state, leadership, progress, message):
        return
    if not message.accepted:
        _back_off(state, progress, message)
        return
    moved = _advance_progress(state, progress, message)
    if progress.state is PROBE:
        progress.begin_replicate()
    _follow_up(state, leadership, progress, moved=moved)


def handle_heartbeat_response(
    state: RaftState, leadership: Leadership, from_: NodeId, message: HeartbeatResponse
) -> None:
    """Handle the response to a heartbeat: a proof of life that may reveal lost appends and lost responses."""
    progress = leadership.progress.get(from_)
    if progress is None or not _hear(state, leadership, progress, message):
        return
    moved = _advance_progress(state, progress, message)
    if progress.state is PROBE:
        progress.probe_sent = False
        if progress.received >= progress.next:
            progress.begin_replicate()
    _follow_up(state, leadership, progress, moved=moved)


def _hear(
    state: RaftState, leadership: Leadership, progress: PeerProgress, message: AppendResponse | HeartbeatResponse
) -> bool:
    """Record that a member is alive and follows; return whether its answer may be used."""
    if progress.state is LOST:
        return False
    is_newest = message.round > progress.round
    if is_newest:  # sent after every answer seen so far
        knows_less = message.received_index < progress.received or message.durable_index < progress.match
        if knows_less and not _note_restart(state, progress, message):
            return False
        progress.round = message.round
        progress.is_joining = message.joining
        if leadership.reads:
            commitment.release_reads(state, leadership)
    if is_newest or message.disk_full:
        progress.note_room(is_low=message.disk_low, is_full=message.disk_full)
    progress.heard_ms = state.now_ms
    return True


def _note_restart(state: RaftState, progress: PeerProgress, message: AppendResponse | HeartbeatResponse) -> bool:
    """Resume a member that has less than it reported before; return whether it can be trusted.

    A restart loses what was received but not durable, and that is fine. Less on disk than was acknowledged
    in this very term is not (R22): unless the member says itself that it is recovering, or is just putting a
    snapshot in place of all that, it is marked as lost until an operator replaces it.
    """
    kept = progress.match
    if message.durable_index < progress.match:
        kept = min(message.match_index, progress.match)
        if state.tracing:
            state.trace(f"n{progress.node} has {message.durable_index} durable, less than it acknowledged")
        is_restoring = message.received_index >= progress.match
        if not message.recovering and not is_restoring:
            progress.mark_lost()
            return False
    progress.fall_back(kept, message.received_index)
    return True


def _advance_progress(state: RaftState, progress: PeerProgress, message: AppendResponse | HeartbeatResponse) -> bool:
    terms = state.log.terms
    known_before = max(progress.match, progress.received)
    match = min(message.match_index, terms.last_index)
    received = min(message.received_index, terms.last_index)
    moved = progress.advance(match, received, now_ms=state.now_ms)
    known = max(progress.match, progress.received)
    if progress.state is SNAPSHOT:
        if known >= terms.base_index:
            progress.ticket = 0
            progress.begin_replicate()
        elif known > known_before and not progress.ticket:  # installed, but the log's start has moved on since
            progress.begin_probe(Index(known + 1), wait=False)
    return moved


def _follow_up(state: RaftState, leadership: Leadership, progress: PeerProgress, *, moved: bool) -> None:
    """Commit, send more and continue a transfer, as far as the answer allows."""
    if moved and progress.match > state.log.commit:
        commitment.advance(state, leadership)
        if state.leadership is None:
            return
    sending.maybe_send(state, progress)
    if leadership.transfer is not None:
        _advance_transfer(state, leadership.transfer, progress)


def _back_off(state: RaftState, progress: PeerProgress, message: AppendResponse) -> None:
    """Search the common entry before a rejected append, skipping whole terms (§5.3)."""
    probing = progress.state is PROBE
    is_stale = message.rejected_index <= progress.match or (probing and message.rejected_index != progress.next - 1)
    if is_stale or progress.state is SNAPSHOT:
        return
    common, _ = state.log.terms.highest_at_most(message.hint_index, message.hint_term)
    next_index = min(common + 1, message.hint_index + 1, message.rejected_index)
    progress.begin_probe(Index(next_index), wait=False)
    sending.maybe_send(state, progress)


def begin_transfer(state: RaftState, leadership: Leadership, to: NodeId) -> None:
    """Start a transfer; asking again for the same target changes nothing.

    Raises:
        RequestError: not done; the target is not another voter.
        UnavailableError: not done; another transfer is running, or the target lost its log or failed lately.
    """
    if to == state.id or to not in state.configuration.voters:
        raise RequestError(f"leadership can only be transferred to another voter; node {to} is not one")
    if leadership.transfer is not None:
        if leadership.transfer.to != to:
            raise UnavailableError(f"leadership is being transferred to node {leadership.transfer.to}")
        return
    progress = leadership.progress[to]
    if progress.state is LOST:
        raise UnavailableError(f"node {to} lost acknowledged entries; choose another voter")
    if state.now_ms < progress.no_transfer_before_ms:
        raise UnavailableError(f"node {to} did not take over leadership a moment ago; choose another voter, or retry")
    leadership.transfer = Transfer(to, state.now_ms + state.config.election_timeout_ms)
    sending.maybe_send(state, progress)
    _advance_transfer(state, leadership.transfer, progress)


def _advance_transfer(state: RaftState, transfer: Transfer, progress: PeerProgress) -> None:
    """Ask the target to campaign, once it has the whole log."""
    if transfer.is_target_notified or progress.node != transfer.to or progress.match < state.log.terms.last_index:
        return
    transfer.is_target_notified = True
    state.send(transfer.to, TimeoutNow(state.term))


def _expire_transfer(state: RaftState, leadership: Leadership, transfer: Transfer) -> None:
    """Abort a transfer that took too long, accept proposals again, and do not ask the target again for a while."""
    if state.now_ms < transfer.deadline_ms:
        return
    leadership.transfer = None
    target = leadership.progress.get(transfer.to)
    if target is not None:
        target.no_transfer_before_ms = state.now_ms + TRANSFER_PAUSE * state.config.election_timeout_ms
    if state.tracing:
        state.trace(f"transfer to n{transfer.to} aborted")
