"""Plan the primary's next commands from the metadata, to reconcile the cluster with its desired state.

Deterministic and stateless: a new primary with the same metadata continues where the last one stopped. Only the end of
a drain also needs what the broker says itself. The limited number of concurrent moves is used in this order: lost
replicas, under-replicated partitions, draining brokers, and rebalancing. A partition whose majority is dead cannot
move; it waits and does not use the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quiver.config import ManagerSettings
from quiver.manager.placement import (
    MoveBudget,
    PlannedMove,
    is_lost,
    plan_drain,
    plan_growth,
    plan_rebalance,
    plan_rebuild,
)
from quiver.metadata import (
    AbortMove,
    BeginMove,
    BrokerRow,
    BrokerState,
    ChangeBrokerState,
    ChangeRebalancing,
    ExpireHold,
    MoveState,
    PreferLeader,
    PurgeTopic,
    View,
)
from quiver.raft import Configuration

Repair = AbortMove | BeginMove | PreferLeader | ChangeRebalancing | ChangeBrokerState | PurgeTopic | ExpireHold
"""The commands that the primary submits on its own."""


def plan_repairs(
    view: View, *, now_ms: int, settings: ManagerSettings, is_emptied: Callable[[BrokerRow], bool]
) -> list[Repair]:
    """Return the next commands, in order; times are of the wall clock.

    `is_emptied` tells whether a draining broker itself says that it holds nothing.
    """
    budget = MoveBudget(view, moves_max=settings.moves_max, broker_moves_max=settings.broker_moves_max)
    moves = _urgent_moves(view, budget, now_ms=now_ms, settings=settings)
    spreads = settings.rebalance == "always" or view.counters.is_rebalancing
    return [
        *_abort_hopeless(view, now_ms),
        *(_begin(move, now_ms) for move in moves),
        *(() if moves or not spreads else _rebalance(view, budget, now_ms)),
        *_conclude_drains(view, now_ms, is_emptied),
        *_purge(view, now_ms),
        *_expire_holds(view, now_ms),
    ]


def plan_members(view: View, members: Configuration) -> Configuration | None:
    """Return the next configuration of the metadata group; None if it needs no change.

    All registered nodes are learners, except the managers, which vote. Only operators add managers
    (`manager_changes`). A voter that was removed from the cluster, or has given up the role, loses its vote, one at a
    time. Voters that have never registered stay: they belong to a cluster that is being formed.
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
    return None


# -- moves -------------------------------------------------------------------------------------------


def _urgent_moves(view: View, budget: MoveBudget, *, now_ms: int, settings: ManagerSettings) -> list[PlannedMove]:
    lost = [
        broker.broker_id
        for broker in view.brokers.values()
        if is_lost(broker, now_ms=now_ms, rebuild_after_ms=settings.rebuild_after_ms)
    ]
    return [*plan_rebuild(view, lost, budget), *plan_growth(view, budget), *plan_drain(view, budget)]


def _begin(move: PlannedMove, now_ms: int) -> BeginMove:
    return BeginMove(
        now_ms=now_ms,
        topic_id=move.topic_id,
        partition_id=move.partition_id,
        target=move.target,
        source=move.source,
    )


def _abort_hopeless(view: View, now_ms: int) -> Iterator[AbortMove]:
    """Abort moves whose target is dead, removed or draining."""
    for move_id, move in sorted(view.moves.items()):
        target = view.brokers.get(move.target)
        is_fit = target is not None and target.is_eligible
        if move.state is MoveState.BEGUN and not is_fit:
            yield AbortMove(now_ms=now_ms, move_id=move_id)


def _rebalance(view: View, budget: MoveBudget, now_ms: int) -> Iterator[Repair]:
    """Yield the next steps of a rebalance; without steps and moves under way, mark it complete."""
    planned = plan_rebalance(view, budget)
    for move in planned.moves:
        yield _begin(move, now_ms)
    for leader in planned.leaders:
        yield PreferLeader(
            now_ms=now_ms, topic_id=leader.topic_id, partition_id=leader.partition_id, leader=leader.leader
        )
    if view.counters.is_rebalancing and not planned.moves and not view.moves:
        yield ChangeRebalancing(now_ms=now_ms, is_rebalancing=False)


# -- completion and expiry ------------------------------------------------------------------------------------


def _conclude_drains(view: View, now_ms: int, is_emptied: Callable[[BrokerRow], bool]) -> Iterator[ChangeBrokerState]:
    """Mark draining brokers without replicas and moves as drained, if they say so, too.

    A group may have carried out a move that was aborted: it then counts a broker of which the metadata knows nothing,
    perhaps as its only voter, until it has changed back.
    """
    draining = [broker for _, broker in sorted(view.brokers.items()) if broker.state is BrokerState.DRAINING]
    for broker in draining:
        moves = view.moves.values()
        is_moving = any(broker.broker_id in (move.source, move.target) for move in moves)
        if not is_moving and not view.partitions_on(broker.broker_id) and is_emptied(broker):
            yield ChangeBrokerState(now_ms=now_ms, broker_id=broker.broker_id, state=BrokerState.DRAINED)


def _purge(view: View, now_ms: int) -> Iterator[PurgeTopic]:
    for topic in view.deleted_topics():
        if topic.purge_ms is not None and topic.purge_ms <= now_ms:
            yield PurgeTopic(now_ms=now_ms, topic_id=topic.topic_id)


def _expire_holds(view: View, now_ms: int) -> Iterator[ExpireHold]:
    for topic_id, name in sorted(view.holds):
        if view.holds[topic_id, name].expires_ms <= now_ms:
            yield ExpireHold(now_ms=now_ms, topic_id=topic_id, name=name)
