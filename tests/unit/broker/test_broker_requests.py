"""Broker requests: leaders serve them, other nodes name the leader, and all refuse unregistered clients."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from broker_cluster import CALL_TIMEOUT_MS, Cluster, simulate

from quiver.errors import (
    ConflictError,
    DecodeError,
    NotAllowedError,
    NotFoundError,
    NotLeaderError,
    QuiverError,
    UnavailableError,
)
from quiver.metadata import RegisterConsumerCommand, RegisterProducerCommand, Retention, TopicSelection
from quiver.model import GroupId, Index, NodeId, PartitionId, ProducerId, TopicId
from quiver.record import build_batch
from quiver.wire.messages import GetMembers, Produce
from quiver.wire.requests import Request


def batch(value: bytes = b"a", *, producer_id: int = -1, sequence: int = 0) -> bytes:
    return bytes(
        build_batch([value], timestamp=1, producer_id=ProducerId(producer_id), producer_epoch=0, base_sequence=sequence)
    )


def produce(topic_id: TopicId, partition_id: int = 0, known_index: int = 0) -> Produce:
    return Produce(topic_id=topic_id, partition_id=PartitionId(partition_id), known_index=Index(known_index))


async def refusal(cluster: Cluster, number: int, request: Request[Any], data: bytes = b"") -> QuiverError:
    with pytest.raises(QuiverError) as caught:
        await cluster.ask(number, request, [data] if data else [])
    return caught.value


def test_follower_names_the_leader() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (2, 1, 3))
        await cluster.produce(topic_id, b"a")
        error = await refusal(cluster, 3, produce(topic_id, known_index=cluster.known_index), batch())
        assert isinstance(error, NotLeaderError)
        assert error.leader == NodeId(2)

    simulate(test)


def test_node_without_a_replica_names_the_leader_by_the_metadata() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (2, 1))
        await cluster.run_on(cluster[3], cluster[3].store.wait_applied(cluster.known_index))
        await cluster.wait(lambda: cluster[3].store.view().partitions[topic_id, PartitionId(0)].leader)
        error = await refusal(cluster, 3, produce(topic_id), batch())
        assert isinstance(error, NotLeaderError)
        assert error.leader == NodeId(2)

    simulate(test)


def test_unknown_topics_and_partitions_are_not_found() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        known = cluster.known_index
        error = await refusal(cluster, 1, produce(TopicId(99)), batch())
        assert (type(error), error.code) == (NotFoundError, "unknown_topic")
        error = await refusal(cluster, 1, produce(topic_id, 7, known_index=known), batch())
        assert (type(error), error.code) == (NotFoundError, "unknown_partition")

    simulate(test)


def test_request_waits_until_the_node_knows_what_the_client_knows() -> None:
    async def test(cluster: Cluster) -> None:
        far = produce(TopicId(1), known_index=cluster.known_index + 1_000)
        error = await refusal(cluster, 1, far, batch())
        assert isinstance(error, UnavailableError)
        topic_id = await cluster.create_topic("logs", (1,))
        soon = produce(topic_id, known_index=cluster.known_index)
        await cluster.wait(lambda: cluster.leader(topic_id))
        await cluster.ask(1, soon, [batch()])

    simulate(test)


def test_producer_must_be_registered_for_the_partition() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (1,), (1,))
        await cluster.wait_leader(topic_id, 0)
        await cluster.wait_leader(topic_id, 1)
        only_first = (TopicSelection("logs", (PartitionId(0),)),)
        producer = await cluster.submit(RegisterProducerCommand(now_ms=1, topics=only_first, name="p"))
        known = cluster.known_index
        await cluster.ask(1, produce(topic_id, 0, known), [batch(producer_id=producer.producer_id)])
        error = await refusal(cluster, 1, produce(topic_id, 1, known), batch(producer_id=producer.producer_id))
        assert (type(error), error.code) == (NotAllowedError, "not_registered")
        error = await refusal(cluster, 1, produce(topic_id, 0, known), batch(producer_id=77))
        assert (type(error), error.code) == (NotFoundError, "unknown_producer")

    simulate(test)


def test_requests_of_a_producer_are_its_heartbeat() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (1,))
        await cluster.wait_leader(topic_id)
        producer = await cluster.submit(RegisterProducerCommand(now_ms=1, topics=(TopicSelection("logs"),), name="p"))
        await cluster.ask(1, produce(topic_id, 0, cluster.known_index), [batch(producer_id=producer.producer_id)])
        await cluster.wait(lambda: ("producer", producer.producer_id) in cluster.clients_heard or None)

    simulate(test)


def test_retry_of_a_batch_is_answered_with_its_first_place_also_by_the_next_leader() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        producer = await cluster.submit(RegisterProducerCommand(now_ms=1, topics=(TopicSelection("logs"),), name="p"))
        data = batch(b"once", producer_id=producer.producer_id)
        request = produce(topic_id, 0, cluster.known_index)
        first, _ = await cluster.ask_leader(topic_id, request, [data])
        (await cluster.wait_leader(topic_id)).kill()
        again, _ = await cluster.ask_leader(topic_id, request, [data])
        assert (again.base_offset, again.is_duplicate) == (first.base_offset, True)
        assert await cluster.fetch(topic_id) == [b"once"]

    simulate(test)


def test_topic_kept_until_consumed_refuses_records_without_consumers() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (1,), retention=Retention(until_consumed=True))
        await cluster.wait_leader(topic_id)
        error = await refusal(cluster, 1, produce(topic_id, 0, cluster.known_index), batch())
        assert (type(error), error.code) == (ConflictError, "no_consumers")
        await cluster.submit(RegisterConsumerCommand(now_ms=1, topics=(TopicSelection("logs"),), request_id="c"))
        await cluster.ask(1, produce(topic_id, 0, cluster.known_index), [batch()])

    simulate(test)


def test_bytes_that_are_no_batch_are_refused() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (1,))
        await cluster.wait_leader(topic_id)
        for data in (b"rubbish", batch()[:-1], batch() + b"x", batch()[:-1] + b"\xff"):
            assert isinstance(await refusal(cluster, 1, produce(topic_id), data), DecodeError)

    simulate(test)


def test_only_a_confirmed_leader_returns_the_members() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (1, 2, 3))
        leader = await cluster.wait_leader(topic_id)
        group = cluster.group_of(topic_id)
        found, _ = await cluster.ask(leader.id, GetMembers(group=group))
        assert found.voters == (1, 2, 3)
        error = await refusal(cluster, 2, GetMembers(group=group))
        assert isinstance(error, NotLeaderError)
        assert isinstance(await refusal(cluster, 1, GetMembers(group=GroupId(999))), NotLeaderError)
        cluster.network.isolate(leader.id)
        assert isinstance(await refusal(cluster, leader.id, GetMembers(group=group)), UnavailableError)

    simulate(test)


def test_failover_loses_nothing_that_was_acknowledged() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        sent = []
        for number in range(12):
            await cluster.produce(topic_id, b"%d" % number)
            sent.append(b"%d" % number)
            if number % 4 == 3:
                leader = await cluster.wait_leader(topic_id)
                leader.kill(loses_power=True)
                await cluster.produce(topic_id, b"after %d" % number)
                sent.append(b"after %d" % number)
                leader.start()
        found = await cluster.fetch(topic_id)
        assert [value for value in dict.fromkeys(found) if value in sent] == sent
        await cluster.wait_equal(topic_id, 1, 2, 3)

    simulate(test)


def test_requests_wait_for_the_first_leader_of_a_new_partition() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (2, 1, 3))
        request = produce(topic_id, known_index=cluster.known_index)
        assert cluster.leader(topic_id) is None
        served, refused = await asyncio.gather(
            cluster.ask(2, request, [batch()]), refusal(cluster, 3, request, batch())
        )
        assert served[0].base_offset == 0
        assert isinstance(refused, NotLeaderError)
        assert refused.leader == NodeId(2), "the node that is asked does not lead: it names the first leader"

    simulate(test)


def test_a_new_partition_without_a_majority_refuses_within_the_deadline() -> None:
    async def test(cluster: Cluster) -> None:
        cluster[3].kill()
        topic_id = await cluster.create_topic("logs", (2, 3))
        error = await refusal(cluster, 2, produce(topic_id, known_index=cluster.known_index), batch())
        assert isinstance(error, NotLeaderError)
        assert error.leader is None

    simulate(test)


def test_a_partition_that_lost_its_leader_refuses_immediately() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (3, 2))
        await cluster.produce(topic_id, b"a")
        await cluster.wait(lambda: cluster[2].store.view().partitions[topic_id, PartitionId(0)].epoch)
        cluster[3].kill()
        await cluster.wait(lambda: not _knows_leader(cluster, topic_id))
        began_ns = cluster.loop.now_ns
        error = await refusal(cluster, 2, produce(topic_id, known_index=cluster.known_index), batch())
        assert isinstance(error, NotLeaderError)
        assert cluster.loop.now_ns - began_ns < CALL_TIMEOUT_MS * 1_000_000 // 10, "clients look for the next leader"

    simulate(test)


def _knows_leader(cluster: Cluster, topic_id: TopicId) -> bool:
    broker = cluster[2].broker
    assert broker is not None
    return broker.describe_replicas(topic_id)[0].leader is not None
