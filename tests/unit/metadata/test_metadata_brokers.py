"""What commands do to brokers."""

from __future__ import annotations

import pytest
from metadata_world import NOW_MS, change_state, create_topic, do, formed_state, init_cluster, refused, register_broker

from quiver.metadata.brokers import TRANSITIONS
from quiver.metadata.commands import (
    BeginMove,
    ChangeRebalancing,
    CommandDone,
    FinishMove,
    ForgetBroker,
    PromoteMove,
    UndrainBroker,
)
from quiver.metadata.rows import BrokerState, EntityKind, MoveId
from quiver.metadata.state import MetadataState
from quiver.model import NodeId, PartitionId, TopicId

ALIVE, SUSPECT, DEAD = BrokerState.ALIVE, BrokerState.SUSPECT, BrokerState.DEAD
DRAINING, DRAINED, REMOVED = BrokerState.DRAINING, BrokerState.DRAINED, BrokerState.REMOVED


def state_of(state: MetadataState, number: int) -> BrokerState:
    return state.view().brokers[NodeId(number)].state


def with_broker_4() -> MetadataState:
    state = formed_state()
    do(state, register_broker(4))
    return state


def test_cluster_is_formed_once() -> None:
    state = MetadataState()
    assert refused(state, register_broker(1)) == "not_formed"
    assert refused(state, init_cluster("")) == "bad_cluster_id"
    do(state, init_cluster("c1"))
    assert state.view().cluster_id == "c1"
    assert state.view().counters.formed_ms == NOW_MS
    assert do(state, init_cluster("c1")) == CommandDone(0)
    assert refused(state, init_cluster("c2")) == "cluster_exists"


def test_registered_broker_is_alive_and_heard_of() -> None:
    state = with_broker_4()
    broker = state.view().brokers[NodeId(4)]
    assert (broker.state, broker.wire_address, broker.registered_ms) == (ALIVE, "host4:9002", NOW_MS)
    assert broker.is_eligible
    assert state.view().last_seen_ms(EntityKind.BROKER, 4) == NOW_MS


def test_broker_that_registers_again_tells_its_new_address_and_is_alive() -> None:
    state = with_broker_4()
    do(state, change_state(4, DEAD, NOW_MS + 5))
    do(state, register_broker(4, now_ms=NOW_MS + 9, wire_address="elsewhere:1"))
    broker = state.view().brokers[NodeId(4)]
    assert (broker.state, broker.wire_address) == (ALIVE, "elsewhere:1")
    assert (broker.registered_ms, broker.changed_ms) == (NOW_MS, NOW_MS + 9)
    assert do(state, register_broker(4, now_ms=NOW_MS + 9, wire_address="elsewhere:1")) == CommandDone(0)


def test_another_node_cannot_take_a_brokers_id() -> None:
    assert refused(with_broker_4(), register_broker(4, identity="other")) == "broker_exists"


@pytest.mark.parametrize("fields", [{"identity": ""}, {"wire_address": ""}])
def test_broker_without_identity_or_address_is_refused(fields: dict[str, str]) -> None:
    assert refused(with_broker_4(), register_broker(5, **fields)) == "bad_broker"
    assert refused(with_broker_4(), register_broker(0)) == "bad_broker"


def test_states_follow_each_other_as_the_table_says() -> None:
    for first in BrokerState:
        for second in BrokerState:
            state = with_broker_4()
            for step in {ALIVE: (), REMOVED: (DEAD, REMOVED), DRAINED: (DRAINING, DRAINED)}.get(first, (first,)):
                do(state, change_state(4, step))
            if first is REMOVED:
                assert refused(state, change_state(4, second)) == "broker_removed"
            elif first is second:
                assert do(state, change_state(4, second)) == CommandDone(0)
            elif second in TRANSITIONS[first]:
                do(state, change_state(4, second))
                assert state_of(state, 4) is second
            elif second is REMOVED:
                assert refused(state, change_state(4, second)) == "not_drained"
            else:
                assert refused(state, change_state(4, second)) == "bad_transition"


def test_wish_to_drain_outlives_a_death() -> None:
    state = with_broker_4()
    for step in (DRAINING, SUSPECT, DEAD):
        do(state, change_state(4, step))
    assert not state.view().brokers[NodeId(4)].is_eligible
    do(state, register_broker(4, now_ms=NOW_MS + 1))
    assert state_of(state, 4) is DRAINING
    do(state, change_state(4, SUSPECT))
    do(state, change_state(4, ALIVE))
    assert state_of(state, 4) is DRAINING


def test_drain_is_taken_back_by_saying_alive() -> None:
    state = with_broker_4()
    do(state, change_state(4, DRAINING))
    do(state, change_state(4, ALIVE))
    assert (state_of(state, 4), state.view().brokers[NodeId(4)].is_draining) == (ALIVE, False)


def test_drained_broker_stays_so_when_it_restarts() -> None:
    state = with_broker_4()
    do(state, change_state(4, DRAINING))
    do(state, change_state(4, DRAINED))
    do(state, register_broker(4, now_ms=NOW_MS + 1))
    assert state_of(state, 4) is DRAINED


def test_broker_with_replicas_is_not_drained() -> None:
    state = formed_state()
    do(state, change_state(1, DRAINING))
    assert refused(state, change_state(1, DRAINED)) == "not_drained"


def test_broker_that_has_still_to_let_go_is_not_drained() -> None:
    state = with_broker_4()
    do(state, change_state(1, DRAINING))
    one, four = NodeId(1), NodeId(4)
    move = BeginMove(now_ms=NOW_MS, topic_id=TopicId(1), partition_id=PartitionId(0), source=one, target=four)
    do(state, move)
    do(state, PromoteMove(now_ms=NOW_MS, move_id=MoveId(1)))
    assert not state.view().partitions_on(one)
    assert refused(state, change_state(1, DRAINED)) == "not_drained"
    do(state, FinishMove(now_ms=NOW_MS, move_id=MoveId(1)))
    do(state, change_state(1, DRAINED))


def test_removed_broker_is_gone_for_good() -> None:
    state = with_broker_4()
    do(state, change_state(4, DEAD))
    do(state, change_state(4, REMOVED))
    assert refused(state, register_broker(4)) == "broker_removed"
    assert refused(state, create_topic("t", (4,))) == "broker_removed"


def test_only_a_removed_broker_without_replicas_is_forgotten() -> None:
    state = with_broker_4()
    forget = ForgetBroker(now_ms=NOW_MS, broker_id=NodeId(4))
    assert refused(state, forget) == "not_drained"
    for number in (3, 4):
        do(state, change_state(number, DEAD))
        do(state, change_state(number, REMOVED))
    assert refused(state, ForgetBroker(now_ms=NOW_MS, broker_id=NodeId(3))) == "not_drained"
    do(state, forget)
    assert NodeId(4) not in state.view().brokers
    assert state.view().last_seen_ms(EntityKind.BROKER, 4) is None
    assert refused(state, forget) == "unknown_broker"
    assert refused(state, change_state(4, ALIVE)) == "unknown_broker"


def test_node_without_the_role_of_a_broker_gets_no_replicas() -> None:
    state = formed_state()
    do(state, register_broker(4, roles=("gateway", "manager")))
    broker = state.view().brokers[NodeId(4)]
    assert (broker.roles, broker.is_eligible, broker.is_unwanted) == (("manager", "gateway"), False, True)
    assert refused(state, create_topic("more", (4,))) == "broker_not_eligible"
    assert refused(state, register_broker(5, roles=())) == "bad_broker"
    do(state, register_broker(4))
    assert state.view().brokers[NodeId(4)].is_eligible


@pytest.mark.parametrize(("before", "after"), [(DRAINING, ALIVE), (DRAINED, ALIVE), (SUSPECT, SUSPECT), (DEAD, DEAD)])
def test_undrained_broker_may_hold_replicas_and_is_as_alive_as_it_was(before: BrokerState, after: BrokerState) -> None:
    state = with_broker_4()
    do(state, change_state(4, DRAINING))
    do(state, change_state(4, before))
    do(state, UndrainBroker(now_ms=NOW_MS, broker_id=NodeId(4)))
    assert (state_of(state, 4), state.view().brokers[NodeId(4)].is_draining) == (after, False)
    assert do(state, UndrainBroker(now_ms=NOW_MS, broker_id=NodeId(4))) == CommandDone(0)


def test_rebalancing_is_wanted_until_it_is_done() -> None:
    state = formed_state()
    for wanted in (True, True, False):
        do(state, ChangeRebalancing(now_ms=NOW_MS, is_rebalancing=wanted))
        assert state.view().counters.is_rebalancing is wanted


@pytest.mark.parametrize(
    "fields", [{"wire_address": "[[::1]]:9002"}, {"wire_address": "host4"}, {"http_address": "host4:99999"}]
)
def test_broker_at_an_address_that_nobody_can_dial_is_refused(fields: dict[str, str]) -> None:
    """Every node reads the row: one that it cannot parse must never get there."""
    state = formed_state()
    assert refused(state, register_broker(4, **fields)) == "bad_broker"
    assert NodeId(4) not in state.view().brokers
    do(state, register_broker(4, http_address=""))
