"""Placement: even, spread over racks, never twice on a broker, never on one that may not have any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata_world import NOW_MS, change_state, create_topic, do, init_cluster, refused, register_broker

from quiver.errors import ConflictError, UnavailableError
from quiver.manager.placement import (
    MoveBudget,
    PlannedLeader,
    PlannedMove,
    default_replicas,
    is_lost,
    place_topic,
    plan_drain,
    plan_growth,
    plan_rebalance,
    plan_rebuild,
)
from quiver.metadata import (
    BeginMove,
    BrokerState,
    FinishMove,
    MetadataState,
    MoveId,
    NodeRole,
    PreferLeader,
    PromoteMove,
    View,
)
from quiver.model import NodeId, PartitionId, TopicId

ALIVE, SUSPECT, DEAD, DRAINING = BrokerState.ALIVE, BrokerState.SUSPECT, BrokerState.DEAD, BrokerState.DRAINING
ONLY_MANAGER: tuple[NodeRole, ...] = ("manager", "gateway")


def cluster(brokers: int, *, racks: Sequence[str] = ()) -> MetadataState:
    state = MetadataState()
    do(state, init_cluster())
    for number in range(1, brokers + 1):
        do(state, register_broker(number, rack=racks[number - 1] if racks else ""))
    return state


def add_topic(state: MetadataState, name: str, *, partitions: int, replicas: int) -> None:
    placed = place_topic(state.view(), partitions=partitions, replicas=replicas)
    do(state, create_topic(name, *placed, replicas=replicas))


def carry_out(state: MetadataState, move: PlannedMove) -> None:
    begun = BeginMove(
        now_ms=NOW_MS, topic_id=move.topic_id, partition_id=move.partition_id, source=move.source, target=move.target
    )
    do(state, begun)
    move_id = MoveId(state.counters.next_move_id - 1)
    do(state, PromoteMove(now_ms=NOW_MS, move_id=move_id))
    do(state, FinishMove(now_ms=NOW_MS, move_id=move_id))


def counts(view: View) -> Counter[NodeId]:
    found = Counter(broker for partition in view.partitions.values() for broker in partition.replicas)
    return Counter({broker: found[broker] for broker in view.brokers})


def leader_counts(view: View) -> Counter[NodeId]:
    return Counter(partition.replicas[0] for partition in view.partitions.values())


def spread(view: View, counted: Counter[NodeId]) -> int:
    values = [counted[broker.broker_id] for broker in view.brokers.values() if broker.is_eligible]
    return max(values) - min(values)


def targets(moves: Sequence[PlannedMove]) -> list[NodeId]:
    return [move.target for move in moves]


def racks_of(view: View, brokers: Sequence[NodeId]) -> int:
    return len({view.brokers[broker].rack for broker in brokers})


sizes = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 7), sizes)
def test_replicas_are_even_and_never_twice_on_a_broker(brokers: int, topics: list[tuple[int, int]]) -> None:
    state = cluster(brokers)
    for number, (partitions, replicas) in enumerate(topics):
        add_topic(state, f"topic-{number}", partitions=partitions, replicas=replicas)
        view = state.view()
        assert spread(view, counts(view)) <= 1
        for partition in view.partitions.values():
            assert len(set(partition.replicas)) == len(partition.replicas)
    assert place_topic(state.view(), partitions=4, replicas=2) == place_topic(state.view(), partitions=4, replicas=2)


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 6), st.integers(1, 20))
def test_preferred_leaders_are_even(brokers: int, partitions: int) -> None:
    state = cluster(brokers)
    add_topic(state, "logs", partitions=partitions, replicas=3)
    view = state.view()
    assert spread(view, Counter({broker: leader_counts(view)[broker] for broker in view.brokers})) <= 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=3, max_size=7), st.integers(1, 10), st.integers(1, 3))
def test_partition_lies_in_as_many_racks_as_there_are(racks: list[str], partitions: int, replicas: int) -> None:
    state = cluster(len(racks), racks=racks)
    add_topic(state, "logs", partitions=partitions, replicas=replicas)
    view = state.view()
    for partition in view.partitions.values():
        assert racks_of(view, partition.replicas) == min(replicas, len(set(racks)))


def choose_naively(view: View, *, partitions: int, replicas: int) -> list[set[NodeId]]:
    """Return the brokers of each partition by the rule itself: look at every broker for every replica."""
    held, placed = counts(view), []
    for _ in range(partitions):
        chosen: list[NodeId] = []
        while len(chosen) < replicas:
            racks = Counter(view.brokers[broker].rack or str(broker) for broker in chosen)
            chosen.append(
                min(
                    (row for row in view.brokers.values() if row.broker_id not in chosen),
                    key=lambda row: (
                        racks[row.rack or str(row.broker_id)],
                        row.state is SUSPECT,
                        held[row.broker_id],
                        row.broker_id,
                    ),
                ).broker_id
            )
        held.update(chosen)
        placed.append(set(chosen))
    return placed


@given(
    st.lists(st.sampled_from(["a", "b", "c", "d", ""]), min_size=1, max_size=9),
    st.lists(st.integers(1, 9)),
    st.integers(1, 12),
    st.data(),
)
def test_new_partitions_go_where_a_look_at_every_broker_would_put_them(
    racks: list[str], suspects: list[int], partitions: int, data: st.DataObject
) -> None:
    state = cluster(len(racks), racks=racks)
    add_topic(state, "uneven", partitions=3, replicas=data.draw(st.integers(1, len(racks)), label="uneven"))
    for number in {suspect for suspect in suspects if suspect <= len(racks)}:
        do(state, change_state(number, SUSPECT))
    replicas = data.draw(st.integers(1, len(racks)), label="replicas")
    placed = place_topic(state.view(), partitions=partitions, replicas=replicas)
    assert [set(members) for members in placed] == choose_naively(
        state.view(), partitions=partitions, replicas=replicas
    )


def hosts(*names: str) -> MetadataState:
    """Return a cluster whose nodes have no rack and publish these hosts, each with a port of its own."""
    state = MetadataState()
    do(state, init_cluster())
    for number, host in enumerate(names, 1):
        do(state, register_broker(number, wire_address=f"{host}:{9000 + number}"))
    return state


def hosts_of(view: View, brokers: Sequence[NodeId]) -> int:
    return len({view.brokers[broker].wire_address.rpartition(":")[0] for broker in brokers})


def test_nodes_of_one_host_are_one_rack() -> None:
    view = hosts("a", "a", "b", "b", "c", "c").view()
    placed = place_topic(view, partitions=12, replicas=3)
    assert {hosts_of(view, members) for members in placed} == {3}
    assert len({broker for members in placed for broker in members}) == 6


def test_replicas_share_a_host_where_there_are_too_few() -> None:
    one, two = hosts("a", "a", "a").view(), hosts("a", "a", "b").view()
    assert [sorted(members) for members in place_topic(one, partitions=2, replicas=3)] == [[1, 2, 3], [1, 2, 3]]
    assert {hosts_of(two, members) for members in place_topic(two, partitions=4, replicas=2)} == {2}


def test_hosts_matter_only_to_nodes_without_a_rack() -> None:
    state = hosts("nat", "nat", "nat")
    for number, rack in ((1, "x"), (2, "y"), (3, "x")):
        do(state, register_broker(number, wire_address=f"nat:{9000 + number}", rack=rack))
    assert all(2 in members for members in place_topic(state.view(), partitions=4, replicas=2))


def test_rebalance_parts_replicas_that_share_a_host() -> None:
    state = hosts("a", "a", "b")
    do(state, create_topic("logs", (1, 2), (2, 1), (1, 3), replicas=2))
    moves = plan_rebalance(state.view()).moves
    for move in moves:
        carry_out(state, move)
    view = state.view()
    assert len(moves) == 2
    assert {hosts_of(view, row.replicas) for row in view.partitions.values()} == {2}
    assert not plan_rebalance(view).moves


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["alive", "suspect", "dead", "draining", "no_broker"]), min_size=3, max_size=7))
def test_ineligible_broker_is_never_chosen(kinds: list[str]) -> None:
    state = cluster(len(kinds))
    for number, kind in enumerate(kinds, 1):
        if kind == "no_broker":
            do(state, register_broker(number, roles=ONLY_MANAGER))
        elif kind != "alive":
            do(state, change_state(number, BrokerState(kind)))
    allowed = {number for number, kind in enumerate(kinds, 1) if kind in ("alive", "suspect")}
    if not allowed:
        with pytest.raises((ConflictError, UnavailableError)):
            place_topic(state.view(), partitions=1, replicas=1)
        return
    placed = place_topic(state.view(), partitions=6, replicas=1)
    assert {broker for assignment in placed for broker in assignment} <= allowed


@pytest.mark.parametrize("racks", [(), ("a", "a", "b", "b")])
def test_suspect_broker_is_chosen_only_where_no_other_will_do(racks: Sequence[str]) -> None:
    state = cluster(4, racks=racks)
    do(state, change_state(1, SUSPECT))
    view = state.view()
    assert not any(1 in members for members in place_topic(view, partitions=8, replicas=1))
    assert not any(1 in members for members in place_topic(view, partitions=8, replicas=3))
    assert all(1 in members for members in place_topic(view, partitions=8, replicas=4))
    do(state, create_topic("logs", (2, 3), replicas=3))
    (move,) = plan_growth(state.view())
    assert (move.source, move.target) == (None, 4)


def test_too_many_replicas_are_refused_and_dead_brokers_get_theirs_later() -> None:
    state = cluster(3)
    with pytest.raises(ConflictError) as caught:
        place_topic(state.view(), partitions=1, replicas=4)
    assert caught.value.code == "too_few_brokers"
    do(state, change_state(1, DEAD))
    assert place_topic(state.view(), partitions=1, replicas=3) == ((2, 3),)
    add_topic(state, "logs", partitions=1, replicas=3)
    assert plan_growth(state.view()) == []
    do(state, register_broker(1))
    (move,) = plan_growth(state.view())
    assert (move.source, move.target) == (None, 1)
    do(state, change_state(2, DEAD))
    do(state, change_state(3, DEAD))
    with pytest.raises(UnavailableError):
        place_topic(state.view(), partitions=1, replicas=3)


def test_default_is_three_replicas_or_as_many_as_there_are_brokers() -> None:
    assert [default_replicas(cluster(brokers).view()) for brokers in (0, 1, 2, 3, 4)] == [1, 1, 2, 3, 3]
    state = cluster(3)
    do(state, change_state(1, DEAD))
    assert default_replicas(state.view()) == 3
    do(state, change_state(2, DRAINING))
    assert default_replicas(state.view()) == 2


def test_managers_that_start_count_as_brokers() -> None:
    managers = [NodeId(node) for node in (1, 2, 3)]
    assert [default_replicas(cluster(brokers).view(), managers) for brokers in (0, 1, 2, 3, 4)] == [3] * 5
    assert default_replicas(cluster(1).view(), managers[:2]) == 2


def test_replacement_goes_to_a_new_rack_then_to_the_emptiest() -> None:
    state = cluster(5, racks=["a", "a", "b", "b", "c"])
    do(state, create_topic("logs", (1, 3), replicas=3))
    do(state, create_topic("more", (5,), replicas=1))
    assert targets(plan_rebuild(state.view(), [NodeId(3)])) == [4]  # b is as new as c, and emptier
    assert targets(plan_growth(state.view())) == [5]
    do(state, change_state(4, DEAD))
    do(state, change_state(5, DEAD))
    assert targets(plan_rebuild(state.view(), [NodeId(1)])) == [2]
    do(state, change_state(2, DEAD))
    assert targets(plan_rebuild(state.view(), [NodeId(1)])) == []


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 7), sizes, st.data())
def test_drain_leaves_nothing(brokers: int, topics: list[tuple[int, int]], data: st.DataObject) -> None:
    state = cluster(brokers)
    for number, (partitions, replicas) in enumerate(topics):
        add_topic(state, f"topic-{number}", partitions=partitions, replicas=replicas)
    leaving = data.draw(st.sets(st.integers(1, brokers), min_size=1, max_size=brokers - 3))
    for number in sorted(leaving):
        do(state, change_state(number, DRAINING))
    moves = 0
    while planned := plan_drain(state.view()):
        for move in planned:
            carry_out(state, move)
            moves += 1
    view = state.view()
    assert all(not view.partitions_on(NodeId(number)) for number in leaving)
    assert moves <= sum(partitions * replicas for partitions, replicas in topics)
    assert spread(view, counts(view)) <= max(2, moves)


def test_drain_takes_what_a_node_without_the_role_still_holds() -> None:
    state = cluster(3)
    do(state, create_topic("logs", (1, 2), replicas=2))
    do(state, register_broker(1, roles=ONLY_MANAGER))
    assert plan_drain(state.view()) == [PlannedMove(TopicId(1), PartitionId(0), NodeId(1), NodeId(3))]


def test_partition_that_moves_is_left_alone_and_counted_where_it_goes() -> None:
    state = cluster(4)
    do(state, create_topic("logs", (1, 2), (1, 2), replicas=2))
    do(state, change_state(1, DRAINING))
    first, second = plan_drain(state.view())
    assert (first.target, second.target) == (3, 4)
    do(
        state,
        BeginMove(now_ms=1, topic_id=TopicId(1), partition_id=PartitionId(0), source=first.source, target=first.target),
    )
    assert plan_drain(state.view()) == [second]


def test_drain_waits_where_nobody_can_take_a_replica() -> None:
    state = cluster(2)
    do(state, create_topic("logs", (1, 2), replicas=2))
    do(state, change_state(1, DRAINING))
    assert plan_drain(state.view()) == []


def test_replicas_of_the_dead_are_built_anew() -> None:
    state = cluster(4)
    add_topic(state, "logs", partitions=4, replicas=3)
    do(state, change_state(2, DEAD, NOW_MS))
    broker = state.view().brokers[NodeId(2)]
    assert not is_lost(broker, now_ms=NOW_MS + 9, rebuild_after_ms=10)
    assert is_lost(broker, now_ms=NOW_MS + 10, rebuild_after_ms=10)
    assert not is_lost(broker, now_ms=NOW_MS - 9, rebuild_after_ms=10)
    assert is_lost(broker, now_ms=NOW_MS - 10, rebuild_after_ms=10), "the clock was moved back"
    for move in plan_rebuild(state.view(), [NodeId(2)]):
        assert move.source == 2
        carry_out(state, move)
    view = state.view()
    assert not view.partitions_on(NodeId(2))
    assert all(len(partition.replicas) == 3 for partition in view.partitions.values())


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 5), sizes, st.integers(1, 3))
def test_rebalance_brings_counts_within_one_with_the_fewest_moves(
    brokers: int, topics: list[tuple[int, int]], joining: int
) -> None:
    state = cluster(brokers)
    for number, (partitions, replicas) in enumerate(topics):
        add_topic(state, f"topic-{number}", partitions=partitions, replicas=replicas)
    for number in range(brokers + 1, brokers + joining + 1):
        do(state, register_broker(number))
    before = counts(state.view())
    moves = 0
    while planned := plan_rebalance(state.view()).moves:
        for move in planned:
            carry_out(state, move)
            moves += 1
    view = state.view()
    assert spread(view, counts(view)) <= 1
    total, eligible = sum(before.values()), brokers + joining
    shares = [total // eligible + (number < total % eligible) for number in range(eligible)]
    surplus = (max(0, had - share) for had, share in zip(sorted(before.values(), reverse=True), shares, strict=True))
    assert moves == sum(surplus)
    for leader in plan_rebalance(view).leaders:
        do(state, prefer(leader))
    assert plan_rebalance(state.view()).leaders == ()


def prefer(planned: PlannedLeader) -> PreferLeader:
    return PreferLeader(
        now_ms=NOW_MS, topic_id=planned.topic_id, partition_id=planned.partition_id, leader=planned.leader
    )


def test_rebalance_names_other_leaders_where_replicas_are_even() -> None:
    state = cluster(3)
    do(state, create_topic("logs", (1, 2, 3), (1, 2, 3), (1, 2, 3), replicas=3))
    planned = plan_rebalance(state.view())
    assert planned.moves == ()
    for leader in planned.leaders:
        do(state, prefer(leader))
    assert sorted(leader_counts(state.view()).values()) == [1, 1, 1]


def test_rebalance_keeps_racks_apart() -> None:
    state = cluster(3, racks=["a", "b", "b"])
    do(state, create_topic("logs", *[(1, 2)] * 4, replicas=2))
    while planned := plan_rebalance(state.view()).moves:
        for move in planned:
            carry_out(state, move)
    view = state.view()
    assert [counts(view)[NodeId(n)] for n in (1, 2, 3)] == [4, 2, 2]
    assert all(racks_of(view, partition.replicas) == 2 for partition in view.partitions.values())


def test_rebalance_is_planned_as_far_as_it_is_asked_for() -> None:
    state = cluster(2)
    do(state, create_topic("logs", *[(1,)] * 8, replicas=1))
    assert len(plan_rebalance(state.view(), MoveBudget(state.view(), moves_max=2)).moves) == 2
    assert len(plan_rebalance(state.view()).moves) == 4


def test_leader_that_has_no_replica_is_not_preferred() -> None:
    state = cluster(3)
    do(state, create_topic("logs", (1, 2), replicas=2))
    assert refused(state, prefer(PlannedLeader(TopicId(1), PartitionId(0), NodeId(3)))) == "not_replica"
    assert refused(state, prefer(PlannedLeader(TopicId(1), PartitionId(7), NodeId(1)))) == "unknown_partition"
