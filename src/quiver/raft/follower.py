"""A follower's handling of its leader's messages.

It accepts entries that fit its log, truncates only entries that conflict (R6), and acknowledges only entries that are
both equal to the leader's log and durable here (R3). Acknowledgements of a write leave with the event that reports it
durable; an append with nothing new is answered immediately, by the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from quiver.errors import invariant
from quiver.model import Index, NodeId
from quiver.raft import hibernation
from quiver.raft.messages import Append, AppendResponse, Entry, Heartbeat, HeartbeatResponse
from quiver.raft.state import RaftState


def hear_leader(state: RaftState, from_: NodeId, heard_round: int) -> None:
    """Record a message from the leader of this term, and follow it if it is new (§5.2)."""
    if state.leader != from_:
        invariant(state.leader is None, "one leader per term", term=state.term, known=state.leader, other=from_)
        state.become_follower(state.term, from_)
    else:
        state.election_deadline_ms = state.now_ms + state.election_timeout_ms
    state.leader_contact_ms = state.now_ms
    if heard_round > state.round_heard:
        state.round_heard = heard_round


def handle_append(state: RaftState, from_: NodeId, message: Append) -> None:
    """Handle entries from the leader (§5.3, Figure 2)."""
    hear_leader(state, from_, message.round)
    if not _is_consistent(state, message):
        _reject(state, from_, message)
        return
    entries = _unknown(state, message)
    if entries:
        state.append(entries)
    state.mark_matched(Index(message.prev_index + len(message.entries)))
    _follow_commit(state, message.commit)
    note_recovery(state)
    _note_join(state, message.commit)
    _answer_append(state, from_, entries)


def handle_heartbeat(state: RaftState, from_: NodeId, message: Heartbeat) -> None:
    """Answer a heartbeat, or hibernate with the group."""
    hear_leader(state, from_, message.round)
    _follow_commit(state, message.commit)
    _note_join(state, message.commit)
    if message.hibernate and hibernation.agrees(state, message):
        state.hibernating = True
        return
    report(state, from_)


def report(state: RaftState, to: NodeId) -> None:
    """Report to a leader how much this member has, and that it is awake."""
    response = HeartbeatResponse(
        state.term,
        state.acknowledgeable(),
        state.matched,
        state.log.durable,
        state.round_heard,
        state.recover_until is not None,
        state.disk_low,
        state.disk_full,
        state.is_joining,
    )
    state.send(to, response)


def note_durable(state: RaftState) -> None:
    """Acknowledge to the leader what its write made durable here (R3)."""
    note_recovery(state)
    _end_join(state)
    if state.leader is not None and state.acknowledgeable() > state.acknowledged:
        acknowledge(state, state.leader)


def note_recovery(state: RaftState) -> None:
    """End recovery once everything that may have been lost is back, under a current leader (R18)."""
    if state.recover_until is None or state.leader is None:
        return
    if min(state.matched, state.log.durable) >= state.recover_until:
        state.recover_until = None
        state.output.recovered = True
        if state.tracing:
            state.trace("recovered")


def _note_join(state: RaftState, leader_commit: Index) -> None:
    """Let a joining member catch up with what is committed, as its leader says (R24).

    A leader that has committed an entry of its own term knows all that is committed: the removal of this node, if it
    was a member before, is among that, because a change begins only when the one before it is committed.
    """
    if not state.is_joining:
        return
    is_reached = state.join_index is not None and state.matched >= state.join_index
    if state.join_index is None or (is_reached and not _is_of_this_term(state, state.join_index)):
        state.join_index = leader_commit  # else the first one stays: under load the newest is always out of reach
    _end_join(state)


def _end_join(state: RaftState) -> None:
    """Let a member that has caught up vote; that is saved before it acknowledges what may make it a voter."""
    if state.join_index is None or state.acknowledgeable() < state.join_index:
        return
    if state.is_joining and _is_of_this_term(state, state.join_index):
        state.is_joining = False
        state.join_index = None
        state.output.joined = True
        state.save_hard_state()
        state.reset_election_timer()
        if state.tracing:
            state.trace("joined")


def _is_of_this_term(state: RaftState, index: Index) -> bool:
    return state.log.terms.term_at(index) == state.term


def acknowledge(state: RaftState, to: NodeId) -> None:
    """Acknowledge the log as far as it is equal and durable."""
    state.acknowledged = state.acknowledgeable()
    response = AppendResponse(
        term=state.term,
        accepted=True,
        match_index=state.acknowledged,
        received_index=state.matched,
        durable_index=state.log.durable,
        round=state.round_heard,
        recovering=state.recover_until is not None,
        disk_low=state.disk_low,
        disk_full=state.disk_full,
        joining=state.is_joining,
    )
    state.send(to, response)


def refuse(state: RaftState, to: NodeId) -> None:
    """Answer a leader of an earlier term, so that it learns of the new term (§5.1)."""
    nothing = Index(0)
    response = AppendResponse(
        term=state.term,
        accepted=False,
        match_index=nothing,
        received_index=nothing,
        durable_index=state.log.durable,
        round=0,
    )
    state.send(to, response)


def _answer_append(state: RaftState, to: NodeId, appended: Sequence[Entry]) -> None:
    """Acknowledge an append that brought nothing new; new entries are acknowledged when they are durable (R3)."""
    if not appended:
        acknowledge(state, to)


def _is_consistent(state: RaftState, message: Append) -> bool:
    """Return whether the entry before the new ones is the leader's (§5.3).

    Entries committed here are in the leader's log (§5.4), so they are not compared; they may be compacted.
    """
    log = state.log
    if message.prev_index <= log.commit:
        return True
    return log.terms.term_at(message.prev_index) == message.prev_term


def _unknown(state: RaftState, message: Append) -> Sequence[Entry]:
    """Return the entries that are not in the log yet, after truncating those that conflict with them."""
    entries = message.entries
    terms = state.log.terms
    if message.prev_index == terms.last_index or not entries:  # the common case
        return entries
    for position in range(max(state.log.commit - message.prev_index, 0), len(entries)):
        entry = entries[position]
        known = terms.term_at(entry.index)
        if known is None:  # past the end: all the rest is new
            return entries[position:]
        if known != entry.term:
            state.truncate(entry.index)
            return entries[position:]
    return ()


def _reject(state: RaftState, from_: NodeId, message: Append) -> None:
    """Say which append does not fit, and the highest entry that could be common (§5.3)."""
    log = state.log
    hint_index, hint_term = log.terms.highest_at_most(message.prev_index, message.prev_term)
    response = AppendResponse(
        term=state.term,
        accepted=False,
        match_index=state.acknowledgeable(),
        received_index=state.matched,
        durable_index=log.durable,
        round=state.round_heard,
        rejected_index=message.prev_index,
        hint_index=hint_index,
        hint_term=hint_term,
        recovering=state.recover_until is not None,
        disk_low=state.disk_low,
        disk_full=state.disk_full,
        joining=state.is_joining,
    )
    state.send(from_, response)


def _follow_commit(state: RaftState, leader_commit: Index) -> None:
    """Commit what the leader has committed, as far as this log is known to be the leader's (§5.3)."""
    if leader_commit > state.log.commit:
        state.commit_to(min(leader_commit, state.matched))
