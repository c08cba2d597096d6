"""A follower whose disk is full: it takes nothing that it cannot store, says so, and catches up when it has room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from broker_cluster import SETTINGS, Cluster, Node, simulate

from quiver.errors import DiskFullError
from quiver.model import PartitionId, TopicId
from quiver.raft import Raft
from quiver.raft.progress import PeerProgress
from quiver.record import build_batch
from quiver.storage import DiskSpace
from quiver.wire.messages import Produce

FREE_BYTES_MIN = 60_000
SMALL_DISKS = msgspec.structs.replace(
    SETTINGS,
    log=msgspec.structs.replace(SETTINGS.log, free_bytes_min=FREE_BYTES_MIN, free_check_interval_ms=100),
)
RECORD = b"r" * 1_000
RECORDS = 150


async def produce_many(cluster: Cluster, topic_id: TopicId, count: int) -> None:
    for _ in range(count):
        await cluster.produce(topic_id, RECORD)


async def make_topic(cluster: Cluster) -> TopicId:
    topic_id = await cluster.create_topic("logs", (1, 2, 3))
    await cluster.produce(topic_id, b"first")
    await cluster.wait(lambda: ((leader := cluster.leader(topic_id)) is not None and leader.id == 1) or None)
    return topic_id


def watch_full_follower(then: Callable[[Cluster, Node], None]) -> None:
    """Let a follower's disk fill up while the others go on; when it has room again, it catches up."""

    async def test(cluster: Cluster) -> None:
        topic_id = await make_topic(cluster)
        follower = cluster[3]
        follower.disk.limit_space(FREE_BYTES_MIN)
        await asyncio.sleep(0.3)  # it looks at its disk
        await produce_many(cluster, topic_id, RECORDS)
        then(cluster, follower)
        follower.disk.limit_space(None)
        await cluster.wait_equal(topic_id, 1, 2, 3)
        assert len(await cluster.fetch(topic_id)) == 1 + RECORDS

    simulate(test, is_managed=True, settings=SMALL_DISKS)


def test_full_follower_keeps_its_reserve_and_catches_up() -> None:
    def check(cluster: Cluster, follower: Node) -> None:
        assert follower.is_up
        assert not follower.disk.faults["enospc"], "the reserve is for votes and snapshots"
        assert follower.disk.free_bytes("/") >= FREE_BYTES_MIN // 4
        space = follower.replicator.space
        assert 0 < space.refused_appends < RECORDS // 4, "the leader stops sending what is not stored"
        leader = next(node for node in cluster.up if node.id == 1)
        statuses = leader.replicator.status().members[-1].raft.peers
        assert [peer.node for peer in statuses if peer.is_full] == [3]

    watch_full_follower(check)


def test_ablation_a_follower_that_takes_everything_uses_up_its_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskSpace, "take", lambda *_, **__: True)
    found: list[int] = []
    watch_full_follower(lambda _, follower: found.append(follower.disk.faults["enospc"]))
    assert found[0] > 0


def test_ablation_a_leader_that_is_not_held_back_sends_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerProgress, "note_room", lambda *_, **__: None)
    found: list[int] = []
    watch_full_follower(lambda _, follower: found.append(follower.replicator.space.refused_appends))
    assert found[0] >= RECORDS // 4


def test_full_follower_still_votes() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await make_topic(cluster)
        cluster[3].disk.limit_space(FREE_BYTES_MIN // 2)
        await asyncio.sleep(0.5)
        cluster[2].kill()
        cluster[1].kill()
        cluster[2].start()  # with node 3 a majority; node 2 lacks nothing
        await cluster.wait(lambda: ((leader := cluster.leader(topic_id)) is not None and leader.id != 1) or None)
        assert await cluster.fetch(topic_id) == [b"first"]

    simulate(test, is_managed=True, settings=SMALL_DISKS)


async def refusal(cluster: Cluster) -> str | None:
    """Fill two followers a little, and return why the leader, which has room, refuses a record."""
    topic_id = await make_topic(cluster)
    for number in (2, 3):
        cluster[number].disk.limit_space(FREE_BYTES_MIN * 3 // 4)
    await asyncio.sleep(2)
    request = Produce(topic_id=topic_id, partition_id=PartitionId(0), known_index=cluster.known_index)
    try:
        await cluster.ask(1, request, [bytes(build_batch([b"x"], timestamp=1))])
    except DiskFullError as error:
        return error.message
    return None


def test_leader_refuses_records_that_no_majority_has_room_for() -> None:
    async def test(cluster: Cluster) -> None:
        found = await refusal(cluster)
        assert found is not None
        assert "not done: the disks of a majority" in found

    simulate(test, is_managed=True, settings=SMALL_DISKS)


def test_ablation_a_leader_that_ignores_low_disks_uses_up_the_reserve_of_a_majority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Raft, "is_short_of_room", False)

    async def test(cluster: Cluster) -> None:
        assert await refusal(cluster) is None

    simulate(test, is_managed=True, settings=SMALL_DISKS)
