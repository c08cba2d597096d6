"""Snapshots: installing one from the leader, and tracking those that a leader sends (§7, R16).

The driver transfers the content; the core decides. A snapshot that contains nothing new is only
answered. One whose last entry is in the log leaves the log alone, suffix and all. Any other replaces
the whole log: a suffix kept after an entry that differs would be a diverged tail, taken for the leader's.
"""

from __future__ import annotations

from quiver.model import Index, NodeId
from quiver.raft import follower
from quiver.raft.leadership import Leadership
from quiver.raft.log import RaftLog
from quiver.raft.messages import InstallSnapshot, SnapshotMetadata
from quiver.raft.progress import SNAPSHOT, PeerProgress
from quiver.raft.state import RaftState


def handle_install(state: RaftState, from_: NodeId, message: InstallSnapshot) -> None:
    """Install a snapshot, if it is ahead of this member."""
    follower.hear_leader(state, from_, message.round)
    log, snapshot = state.log, message.snapshot
    if _is_old(log, snapshot):
        follower.acknowledge(state, from_)
        return
    if _is_in_log(log, snapshot):
        state.matched = max(state.matched, snapshot.last_index)
        state.commit_to(snapshot.last_index)
        follower.acknowledge(state, from_)
        return
    log.restore(snapshot, term=state.term, matched=state.matched)
    state.matched = snapshot.last_index  # equal to the leader's log, though not durable yet
    state.restoring = snapshot.last_index
    state.output.restore = snapshot
    state.refresh_configuration()
    if state.tracing:
        state.trace(f"restore snapshot up to {snapshot.last_index}")


def _is_old(log: RaftLog, snapshot: SnapshotMetadata) -> bool:
    """Return whether everything in a snapshot is committed here: installing it would roll this member back."""
    return snapshot.last_index <= log.commit


def _is_in_log(log: RaftLog, snapshot: SnapshotMetadata) -> bool:
    """Return whether the log has the snapshot's last entry, with its term: then it agrees with the leader up to it."""
    return log.terms.term_at(snapshot.last_index) == snapshot.last_term


def note_restored(state: RaftState, index: Index) -> bool:
    """Count a snapshot as durable, now that it has replaced log and state; return whether it is still current."""
    if state.restoring != index:
        return False  # a later snapshot replaced it
    state.restoring = None
    state.log.durable = max(state.log.durable, index)
    return True


def note_sent(state: RaftState, leadership: Leadership, to: NodeId, ticket: int) -> None:
    """Record that a snapshot was sent: its answer is pending."""
    progress = _holder(leadership, to, ticket)
    if progress is not None:
        progress.note_snapshot_sent(now_ms=state.now_ms)


def note_failed(leadership: Leadership, to: NodeId, ticket: int) -> None:
    """Probe a member again when it answers."""
    progress = _holder(leadership, to, ticket)
    if progress is not None:
        progress.begin_probe(Index(progress.received + 1), wait=True)


def _holder(leadership: Leadership, to: NodeId, ticket: int) -> PeerProgress | None:
    progress = leadership.progress.get(to)
    if progress is None or progress.ticket != ticket or progress.state is not SNAPSHOT:
        return None
    return progress
