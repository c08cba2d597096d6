"""A leader's handling of the answers of its members.

Answers may be late, doubled or out of order: everything here is a maximum, or is checked against the round
or the index that the answer is about (R7). Answers of earlier terms never get here.
"""

from __future__ import annotations

from quiver.model import Index, NodeId
from quiver.raft import commitment, sending, transfer
from quiver.raft.leadership import Leadership
from quiver.raft.messages import AppendResponse, HeartbeatResponse
from quiver.raft.progress import LOST, PROBE, SNAPSHOT, PeerProgress
from quiver.raft.state import RaftState


def handle_append_response(state: RaftState, leadership: Leadership, from_: NodeId, message: AppendResponse) -> None:
    """Take an answer to an append or a snapshot."""
    progress = leadership.progress.get(from_)
    if progress is None or not _hear(state, leadership, progress, message):
        return
    if not message.accepted:
        _back_off(state, progress, message)
        return
    moved = _advance(state, progress, message)
    if progress.state is PROBE:
        progress.begin_replicate()
    _follow_up(state, leadership, progress, moved=moved)


def handle_heartbeat_response(
    state: RaftState, leadership: Leadership, from_: NodeId, message: HeartbeatResponse
) -> None:
    """Take an answer to a heartbeat: a proof of life that may reveal lost appends and lost answers."""
    progress = leadership.progress.get(from_)
    if progress is None or not _hear(state, leadership, progress, message):
        return
    moved = _advance(state, progress, message)
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
    if message.round > progress.round:  # sent after every answer seen so far
        knows_less = message.received_index < progress.received or message.durable_index < progress.match
        if knows_less and not _note_restart(state, progress, message):
            return False
        progress.round = message.round
        if leadership.reads:
            commitment.release_reads(state, leadership)
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


def _advance(state: RaftState, progress: PeerProgress, message: AppendResponse | HeartbeatResponse) -> bool:
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
        transfer.advance(state, leadership.transfer, progress)


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
