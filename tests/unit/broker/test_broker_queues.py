"""Work queues of a whole cluster: failovers between lease and acknowledgement, refusals, and dead letters."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from unittest.mock import patch

import msgspec
import pytest
from broker_cluster import Cluster, simulate

from quiver.broker import queue_requests
from quiver.errors import ConflictError, NotAllowedError, NotFoundError, OverloadedError, UnavailableError
from quiver.groups.settings import DEAD_LETTERS_PREFIX, QueueSettings
from quiver.manager.node_router import NodeRouter
from quiver.metadata import (
    ConfigureGroupCommand,
    ConfigureTopicCommand,
    GroupKind,
    RegisterConsumerCommand,
    Retention,
    TopicSelection,
)
from quiver.model import Buffer, ConsumerId, Index, NodeId, Offset, PartitionId, TopicId
from quiver.partition.queue_handler import QueueHandler
from quiver.record import Batch, Compression, Record, build_batch
from quiver.testing.queue_ablations import QueueSafeguard, disabled
from quiver.wire.messages import BeginEpoch, Consume, Fetch, GetCursors, Produce
from quiver.wire.queue_messages import (
    GetQueue,
    QueueReceive,
    QueueReceived,
    QueueReject,
    QueueSettle,
    QueueSettled,
    ReceiptRange,
    decode_queue_records,
)
from quiver.wire.requests import R, Request

P0 = PartitionId(0)
DEAD_TOPIC = "logs.workers.dead"


class Queue:
    """The work queue of a topic's only partition."""

    def __init__(self, cluster: Cluster, topic_id: TopicId, group_id: ConsumerId) -> None:
        self.cluster = cluster
        self.topic_id = topic_id
        self.group_id = group_id

    @classmethod
    async def open(cls, cluster: Cluster, settings: QueueSettings | None = None) -> Queue:
        topic_id = await cluster.create_topic()
        command = ConfigureGroupCommand(
            now_ms=1, group="workers", topics=(TopicSelection("logs"),), group_kind=GroupKind.QUEUE, settings=settings
        )
        return cls(cluster, topic_id, (await cluster.submit(command)).consumer_id)

    async def receive(
        self, records_max: int = 10, *, lease_ms: int = 2_000, wait_ms: int = 0
    ) -> tuple[QueueReceived, list[bytes | None]]:
        request = QueueReceive(
            topic_id=self.topic_id,
            partition_id=P0,
            group_id=self.group_id,
            records_max=records_max,
            lease_ms=lease_ms,
            wait_ms=wait_ms,
            known_index=self.cluster.known_index,
        )
        received, payload = await self.cluster.ask_leader(self.topic_id, request)
        return received, [one.value for one in decode_queue_records(payload)] if received.leases else []

    async def settle(self, **fields: object) -> QueueSettled:
        request = msgspec.structs.replace(
            QueueSettle(topic_id=self.topic_id, partition_id=P0, group_id=self.group_id),
            known_index=self.cluster.known_index,
            **fields,
        )
        return (await self.cluster.ask_leader(self.topic_id, request))[0]

    async def cursor(self) -> Offset:
        request = GetCursors(topic_id=self.topic_id, partition_id=P0, consumer_ids=(self.group_id,))
        return (await self.cluster.ask_leader(self.topic_id, request))[0].cursors[0]

    async def kill_leader(self) -> None:
        (await self.cluster.wait_leader(self.topic_id)).kill()
        self.cluster.start_all()


def ranges(received: QueueReceived) -> tuple[ReceiptRange, ...]:
    return tuple(ReceiptRange(one.first, one.count, received.grant) for one in received.leases)


def test_every_record_is_worked_on_and_no_acknowledged_one_again_across_failovers() -> None:
    async def test(cluster: Cluster) -> None:
        queue = await Queue.open(cluster)
        sent = [b"%d" % number for number in range(60)]
        for first in range(0, 60, 20):
            await cluster.produce(queue.topic_id, *sent[first : first + 20])
        acknowledged: Counter[bytes | None] = Counter()
        rounds = 0
        while len(acknowledged) < len(sent):
            received, values = await queue.receive(7, wait_ms=1_000)
            rounds += 1
            assert not acknowledged.keys() & set(values)
            if rounds % 3 == 0:
                await queue.kill_leader()  # what it received is lost, or not: it comes back
                continue
            if rounds % 4 == 0:
                await queue.kill_leader()  # receipts are good at the next leader
            if (await queue.settle(acks=ranges(received))).stale == ():
                acknowledged.update(values)
        assert acknowledged == Counter(sent)
        assert await queue.cursor() == 60
        assert (await queue.receive())[0].stall == "empty"

    simulate(test, is_managed=True)


def test_replicas_have_the_same_windows() -> None:
    async def test(cluster: Cluster) -> None:
        queue = await Queue.open(cluster)
        await cluster.produce(queue.topic_id, *(b"%d" % number for number in range(30)))
        received, _ = await queue.receive(20)
        await queue.settle(
            acks=(ReceiptRange(3, 5, received.grant),), rejects=(QueueReject(9, 2, received.grant, "x"),)
        )
        await cluster.wait_equal(queue.topic_id, 1, 2, 3)

        def snapshots() -> set[bytes]:
            brokers = [node.broker for node in cluster.up]
            replicas = [broker._table.get((queue.topic_id, P0)) for broker in brokers if broker is not None]
            return {one.replica.state.snapshot() for one in replicas if one is not None and one.replica is not None}

        await cluster.wait(lambda: len(snapshots()) == 1 or None)

    simulate(test, is_managed=True)


def test_unknown_groups_and_partitions_are_refused() -> None:
    async def test(cluster: Cluster) -> None:
        queue = await Queue.open(cluster)
        unknown = Queue(cluster, queue.topic_id, ConsumerId(99))
        with pytest.raises(NotFoundError, match="register again"):
            await unknown.receive()
        await cluster.create_topic("other")
        command = RegisterConsumerCommand(now_ms=1, topics=(TopicSelection("other"),), request_id="elsewhere")
        stranger = Queue(cluster, queue.topic_id, (await cluster.submit(command)).consumer_id)
        with pytest.raises(NotAllowedError, match="not registered"):
            await stranger.settle(acks=(ReceiptRange(0, 1, 1),))
        command = RegisterConsumerCommand(now_ms=1, topics=(TopicSelection("logs"),), request_id="streams")
        stream = Queue(cluster, queue.topic_id, (await cluster.submit(command)).consumer_id)
        with pytest.raises(ConflictError, match="as streams") as refused:
            await stream.receive()
        assert refused.value.code == "not_a_queue"
        await cluster.produce(queue.topic_id, b"a")
        await queue.receive()
        consume = Consume(
            topic_id=queue.topic_id, partition_id=P0, consumer_id=queue.group_id, known_index=cluster.known_index
        )
        with pytest.raises(ConflictError, match="work queue"):
            await cluster.ask_leader(queue.topic_id, consume)
        found, _ = await cluster.ask_leader(
            queue.topic_id, GetQueue(topic_id=queue.topic_id, partition_id=P0, group_id=queue.group_id)
        )
        assert (found.leased, found.ready, found.in_flight_max, found.stall) == (1, 0, 10_000, "empty")

    simulate(test, is_managed=True)


def test_one_owner_leaves_room_for_queues_of_others() -> None:
    async def open_as(cluster: Cluster, topic_id: TopicId, user: str, number: int) -> str:
        command = ConfigureGroupCommand(
            now_ms=1,
            group=f"{user}-{number}",
            topics=(TopicSelection("logs"),),
            group_kind=GroupKind.QUEUE,
            principal=user,
        )
        group_id = (await cluster.submit(command)).consumer_id
        request = QueueReceive(
            topic_id=topic_id, partition_id=P0, group_id=group_id, records_max=1, known_index=cluster.known_index
        )
        try:
            await cluster.ask((await cluster.wait_leader(topic_id)).id, request)
        except OverloadedError as error:
            return error.code
        return ""

    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        await cluster.produce(topic_id, b"x")
        assert [await open_as(cluster, topic_id, "user:eve", number) for number in range(8)] == [""] * 8
        assert await open_as(cluster, topic_id, "user:eve", 8) == "too_many_queues"
        assert await open_as(cluster, topic_id, "user:eve", 0) == "", "one that has state goes on"
        assert [await open_as(cluster, topic_id, "user:bob", number) for number in range(3)] == [
            "",
            "",
            "too_many_queues",
        ]

    with patch.object(queue_requests, "QUEUES_MAX", 16):
        simulate(test, is_managed=True)


# -- dead letters -----------------------------------------------------------------------------------------


async def read_dead(cluster: Cluster, name: str = DEAD_TOPIC) -> list[Record]:
    topic = cluster.view().topic(name)
    if topic is None:
        return []
    records: list[Record] = []
    while True:
        offset = Offset(len(records))
        request = Fetch(topic_id=topic.topic_id, partition_id=P0, offset=offset, known_index=cluster.known_index)
        fetched, payload = await cluster.ask_leader(topic.topic_id, request)
        while payload:
            batch = Batch.decode(payload)
            records += batch.records()
            payload = payload[batch.header.batch_bytes :]
        if len(records) >= fetched.end_offset:
            return records


async def wait_any_dead(cluster: Cluster) -> None:
    while True:
        if await read_dead(cluster):
            return
        await asyncio.sleep(0.2)


async def wait_moved(queue: Queue, offset: int, *, topic: str = DEAD_TOPIC) -> list[Record]:
    """Wait until every record below an offset is acknowledged or moved; return the dead letters."""
    await wait_settled(queue, offset)
    return await read_dead(queue.cluster, topic)


async def wait_settled(queue: Queue, offset: int) -> None:
    while True:
        if await queue.cursor() >= offset:
            return
        await asyncio.sleep(0.2)


def test_rejected_record_is_moved_with_its_history() -> None:
    async def test(cluster: Cluster) -> None:
        queue = await Queue.open(cluster)
        await cluster.produce(queue.topic_id, b"a", b"b", b"c")
        received, _ = await queue.receive()
        await queue.settle(
            acks=(ReceiptRange(0, 1, received.grant), ReceiptRange(2, 1, received.grant)),
            rejects=(QueueReject(1, 1, received.grant, "no such user"),),
        )
        (dead,) = await wait_moved(queue, 3)
        headers = dict(dead.headers)
        assert dead.value == b"b"
        assert headers.pop("quiver-dead-time")
        assert headers == {
            "quiver-dead-topic": b"logs",
            "quiver-dead-partition": b"0",
            "quiver-dead-offset": b"1",
            "quiver-dead-group": b"workers",
            "quiver-dead-attempts": b"1",
            "quiver-dead-reason": b"no such user",
        }

    simulate(test, is_managed=True)


def test_topic_of_dead_letters_belongs_to_the_owner_of_the_group() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        command = ConfigureGroupCommand(
            now_ms=1,
            group="workers",
            topics=(TopicSelection("logs"),),
            group_kind=GroupKind.QUEUE,
            principal="user:alice",
        )
        queue = Queue(cluster, topic_id, (await cluster.submit(command)).consumer_id)
        await cluster.produce(topic_id, b"a")
        received, _ = await queue.receive()
        await queue.settle(rejects=(QueueReject(0, 1, received.grant, "bad"),))
        await wait_moved(queue, 1)
        made = cluster.view().topic(DEAD_TOPIC)
        assert made is not None
        assert made.owner == "user:alice"
        assert made.request_id.startswith(f"{DEAD_LETTERS_PREFIX}{queue.group_id}/")

    simulate(test, is_managed=True)


def test_leader_of_dead_letters_waits_for_the_registration_of_their_mover() -> None:
    """Seed 5100089: it refused an epoch that it did not know yet, and the mover then began the next one, for ever."""
    asked: list[tuple[Index, Index]] = []
    ask = NodeRouter.ask

    async def record(router: NodeRouter, node: NodeId, request: Request[R], payload: Sequence[Buffer] = ()) -> R:
        if isinstance(request, BeginEpoch | Produce):
            asked.append((request.known_index, router._store.applied_index))
        return await ask(router, node, request, payload)

    async def test(cluster: Cluster) -> None:
        queue = await Queue.open(cluster)
        await cluster.produce(queue.topic_id, b"a")
        received, _ = await queue.receive()
        await queue.settle(rejects=(QueueReject(received.leases[0].first, 1, received.grant, "bad"),))
        with patch.object(NodeRouter, "ask", record):
            await wait_moved(queue, 1)
        assert asked
        assert all(known == applied > 0 for known, applied in asked)

    simulate(test, is_managed=True)


def test_dead_letters_with_large_keys_are_moved_within_a_bound() -> None:
    """Records of a few hundred bytes with a key of 2 MiB: each was counted by its value alone."""
    count, key_bytes = 40, 2 << 20

    async def test(cluster: Cluster) -> None:
        queue = await Queue.open(cluster)
        for number in range(count):
            built = build_batch([b"%d" % number], keys=[bytes(key_bytes)], timestamp=1, compression=Compression.ZSTD)
            request = Produce(topic_id=queue.topic_id, partition_id=P0, known_index=cluster.known_index)
            await cluster.ask_leader(queue.topic_id, request, [built])
        grants: dict[Offset, int] = {}
        while (received := (await queue.receive(lease_ms=60_000))[0]).leases:
            grants |= {one.first: received.grant for one in received.leases}
        tracemalloc.start()
        try:
            await queue.settle(rejects=tuple(QueueReject(first, 1, grant, "x") for first, grant in grants.items()))
            await wait_settled(queue, count)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        dead = await read_dead(cluster)
        assert sorted(dict(one.headers)["quiver-dead-offset"] or b"" for one in dead) == sorted(
            b"%d" % offset for offset in range(count)
        )
        assert peak < 20 * key_bytes

    simulate(test, is_managed=True)


def run_dead_letters(seed: int) -> None:
    """Reject records while leaders of source and target are killed; every dead letter must be there once."""

    async def test(cluster: Cluster) -> None:
        queue = await Queue.open(cluster)
        sent = [b"%d" % number for number in range(30)]
        await cluster.produce(queue.topic_id, *sent)
        for number in range(6):
            received, _ = await queue.receive(5, lease_ms=60_000, wait_ms=2_000)
            rejects = tuple(QueueReject(one.first, one.count, received.grant, "bad") for one in received.leases)
            await queue.settle(rejects=rejects)
            await asyncio.sleep(cluster.streams.stream("test").random())
            if number % 2:
                await queue.kill_leader()
            dead_topic = cluster.view().topic(DEAD_TOPIC)
            if dead_topic is not None and number % 3 == 2:
                (await cluster.wait_leader(dead_topic.topic_id)).kill()
                cluster.start_all()
        dead = await wait_moved(queue, 30)
        assert sorted(one.value or b"" for one in dead) == sorted(sent)

    simulate(test, is_managed=True, seed=seed)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_dead_record_is_moved_once_across_failovers(seed: int) -> None:
    run_dead_letters(seed)


def test_last_attempts_end_as_dead_letters_though_nobody_receives() -> None:
    async def test(cluster: Cluster) -> None:
        queue = await Queue.open(cluster, QueueSettings(max_attempts=2, dead_letter_topic="graves"))
        await cluster.produce(queue.topic_id, b"a", b"b")
        for attempt in (1, 2):
            received, values = await queue.receive(lease_ms=500, wait_ms=2_000)
            assert (values, received.leases[0].attempt) == ([b"a", b"b"], attempt)
        dead = await wait_moved(queue, 2, topic="graves")
        assert [(one.value, dict(one.headers)["quiver-dead-reason"]) for one in dead] == [
            (b"a", b"max_attempts"),
            (b"b", b"max_attempts"),
        ]

    simulate(test, is_managed=True)


def test_changed_dead_letter_topic_gets_what_the_earlier_one_has_not() -> None:
    async def test(cluster: Cluster) -> None:
        queue = await Queue.open(cluster)
        await cluster.produce(queue.topic_id, *(b"%d" % number for number in range(6)))
        received, _ = await queue.receive(lease_ms=60_000)
        await queue.settle(rejects=(QueueReject(0, 2, received.grant, "bad"),))
        assert [one.value for one in await wait_moved(queue, 2)] == [b"0", b"1"]
        change = ConfigureGroupCommand(now_ms=2, group="workers", settings=QueueSettings(dead_letter_topic="graves"))
        await cluster.submit(change)
        await queue.kill_leader()
        await queue.settle(rejects=(QueueReject(3, 2, received.grant, "bad"),))
        await queue.settle(acks=(ReceiptRange(2, 1, received.grant), ReceiptRange(5, 1, received.grant)))
        assert [one.value for one in await wait_moved(queue, 6, topic="graves")] == [b"3", b"4"]
        assert len(await read_dead(cluster)) == 2

    simulate(test, is_managed=True)


def move_without_burying(seed: int) -> list[bytes | None]:
    """Return the dead letters after movers died between sending letters and recording that."""
    found: list[bytes | None] = []

    async def refuse(*_: object) -> None:
        raise UnavailableError("not done: a test")

    async def test(cluster: Cluster) -> None:
        queue = await Queue.open(cluster)
        await cluster.produce(queue.topic_id, b"a", b"b", b"c")
        received, _ = await queue.receive(lease_ms=60_000)
        with patch.object(QueueHandler, "bury", refuse):
            await queue.settle(rejects=(QueueReject(0, 2, received.grant, "bad"),))
            await wait_any_dead(cluster)
            await asyncio.sleep(2)  # several rounds of the mover
            await queue.kill_leader()
            await cluster.wait_leader(queue.topic_id)
        await queue.settle(rejects=(QueueReject(2, 1, received.grant, "bad"),))
        found.extend(one.value for one in await wait_moved(queue, 3))

    simulate(test, is_managed=True, seed=seed)
    return found


def test_letters_that_were_sent_and_not_buried_are_not_sent_again() -> None:
    assert move_without_burying(1) == [b"a", b"b", b"c"]
    with disabled(QueueSafeguard.DEAD_LETTERS_ONCE):
        assert len(move_without_burying(1)) > 3


def test_retention_until_consumed_and_lag_know_what_is_not_settled() -> None:
    async def test(cluster: Cluster) -> None:
        queue = await Queue.open(cluster)
        retention = Retention(until_consumed=True)
        await cluster.submit(ConfigureTopicCommand(now_ms=1, topic="logs", retention=retention))
        value = bytes(1_000)
        for _ in range(20):
            await cluster.produce(queue.topic_id, value, value)
        received, _ = await queue.receive(40, lease_ms=600_000)
        await queue.settle(acks=(ReceiptRange(5, 35, received.grant),))
        await asyncio.sleep(5)

        async def first_offset() -> Offset:
            request = GetCursors(topic_id=queue.topic_id, partition_id=P0, consumer_ids=(queue.group_id,))
            return (await cluster.ask_leader(queue.topic_id, request))[0].first_offset

        assert await first_offset() <= await queue.cursor() == 0
        leader = await cluster.wait_leader(queue.topic_id)
        assert leader.broker is not None
        assert [lag.records for lag in await leader.broker.describe_lags()] == [40]
        await queue.settle(acks=(ReceiptRange(0, 5, received.grant),))
        for _ in range(60):
            await cluster.produce(queue.topic_id, value)  # a trim needs a state snapshot after the records
            if await first_offset() >= 5:
                return
            await asyncio.sleep(0.5)
        raise AssertionError("settled records stay")

    simulate(test, is_managed=True)
