"""Sending to members: permissions for entries and snapshots, and heartbeats.

The core holds no entries, so it cannot send any: it permits the driver to (`SendEntries`) and waits for
`sent` before it permits more. Flow control lives here: one append at a time while probing, a window of
messages and bytes while replicating, since every buffer has a bound. A member whose disk is full is sent
no entries; a probe without entries still finds the common entry, so that it follows the commit index.
"""

from __future__ import annotations

from collections.abc import Sequence

from quiver.errors import invariant
from quiver.model import Index
from quiver.raft.configuration import Configuration
from quiver.raft.leadership import Leadership
from quiver.raft.messages import Entry, EntryKind, Heartbeat
from quiver.raft.output import SendEntries, SendSnapshot
from quiver.raft.progress import LOST, PROBE, REPLICATE, PeerProgress
from quiver.raft.state import RaftState


def append(state: RaftState, leadership: Leadership, entries: Sequence[Entry]) -> None:
    """Append to the leader's log and send the entries to the members immediately, in parallel with the local write.

    Dissertation §10.2.1: the leader counts its own copy only when its disk reports it durable, like any other.
    """
    state.append(entries)
    send_to_all(state, leadership)


def append_own(
    state: RaftState, leadership: Leadership, kind: EntryKind, configuration: Configuration | None = None
) -> None:
    """Append an entry that the core makes itself."""
    index = Index(state.log.terms.last_index + 1)
    append(state, leadership, (Entry(index, state.term, kind, b"", configuration),))


def send_to_all(state: RaftState, leadership: Leadership) -> None:
    """Permit an append to every member that may receive one now."""
    for progress in leadership.peers:
        maybe_send(state, progress)


def maybe_send(state: RaftState, progress: PeerProgress) -> None:
    """Permit one append to a member, if there is something to send and its window has room."""
    terms = state.log.terms
    if progress.ticket:
        return
    # A restarted member that no longer knows that its log matches is sent an append without entries (`is_unverified`).
    if progress.next > terms.last_index and (progress.state is REPLICATE or not progress.is_unverified()):
        return
    if not _has_room(state, progress) or (progress.is_full and progress.state is REPLICATE):
        return
    prev_index = Index(progress.next - 1)
    prev_term = terms.term_at(prev_index)
    if prev_term is None:
        _send_snapshot(state, progress)
        return
    config = state.config
    progress.begin_sending(state.next_ticket())
    state.output.send.append(
        SendEntries(
            progress.node,
            progress.ticket,
            state.term,
            prev_index,
            prev_term,
            progress.next,
            progress.next if progress.is_full else Index(terms.last_index + 1),
            state.log.commit,
            state.round,
            min(config.append_bytes_max, config.inflight_bytes_max - progress.inflight_bytes),
        )
    )


def record_sent(state: RaftState, progress: PeerProgress, *, end_index: Index, size_bytes: int) -> None:
    """Record what the driver sent under a permission, and permit the next append."""
    invariant(end_index <= state.log.terms.last_index + 1, "only entries of the log are sent")
    if progress.record_sent(end_index, size_bytes, now_ms=state.now_ms):
        maybe_send(state, progress)  # else nothing could be read: the next answer or heartbeat tries again


def broadcast_heartbeat(state: RaftState, leadership: Leadership, *, hibernate: bool = False) -> None:
    """Begin a new round: every answer to it proves leadership after this moment."""
    state.round += 1
    leadership.begin_round(state.round, now_ms=state.now_ms)
    heartbeat = Heartbeat(state.term, state.log.commit, state.round, hibernate)
    for progress in leadership.peers:
        if progress.state is not LOST:
            state.send(progress.node, heartbeat)


def _has_room(state: RaftState, progress: PeerProgress) -> bool:
    if progress.state is REPLICATE:
        config = state.config
        is_full = len(progress.inflight) >= config.inflight_messages_max
        return not is_full and progress.inflight_bytes < config.inflight_bytes_max
    return progress.state is PROBE and not progress.probe_sent


def _send_snapshot(state: RaftState, progress: PeerProgress) -> None:
    """Permit a snapshot to a member whose next entry is no longer in the log (§7)."""
    progress.begin_snapshot(state.next_ticket())
    needed_index = state.log.terms.base_index
    permission = SendSnapshot(progress.node, progress.ticket, state.term, needed_index, state.round)
    state.output.send_snapshot = (*state.output.send_snapshot, permission)
    if state.tracing:
        state.trace(f"n{progress.node} needs a snapshot up to {needed_index} or later")
