"""What the primary should do next, seen from the metadata alone: commands that bring what is to what is meant to be.

Deterministic, and without memory: a new primary that sees the same metadata goes on where the last one stopped. The few
moves that may be under way at once go, in this order, to replicas that are lost, to partitions that have fewer than are
meant, to brokers that are to be emptied, and last to spreading replicas evenly. A partition whose majority is dead
cannot move anything; it waits, and takes nobody's turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from quiver.config import ManagerSettings
from quiver.manager.placement import (
    PlannedMove,
    can_move,
    is_lost,
    plan_drain,
    plan_growth,
    plan_rebalance,
    plan_rebuild,
)
from quiver.metadata import (
    AbortMove,
    BeginMove,
    BrokerState,
    ChangeBrokerState,
    ChangeRebalancing,
    Move,
    MoveState,
    PreferLeader,
    PurgeTopic,
    TopicState,
    View,
)
from quiver.model import NodeId
from quiver.raft import Configuration

Repair = AbortMove | BeginMove | PreferLeader | ChangeRebalancing | ChangeBrokerState | PurgeTopic
"""What the primary does by itself."""


def plan_repairs(view: View, *, now_ms: int, settings: ManagerSettings) -> list[Repair]:
    """Return what to do next, in order; times are the wall clock's."""
    moves = list(_allowed(view, _urgent_moves(view, now_ms, settings), settings))
    spreads = settings.rebalance == "always" or view.counters.is_rebalancing
    return [
        *_abort_hopeless(view, now_ms),
        *(_begin(move, now_ms) for move in moves),
        *(() if moves or not spreads else _rebalance(view, now_ms, settings)),
        *_conclude_drains(view, now_ms),
        *_purge(view, now_ms),
    ]


def plan_members(view: View, members: Configuration) -> Configuration | None:
    """Return the next step of the metadata's own group to its members; None if there is none to take.

    All nodes follow the metadata, managers vote. Voters that have never registered stay: they belong to a cluster that
    is just being formed. One voter more or less at a time.
    """
    if members.is_joint:
        return None
    known = {broker.broker_id: broker for broker in view.brokers.values() if broker.state is not BrokerState.REMOVED}
    voters = set(members.voters)
    learners = {node for node in known if node not in voters}
    if learners != set(members.learners):
        return Configuration(voters=members.voters, learners=tuple(sorted(learners)))
    for node in members.voters:
        is_unwanted = node in view.brokers and (node not in known or "manager" not in known[node].roles)
        if is_unwanted and len(voters) > 1:
            stays = {node} & known.keys()
            return Configuration(voters=tuple(sorted(voters - {node})), learners=tuple(sorted(learners | stays)))
    for node in sorted(learners):
        if known[node].state is BrokerState.ALIVE and "manager" in known[node].roles:
            return Configuration(voters=tuple(sorted(voters | {node})), learners=tuple(sorted(learners - {node})))
    return None


# -- moves -------------------------------------------------------------------------------------------


def _urgent_moves(view: View, now_ms: int, settings: ManagerSettings) -> Iterable[PlannedMove]:
    lost = [
        broker.broker_id
        for broker in view.brokers.values()
        if is_lost(broker, now_ms=now_ms, rebuild_after_ms=settings.rebuild_after_ms)
    ]
    empties = any(broker.is_unwanted for broker in view.brokers.values())
    return chain(
        plan_rebuild(view, lost) if lost else (),
        plan_growth(view),
        plan_drain(view) if empties else (),
    )


def _allowed(view: View, planned: Iterable[PlannedMove], settings: ManagerSettings) -> Iterator[PlannedMove]:
    """Yield the moves that may be begun now: one for each partition, and so many in all and for each broker."""
    moving = [move for move in view.moves.values() if _is_under_way(view, move)]
    busy = Counter(broker for move in moving for broker in _busy(view, move.source, move.target))
    free = settings.moves_max - len(moving)
    begun = set()
    for move in planned:
        brokers = _busy(view, move.source, move.target)
        key = (move.topic_id, move.partition_id)
        if free > 0 and key not in begun and all(busy[broker] < settings.broker_moves_max for broker in brokers):
            free -= 1
            begun.add(key)
            busy.update(brokers)
            yield move


def _is_under_way(view: View, move: Move) -> bool:
    """Tell whether a move can come forward; one that cannot takes nobody's turn."""
    return can_move(view, view.partitions[move.topic_id, move.partition_id])


def _busy(view: View, source: NodeId | None, target: NodeId) -> Sequence[NodeId]:
    """Return the brokers that a move is work for; a dead source does none."""
    is_working = source is not None and source in view.brokers and view.brokers[source].state not in _GONE
    return (source, target) if source is not None and is_working else (target,)


_GONE = (BrokerState.DEAD, BrokerState.REMOVED)


def _begin(move: PlannedMove, now_ms: int) -> BeginMove:
    return BeginMove(
        now_ms=now_ms,
        topic_id=move.topic_id,
        partition_id=move.partition_id,
        target=move.target,
        source=move.source,
    )


def _abort_hopeless(view: View, now_ms: int) -> Iterator[AbortMove]:
    """Give up moves whose target is gone or to be emptied itself, or whose topic was deleted."""
    for move_id, move in sorted(view.moves.items()):
        target = view.brokers.get(move.target)
        is_fit = target is not None and target.is_eligible
        is_used = view.topics[move.topic_id].state is TopicState.ACTIVE
        if move.state is MoveState.BEGUN and not (is_fit and is_used):
            yield AbortMove(now_ms=now_ms, move_id=move_id)


def _rebalance(view: View, now_ms: int, settings: ManagerSettings) -> Iterator[Repair]:
    """Take the next steps of a rebalance; when there are none and nothing moves, it is done."""
    planned = plan_rebalance(view, moves_max=settings.moves_max)
    for move in _allowed(view, planned.moves, settings):
        yield _begin(move, now_ms)
    for leader in planned.leaders:
        yield PreferLeader(
            now_ms=now_ms, topic_id=leader.topic_id, partition_id=leader.partition_id, leader=leader.leader
        )
    if view.counters.is_rebalancing and not planned.moves and not view.moves:
        yield ChangeRebalancing(now_ms=now_ms, is_rebalancing=False)


# -- what is over ------------------------------------------------------------------------------------


def _conclude_drains(view: View, now_ms: int) -> Iterator[ChangeBrokerState]:
    """Say of brokers that are being emptied that they are empty."""
    draining = [broker for _, broker in sorted(view.brokers.items()) if broker.state is BrokerState.DRAINING]
    for broker in draining:
        moves = view.moves.values()
        is_moving = any(broker.broker_id in (move.source, move.target) for move in moves)
        if not is_moving and not view.partitions_on(broker.broker_id):
            yield ChangeBrokerState(now_ms=now_ms, broker_id=broker.broker_id, state=BrokerState.DRAINED)


def _purge(view: View, now_ms: int) -> Iterator[PurgeTopic]:
    for topic in view.deleted_topics():
        if topic.purge_ms is not None and topic.purge_ms <= now_ms:
            yield PurgeTopic(now_ms=now_ms, topic_id=topic.topic_id)
