"""Consumers of a simulated cluster: by position, by committed cursor, and whatever comes next at the cursor."""

from __future__ import annotations

from quiver.client.consumer import AsyncConsumer
from quiver.client.cursors import ConsumerCursors, register_consumer
from quiver.client.prefetch import find_offset
from quiver.config import KIB
from quiver.errors import QuiverError
from quiver.model import ConsumerId, Offset, PartitionId
from quiver.record import Batch, Record
from quiver.testing.clusters.clients import ClientWorkload
from quiver.wire.consumed_records import decode_consumed
from quiver.wire.messages import Consume, ConsumeMany, TopicInfo

FETCH_BYTES = 4 * KIB
"""Bytes per fetch: few, because the logs are small."""


class ReaderWorkload(ClientWorkload):
    """Reads every partition from its beginning, and leaves nothing out."""

    consumer: AsyncConsumer | None = None

    async def begin(self) -> None:
        """Begin at the beginning."""
        self.consumer = await self.cluster.consumer(
            self.topic.name, on_trimmed="earliest", fetch_bytes=FETCH_BYTES, prefetch_bytes=FETCH_BYTES
        )
        self._seen: set[int] = set()

    async def step(self) -> None:
        """Read what is there."""
        assert self.consumer is not None
        try:
            records = await self.consumer.poll(50, timeout=0.3)
        except QuiverError as error:
            self.check(error, "poll")
            return
        for partition, part in _by_partition(records).items():
            if partition not in self._seen:
                self._seen.add(partition)
                self.world.recorder.note(self.proc(), "assign", self.key(partition), 0)
            self.succeed(self.invoke("poll", self.key(partition)), part)

    async def restart(self) -> None:
        """Begin again, as another reader."""
        assert self.consumer is not None
        await self.consumer.close()
        self._generations[""] += 1
        await self.insist(self.begin)

    async def drain(self) -> None:
        """Read all that there is, and record that it was all."""
        await self.insist(self.cluster.open)
        await self.insist(self.begin)
        assert self.consumer is not None
        for partition in self.consumer.partitions:
            end = await find_offset(self.cluster.router, self.topic.name, PartitionId(partition), "latest")
            while self.consumer.position(partition) < end:
                await self.step()
            self.world.recorder.note(self.proc(), "drain", self.key(partition), int(end))
        await self.cluster.close()


class CommitWorkload(ClientWorkload):
    """Reads under a name and commits now and then; after a restart it resumes where it last committed."""

    consumer: AsyncConsumer

    async def begin(self) -> None:
        """Find its place again."""
        self.consumer = await self.cluster.consumer(
            self.topic.name, self.name, on_trimmed="earliest", fetch_bytes=FETCH_BYTES, prefetch_bytes=FETCH_BYTES
        )
        for partition in self.consumer.partitions:
            call = self.invoke("cursor", self.key(partition), {"consumer": self.name})
            self.succeed(call, int(self.consumer.position(partition)))

    async def step(self) -> None:
        """Read what is there, and perhaps commit."""
        try:
            records = await self.consumer.poll(20, timeout=0.3)
        except QuiverError as error:
            self.check(error, "poll")
            return
        for partition, part in _by_partition(records).items():
            value = {"consumer": self.name, "max": len(part), "offset": part[0][0]}
            self.succeed(self.invoke("consume", self.key(partition), value), part)
        if self.rng.random() < 0.4:
            await self._commit()

    async def _commit(self) -> None:
        calls = {}
        for partition in self.consumer.partitions:
            value = {"consumer": self.name, "offset": int(self.consumer.position(partition))}
            calls[partition] = self.invoke("commit", self.key(partition), value, lane=f"/{partition}")
        try:
            await self.consumer.commit()
        except QuiverError as error:
            for partition, call in calls.items():  # some partitions' may be done, others' not
                call.info(error.code)
                self._generations[f"/{partition}"] += 1
            self.check(error, "commit")
        else:
            for call in calls.values():
                self.succeed(call)

    async def restart(self) -> None:
        """Forget what was not committed."""
        await self.consumer.close()
        self._generations[""] += 1
        await self.insist(self.begin)


class ConsumeWorkload(ClientWorkload):
    """Takes whatever is next for it at its cursor, and never asks twice for the same."""

    async def begin(self) -> None:
        """Register under the name."""
        router = self.cluster.router
        registering = register_consumer(
            router, (self.topic.name,), name=self.name, consumer_id=None, deadline=router.deadline()
        )
        self._cursors = ConsumerCursors(router, self.topic.name, (await registering)[0])

    async def step(self) -> None:
        """Take some records of a partition."""
        try:
            info = await self._topic()
        except QuiverError as error:
            self.check(error, "find_topic")
            return
        await self._take(PartitionId(self.rng.randrange(len(info.partitions))))

    async def end(self) -> None:
        """Take all that is left, so that whatever it was not given shows."""
        for partition in (await self._topic()).partitions:
            while await self._take(partition.partition_id):
                pass

    async def _topic(self) -> TopicInfo:
        return await self.cluster.router.find_topic(self.topic.name, deadline=self.cluster.router.deadline())

    async def _take(self, partition_id: PartitionId) -> int:
        """Take some records; return how many came."""
        assert self._cursors.consumer_id is not None
        count = 1 + self.rng.randrange(20)
        argument = {"consumer": self.name, "max": count, "offset": None}
        call = self.invoke("consume", self.key(partition_id), argument)
        take = self._take_some if self.rng.random() < 0.6 else self._take_each
        try:
            records = await take(self._cursors.consumer_id, partition_id, count)
        except QuiverError as error:
            self.fail(call, error)
            return 0
        self.succeed(call, records)
        return len(records)

    async def _take_some(self, consumer_id: ConsumerId, partition_id: PartitionId, count: int) -> list[tuple[int, str]]:
        """Ask for a range of records."""
        router = self.cluster.router

        def build(info: TopicInfo) -> Consume:
            return Consume(
                topic_id=info.topic_id,
                partition_id=partition_id,
                consumer_id=consumer_id,
                records_max=count,
                bytes_max=FETCH_BYTES,
            )

        consumed, payload = await router.ask_leader(self.topic.name, partition_id, build, deadline=router.deadline())
        return _decode(payload, consumed.first_offset, consumed.cursor)

    async def _take_each(self, consumer_id: ConsumerId, partition_id: PartitionId, count: int) -> list[tuple[int, str]]:
        """Ask so many times for the next record, in one request, as a gateway does."""
        router = self.cluster.router

        def build(info: TopicInfo) -> ConsumeMany:
            return ConsumeMany(
                topic_id=info.topic_id,
                partition_id=partition_id,
                consumer_ids=(consumer_id,) * count,
            )

        _, payload = await router.ask_leader(self.topic.name, partition_id, build, deadline=router.deadline())
        return [(one.offset, (one.value or b"").decode()) for one in decode_consumed(payload) if one is not None]


def _by_partition(records: list[Record]) -> dict[int, list[tuple[int, str]]]:
    found: dict[int, list[tuple[int, str]]] = {}
    for record in records:
        assert record.partition is not None
        found.setdefault(record.partition, []).append((record.offset, (record.value or b"").decode()))
    return found


def _decode(payload: memoryview, first_offset: Offset, end_offset: Offset) -> list[tuple[int, str]]:
    """Return the records of some batches that lie in a range."""
    records: list[tuple[int, str]] = []
    while payload:
        batch = Batch.decode(payload)
        values = ((record.offset, (record.value or b"").decode()) for record in batch.records(first_offset, end_offset))
        records += values
        payload = payload[batch.header.batch_bytes :]
    return records
