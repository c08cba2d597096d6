"""What a leader learns from the answers of its members.

Answers may be late, doubled or out of order: everything here is a maximum, or is checked against the round
or the index that the answer is about (R7). Answers of earlier terms never get here.
"""

from __future__ import annotations

from quiver.model import Index, NodeId
from quiver.raft import commitment, sending, transfer
from quiver.raft.leadership import Leadership
from quiver.raft.messages import AppendResponse, HeartbeatResponse
from quiver.raft.progress import Progress, ProgressState
from quiver.raft.state import State


def handle_append_response(state: State, leadership: Leadership, from_: NodeId, message: AppendResponse) -> None:
    """Take an answer to an append or a snapshot."""
    progress = leadership.progress.get(from_)
    if progress is None or not _hear(state, leadership, progress, message):
        return
    if not message.accepted:
        _back_off(state, progress, message)
        return
    moved = _advance(state, progress, message)
    if progress.state is ProgressState.PROBE:
        progress.begin_replicate()
    _follow_up(state, leadership, progress, moved=moved)


def handle_heartbeat_response(state: State, leadership: Leadership, from_: NodeId, message: HeartbeatResponse) -> None:
    """Take an answer to a heartbeat: a proof of life that may reveal lost appends and lost answers."""
    progress = leadership.progress.get(from_)
    if progress is None or not _hear(state, leadership, progress, message):
        return
    moved = _advance(state, progress, message)
    if progress.state is ProgressState.PROBE:
        progress.probe_sent = False
        if progress.received >= progress.next:
            progress.begin_replicate()
    _follow_up(state, leadership, progress, moved=moved)


def _hear(
    state: State, leadership: Leadership, progress: Progress, message: AppendResponse | HeartbeatResponse
) -> bool:
    """Note that a member is alive and follows; tell whether its answer may be used."""
    if progress.state is ProgressState.LOST:
        return False
    if message.durable_index < progress.match and message.round > progress.match_round:
        _note_loss(state, progress, message)
        if not message.recovering:
            return False
    progress.heard_ms = state.now_ms
    if message.round > progress.round:
        progress.round = message.round
        if leadership.reads:
            commitment.release_reads(state, leadership)
    return True


def _note_loss(state: State, progress: Progress, message: AppendResponse | HeartbeatResponse) -> None:
    """Stop trusting a member that has less on disk than it acknowledged in this very term (R22).

    The answer's round proves that it was sent after the acknowledgement. A member that says itself that it
    is recovering is served again from what it has; any other is lost until somebody looks at it.
    """
    if message.recovering:
        progress.fall_back(message.match_index, message.received_index)
    else:
        progress.mark_lost()
    if state.tracing:
        state.trace(f"n{progress.node} has {message.durable_index}, less than it acknowledged: {progress.state}")


def _advance(state: State, progress: Progress, message: AppendResponse | HeartbeatResponse) -> bool:
    terms = state.log.terms
    match = min(message.match_index, terms.last_index)
    received = min(message.received_index, terms.last_index)
    moved = progress.advance(match, received, round=message.round, now_ms=state.now_ms)
    if progress.state is ProgressState.SNAPSHOT and progress.match >= terms.base_index:
        progress.begin_replicate()
        progress.ticket = 0
    return moved


def _follow_up(state: State, leadership: Leadership, progress: Progress, *, moved: bool) -> None:
    """Commit, send more and hand over, as far as the answer allows."""
    if moved and progress.match > state.log.commit:
        commitment.advance(state, leadership)
        if state.leadership is None:
            return
    sending.maybe_send(state, progress)
    if leadership.transfer is not None:
        transfer.advance(state, leadership.transfer, progress)


def _back_off(state: State, progress: Progress, message: AppendResponse) -> None:
    """Look for the common entry below a rejected append, skipping whole terms (§5.3)."""
    probing = progress.state is ProgressState.PROBE
    is_stale = message.rejected_index <= progress.match or (probing and message.rejected_index != progress.next - 1)
    if is_stale or progress.state is ProgressState.SNAPSHOT:
        return
    common, _ = state.log.terms.highest_at_most(message.hint_index, message.hint_term)
    next_index = min(common + 1, message.hint_index + 1, message.rejected_index)
    progress.begin_probe(Index(next_index), wait=False)
    sending.maybe_send(state, progress)
