"""What clients may rely on, tested against three targets: the real broker, the cluster in memory, and the gateway's.

The two in memory make the tests of clients fast; these tests keep them honest. Each test talks to its target in
requests of the wire protocol only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import pytest
from broker_cluster import Cluster, simulate
from gateway_world import GatewayCluster

from quiver.errors import (
    FencedError,
    NotAllowedError,
    NotFoundError,
    NotLeaderError,
    OutcomeUnknownError,
    OutOfRangeError,
    OutOfSequenceError,
    UnavailableError,
)
from quiver.model import ConsumerId, Index, Offset, PartitionId, ProducerId, TopicId
from quiver.record import Batch, build_batch
from quiver.routing.transport import Transport
from quiver.testing import RandomStreams, SimulatedClock, SimulatedLoop
from quiver.testing.memory_cluster import MemoryCluster
from quiver.wire.consumed_records import decode_consumed
from quiver.wire.messages import (
    BeginEpoch,
    Consume,
    Consumed,
    ConsumeMany,
    CreateTopicRequest,
    Fetch,
    FindOffset,
    GetCursors,
    MoveCursor,
    Produce,
    Produced,
    RegisterConsumerRequest,
    RegisterProducerRequest,
    Selection,
)
from quiver.wire.requests import Request, Response

R = TypeVar("R", bound=Response)
P0 = PartitionId(0)
TIMEOUT_MS = 5_000


class Target:
    """One cluster, asked as a client asks it."""

    def __init__(self, transport: Transport, addresses: Sequence[str]) -> None:
        self._transport = transport
        self._addresses = addresses
        self.known_index = Index(0)

    async def ask(self, request: Request[R], payload: bytes = b"") -> tuple[R, memoryview]:
        """Ask every node in turn until the right one answers."""
        at = 0
        while True:
            try:
                return await self._transport.call(
                    self._addresses[at % len(self._addresses)],
                    request,
                    [payload] if payload else (),
                    timeout_ms=TIMEOUT_MS,
                )
            except (NotLeaderError, UnavailableError, OutcomeUnknownError):
                at += 1
                await asyncio.sleep(0.02)

    async def create_topic(self, name: str = "logs") -> TopicId:
        request = CreateTopicRequest(topic=name, partitions=1, request_id=f"create-{name}")
        created, _ = await self.ask(request)
        self.known_index = max(self.known_index, created.index)
        return created.topic_id

    async def register_producer(self, topic: str = "logs", name: str = "p") -> tuple[ProducerId, int]:
        registered, _ = await self.ask(RegisterProducerRequest(topics=(Selection(topic=topic),), name=name))
        self.known_index = max(self.known_index, registered.index)
        return registered.producer_id, registered.epoch

    async def register_consumer(self, topic: str = "logs", name: str = "c") -> ConsumerId:
        registered, _ = await self.ask(RegisterConsumerRequest(topics=(Selection(topic=topic),), request_id=name))
        self.known_index = max(self.known_index, registered.index)
        return registered.consumer_id

    async def produce(
        self,
        topic_id: TopicId,
        *values: bytes,
        producer: tuple[ProducerId, int] | None = None,
        sequence: int = 0,
    ) -> Produced:
        identity: dict[str, Any] = {}
        if producer is not None:
            identity = {"producer_id": producer[0], "producer_epoch": producer[1], "base_sequence": sequence}
        batch = bytes(build_batch(list(values), timestamp=1, **identity))
        request = Produce(topic_id=topic_id, partition_id=P0, known_index=self.known_index)
        return (await self.ask(request, batch))[0]

    async def fetch(self, topic_id: TopicId, offset: int = 0, *, wait_ms: int = 0) -> tuple[int, list[bytes | None]]:
        request = Fetch(
            topic_id=topic_id, partition_id=P0, offset=Offset(offset), wait_ms=wait_ms, known_index=self.known_index
        )
        fetched, payload = await self.ask(request)
        return fetched.end_offset, values_of(payload)

    async def consume(
        self, topic_id: TopicId, consumer_id: ConsumerId, *, offset: int | None = None, count: int = 1, wait_ms: int = 0
    ) -> tuple[Consumed, list[bytes | None]]:
        request = Consume(
            topic_id=topic_id,
            partition_id=P0,
            consumer_id=consumer_id,
            offset=None if offset is None else Offset(offset),
            records_max=count,
            wait_ms=wait_ms,
            known_index=self.known_index,
        )
        consumed, payload = await self.ask(request)
        return consumed, values_of(payload, consumed.first_offset, consumed.cursor)

    async def cursors(self, topic_id: TopicId, *consumer_ids: ConsumerId) -> tuple[int, ...]:
        request = GetCursors(
            topic_id=topic_id, partition_id=P0, consumer_ids=consumer_ids, known_index=self.known_index
        )
        return (await self.ask(request))[0].cursors

    async def move_cursor(self, topic_id: TopicId, consumer_id: ConsumerId, offset: int) -> None:
        request = MoveCursor(
            topic_id=topic_id,
            partition_id=P0,
            cursors=((consumer_id, Offset(offset)),),
            known_index=self.known_index,
        )
        await self.ask(request)


def values_of(payload: memoryview, first: int = 0, end: int = 1 << 62) -> list[bytes | None]:
    """Return the values of the records in a range of offsets."""
    values: list[bytes | None] = []
    while payload:
        batch = Batch.decode(payload)
        values += [record.value for record in batch.records() if first <= record.offset < end]
        payload = payload[batch.header.batch_bytes :]
    return values


Contract = Callable[[Target], Coroutine[Any, Any, None]]


def run_on_broker(contract: Contract) -> None:
    async def test(cluster: Cluster) -> None:
        await contract(Target(cluster.client, list(cluster.addresses.values())))

    simulate(test, is_managed=True)


def run_in_memory(contract: Contract, kind: type[MemoryCluster]) -> None:
    streams = RandomStreams(1)
    loop = SimulatedLoop(streams.schedule, time_max_s=600)
    memory = kind(clock=SimulatedClock(loop), rng=streams.network)
    try:
        loop.run_until_complete(contract(Target(memory, memory.addresses)))
    finally:
        loop.close()


TARGETS: dict[str, Callable[[Contract], None]] = {
    "broker": run_on_broker,
    "memory": lambda contract: run_in_memory(contract, MemoryCluster),
    "gateway": lambda contract: run_in_memory(contract, GatewayCluster),
}

pytestmark = pytest.mark.parametrize("run", TARGETS.values(), ids=TARGETS)
Run = Callable[[Contract], None]


def test_records_are_fetched_in_the_order_of_their_offsets(run: Run) -> None:
    async def contract(target: Target) -> None:
        topic_id = await target.create_topic()
        assert (await target.produce(topic_id, b"a", b"b")).base_offset == 0
        assert (await target.produce(topic_id, b"c")).base_offset == 2
        assert await target.fetch(topic_id) == (3, [b"a", b"b", b"c"])
        assert await target.fetch(topic_id, 2) == (3, [b"c"])
        assert await target.fetch(topic_id, 3) == (3, [])

    run(contract)


def test_topic_that_is_created_again_by_the_same_request_is_the_same(run: Run) -> None:
    async def contract(target: Target) -> None:
        assert await target.create_topic() == await target.create_topic()

    run(contract)


def test_batch_that_is_sent_again_is_stored_once(run: Run) -> None:
    async def contract(target: Target) -> None:
        topic_id = await target.create_topic()
        producer = await target.register_producer()
        first = await target.produce(topic_id, b"a", producer=producer)
        again = await target.produce(topic_id, b"a", producer=producer)
        assert (first.base_offset, first.is_duplicate) == (0, False)
        assert (again.base_offset, again.is_duplicate) == (0, True)
        assert await target.fetch(topic_id) == (1, [b"a"])

    run(contract)


def test_gap_in_sequences_is_refused(run: Run) -> None:
    async def contract(target: Target) -> None:
        topic_id = await target.create_topic()
        producer = await target.register_producer()
        await target.produce(topic_id, b"a", producer=producer)
        with pytest.raises(OutOfSequenceError):
            await target.produce(topic_id, b"c", producer=producer, sequence=2)
        assert await target.fetch(topic_id) == (1, [b"a"])

    run(contract)


def test_producer_that_registers_again_fences_the_earlier_one(run: Run) -> None:
    async def contract(target: Target) -> None:
        topic_id = await target.create_topic()
        old = await target.register_producer()
        await target.produce(topic_id, b"a", producer=old)
        new = await target.register_producer()
        assert new[0] == old[0]
        assert new[1] > old[1]
        request = BeginEpoch(
            topic_id=topic_id, partition_id=P0, producer_id=new[0], epoch=new[1], known_index=target.known_index
        )
        begun, _ = await target.ask(request)
        assert begun.next_sequence == 1
        with pytest.raises(FencedError):
            await target.produce(topic_id, b"b", producer=old, sequence=1)
        await target.produce(topic_id, b"b", producer=new, sequence=1)
        assert (await target.fetch(topic_id))[1][:1] == [b"a"]  # a fetch may end early, but not before the first batch
        assert await target.fetch(topic_id, 1) == (2, [b"b"])

    run(contract)


def test_producer_must_be_registered_for_the_topic(run: Run) -> None:
    async def contract(target: Target) -> None:
        topic_id = await target.create_topic()
        await target.create_topic("other")
        stranger = await target.register_producer("other")
        with pytest.raises(NotAllowedError) as refused:
            await target.produce(topic_id, b"a", producer=stranger)
        assert refused.value.code == "not_registered"

    run(contract)


def test_unknown_topic_is_refused(run: Run) -> None:
    async def contract(target: Target) -> None:
        await target.create_topic()
        with pytest.raises(NotFoundError) as refused:
            await target.produce(TopicId(999), b"a")
        assert refused.value.code == "unknown_topic"

    run(contract)


def test_offset_beyond_the_end_is_refused(run: Run) -> None:
    async def contract(target: Target) -> None:
        topic_id = await target.create_topic()
        await target.produce(topic_id, b"a")
        with pytest.raises(OutOfRangeError) as refused:
            await target.fetch(topic_id, 2)
        assert refused.value.code == "offset_out_of_range"
        consumer_id = await target.register_consumer()
        with pytest.raises(OutOfRangeError) as refused:
            await target.consume(topic_id, consumer_id, offset=2)
        assert refused.value.code == "offset_out_of_range"

    run(contract)


def test_fetch_waits_for_a_record_and_not_longer_than_asked(run: Run) -> None:
    async def contract(target: Target) -> None:
        topic_id = await target.create_topic()
        assert await target.fetch(topic_id, wait_ms=50) == (0, [])
        waiting = asyncio.ensure_future(target.fetch(topic_id, wait_ms=3_000))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await target.produce(topic_id, b"a")
        assert await waiting == (1, [b"a"])

    run(contract)


def test_consumer_gets_every_record_once_and_its_cursor_follows(run: Run) -> None:
    async def contract(target: Target) -> None:
        topic_id = await target.create_topic()
        await target.produce(topic_id, b"a", b"b", b"c")
        consumer_id = await target.register_consumer()
        assert await target.cursors(topic_id, consumer_id) == (0,)
        consumed, values = await target.consume(topic_id, consumer_id, count=2)
        assert (consumed.first_offset, consumed.cursor, consumed.end_offset) == (0, 2, 3)
        assert values == [b"a", b"b"]
        assert (await target.consume(topic_id, consumer_id))[1] == [b"c"]
        consumed, values = await target.consume(topic_id, consumer_id)
        assert (consumed.first_offset, consumed.cursor, values) == (3, 3, [])
        assert await target.cursors(topic_id, consumer_id) == (3,)

    run(contract)


def test_consumer_that_names_an_offset_reads_again_and_its_cursor_follows(run: Run) -> None:
    async def contract(target: Target) -> None:
        topic_id = await target.create_topic()
        await target.produce(topic_id, b"a", b"b")
        consumer_id = await target.register_consumer()
        for _ in range(2):
            assert (await target.consume(topic_id, consumer_id, offset=0))[1] == [b"a"]
        assert await target.cursors(topic_id, consumer_id) == (1,)

    run(contract)


def test_consume_waits_for_a_record(run: Run) -> None:
    async def contract(target: Target) -> None:
        topic_id = await target.create_topic()
        consumer_id = await target.register_consumer()
        waiting = asyncio.ensure_future(target.consume(topic_id, consumer_id, wait_ms=3_000))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await target.produce(topic_id, b"a")
        assert (await waiting)[1] == [b"a"]

    run(contract)


def test_consumers_in_one_request_get_a_record_each_time_they_are_named(run: Run) -> None:
    async def contract(target: Target) -> None:
        topic_id = await target.create_topic()
        await target.produce(topic_id, b"a", b"b")
        one, two = await target.register_consumer(), await target.register_consumer(name="d")
        request = ConsumeMany(
            topic_id=topic_id, partition_id=P0, consumer_ids=(one, two, one, one), known_index=target.known_index
        )
        _, payload = await target.ask(request)
        records = decode_consumed(payload)
        assert [None if record is None else record.value for record in records] == [b"a", b"a", b"b", None]
        assert await target.cursors(topic_id, one, two) == (2, 1)

    run(contract)


def test_cursor_is_where_it_was_moved(run: Run) -> None:
    async def contract(target: Target) -> None:
        topic_id = await target.create_topic()
        await target.produce(topic_id, b"a", b"b", b"c")
        consumer_id = await target.register_consumer()
        await target.move_cursor(topic_id, consumer_id, 2)
        assert await target.cursors(topic_id, consumer_id) == (2,)
        assert (await target.consume(topic_id, consumer_id))[1] == [b"c"]

    run(contract)


def test_ends_and_times_are_found_as_offsets(run: Run) -> None:
    async def contract(target: Target) -> None:
        topic_id = await target.create_topic()
        await target.produce(topic_id, b"a", b"b")

        async def find(at: Any) -> int:
            request = FindOffset(topic_id=topic_id, partition_id=P0, at=at, known_index=target.known_index)
            return (await target.ask(request))[0].offset

        assert await find("earliest") == 0
        assert await find("latest") == 2
        assert await find(1) == 0

    run(contract)
