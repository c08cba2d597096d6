"""Lifecycle of a replica: created with its topic, reopened, closed when the topic is deleted, removed when purged."""

from __future__ import annotations

import asyncio
import logging

import pytest
from broker_cluster import DIRECTORY, Cluster, Node, simulate

from quiver.features import LEVEL_MAX
from quiver.metadata import (
    DeleteTopicCommand,
    InitCluster,
    PartitionRow,
    PurgeTopic,
    RecoverCluster,
    RestoreTopicCommand,
)
from quiver.metadata.commands import NodeLevel, RaiseLevel, RecoveredPartition
from quiver.model import GroupId, NodeId, TopicId
from quiver.testing import SimulatedDisk


def folders(node: Node) -> set[str]:
    """Return the groups of which a node has a folder."""
    return set(node.disk.names(f"{DIRECTORY}/groups"))


def roles(cluster: Cluster, number: int, topic_id: TopicId) -> list[str]:
    broker = cluster[number].broker
    assert broker is not None
    return [info.role for info in broker.describe_replicas(topic_id)]


def test_new_partitions_are_led_by_their_preferred_replicas() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (1, 2, 3), (2, 3, 1), (3, 1, 2))
        for partition_id, number in enumerate((1, 2, 3)):
            assert await cluster.wait_leader(topic_id, partition_id) is cluster[number]
        assert all(row.leader == row.replicas[0] for row in await reported(cluster, topic_id))

    simulate(test)


async def reported(cluster: Cluster, topic_id: TopicId) -> list[PartitionRow]:
    """Wait until the metadata knows the leader of every partition of a topic; return the partitions."""

    def find() -> list[PartitionRow] | None:
        rows = cluster.view().partitions_of(topic_id)
        return rows if all(row.leader is not None for row in rows) else None

    return await cluster.wait(find)


def test_batches_are_equal_on_all_replicas_and_nowhere_else() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (2, 3))
        for number in range(20):
            await cluster.produce(topic_id, b"x" * number)
        await cluster.wait_equal(topic_id, 2, 3)

    simulate(test)


def test_replicas_open_again_after_a_restart_of_everybody() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        await cluster.produce(topic_id, b"a", b"b")
        for node in cluster.nodes.values():
            node.kill(loses_power=True)
        for node in cluster.nodes.values():
            node.start()
        assert await cluster.fetch(topic_id) == [b"a", b"b"]
        for node in cluster.nodes.values():
            assert node.broker is not None
            await cluster.run_on(node, node.broker.wait_ready())

    simulate(test)


def test_node_that_was_away_when_the_topic_was_made_becomes_a_voter() -> None:
    async def test(cluster: Cluster) -> None:
        cluster[3].kill()
        topic_id = await cluster.create_topic()
        await cluster.produce(topic_id, b"a")
        await reported(cluster, topic_id)
        cluster[3].start()
        await cluster.wait_equal(topic_id, 1, 2, 3)
        cluster[1].kill()
        await cluster.produce(topic_id, b"b")  # which takes the vote of the one that was away
        assert await cluster.fetch(topic_id) == [b"a", b"b"]

    simulate(test)


def test_crash_of_everybody_while_the_partition_is_made_leaves_a_working_one() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        for _ in range(4):
            await asyncio.sleep(0.003)
            for node in cluster.nodes.values():
                node.kill(loses_power=True)
                node.start()
            await cluster.wait(lambda: len(cluster.up) == 3 or None)
        await cluster.produce(topic_id, b"a")

    simulate(test)


def test_deleted_topic_keeps_its_files_and_can_be_restored() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        await cluster.produce(topic_id, b"a")
        await cluster.submit(DeleteTopicCommand(now_ms=1, topic="logs", purge_ms=10))
        await cluster.wait(lambda: not any(roles(cluster, number, topic_id) for number in (1, 2, 3)) or None)
        await cluster.submit(RestoreTopicCommand(now_ms=1, topic_id=topic_id))
        assert await cluster.fetch(topic_id) == [b"a"]

    simulate(test)


def test_replica_of_a_deleted_topic_moves_and_can_be_restored_from_where_it_went() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (1, 2, 3))
        await cluster.produce(topic_id, b"a")
        await reported(cluster, topic_id)
        await cluster.submit(DeleteTopicCommand(now_ms=1, topic="logs", purge_ms=10))
        await cluster.wait(lambda: not any(roles(cluster, number, topic_id) for number in (1, 2, 3)) or None)
        for source, target in ((1, 4), (4, 1)):
            await cluster.begin_move(topic_id, source=source, target=target)
            await cluster.wait(lambda: not cluster.view().moves or None)
            await cluster.wait(lambda: not any(roles(cluster, number, topic_id) for number in (1, 2, 3, 4)) or None)
            group = str(cluster.group_of(topic_id))
            assert [group in folders(cluster[number]) for number in (source, target, 2, 3)] == [False, True, True, True]
        await cluster.submit(RestoreTopicCommand(now_ms=1, topic_id=topic_id))
        assert await cluster.fetch(topic_id) == [b"a"]

    simulate(test, nodes=4)


def test_purged_topic_is_removed_everywhere_also_where_the_node_was_away() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        await cluster.produce(topic_id, b"a")
        group = str(cluster.group_of(topic_id))
        await cluster.wait(lambda: all(group in folders(node) for node in cluster.up) or None)
        cluster[3].kill()
        await cluster.submit(DeleteTopicCommand(now_ms=1, topic="logs", purge_ms=10))
        await cluster.submit(PurgeTopic(now_ms=11, topic_id=topic_id))
        await cluster.wait(lambda: not any(group in folders(cluster[number]) for number in (1, 2)) or None)
        assert group in folders(cluster[3])
        cluster[3].start()
        await cluster.wait(lambda: group not in folders(cluster[3]) or None)
        assert group not in cluster[3].disk.names(f"{DIRECTORY}/joined")
        assert not cluster[3].disk.names(f"{DIRECTORY}/trash")

    simulate(test)


def test_purged_files_stay_while_no_primary_confirms_it() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        await cluster.produce(topic_id, b"a")
        group = str(cluster.group_of(topic_id))
        follower = await cluster.wait(lambda: next((n for n in cluster.up if not n.store.is_primary), None))
        await cluster.submit(DeleteTopicCommand(now_ms=1, topic="logs", purge_ms=10))
        cluster.transport.rates.p_break_before = 1.0  # nobody can ask anybody
        await cluster.submit(PurgeTopic(now_ms=11, topic_id=topic_id))
        await asyncio.sleep(10)
        assert group in folders(follower)
        cluster.transport.rates.p_break_before = 0.0
        await cluster.wait(lambda: group not in folders(follower) or None)

    simulate(test)


def test_files_of_an_unknown_group_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    async def test(cluster: Cluster) -> None:
        node = cluster[2]
        node.kill()
        node.disk.write_file(f"{DIRECTORY}/groups/999/hardstate", b"somebody's")
        node.disk.sync_all()
        node.start()
        await cluster.wait(lambda: "files of an unknown group are kept" in caplog.messages or None)
        await asyncio.sleep(5)
        assert "999" in folders(node)
        assert caplog.messages.count("files of an unknown group are kept") == 1

    with caplog.at_level(logging.WARNING):
        simulate(test)


def test_replica_whose_files_are_gone_is_not_recreated() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        await cluster.produce(topic_id, b"a")
        await cluster.wait_equal(topic_id, 1, 2, 3)
        await lose_files(cluster, cluster[3], cluster.group_of(topic_id))
        broker = cluster[3].broker
        assert broker is not None
        await cluster.run_on(cluster[3], broker.wait_ready())
        assert roles(cluster, 3, topic_id) == ["unusable"]
        assert "files are gone" in broker.status().unusable[0].problem
        await cluster.produce(topic_id, b"b")  # the others go on
        assert not cluster[3].stored_batches(cluster.group_of(topic_id))

    simulate(test)


async def lose_files(cluster: Cluster, node: Node, group: GroupId) -> None:
    """Remove a replica's files behind its node's back."""
    node.kill()
    for name in node.disk.names(f"{DIRECTORY}/groups/{group}"):
        node.disk.remove(f"{DIRECTORY}/groups/{group}/{name}")
    node.disk.sync_all()
    node.start()
    await cluster.wait(lambda: node.is_up or None)


def test_lost_replica_is_healed_by_moving_it_away_and_back() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (1, 2, 3))
        await cluster.produce(topic_id, b"a")
        await lose_files(cluster, cluster[3], cluster.group_of(topic_id))
        for source, target, final in ((3, 4, (1, 2, 4)), (4, 3, (1, 2, 3))):
            await cluster.begin_move(topic_id, source=source, target=target)
            await cluster.wait(lambda: not cluster.view().moves or None)
            await cluster.wait_equal(topic_id, *final)
        assert await cluster.fetch(topic_id) == [b"a"]

    simulate(test, nodes=4)


def test_replica_that_an_error_of_the_disk_kept_closed_is_opened_when_the_error_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        await cluster.produce(topic_id, b"a")
        path = f"{DIRECTORY}/groups/{cluster.group_of(topic_id)}/hardstate"
        cluster[3].kill()
        cluster[3].disk.fail("read", nth=1, path=path)
        cluster[3].start()
        await cluster.wait(lambda: "replica cannot be opened yet" in caplog.messages or None)
        await cluster.wait(lambda: cluster[3].is_up or None)
        await cluster.wait(lambda: roles(cluster, 3, topic_id) in (["follower"], ["leader"]) or None)
        await cluster.wait_equal(topic_id, 1, 2, 3)

    simulate(test)


def test_replica_whose_files_could_not_all_be_made_before_a_restart_is_made_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(cluster: Cluster) -> None:
        cluster[3].kill()
        topic_id = await cluster.create_topic("logs", (3,))
        cluster[3].disk.fail("write", nth=1, path=f"{DIRECTORY}/groups/{cluster.group_of(topic_id)}.new/hardstate")
        cluster[3].start()
        await cluster.wait(lambda: "replica cannot be opened yet" in caplog.messages or None)
        cluster[3].kill()
        assert f"{cluster.group_of(topic_id)}.new" in folders(cluster[3])
        cluster[3].start()
        await cluster.produce(topic_id, b"a")

    simulate(test)


def test_damaged_replica_does_not_keep_the_node_from_serving_others() -> None:
    async def test(cluster: Cluster) -> None:
        damaged = await cluster.create_topic("damaged")
        healthy = await cluster.create_topic("healthy", (3,))
        await cluster.produce(damaged, b"a")
        await cluster.wait_equal(damaged, 1, 2, 3)
        path = f"{DIRECTORY}/groups/{cluster.group_of(damaged)}/hardstate"
        cluster[3].kill()
        for position in (100, 4096 + 100):
            cluster[3].disk.flip_bit(path, position)
        cluster[3].start()
        await cluster.produce(healthy, b"b")
        assert roles(cluster, 3, damaged) == ["unusable"]
        assert roles(cluster, 3, healthy) == ["leader"]

    simulate(test)


def test_stopping_node_transfers_leadership_and_closes_its_replicas() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (1, 2, 3))
        await cluster.produce(topic_id, b"a")
        assert await cluster.wait_leader(topic_id) is cluster[1]
        await cluster.wait_equal(topic_id, 1, 2, 3)
        began_s = cluster.loop.time()
        await cluster[1].stop()
        await cluster.produce(topic_id, b"b")
        assert cluster.loop.time() - began_s < 0.4, "an election would have taken longer"
        leader = await cluster.wait_leader(topic_id)
        assert leader.id != NodeId(1)

    simulate(test)


def test_node_with_another_identity_opens_nothing_under_an_old_id() -> None:
    """R22: a wiped node that comes back under its id neither votes nor acknowledges for what it has lost."""

    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        await cluster.produce(topic_id, b"a")
        node = cluster[3]
        node.kill()
        metadata = {path: node.disk.read_file(path) for path in node.disk.paths() if "/metadata/" in path}
        node.disk = SimulatedDisk()
        for path, data in metadata.items():  # it still follows the metadata, which is what leads it into temptation
            node.disk.write_file(path, data)
        node.disk.sync_all()
        node.identity = "another"
        node.start()
        await asyncio.sleep(10)
        assert folders(node) == set()
        assert roles(cluster, 3, topic_id) == []
        assert cluster.view().brokers[NodeId(3)].identity == "identity-3"

    simulate(test)


def test_node_that_knows_only_how_the_cluster_was_once_founds_no_group() -> None:
    """R22: a replica that was moved away is not made anew from an old row, together with one that was never there."""

    async def test(cluster: Cluster) -> None:
        cluster[2].kill()
        cluster.takes_reports = False
        topic_id = await cluster.create_topic("logs", (1, 2, 3))
        await cluster.produce(topic_id, b"a")
        primary = await cluster.wait(lambda: next((node for node in cluster.up if node.store.is_primary), None))
        primary.kill()  # with the next term everybody saves how far the metadata is: nobody has led yet
        await cluster.submit(InitCluster(now_ms=1, cluster_id="c1"))
        cluster.start_all()
        cluster[2].kill()
        cluster.takes_reports = True
        await cluster.begin_move(topic_id, source=3, target=4)
        await cluster.wait(lambda: not cluster.view().moves or None)
        group = cluster.group_of(topic_id)
        for number in (3, 1, 4, 5):
            cluster[number].kill()
        cluster[3].lose_database()  # it is rebuilt from the log, as far as that is known to be committed
        for number in (2, 3):
            cluster[number].start()
        await asyncio.sleep(10)
        assert not cluster[3].stored_batches(group)
        cluster.start_all()
        assert await cluster.fetch(topic_id) == [b"a"]

    simulate(test, nodes=5)


def test_restarted_node_registers_its_new_address() -> None:
    async def test(cluster: Cluster) -> None:
        cluster[2].kill()
        cluster[2].address = "elsewhere:1"
        cluster[2].start()
        await cluster.wait(lambda: cluster.view().brokers[NodeId(2)].wire_address == "elsewhere:1" or None)

    simulate(test)


def test_partition_that_begins_again_is_opened_once_as_its_new_group() -> None:
    async def test(cluster: Cluster) -> None:
        levels = tuple(NodeLevel(node=node, level=LEVEL_MAX) for node in sorted(cluster.view().brokers))
        await cluster.submit(RaiseLevel(now_ms=1, feature_level=LEVEL_MAX, nodes=levels))
        cluster[3].kill()
        topic_id = await cluster.create_topic("logs", (3,), (3,), (3,))
        first = cluster.view().partitions_of(topic_id)
        again = tuple(
            RecoveredPartition(
                topic_id=topic_id, partition_id=row.partition_id, replicas=row.replicas, is_recreated=True
            )
            for row in first
        )
        await cluster.submit(RecoverCluster(now_ms=1, lost=(), recovered=again))
        cluster[3].start()
        for old, new in zip(first, await reported(cluster, topic_id), strict=True):
            assert (new.group_id > old.group_id, new.leader) == (True, NodeId(3))
            await cluster.wait(lambda group=str(old.group_id): group not in folders(cluster[3]) or None)  # type: ignore[misc] # bound early
        await cluster.produce(topic_id, b"new")
        assert await cluster.fetch(topic_id) == [b"new"]
        assert cluster[3].broker is not None
        assert cluster[3].broker.status().stops == 0

    simulate(test)
