"""Broker requests of consumers, and producer epochs: registration, cursors, long polls, retention."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from broker_cluster import SETTINGS, Cluster, Node, simulate

from quiver.broker.consumer_lags import find_lags
from quiver.errors import FencedError, NotAllowedError, NotFoundError, QuiverError
from quiver.features import LEVEL_MAX
from quiver.metadata import (
    ConfigureTopicCommand,
    EntityKind,
    ForgetClientCommand,
    HoldPosition,
    PlaceHoldCommand,
    RegisterConsumerCommand,
    RegisterProducerCommand,
    ReleaseHoldCommand,
    Retention,
    StartFrom,
    TopicSelection,
)
from quiver.metadata.commands import NodeLevel, RaiseLevel
from quiver.model import ConsumerId, Offset, PartitionId, ProducerId, TopicId
from quiver.record import Batch, build_batch
from quiver.wire.consumed_records import decode_consumed
from quiver.wire.messages import (
    BeginEpoch,
    Consume,
    Consumed,
    ConsumeMany,
    Fetch,
    FindOffset,
    GetCursors,
    MoveCursor,
    Produce,
)

P0 = PartitionId(0)


async def register(cluster: Cluster, *, start: StartFrom = StartFrom.EARLIEST, name: str = "c") -> ConsumerId:
    command = RegisterConsumerCommand(now_ms=1, topics=(TopicSelection("logs"),), start=start, request_id=name)
    return (await cluster.submit(command)).consumer_id


async def consume(
    cluster: Cluster, topic_id: TopicId, consumer_id: ConsumerId, *, offset: int | None = None, wait_ms: int = 0
) -> tuple[Consumed, list[bytes | None]]:
    """Consume one record; return it among the values of the batches that came with it."""
    request = Consume(
        topic_id=topic_id,
        partition_id=P0,
        consumer_id=consumer_id,
        offset=None if offset is None else Offset(offset),
        wait_ms=wait_ms,
        known_index=cluster.known_index,
    )
    found, payload = await cluster.ask_leader(topic_id, request)
    meant: list[bytes | None] = []
    while payload:
        batch = Batch.decode(payload)
        for place, value in enumerate(batch.values()):
            if found.first_offset <= batch.header.base_offset + place < found.cursor:
                meant.append(value)
        payload = payload[batch.header.batch_bytes :]
    return found, meant


def test_consumer_reads_every_record_once_also_across_a_failover() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        consumer_id = await register(cluster)
        await cluster.produce(topic_id, b"a", b"b")
        await cluster.produce(topic_id, b"c")
        values = []
        for number in range(3):
            found, meant = await consume(cluster, topic_id, consumer_id, offset=number)
            values += meant
            assert found.cursor == number + 1
            (await cluster.wait_leader(topic_id)).kill()
            cluster.start_all()
        assert values == [b"a", b"b", b"c"]
        found, meant = await consume(cluster, topic_id, consumer_id)
        assert (found.first_offset, meant) == (3, [])
        await cluster.wait(lambda: ("consumer", consumer_id) in cluster.clients_heard or None)

    simulate(test)


def test_consume_many_requires_that_all_consumers_are_registered() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        first = await register(cluster)
        await cluster.produce(topic_id, b"a", b"b")
        late = await register(cluster, start=StartFrom.LATEST, name="late")

        async def take(*consumer_ids: ConsumerId) -> list[bytes | None]:
            request = ConsumeMany(
                topic_id=topic_id, partition_id=P0, consumer_ids=consumer_ids, known_index=cluster.known_index
            )
            _, payload = await cluster.ask_leader(topic_id, request)
            return [None if record is None else record.value for record in decode_consumed(payload)]

        assert await take(first, late) == [b"a", None]
        with pytest.raises(NotFoundError):
            await take(first, ConsumerId(99))
        (await cluster.wait_leader(topic_id)).kill()
        cluster.start_all()
        await cluster.produce(topic_id, b"c")
        assert await take(first, late, first, first) == [b"b", b"c", b"c", None]
        await cluster.wait(lambda: {("consumer", first), ("consumer", late)} <= set(cluster.clients_heard) or None)

    simulate(test)


def test_long_poll_is_answered_when_a_record_comes() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        consumer_id = await register(cluster)
        await cluster.produce(topic_id, b"a")
        await consume(cluster, topic_id, consumer_id)
        waiting = asyncio.ensure_future(consume(cluster, topic_id, consumer_id, wait_ms=2_000))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await cluster.produce(topic_id, b"b")
        _, meant = await waiting
        assert meant == [b"b"]

    simulate(test)


def test_fetch_that_waits_is_refused_once_a_later_session_begins() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        consumer_id = await register(cluster)
        levels = tuple(NodeLevel(node=node, level=LEVEL_MAX) for node in sorted(cluster.view().brokers))
        await cluster.submit(RaiseLevel(now_ms=1, feature_level=LEVEL_MAX, nodes=levels))

        async def begin(session: int) -> None:
            cursors = ((consumer_id, Offset(0)),)
            move = MoveCursor(topic_id=topic_id, partition_id=P0, cursors=cursors, only_new=True, session=session)
            await cluster.ask_leader(topic_id, msgspec.structs.replace(move, known_index=cluster.known_index))

        def fetch(session: int) -> Fetch:
            return Fetch(
                topic_id=topic_id, partition_id=P0, offset=Offset(0), wait_ms=2_000, reader=(consumer_id, session)
            )

        await begin(5)
        waiting = asyncio.ensure_future(cluster.ask_leader(topic_id, fetch(5)))
        await asyncio.sleep(0.5)
        await begin(7)
        await cluster.produce(topic_id, b"a")
        with pytest.raises(FencedError):
            await waiting
        assert (await cluster.ask_leader(topic_id, fetch(7)))[1]

    simulate(test)


def test_long_poll_ends_within_the_callers_time() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (1,))
        await cluster.wait_leader(topic_id)
        request = Fetch(topic_id=topic_id, partition_id=P0, offset=Offset(0), wait_ms=3_600_000)
        found, payload = await cluster.ask(1, request)
        assert (found.end_offset, bytes(payload)) == (0, b"")

    simulate(test)


def test_long_polls_beyond_the_bound_are_answered_immediately() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (1,))
        await cluster.wait_leader(topic_id)
        request = Fetch(topic_id=topic_id, partition_id=P0, offset=Offset(0), wait_ms=2_000)
        polls = [asyncio.ensure_future(cluster.ask(1, request)) for _ in range(3)]
        await asyncio.sleep(0.5)
        assert [poll.done() for poll in polls].count(False) == 2
        await cluster.produce(topic_id, b"a")
        payloads = [bytes((await poll)[1]) for poll in polls]
        assert payloads.count(b"") == 1

    broker = msgspec.structs.replace(SETTINGS.broker, long_polls_max=2)
    simulate(test, settings=msgspec.structs.replace(SETTINGS, broker=broker))


def test_consumer_must_be_registered_for_the_partition() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        await cluster.create_topic("other")
        consumer_id = await register(cluster)
        other = RegisterConsumerCommand(now_ms=1, topics=(TopicSelection("other"),), request_id="other")
        stranger = (await cluster.submit(other)).consumer_id
        await cluster.wait_leader(topic_id)
        for asked, kind, code in (
            (ConsumerId(99), NotFoundError, "unknown_consumer"),
            (stranger, NotAllowedError, "not_registered"),
        ):
            with pytest.raises(QuiverError) as caught:
                await consume(cluster, topic_id, asked)
            assert (type(caught.value), caught.value.code) == (kind, code)
            request = MoveCursor(
                topic_id=topic_id, partition_id=P0, cursors=((consumer_id, Offset(0)), (asked, Offset(0)))
            )
            with pytest.raises(kind):
                await cluster.ask_leader(topic_id, request)
            with pytest.raises(kind):
                await cluster.ask_leader(
                    topic_id, GetCursors(topic_id=topic_id, partition_id=P0, consumer_ids=(asked,))
                )

    simulate(test)


def test_cursors_begin_where_the_registration_says() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        early = await register(cluster, name="early")
        late = await register(cluster, name="late", start=StartFrom.LATEST)
        await cluster.produce(topic_id, b"a", b"b")
        asked = GetCursors(
            topic_id=topic_id, partition_id=P0, consumer_ids=(early, late), known_index=cluster.known_index
        )
        found, _ = await cluster.ask_leader(topic_id, asked)
        assert found.cursors == (0, 2)
        move = MoveCursor(topic_id=topic_id, partition_id=P0, cursors=((early, "latest"), (late, Offset(1))))
        await cluster.ask_leader(topic_id, move)
        found, _ = await cluster.ask_leader(topic_id, asked)
        assert (found.cursors, found.first_offset, found.end_offset) == ((2, 1), 0, 2)
        latest, _ = await cluster.ask_leader(topic_id, FindOffset(topic_id=topic_id, partition_id=P0, at="latest"))
        assert latest.offset == 2

    simulate(test)


def test_new_epoch_fences_the_old_one_and_continues_its_sequence() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        command = RegisterProducerCommand(now_ms=1, topics=(TopicSelection("logs"),), name="p")
        producer_id = (await cluster.submit(command)).producer_id

        async def send(epoch: int, sequence: int) -> None:
            data = build_batch(
                [b"x"], timestamp=1, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence
            )
            request = Produce(topic_id=topic_id, partition_id=P0, known_index=cluster.known_index)
            await cluster.ask_leader(topic_id, request, [bytes(data)])

        def begin(epoch: int, producer: int = producer_id) -> BeginEpoch:
            return BeginEpoch(
                topic_id=topic_id,
                partition_id=P0,
                producer_id=ProducerId(producer),
                epoch=epoch,
                known_index=cluster.known_index,
            )

        await send(0, 0)
        with pytest.raises(NotAllowedError, match="was never assigned to producer"):
            await cluster.ask_leader(topic_id, begin(1))
        with pytest.raises(NotAllowedError, match="was never assigned to producer"):
            await send(1, 1)
        assert (await cluster.submit(command)).epoch == 1
        begun, _ = await cluster.ask_leader(topic_id, begin(1))
        assert begun.next_sequence == 1
        with pytest.raises(FencedError):
            await send(0, 1)
        await send(1, 1)
        with pytest.raises(NotFoundError):
            await cluster.ask_leader(topic_id, begin(0, 77))

    simulate(test)


def first_offsets(cluster: Cluster, topic_id: TopicId) -> set[int]:
    def of(node: Node) -> int:
        assert node.broker is not None
        return node.broker.describe_replicas(topic_id)[0].first_offset

    return {of(node) for node in cluster.up}


def test_leaders_report_the_lag_of_consumers_with_a_cursor() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        first = await register(cluster, name="first")
        second = await register(cluster, name="second")
        gone = await register(cluster, name="gone")
        await register(cluster, name="not-begun")
        for number in range(10):
            await cluster.produce(topic_id, b"%d" % number)
        cursors = ((first, Offset(7)), (second, Offset(2)), (gone, Offset(1)))
        await cluster.ask_leader(topic_id, MoveCursor(topic_id=topic_id, partition_id=P0, cursors=cursors))
        await cluster.submit(ForgetClientCommand(now_ms=2, kind=EntityKind.CONSUMER, id=gone))
        leader = await cluster.wait_leader(topic_id)
        for node in cluster.up:
            assert node.broker is not None
            told = [(lag.consumer, lag.topic, lag.records) for lag in await node.broker.describe_lags()]
            assert told == ([("second", "logs", 8), ("first", "logs", 3)] if node is leader else [])
            assert len(await find_lags(node.store.view(), node.broker._table, lags_max=1)) == (node is leader)

    simulate(test)


async def fill(cluster: Cluster, topic_id: TopicId, batches: int) -> None:
    for _ in range(batches):
        await cluster.produce(topic_id, b"x" * 500)


def test_consumed_records_go_everywhere_when_the_slowest_consumer_is_past_them() -> None:
    async def test(cluster: Cluster) -> None:
        fast = await register(cluster, name="fast")
        slow = await register(cluster, name="slow")
        topic_id = cluster.view().topics_by_name["logs"]
        await fill(cluster, topic_id, 60)
        for consumer_id, offset in ((fast, 55), (slow, 30)):
            move = MoveCursor(topic_id=topic_id, partition_id=P0, cursors=((consumer_id, Offset(offset)),))
            await cluster.ask_leader(topic_id, move)
        await cluster.wait(lambda: first_offsets(cluster, topic_id) - {0} or None)
        await asyncio.sleep(3)
        (first,) = first_offsets(cluster, topic_id)
        assert 0 < first <= 30
        await cluster.submit(ForgetClientCommand(now_ms=2, kind=EntityKind.CONSUMER, id=slow))
        await cluster.wait(lambda: min(first_offsets(cluster, topic_id)) > 30 or None)

    async def prepare(cluster: Cluster) -> None:
        await cluster.create_topic("logs", (1, 2, 3), retention=Retention(until_consumed=True))
        await test(cluster)

    simulate(prepare)


def test_held_records_stay_under_every_leader_until_they_are_released() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic(retention=Retention(bytes=5_000))
        held = (HoldPosition(partition_id=P0, first_offset=20),)
        await cluster.submit(
            PlaceHoldCommand(now_ms=1, topic_id=topic_id, name="q", positions=held, lasting_ms=24 * 60 * 60 * 1000)
        )
        for _ in range(2):
            await fill(cluster, topic_id, 40)
            await asyncio.sleep(3)
            assert 0 < max(first_offsets(cluster, topic_id)) <= 20
            (await cluster.wait_leader(topic_id)).kill()
            cluster.start_all()
            await asyncio.sleep(3)
        await cluster.submit(ReleaseHoldCommand(now_ms=2, name="q"))
        await cluster.wait(lambda: min(first_offsets(cluster, topic_id)) > 20 or None)

    simulate(test)


def test_retention_follows_the_topic() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic()
        await fill(cluster, topic_id, 40)
        await asyncio.sleep(3)
        assert first_offsets(cluster, topic_id) == {0}
        await cluster.submit(ConfigureTopicCommand(now_ms=2, topic="logs", retention=Retention(bytes=5_000)))
        await fill(cluster, topic_id, 5)
        await cluster.wait(lambda: min(first_offsets(cluster, topic_id)) > 0 or None)

    simulate(test)
