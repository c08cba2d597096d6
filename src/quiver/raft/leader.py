"""A leader's work: take over, accept proposals, send heartbeats, and step down without a quorum.

Sending is `sending`'s, answers are `responses`', commitment and reads `commitment`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from quiver.errors import OverloadedError, UnavailableError, invariant
from quiver.model import Index
from quiver.raft import commitment, hibernation, sending, transfer
from quiver.raft.leadership import Leadership
from quiver.raft.messages import Entry, EntryKind
from quiver.raft.output import Role
from quiver.raft.state import RaftState


def become_leader(state: RaftState) -> None:
    """Take over a won term: probe every member with a no-op of this term (§5.2, §5.4.2, §8)."""
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
    """Append a no-op: with it the leader commits the entries of earlier terms, without waiting for a proposal (§8)."""
    sending.append_own(state, leadership, EntryKind.NOOP)


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
        transfer.expire(state, leadership, leadership.transfer)
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
