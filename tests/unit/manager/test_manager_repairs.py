"""Repairs: what the primary would do next follows from the metadata alone, in order and within bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from metadata_world import NOW_MS, change_state, create_topic, do, init_cluster, register_broker

from quiver.config import ManagerSettings
from quiver.manager.repairs import Repair, plan_members, plan_repairs
from quiver.metadata import (
    AbortMove,
    AddPartitionsCommand,
    BeginMove,
    BrokerState,
    ChangeBrokerState,
    ChangeRebalancing,
    DeleteTopicCommand,
    ExpireHold,
    FinishMove,
    HoldPosition,
    MetadataState,
    MoveId,
    PlaceHoldCommand,
    PreferLeader,
    PromoteMove,
    PurgeTopic,
    UndrainBroker,
)
from quiver.model import NodeId, PartitionId, TopicId
from quiver.raft import Configuration

DEAD, DRAINING = BrokerState.DEAD, BrokerState.DRAINING
SETTINGS = ManagerSettings(rebuild_after_ms=1_000)


def cluster(brokers: int, *assignments: tuple[int, ...], replicas: int | None = None) -> MetadataState:
    state = MetadataState()
    do(state, init_cluster())
    for number in range(1, brokers + 1):
        do(state, register_broker(number))
    if assignments:
        do(state, create_topic("logs", *assignments, replicas=replicas or len(assignments[0])))
    return state


def plan(state: MetadataState, now_ms: int = NOW_MS, *, is_emptied: bool = True, **settings: Any) -> list[Repair]:
    chosen = msgspec.structs.replace(SETTINGS, **settings)
    return plan_repairs(state.view(), now_ms=now_ms, settings=chosen, is_emptied=lambda _: is_emptied)


def moves(planned: list[Repair]) -> list[tuple[int, int | None, int]]:
    return [(item.partition_id, item.source, item.target) for item in planned if isinstance(item, BeginMove)]


def carry_out(state: MetadataState, planned: list[Repair]) -> None:
    """Do what is planned, and let every move that is begun come to its end."""
    for command in planned:
        do(state, command)
    for move_id in list(state.view().moves):
        do(state, PromoteMove(now_ms=NOW_MS, move_id=move_id))
        do(state, FinishMove(now_ms=NOW_MS, move_id=move_id))


def test_holds_that_are_over_are_let_go() -> None:
    state = cluster(3, (1, 2, 3))
    for name, lasting_ms in (("short", 1_000), ("long", 2_000)):
        held = (HoldPosition(partition_id=PartitionId(0), first_offset=1),)
        do(
            state,
            PlaceHoldCommand(now_ms=NOW_MS, topic_id=TopicId(1), name=name, positions=held, lasting_ms=lasting_ms),
        )
    assert plan(state, NOW_MS + 999) == []
    planned = plan(state, NOW_MS + 1_000)
    assert planned == [ExpireHold(now_ms=NOW_MS + 1_000, topic_id=TopicId(1), name="short")]
    carry_out(state, planned)
    assert plan(state, NOW_MS + 1_000) == []


def test_healthy_cluster_needs_nothing() -> None:
    assert plan(cluster(3, (1, 2, 3), (2, 3, 1), (3, 1, 2))) == []


def test_drain_is_a_few_moves_at_a_time_until_nothing_is_left() -> None:
    state = cluster(4, *[(1, 2, 3)] * 10)
    do(state, change_state(1, DRAINING))
    rounds = 0
    while state.view().brokers[NodeId(1)].state is not BrokerState.DRAINED:
        planned = plan(state, broker_moves_max=3)
        assert planned
        assert len(moves(planned)) <= 3
        carry_out(state, planned)
        rounds += 1
    assert rounds == 5
    assert not state.view().partitions_on(NodeId(1))


def test_moves_are_bounded_in_all_and_for_each_broker() -> None:
    state = cluster(7, *[(1, 2)] * 6, *[(3, 4)] * 6)
    for number in (1, 3):
        do(state, change_state(number, DRAINING))
    assert len(moves(plan(state, moves_max=3, broker_moves_max=9))) == 3
    planned = moves(plan(state, moves_max=99, broker_moves_max=2))
    assert [source for _, source, _ in planned].count(1) == 2
    assert [source for _, source, _ in planned].count(3) == 2
    carried = plan(state, moves_max=3)
    for command in carried:
        do(state, command)
    assert moves(plan(state, moves_max=3)) == []


def test_replicas_of_the_dead_are_built_anew_after_their_time() -> None:
    state = cluster(4, (1, 2, 3), (2, 3, 1))
    do(state, change_state(1, DEAD, NOW_MS))
    assert plan(state, NOW_MS + 999) == []
    assert moves(plan(state, NOW_MS + 1_000)) == [(0, 1, 4), (1, 1, 4)]
    do(state, change_state(1, BrokerState.REMOVED, NOW_MS))
    assert len(moves(plan(state, NOW_MS))) == 2


def test_what_is_lost_comes_before_what_is_drained() -> None:
    state = cluster(5, (1, 2, 3), (2, 3, 4))
    do(state, change_state(4, DRAINING))
    do(state, change_state(1, DEAD, NOW_MS))
    assert moves(plan(state, NOW_MS + 1_000, moves_max=1)) == [(0, 1, 5)]


def test_partition_that_lost_its_majority_takes_nobodys_turn() -> None:
    state = cluster(5, (1, 2, 3), (3, 4, 5))
    for number in (1, 2):
        do(state, change_state(number, DEAD, NOW_MS))
    assert moves(plan(state, NOW_MS + 1_000)) == []
    state = cluster(6, (1, 2, 3), (3, 4, 5))
    do(state, change_state(1, DEAD, NOW_MS))
    (begun,) = plan(state, NOW_MS + 1_000)
    do(state, begun)
    do(state, change_state(2, DEAD, NOW_MS))
    do(state, change_state(5, DRAINING))
    assert moves(plan(state, NOW_MS + 1_000, moves_max=1)) == [(1, 5, 6)]


def test_partition_with_too_few_replicas_gets_one_more() -> None:
    state = cluster(2, (1, 2), replicas=3)
    assert plan(state) == []
    do(state, register_broker(3))
    assert moves(plan(state)) == [(0, None, 3)]
    carry_out(state, plan(state))
    assert state.view().partitions[TopicId(1), PartitionId(0)].replicas == (1, 2, 3)
    assert plan(state) == []


@pytest.mark.parametrize("fate", ["dead", "draining", "removed", "no_broker"])
def test_move_that_leads_nowhere_is_aborted_and_planned_anew(fate: str) -> None:
    state = cluster(5, (1, 2, 3))
    do(state, change_state(1, DRAINING))
    carry = plan(state)
    assert moves(carry) == [(0, 1, 4)]
    do(state, carry[0])
    assert plan(state) == []
    if fate == "no_broker":
        do(state, register_broker(4, roles=("gateway",)))
    elif fate == "draining":
        do(state, change_state(4, DRAINING))
    else:
        do(state, change_state(4, DEAD))
        if fate == "removed":
            do(state, change_state(4, BrokerState.REMOVED))
    planned = plan(state)
    assert planned[0] == AbortMove(now_ms=NOW_MS, move_id=MoveId(1))
    do(state, planned[0])
    assert moves(plan(state)) == [(0, 1, 5)]


def test_undrained_broker_keeps_what_it_has() -> None:
    state = cluster(4, (1, 2, 3))
    do(state, change_state(1, DRAINING))
    do(state, UndrainBroker(now_ms=NOW_MS, broker_id=NodeId(1)))
    assert plan(state) == []


def test_broker_is_drained_when_nothing_moves_to_or_from_it() -> None:
    state = cluster(4, (1, 2, 3))
    do(state, change_state(1, DRAINING))
    do(state, plan(state)[0])
    do(state, PromoteMove(now_ms=NOW_MS, move_id=MoveId(1)))
    assert plan(state) == []  # it has still to let go of its files
    do(state, FinishMove(now_ms=NOW_MS, move_id=MoveId(1)))
    assert plan(state, is_emptied=False) == []  # a group may count it all the same
    assert plan(state) == [ChangeBrokerState(now_ms=NOW_MS, broker_id=NodeId(1), state=BrokerState.DRAINED)]


def test_drain_moves_a_topic_that_is_deleted_and_can_still_be_restored() -> None:
    state = cluster(4, (1, 2, 3))
    do(state, DeleteTopicCommand(now_ms=NOW_MS, topic="logs", purge_ms=NOW_MS + 50))
    do(state, change_state(1, DRAINING))
    assert moves(plan(state, NOW_MS + 49)) == [(0, 1, 4)]
    carry_out(state, plan(state, NOW_MS + 49))
    assert state.view().partitions[TopicId(1), PartitionId(0)].replicas == (4, 2, 3)
    drained = ChangeBrokerState(now_ms=NOW_MS + 49, broker_id=NodeId(1), state=BrokerState.DRAINED)
    assert plan(state, NOW_MS + 49) == [drained]


def test_deleted_topic_is_purged_when_its_time_has_come() -> None:
    state = cluster(3, (1, 2, 3))
    do(state, DeleteTopicCommand(now_ms=NOW_MS, topic="logs", purge_ms=NOW_MS + 50))
    do(state, change_state(1, DRAINING))
    assert plan(state, NOW_MS + 49) == []  # there is no fourth broker
    assert plan(state, NOW_MS + 50) == [PurgeTopic(now_ms=NOW_MS + 50, topic_id=TopicId(1))]
    carry_out(state, plan(state, NOW_MS + 50))
    assert plan(state, NOW_MS + 50) == [
        ChangeBrokerState(now_ms=NOW_MS + 50, broker_id=NodeId(1), state=BrokerState.DRAINED)
    ]


@pytest.mark.parametrize("is_asked", [True, False])
def test_rebalance_runs_when_asked_for_or_always_and_ends(is_asked: bool) -> None:
    state = cluster(2, *[(1, 2)] * 4)
    do(state, register_broker(3))
    rebalance = "on_request" if is_asked else "always"
    assert plan(state) == []
    if is_asked:
        do(state, ChangeRebalancing(now_ms=NOW_MS, is_rebalancing=True))
    rounds = 0
    while planned := plan(state, rebalance=rebalance):
        assert len(moves(planned)) <= SETTINGS.broker_moves_max
        carry_out(state, planned)
        rounds += 1
        assert rounds < 20
    view = state.view()
    counts = [len(view.partitions_on(NodeId(number))) for number in (1, 2, 3)]
    assert max(counts) - min(counts) <= 1
    assert not view.counters.is_rebalancing


def test_rebalance_evens_out_leaders_once_nothing_moves() -> None:
    state = cluster(3, *[(1, 2, 3)] * 3)
    do(state, ChangeRebalancing(now_ms=NOW_MS, is_rebalancing=True))
    planned = plan(state)
    assert sorted(item.leader for item in planned if isinstance(item, PreferLeader)) == [2, 3]
    carry_out(state, planned)
    assert {partition.replicas[0] for partition in state.view().partitions.values()} == {1, 2, 3}
    assert plan(state) == []


def test_partitions_that_are_added_count() -> None:
    state = cluster(3, (1,))
    command = AddPartitionsCommand(now_ms=NOW_MS, topic="logs", partitions=2, assignments=((NodeId(1),),))
    do(state, command)
    assert len(moves(plan(state, rebalance="always"))) == 1


# -- the metadata's own group ------------------------------------------------------------------------


def members(voters: tuple[int, ...], learners: tuple[int, ...] = (), **fields: Any) -> Configuration:
    return Configuration(
        voters=tuple(NodeId(node) for node in voters), learners=tuple(NodeId(node) for node in learners), **fields
    )


def with_nodes(**roles: tuple[str, ...]) -> MetadataState:
    state = cluster(0)
    for name, given in roles.items():
        do(state, register_broker(int(name.removeprefix("n")), roles=given))
    return state


def test_registered_nodes_follow_the_metadata() -> None:
    state = with_nodes(n1=("manager",), n4=("broker",), n5=("gateway",))
    assert plan_members(state.view(), members((1, 2, 3))) == members((1, 2, 3), (4, 5))
    assert plan_members(state.view(), members((1, 2, 3), (4, 5))) is None
    assert plan_members(state.view(), members((1, 2), (4,), voters_outgoing=(NodeId(1),))) is None


def test_node_that_was_removed_or_forgotten_leaves() -> None:
    state = with_nodes(n1=("manager",), n4=("broker",))
    do(state, change_state(4, DEAD))
    assert plan_members(state.view(), members((1,), (4, 9))) == members((1,), (4,))
    do(state, change_state(4, BrokerState.REMOVED))
    assert plan_members(state.view(), members((1,), (4,))) == members((1,))


def test_node_with_the_role_manager_learns_and_does_not_vote_by_itself() -> None:
    state = with_nodes(n1=("manager",), n4=("manager", "broker"))
    assert plan_members(state.view(), members((1, 2, 3))) == members((1, 2, 3), (4,))
    assert plan_members(state.view(), members((1, 2, 3), (4,))) is None


def test_manager_that_was_removed_votes_no_longer_and_one_that_gave_up_the_role_learns() -> None:
    state = with_nodes(n1=("manager",), n2=("manager",), n3=("broker",))
    assert plan_members(state.view(), members((1, 2, 3))) == members((1, 2), (3,))
    do(state, change_state(2, DEAD))
    do(state, change_state(2, BrokerState.REMOVED))
    assert plan_members(state.view(), members((1, 2), (3,))) == members((1,), (3,))
    do(state, change_state(1, DEAD))
    do(state, change_state(1, BrokerState.REMOVED))
    assert plan_members(state.view(), members((1,), (3,))) is None
