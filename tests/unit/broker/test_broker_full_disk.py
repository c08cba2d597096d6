"""A leader whose disk is full makes way for a replica that has room, and keeps leading if there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import broker_cluster
import msgspec
import pytest
from broker_cluster import SETTINGS, Cluster, Node, simulate

from quiver.broker.leader_balancer import LeaderBalancer
from quiver.errors import DiskFullError, QuiverError
from quiver.model import PartitionId, TopicId
from quiver.record import build_batch
from quiver.wire.messages import Produce

FREE_BYTES_MIN = 60_000
NEARLY_FULL_BYTES = 50_000
"""Too little for records, and enough for what a follower still appends in these tests."""
ACCEPTS_WITHIN_S = 4.0
"""The bound: a heartbeat, its answer, a check of the balancer and a transfer, each at most a second here."""
SMALL_DISKS = msgspec.structs.replace(
    SETTINGS,
    log=msgspec.structs.replace(SETTINGS.log, free_bytes_min=FREE_BYTES_MIN, free_check_interval_ms=100),
)


def fill(nodes: Iterable[Node]) -> None:
    for node in nodes:
        node.disk.limit_space(NEARLY_FULL_BYTES)


async def try_produce(cluster: Cluster, topic_id: TopicId, node: Node) -> None:
    request = Produce(topic_id=topic_id, partition_id=PartitionId(0), known_index=cluster.known_index)
    await cluster.ask(node.id, request, [bytes(build_batch([b"x"], timestamp=1))])


async def seconds_until_accepted(cluster: Cluster, topic_id: TopicId, *, within_s: float) -> float | None:
    """Return how long it takes until the leader accepts a record; None if it takes longer than `within_s`."""
    begun_s = cluster.loop.time()
    while cluster.loop.time() - begun_s < within_s:
        leader = cluster.leader(topic_id)
        if leader is not None:
            try:
                await try_produce(cluster, topic_id, leader)
            except QuiverError:
                pass
            else:
                return cluster.loop.time() - begun_s
        await asyncio.sleep(0.05)
    return None


async def make_topic_led_by_1(cluster: Cluster) -> TopicId:
    topic_id = await cluster.create_topic("logs", (1, 2, 3))
    await cluster.produce(topic_id, b"first")
    await cluster.wait(lambda: ((leader := cluster.leader(topic_id)) is not None and leader.id == 1) or None)
    await asyncio.sleep(3)
    return topic_id


@pytest.mark.parametrize("seed", range(1, 7))
def test_partition_accepts_records_within_the_bound_while_a_majority_has_room(seed: int) -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await make_topic_led_by_1(cluster)
        fill([cluster[1]])
        await asyncio.sleep(0.5)
        assert await seconds_until_accepted(cluster, topic_id, within_s=ACCEPTS_WITHIN_S) is not None
        for _ in range(10):
            await asyncio.sleep(1)
            leader = cluster.leader(topic_id)
            assert leader is not None
            assert leader.id != 1, "leadership does not return to the preferred replica while its disk is full"
        cluster[1].disk.limit_space(None)
        await cluster.wait(lambda: ((leader := cluster.leader(topic_id)) is not None and leader.id == 1) or None)
        await cluster.produce(topic_id, b"last")

    simulate(test, is_managed=True, seed=seed, settings=SMALL_DISKS)


def test_ablation_without_making_way_no_record_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the test above notices a balancer that ignores full disks."""
    monkeypatch.setattr(LeaderBalancer, "_make_way", lambda _: None)

    async def test(cluster: Cluster) -> None:
        topic_id = await make_topic_led_by_1(cluster)
        fill([cluster[1]])
        await asyncio.sleep(0.5)
        assert await seconds_until_accepted(cluster, topic_id, within_s=5 * ACCEPTS_WITHIN_S) is None

    simulate(test, is_managed=True, settings=SMALL_DISKS)


@pytest.mark.parametrize("with_room", [2, 3])
def test_the_replica_with_room_is_chosen(with_room: int) -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await make_topic_led_by_1(cluster)
        fill(node for node in cluster.nodes.values() if node.id not in (1, with_room))
        await asyncio.sleep(1)
        fill([cluster[1]])
        await cluster.wait(lambda: ((leader := cluster.leader(topic_id)) is not None and leader.id != 1) or None)
        leader = cluster.leader(topic_id)
        assert leader is not None
        assert leader.id == with_room
        await asyncio.sleep(1)
        with pytest.raises(DiskFullError, match="not done: the disks of a majority"):
            await try_produce(cluster, topic_id, leader)
        cluster[1].disk.limit_space(None)
        assert await seconds_until_accepted(cluster, topic_id, within_s=ACCEPTS_WITHIN_S) is not None

    simulate(test, is_managed=True, settings=SMALL_DISKS)


def test_leader_stays_and_rejects_records_if_no_replica_has_room() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await make_topic_led_by_1(cluster)
        fill([cluster[2], cluster[3]])
        await asyncio.sleep(2)
        fill([cluster[1]])
        await asyncio.sleep(2)
        for _ in range(5):
            leader = cluster.leader(topic_id)
            assert leader is not None
            assert leader.id == 1
            with pytest.raises(DiskFullError, match="not done"):
                await try_produce(cluster, topic_id, leader)
            assert await cluster.fetch(topic_id) == [b"first"], "consumers are served"
            await asyncio.sleep(1)
        cluster[1].disk.limit_space(None)
        cluster[2].disk.limit_space(None)
        assert await seconds_until_accepted(cluster, topic_id, within_s=ACCEPTS_WITHIN_S) is not None

    simulate(test, is_managed=True, settings=SMALL_DISKS)


def test_leader_that_moves_away_transfers_leadership_to_a_replica_with_room() -> None:
    """A replica that cannot write does not take over: the move would wait for it, and so would producers."""

    async def test(cluster: Cluster) -> None:
        topic_id = await make_topic_led_by_1(cluster)
        cluster[2].disk.limit_space(0)
        await asyncio.sleep(1)
        await cluster.begin_move(topic_id, source=1, target=4)
        assert await seconds_until_accepted(cluster, topic_id, within_s=ACCEPTS_WITHIN_S) is not None
        await cluster.wait(lambda: ((leader := cluster.leader(topic_id)) is not None and leader.id == 3) or None)
        await cluster.wait(lambda: not cluster.view().moves or None)
        await cluster.produce(topic_id, b"last")
        assert await cluster.fetch(topic_id) == [b"first", b"x", b"last"]

    simulate(test, nodes=4, is_managed=True, settings=SMALL_DISKS)


def test_full_primary_makes_way_for_a_manager_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_cluster, "MANAGERS", 5)

    async def test(cluster: Cluster) -> None:
        full = await cluster.wait(lambda: next((node for node in cluster.up if node.store.is_primary), None))
        await asyncio.sleep(3)
        dead, *alive = (node for node in cluster.up if node is not full)  # all have the whole log
        dead.kill()
        full.disk.limit_space(0)
        await cluster.wait(lambda: any(node.store.is_primary for node in alive) or None)

    simulate(test, nodes=5, is_managed=True, settings=SMALL_DISKS)
