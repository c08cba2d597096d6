"""Hibernation of idle groups, so that a thousand of them cost nothing.

A group sleeps when every member has everything, durable and committed, and knows it. Then nothing can
be lost by not talking: timers stop, on the leader and on the followers that agree. A follower that does
not agree answers the heartbeat and thereby wakes the leader. While asleep the leader stays *fresh*: whether
its node is alive is the driver's to watch, once per node, not per group; it calls `wake` for every group
of a node that stops answering or comes back as a new process.

Safety never depends on this module: terms, votes and rounds work as always.
"""

from __future__ import annotations

from quiver.raft import sending
from quiver.raft.leadership import Leadership
from quiver.raft.messages import AppendResponse, Heartbeat, HeartbeatResponse, RaftMessage
from quiver.raft.state import RaftState


def try_sleep(state: RaftState, leadership: Leadership) -> bool:
    """Hibernate an idle group at a heartbeat; return whether it hibernates now."""
    if not state.config.hibernation:
        return False
    leadership.idle_heartbeats = leadership.idle_heartbeats + 1 if _is_idle(state, leadership) else 0
    if leadership.idle_heartbeats < state.config.idle_ticks_before_hibernation:
        return False
    sending.broadcast_heartbeat(state, leadership, hibernate=True)
    state.hibernating = True
    if state.tracing:
        state.trace("hibernate")
    return True


def agrees(state: RaftState, message: Heartbeat) -> bool:
    """Return whether this follower has exactly what the leader says everybody has."""
    log = state.log
    return message.commit == log.commit == log.terms.last_index == log.durable == state.matched


def stirs(state: RaftState, message: RaftMessage) -> bool:
    """Return whether a message wakes a sleeping member."""
    if state.leadership is None:
        return not (type(message) is Heartbeat and message.hibernate and message.term == state.term)
    if isinstance(message, AppendResponse | HeartbeatResponse) and message.term == state.term:
        return message.round == state.round  # those who agreed are silent; older answers were merely slow
    return True


def wake(state: RaftState) -> None:
    """Restart the timers, as if every member had just answered."""
    if not state.hibernating:
        return
    state.hibernating = False
    state.leader_contact_ms = state.now_ms
    state.reset_election_timer()
    if state.leadership is not None:
        state.leadership.idle_heartbeats = 0
        state.leadership.heartbeat_deadline_ms = state.now_ms
        for progress in state.leadership.peers:
            progress.heard_ms = state.now_ms
    if state.tracing:
        state.trace("wake")


def _is_idle(state: RaftState, leadership: Leadership) -> bool:
    log = state.log
    if not log.commit == log.durable == log.terms.last_index or leadership.reads or leadership.transfer is not None:
        return False
    needed_round = max(leadership.commit_round, state.round)
    if any(peer.is_low or peer.is_joining for peer in leadership.peers):
        return False  # it would not be heard when it has room again, or may vote
    return all(peer.match == peer.received == log.commit and peer.round >= needed_round for peer in leadership.peers)
