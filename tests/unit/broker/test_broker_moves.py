"""Moves of replicas: performed by the current leader, resumed after any crash, never with a copy too few."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from broker_cluster import DIRECTORY, SETTINGS, Cluster, Node, simulate

from quiver.errors import NotAllowedError
from quiver.manager.node_router import NodeRouter
from quiver.metadata import (
    AbortMove,
    BrokerState,
    ChangeBrokerState,
    Command,
    DeleteTopicCommand,
    MoveState,
    PromoteMove,
    RestoreTopicCommand,
)
from quiver.metrics import MetricReader
from quiver.model import NodeId, PartitionId, TopicId
from quiver.testing.raft_ablations import Safeguard, disabled


def replicas(cluster: Cluster, topic_id: TopicId) -> tuple[NodeId, ...]:
    return cluster.view().partitions[topic_id, PartitionId(0)].replicas


def move_state(cluster: Cluster) -> MoveState | None:
    return next((move.state for move in cluster.view().moves.values()), None)


async def filled_topic(cluster: Cluster, *assignment: int, batches: int = 30) -> TopicId:
    topic_id = await cluster.create_topic("logs", assignment)
    for number in range(batches):
        await cluster.produce(topic_id, b"%d" % number * 20)
    return topic_id


async def wait_moved(cluster: Cluster, topic_id: TopicId, *final: int) -> None:
    """Wait for the end of a move, and check that the batches are where they should be and nowhere else."""
    await cluster.wait(lambda: not cluster.view().moves or None)
    assert sorted(replicas(cluster, topic_id)) == sorted(final)
    await cluster.produce(topic_id, b"after")
    await cluster.wait_equal(topic_id, *final)
    values = await cluster.fetch(topic_id)
    assert [value for value in values if value != b"after"] == [b"%d" % n * 20 for n in range(len(values) - 1)]


def test_follower_moves() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await filled_topic(cluster, 1, 2, 3)
        await cluster.begin_move(topic_id, source=3, target=4)
        await wait_moved(cluster, topic_id, 1, 2, 4)
        assert not cluster[3].disk.names(f"{DIRECTORY}/joined")

    simulate(test, nodes=4)


def test_leader_transfers_leadership_before_it_moves() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await filled_topic(cluster, 1, 2, 3)
        assert await cluster.wait_leader(topic_id) is cluster[1]
        await cluster.begin_move(topic_id, source=1, target=4)
        await wait_moved(cluster, topic_id, 2, 3, 4)

    simulate(test, nodes=4)


def test_move_goes_on_after_its_report_was_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, refused = NodeRouter.submit, list[Command[Any]]()

    async def refuse_once(router: NodeRouter, command: Command[Any]) -> None:
        """Answer as the primary does if a manager forwards the report that was removed meanwhile."""
        if isinstance(command, PromoteMove) and not refused:
            refused.append(command)
            raise NotAllowedError("not done: node 9 takes no part in the move, which is not allowed")
        await submit(router, command)

    async def test(cluster: Cluster) -> None:
        topic_id = await filled_topic(cluster, 1, 2, 3, batches=3)
        await cluster.begin_move(topic_id, source=3, target=4)
        await wait_moved(cluster, topic_id, 1, 2, 4)

    monkeypatch.setattr(NodeRouter, "submit", refuse_once)
    simulate(test, nodes=4)
    assert refused


def test_only_replica_moves() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await filled_topic(cluster, 1)
        await cluster.begin_move(topic_id, source=1, target=2)
        await wait_moved(cluster, topic_id, 2)

    simulate(test)


def give_the_only_replica_back() -> None:
    """Move a replica away and back, and cut the node off while it catches up and its log says that it votes alone."""

    async def test(cluster: Cluster) -> None:
        topic_id = await filled_topic(cluster, 1)
        group = cluster.group_of(topic_id)
        await cluster.begin_move(topic_id, source=1, target=2)
        await cluster.wait(lambda: not cluster.view().moves or None)
        await cluster.begin_move(topic_id, source=2, target=1)
        await cluster.wait(lambda: len(cluster[1].stored_batches(group)) > 1 or None)
        assert len(cluster[1].stored_batches(group)) < 30
        cluster.network.isolate(NodeId(1))
        await asyncio.sleep(5)
        assert cluster.leader(topic_id) is cluster[2]
        cluster.network.heal()
        await wait_moved(cluster, topic_id, 1)

    slow = msgspec.structs.replace(SETTINGS.replication, catch_up_bytes_per_second=1024, append_bytes_max=1024)
    simulate(test, settings=msgspec.structs.replace(SETTINGS, replication=slow))


def test_node_that_gets_the_only_replica_back_does_not_elect_itself_while_it_catches_up() -> None:
    """R24."""
    give_the_only_replica_back()
    with disabled(Safeguard.JOINING_MEMBER_NO_VOTE), pytest.raises(AssertionError):
        give_the_only_replica_back()


def test_partition_gets_one_replica_more() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await filled_topic(cluster, 1, 2)
        await cluster.begin_move(topic_id, source=None, target=3)
        await wait_moved(cluster, topic_id, 1, 2, 3)

    simulate(test)


def test_metrics_show_how_many_bytes_a_rebuild_still_lacks() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await filled_topic(cluster, 1, 2, batches=30)
        leader = await cluster.wait_leader(topic_id)
        assert await left_bytes(leader) is None
        await cluster.begin_move(topic_id, source=None, target=3)
        await cluster.wait(lambda: learners(leader, topic_id) or None)
        seen = [await left_bytes(leader)]
        while learners(leader, topic_id):
            await asyncio.sleep(0.2)
            seen.append(await left_bytes(leader))
        falling = [left for left in seen if left is not None]
        assert len(set(falling)) > 3, seen
        assert falling[-1] < falling[0] / 2
        size_bytes = await read_metric(leader, "quiver_partition_log_bytes") or 0
        assert size_bytes / 2 < falling[0] <= size_bytes
        assert await left_bytes(leader) is None
        assert size_bytes / 2 < (await read_metric(leader, "quiver_rebuild_sent_bytes_total") or 0) < 2 * size_bytes

    slow = msgspec.structs.replace(SETTINGS.replication, catch_up_bytes_per_second=1024, append_bytes_max=1024)
    simulate(test, settings=msgspec.structs.replace(SETTINGS, replication=slow))


def test_partition_that_never_had_a_leader_can_be_moved() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (1, 2, 3))
        await cluster.begin_move(topic_id, source=2, target=4)
        await cluster.wait(lambda: not cluster.view().moves or None)
        assert cluster.view().partitions[topic_id, PartitionId(0)].epoch > 0
        await cluster.produce(topic_id, b"a")
        await cluster.wait_equal(topic_id, 1, 3, 4)

    simulate(test, nodes=4)


def test_move_is_not_promoted_before_a_leader_was_reported() -> None:
    """Until then the metadata names the nodes that the partition was made with, and whoever is late goes by that."""

    async def test(cluster: Cluster) -> None:
        cluster.takes_reports = False
        topic_id = await filled_topic(cluster, 1, 2, 3, batches=3)
        leader = await cluster.wait_leader(topic_id)
        await cluster.begin_move(topic_id, source=3, target=4)
        await cluster.wait(lambda: voters(leader, topic_id) == (1, 2, 4) or None)
        await asyncio.sleep(5)
        assert move_state(cluster) is MoveState.BEGUN
        cluster.takes_reports = True
        await wait_moved(cluster, topic_id, 1, 2, 4)

    simulate(test, nodes=4)


@pytest.mark.parametrize("victim", [1, 2, 3, 4])
@pytest.mark.parametrize("delay_ms", [5, 60, 150, 300])
def test_move_survives_the_crash_of_anyone_at_any_time(victim: int, delay_ms: int) -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await filled_topic(cluster, 1, 2, 3)
        await cluster.begin_move(topic_id, source=1, target=4)
        await asyncio.sleep(delay_ms / 1000)
        cluster[victim].kill(loses_power=True)
        await asyncio.sleep(0.5)
        cluster[victim].start()
        await wait_moved(cluster, topic_id, 2, 3, 4)

    simulate(test, nodes=4, seed=victim * 1000 + delay_ms)


def test_move_survives_lost_and_broken_requests() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await filled_topic(cluster, 1, 2, 3)
        cluster.transport.rates.p_break_before = cluster.transport.rates.p_break_after = 0.3
        await cluster.begin_move(topic_id, source=2, target=4)
        await cluster.wait(lambda: not cluster.view().moves or None)
        cluster.transport.rates.p_break_before = cluster.transport.rates.p_break_after = 0.0
        await wait_moved(cluster, topic_id, 1, 3, 4)

    simulate(test, nodes=4)


def test_move_away_from_a_dead_broker_ends_and_it_removes_its_files_when_it_is_back() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await filled_topic(cluster, 1, 2, 3)
        await cluster.wait_equal(topic_id, 1, 2, 3)
        group = cluster.group_of(topic_id)
        cluster[3].kill()
        await cluster.submit(ChangeBrokerState(now_ms=2, broker_id=NodeId(3), state=BrokerState.DEAD))
        await cluster.begin_move(topic_id, source=3, target=4)
        await cluster.wait(lambda: not cluster.view().moves or None)
        assert cluster[3].stored_batches(group)
        cluster[3].start()
        await wait_moved(cluster, topic_id, 1, 2, 4)

    simulate(test, nodes=4)


def test_aborted_move_leaves_everything_as_it_was() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await filled_topic(cluster, 1, 2, 3)
        cluster.network.isolate(NodeId(4))  # it never catches up
        await cluster.begin_move(topic_id, source=3, target=4)
        await asyncio.sleep(1)
        move_id = next(iter(cluster.view().moves))
        await cluster.submit(AbortMove(now_ms=2, move_id=move_id))
        cluster.network.heal()
        await wait_moved(cluster, topic_id, 1, 2, 3)
        leader = await cluster.wait_leader(topic_id)
        await cluster.wait(lambda: not learners(leader, topic_id) or None)

    simulate(test, nodes=4)


def test_move_aborted_just_after_the_group_carried_it_out_is_undone() -> None:
    async def test(cluster: Cluster) -> None:
        primary = await cluster.wait(lambda: next((node.id for node in cluster.up if node.store.is_primary), None))
        first, second, target = (node for node in cluster.nodes if node != primary)
        topic_id = await filled_topic(cluster, first, second, primary, batches=5)
        leader = await cluster.wait_leader(topic_id)
        assert leader.id == first, "the leader must need a request to tell the primary how far it is"
        await cluster.wait(lambda: cluster.view().partitions[topic_id, PartitionId(0)].epoch)
        cluster.transport.rates.p_break_before = 1.0
        await cluster.begin_move(topic_id, source=second, target=target)
        await cluster.wait(lambda: set(voters(leader, topic_id)) == {first, primary, target} or None)
        await cluster.submit(AbortMove(now_ms=2, move_id=next(iter(cluster.view().moves))))
        cluster.transport.rates.p_break_before = 0.0
        await cluster.wait(lambda: set(voters(leader, topic_id)) == {first, primary, second} or None)
        await wait_moved(cluster, topic_id, first, primary, second)

    simulate(test, nodes=4)


async def abort_a_move_that_was_made(cluster: Cluster) -> tuple[TopicId, NodeId, NodeId]:
    """Move the only replica of a topic, and abort the move just after its group has carried it out.

    Return the topic, and the source and the target of the move. Requests fail until the caller lets them pass.
    """
    primary = await cluster.wait(lambda: next((node.id for node in cluster.up if node.store.is_primary), None))
    source, target = [node for node in cluster.nodes if node != primary][:2]
    topic_id = await filled_topic(cluster, source, batches=5)
    await cluster.wait(lambda: cluster.view().partitions[topic_id, PartitionId(0)].epoch)
    cluster.transport.rates.p_break_before = 1.0
    await cluster.begin_move(topic_id, source=source, target=target)
    await cluster.wait(lambda: cluster.leader(topic_id) is cluster[target] or None)
    await cluster.submit(AbortMove(now_ms=2, move_id=next(iter(cluster.view().moves))))
    return topic_id, source, target


def test_only_voter_that_the_metadata_does_not_know_serves_again_after_a_restart() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id, source, target = await abort_a_move_that_was_made(cluster)
        await cluster.wait(lambda: not cluster[target].store.view().moves or None)
        cluster[target].kill()
        cluster.transport.rates.p_break_before = 0.0
        cluster[target].start()
        await wait_moved(cluster, topic_id, source)

    simulate(test, nodes=4)


def test_drained_node_holds_nothing_only_when_no_group_counts_it_whatever_the_metadata_says() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id, source, target = await abort_a_move_that_was_made(cluster)
        await cluster.submit(ChangeBrokerState(now_ms=3, broker_id=target, state=BrokerState.DRAINING))
        drain_ms = cluster.view().brokers[target].changed_ms
        await cluster.wait(lambda: cluster[target].store.view().brokers[target].is_draining or None)
        assert not cluster[target].store.view().partitions_on(target)
        assert emptied_ms(cluster[target]) == 0, "it is the only voter"
        cluster.transport.rates.p_break_before = 0.0
        await wait_moved(cluster, topic_id, source)
        await cluster.wait(lambda: emptied_ms(cluster[target]) or None)
        assert emptied_ms(cluster[target]) == drain_ms
        assert not cluster[target].disk.names(f"{DIRECTORY}/joined")
        others = [node for node in cluster.nodes if node not in (source, target)]
        assert not any(emptied_ms(cluster[node]) for node in others), "they do not drain"

    simulate(test, nodes=4)


@pytest.mark.parametrize("was_made", [False, True])
def test_node_that_a_move_of_a_deleted_topic_left_behind_is_drained(*, was_made: bool) -> None:
    async def test(cluster: Cluster) -> None:
        topic_id, source, target = await (abort_a_move_that_was_made if was_made else abort_a_move)(cluster)
        await cluster.submit(DeleteTopicCommand(now_ms=2, topic="logs", purge_ms=10**9))
        await cluster.submit(ChangeBrokerState(now_ms=3, broker_id=target, state=BrokerState.DRAINING))
        await cluster.wait(lambda: not is_open(cluster[source], topic_id) or None)
        cluster.transport.rates.p_break_before = 0.0
        await cluster.wait(lambda: emptied_ms(cluster[target]) or None)
        await cluster.wait(lambda: not any(is_open(node, topic_id) for node in cluster.up) or None)
        await cluster.submit(RestoreTopicCommand(now_ms=4, topic_id=topic_id))
        await wait_moved(cluster, topic_id, *replicas(cluster, topic_id))

    simulate(test, nodes=4)


async def abort_a_move(cluster: Cluster) -> tuple[TopicId, NodeId, NodeId]:
    """Begin a move, and abort it when its target has files; requests fail until the caller lets them pass."""
    topic_id = await filled_topic(cluster, 1, 2, 3, batches=5)
    await cluster.wait(lambda: cluster.view().partitions[topic_id, PartitionId(0)].epoch)
    cluster.network.isolate(NodeId(4))  # it cannot catch up
    await cluster.begin_move(topic_id, source=3, target=4)
    cluster.network.heal()
    await cluster.wait(lambda: is_open(cluster[4], topic_id) or None)
    cluster.transport.rates.p_break_before = 1.0
    await cluster.submit(AbortMove(now_ms=2, move_id=next(iter(cluster.view().moves))))
    return topic_id, NodeId(3), NodeId(4)


def is_open(node: Node, topic_id: TopicId) -> bool:
    return node.broker is not None and bool(node.broker.describe_replicas(topic_id))


def emptied_ms(node: Node) -> int:
    assert node.broker is not None
    return node.broker._replica_manager.emptied_ms()


def voters(node: Node, topic_id: TopicId) -> tuple[NodeId, ...]:
    assert node.broker is not None
    return node.broker.describe_replicas(topic_id)[0].voters


async def read_metric(node: Node, name: str) -> float | None:
    assert node.broker is not None
    return MetricReader(await node.broker.metrics()).total(name)


async def left_bytes(node: Node) -> float | None:
    return await read_metric(node, "quiver_rebuild_remaining_bytes")


def learners(node: Node, topic_id: TopicId) -> tuple[NodeId, ...]:
    assert node.broker is not None
    return node.broker.describe_replicas(topic_id)[0].learners


def test_source_keeps_its_files_while_the_group_still_counts_it() -> None:
    """R19: metadata that says too early that a move is over costs no copy."""

    async def test(cluster: Cluster) -> None:
        topic_id = await filled_topic(cluster, 1, 2, 3)
        await cluster.wait_equal(topic_id, 1, 2, 3)
        group = cluster.group_of(topic_id)
        cluster.network.isolate(NodeId(4))  # the group cannot carry the move out
        await cluster.begin_move(topic_id, source=3, target=4)
        await cluster.submit(PromoteMove(now_ms=2, move_id=next(iter(cluster.view().moves))))
        await asyncio.sleep(10)
        assert cluster[3].stored_batches(group) == cluster[1].stored_batches(group)
        assert move_state(cluster) is MoveState.PROMOTED
        cluster.network.heal()
        await wait_moved(cluster, topic_id, 1, 2, 4)

    simulate(test, nodes=4)


def test_source_keeps_its_files_while_no_leader_is_confirmed() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await filled_topic(cluster, 1, 2, 3)
        group = cluster.group_of(topic_id)
        await cluster.begin_move(topic_id, source=3, target=4)
        await cluster.wait(lambda: move_state(cluster) is MoveState.PROMOTED or None, step_s=0.001)
        cluster.network.isolate(NodeId(3))
        kept = cluster[3].stored_batches(group)  # a leader may have confirmed already that they are not needed
        await asyncio.sleep(5)
        assert cluster[3].stored_batches(group) == kept
        cluster.network.heal()
        await wait_moved(cluster, topic_id, 1, 2, 4)

    simulate(test, nodes=4)


def test_leadership_returns_to_the_preferred_replica() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await filled_topic(cluster, 1, 2, 3)
        cluster[1].kill()
        assert await cluster.wait_leader(topic_id) is not cluster[1]
        cluster[1].start()
        await cluster.wait(lambda: cluster.leader(topic_id) is cluster[1] or None)
        await cluster.wait(lambda: cluster.view().partitions[topic_id, PartitionId(0)].leader == 1 or None)

    simulate(test)
