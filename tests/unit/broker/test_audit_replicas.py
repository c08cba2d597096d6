"""Reads of a node's own replica, leader or not, and their comparison by the SDK."""

from __future__ import annotations

import pytest
from broker_cluster import Cluster, simulate

from quiver.client.cluster import AsyncCluster
from quiver.client.options import ClusterOptions
from quiver.errors import NotFoundError, OutOfRangeError, UnavailableError
from quiver.model import NodeId, Offset, PartitionId, TopicId
from quiver.record import Batch, decode_batches
from quiver.testing import SimulatedClock
from quiver.wire.messages import ReadReplica

P0 = PartitionId(0)


def read(topic_id: TopicId, offset: int = 0, bytes_max: int = 1 << 20) -> ReadReplica:
    return ReadReplica(topic_id=topic_id, partition_id=P0, offset=Offset(offset), bytes_max=bytes_max)


def connect(cluster: Cluster) -> AsyncCluster:
    async def no_http(*_: object) -> bytes:
        raise UnavailableError("there is no gateway here")

    return AsyncCluster(
        [node.address for node in cluster.nodes.values()],
        transport=cluster.client,
        clock=SimulatedClock(cluster.loop),
        rng=cluster.streams.workload,
        options=ClusterOptions(timeout_ms=3_000),
        http_get=no_http,
    )


async def fill(cluster: Cluster, batches: int = 20) -> TopicId:
    """A topic on nodes 1 and 2 whose two replicas have the same batches on disk."""
    topic_id = await cluster.create_topic("logs", (1, 2))
    for number in range(batches):
        await cluster.produce(topic_id, b"%d-a" % number, b"%d-b" % number)
    await cluster.wait_equal(topic_id, 1, 2)
    return topic_id


def test_every_replica_returns_its_own_copy() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await fill(cluster)

        def knows_all() -> bool:
            infos = [cluster[node].broker.describe_replicas(topic_id)[0] for node in (1, 2)]  # type: ignore[union-attr] # it is up
            return all(info.end_offset == 40 for info in infos)

        await cluster.wait(lambda: knows_all() or None)
        stored = []
        for node in (1, 2):
            batches: list[bytes] = []
            while (at := sum(len(Batch.decode(batch)) for batch in batches)) < 40:
                response, payload = await cluster.ask(node, read(topic_id, offset=at))
                assert (response.first_offset, response.end_offset) == (0, 40)
                batches += [bytes(batch.data) for batch in decode_batches(payload)]
            stored.append(batches)
        assert stored[0] == stored[1]
        values = [value for batch in stored[1] for value in Batch.decode(batch).values()]
        assert values == [b"%d-%s" % (number, half) for number in range(20) for half in (b"a", b"b")]

    simulate(test)


def test_replica_is_read_from_the_batch_with_the_offset_on() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await fill(cluster)
        _, payload = await cluster.ask(1, read(topic_id, offset=7, bytes_max=1))
        (batch,) = decode_batches(payload)
        assert (batch.header.base_offset, batch.header.end_offset) == (6, 8)
        response, payload = await cluster.ask(1, read(topic_id, offset=40))
        assert (response.end_offset, len(payload)) == (40, 0)

    simulate(test)


def test_node_without_a_replica_says_so() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await fill(cluster, 1)
        request = ReadReplica(topic_id=topic_id, partition_id=P0, offset=Offset(0), known_index=cluster.known_index)
        with pytest.raises(NotFoundError, match="node 3 has no replica") as caught:
            await cluster.ask(3, request)
        assert caught.value.code == "no_replica"
        with pytest.raises(NotFoundError, match="unknown topic"):
            await cluster.ask(3, read(TopicId(99)))

    simulate(test)


def test_sdk_reads_a_range_of_one_replica() -> None:
    async def test(cluster: Cluster) -> None:
        await fill(cluster)
        async with connect(cluster) as client:
            for node in (1, 2):
                found = [
                    (record.offset, record.value)
                    async for batch in client.read_replica("logs", 0, node, 5, 33, fetch_bytes=100)
                    for record in batch.records(Offset(5), Offset(33))
                ]
                assert found == [(at, b"%d-%s" % (at // 2, b"ab"[at % 2 : at % 2 + 1])) for at in range(5, 33)]

    simulate(test)


def test_sdk_reports_replicas_that_are_missing_short_or_unreachable() -> None:
    async def test(cluster: Cluster) -> None:
        await fill(cluster)
        async with connect(cluster) as client:

            async def drain(node: int, end_offset: int = 40) -> None:
                async for _ in client.read_replica("logs", 0, node, 0, end_offset):
                    pass

            with pytest.raises(NotFoundError, match="no replica"):
                await drain(3)
            with pytest.raises(NotFoundError, match="no node 9"):
                await drain(9)
            with pytest.raises(
                OutOfRangeError, match="node 2: topic 'logs' partition 0 ends at 40, before 41"
            ) as caught:
                await drain(2, 41)
            assert caught.value.code == "past_end"
            cluster.nodes[NodeId(2)].kill()
            with pytest.raises(UnavailableError):
                await drain(2)

    simulate(test)
