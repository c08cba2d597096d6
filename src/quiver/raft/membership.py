"""Membership changes by joint consensus (§6).

One call goes from a simple configuration through a joint one to a simple one. Rules (R13): one change
at a time; only after the leader has committed in its own term; a configuration is in force from the
moment it is appended and no longer when it is truncated; voters come from caught-up learners.

Deviation: many implementations bar a member from campaigning while a committed configuration is not
applied. That guards schemes that put configurations into force when applied. Here they are in force
when appended, and two simple configurations never follow each other without a joint one that is
committed by majorities of both, so any two quorums that can decide meet.
"""

from __future__ import annotations

from quiver.errors import RequestError, UnavailableError
from quiver.model import NodeId
from quiver.raft import sending
from quiver.raft.configuration import Configuration
from quiver.raft.leadership import Leadership
from quiver.raft.messages import EntryKind, TimeoutNow
from quiver.raft.progress import LOST
from quiver.raft.state import RaftState


def change(
    state: RaftState, leadership: Leadership, *, voters: tuple[NodeId, ...], learners: tuple[NodeId, ...]
) -> None:
    """Append the first step of a change to these voters and learners; do nothing if they are the members.

    Raises:
        UnavailableError: not done; another change is pending or a learner is not caught up. Retry later.
        RequestError: not done; the target can never be reached in one change from here.
    """
    _check_ready(state, leadership)
    target = Configuration(voters=tuple(sorted(voters)), learners=tuple(sorted(learners)))
    current = state.configuration
    if target == current:
        return
    _check_target(target)
    for node in target.voters:
        if node not in current.voters:
            _check_promotable(state, leadership, node)
    if target.voters == current.voters:  # quorums stay the same: no joint phase is needed
        first_step = target
    else:
        first_step = Configuration(voters=target.voters, voters_outgoing=current.voters, learners=target.learners)
    sending.append_own(state, leadership, EntryKind.CONFIG, first_step)


def is_caught_up(state: RaftState, leadership: Leadership, node: NodeId) -> bool:
    """Return whether another member has the configuration in force and almost everything since, and may vote (R24).

    A voter without a vote could leave the group without a leader, from which alone it can learn what it misses.
    """
    progress = leadership.progress.get(node)
    if progress is None or progress.state is LOST or progress.is_joining:
        return False
    lag = state.log.terms.last_index - progress.match
    return progress.match >= state.log.configurations.active_index and lag <= state.config.promotion_lag_max


def after_commit(state: RaftState, leadership: Leadership) -> None:
    """Continue a change whose latest step was committed."""
    configurations = state.log.configurations
    if configurations.active_index > state.log.commit:
        return
    if configurations.active.is_joint:
        sending.append_own(state, leadership, EntryKind.CONFIG, configurations.active.left())
    elif not configurations.active.is_voter(state.id):
        _leave(state, leadership)


def _leave(state: RaftState, leadership: Leadership) -> None:
    """Step down as a removed leader: send the commit index, ask a successor to campaign, and follow (§6, R14)."""
    sending.broadcast_heartbeat(state, leadership)
    state.send(leadership.successor(state.configuration.voters), TimeoutNow(state.term))
    if state.tracing:
        state.trace("removed from the group: stepping down")
    state.become_follower(state.term, None)


def _check_ready(state: RaftState, leadership: Leadership) -> None:
    if leadership.transfer is not None:
        raise UnavailableError("leadership is being transferred")
    if state.log.commit < leadership.first_own_index:
        raise UnavailableError("the leader has not committed in its own term yet")
    if _is_change_pending(state):
        raise UnavailableError("another membership change is pending; retry when it is done")


def _is_change_pending(state: RaftState) -> bool:
    configurations = state.log.configurations
    return configurations.active.is_joint or configurations.active_index > state.log.commit


def _check_target(target: Configuration) -> None:
    if not target.voters:
        raise RequestError("a group needs at least one voter")
    if len({*target.voters, *target.learners}) != len(target.voters) + len(target.learners):
        raise RequestError("a node is named twice among voters and learners")


def _check_promotable(state: RaftState, leadership: Leadership, node: NodeId) -> None:
    """Refuse to promote a node that is no learner, or lacks its own addition or more than a little since."""
    if node not in state.configuration.learners:
        raise RequestError(f"node {node} must be a learner before it can be a voter")
    if not is_caught_up(state, leadership, node):
        progress = leadership.progress[node]
        lag = state.log.terms.last_index - progress.match
        what = "it has no vote yet" if progress.is_joining else f"it misses {lag} entries"
        raise UnavailableError(f"learner {node} is not caught up: {what}")
