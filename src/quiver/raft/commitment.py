"""Commitment of entries, and confirmation of reads.

The commit rule (§5.4.2, R1): a leader counts copies only for entries of its own term; what came before is
committed with them. Copies count when durable (R3), in both electorates while joint (§6).
"""

from __future__ import annotations

from quiver.model import Index
from quiver.raft import membership, sending
from quiver.raft.leadership import Leadership
from quiver.raft.state import RaftState


def advance(state: RaftState, leadership: Leadership) -> None:
    """Commit what a quorum holds. Afterwards the member may no longer be the leader."""
    index = leadership.agreed_match()
    if not _is_of_own_term(leadership, index):
        return
    was_ready = is_ready(state, leadership)
    if not state.commit_to(index):
        return
    leadership.settle(index)
    leadership.commit_round = state.round + 1
    if not was_ready:
        _serve_held_reads(state, leadership)
    membership.after_commit(state, leadership)


def is_ready(state: RaftState, leadership: Leadership) -> bool:
    """Return whether the leader has committed in its own term, so that it knows all that is committed (§8)."""
    return state.log.commit >= leadership.first_own_index


def read(state: RaftState, leadership: Leadership, context: int) -> None:
    """Queue a read until a round of heartbeats proves that this member still leads."""
    if not is_ready(state, leadership):
        leadership.reads.hold(context)
        return
    leadership.reads.add(context, index=state.log.commit, needed_round=state.round + 1)
    begin_read_round(state, leadership)


def begin_read_round(state: RaftState, leadership: Leadership) -> None:
    """Begin a round for the reads that need one, unless an earlier round is still in flight."""
    reads = leadership.reads
    if reads.has_round_in_flight(state.round) or not reads.needs_round_after(state.round):
        return
    sending.broadcast_heartbeat(state, leadership)
    release_reads(state, leadership)


def release_reads(state: RaftState, leadership: Leadership) -> None:
    """Answer the reads whose round a quorum has answered, then begin the next round if one is needed."""
    ready = leadership.reads.release(leadership.agreed_round())
    if ready:
        state.output.reads = (*state.output.reads, *ready)
        begin_read_round(state, leadership)


def _is_of_own_term(leadership: Leadership, index: Index) -> bool:
    """Return whether an entry was appended in this leader's term: only such an entry is committed by counting (R1)."""
    return index >= leadership.first_own_index


def _serve_held_reads(state: RaftState, leadership: Leadership) -> None:
    index = Index(state.log.commit)
    if leadership.reads.make_ready(index=index, needed_round=state.round + 1):
        begin_read_round(state, leadership)
