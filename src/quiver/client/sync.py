"""The face without asyncio: the same objects, whose methods block.

Everything runs on the core's loop in a `LoopThread`, except what must be quick: `send` appends to the accumulator from
the caller's thread, and a consumer's records are made from their batch in the caller's thread. Calls are safe from any
thread; one consumer's records, though, are for one thread at a time.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from quiver.client.batching import RecordHeaders
from quiver.client.cluster import AsyncCluster, TopicDescription
from quiver.client.consumer import AsyncConsumer, SeekTarget, iterate
from quiver.client.cursors import PartitionLag
from quiver.client.delivery import Deliveries, Delivery, Outcome
from quiver.client.overview import ClusterOverview
from quiver.client.producer import AsyncProducer, record_bytes
from quiver.client.ranges import OffsetSpecs, RangeReader, ReplicaReader, TopicOffsets
from quiver.client.thread import LoopThread
from quiver.errors import OverloadedError, QuiverError, RequestError
from quiver.model import ConsumerId, Offset, PartitionId, ProducerId
from quiver.record import Batch, Record, Value
from quiver.tasks import timeout
from quiver.wire.admin_messages import ClientInfo, HoldInfo
from quiver.wire.messages import NodeInfo, RetentionInfo

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

EXIT_TIMEOUT_S = 5.0
"""How long a program that ends without closing its clients waits for what it has sent."""


class Cluster:
    """Use a cluster from threads; made by `quiver.connect`.

    Example:
        with quiver.connect("127.0.0.1:8002") as cluster:
            cluster.create_topic("logs", partitions=3, exist_ok=True)
            producer = cluster.producer("logs", name="web-1")
            producer.send("hello").result()
    """

    def __init__(self, cluster: AsyncCluster) -> None:
        """Open a cluster in a thread of its own."""
        self._cluster = cluster
        self._thread = LoopThread("quiver-client")
        self._ending = asyncio.Event()
        self._owner_task: asyncio.Task[None] | None = None
        atexit.register(self._close_at_exit)
        try:
            self._run(self._open())
        except BaseException:
            atexit.unregister(self._close_at_exit)
            self._thread.close()
            raise

    def close(self) -> None:
        """Close every producer and consumer that was made here, then the connections; idempotent."""
        self._end(timeout_s=None)

    def _close_at_exit(self) -> None:
        """Do what a program forgot to do, but do not keep it from ending for long."""
        with suppress(TimeoutError):
            self._end(timeout_s=EXIT_TIMEOUT_S)

    def _end(self, *, timeout_s: float | None) -> None:
        atexit.unregister(self._close_at_exit)
        try:
            self._run(self._close(timeout_s))
        except RequestError as error:
            if error.code not in ("closed", "forked"):
                raise
        finally:
            self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def cluster_id(self) -> str:
        """The id of the cluster, once a node has answered."""
        return self._cluster.cluster_id

    # -- topics ----------------------------------------------------------------------------------

    def create_topic(
        self,
        topic: str,
        partitions: int = 3,
        *,
        replicas: int | None = None,
        retention: RetentionInfo | None = None,
        exist_ok: bool = False,
    ) -> None:
        """Create a topic; its partitions take records when this returns or soon after.

        Raises:
            ConflictError: it exists (`topic_exists`), unless `exist_ok`.
        """
        self._run(
            self._cluster.create_topic(topic, partitions, replicas=replicas, retention=retention, exist_ok=exist_ok)
        )

    def delete_topic(self, topic: str) -> None:
        """Take a topic out of use; `restore_topic` brings it back for a while."""
        self._run(self._cluster.delete_topic(topic))

    def restore_topic(self, topic: str) -> None:
        """Take the newest deleted topic of a name back into use."""
        self._run(self._cluster.restore_topic(topic))

    def add_partitions(self, topic: str, partitions: int) -> None:
        """Bring a topic to so many partitions; keys are spread anew over all of them."""
        self._run(self._cluster.add_partitions(topic, partitions))

    def configure_topic(self, topic: str, *, retention: RetentionInfo) -> None:
        """Change when records of a topic may go."""
        self._run(self._cluster.configure_topic(topic, retention=retention))

    def list_topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        return self._run(self._cluster.list_topics())

    def describe_topic(self, topic: str) -> TopicDescription:
        """Return a topic with the state of every partition, as its leader sees it."""
        return self._run(self._cluster.describe_topic(topic))

    # -- brokers and clients ---------------------------------------------------------------------

    def brokers(self) -> list[NodeInfo]:
        """Return all nodes, by id."""
        return self._run(self._cluster.brokers())

    def drain(self, broker: int, *, is_undone: bool = False) -> None:
        """Move everything off a broker; or, undone, let it hold replicas again."""
        self._run(self._cluster.drain(broker, is_undone=is_undone))

    def remove(self, broker: int) -> None:
        """Forget a broker that is drained, or dead and empty."""
        self._run(self._cluster.remove(broker))

    def rebalance(self) -> None:
        """Move replicas until every broker has its share; `status` tells how far it is."""
        self._run(self._cluster.rebalance())

    def status(self) -> ClusterOverview:
        """Return the whole cluster: every node as it is now, every partition as its leader sees it."""
        return self._run(self._cluster.status())

    def clients(self, kind: Literal["producer", "consumer", ""] = "", topic: str | None = None) -> list[ClientInfo]:
        """Return the registered producers and consumers, or one kind of them."""
        return self._run(self._cluster.clients(kind, topic))

    def forget(self, kind: Literal["producer", "consumer"], id: int) -> None:  # noqa: A002 - what it is
        """Drop a producer or consumer: its cursors no longer hold records back."""
        self._run(self._cluster.forget(kind, id))

    def lag(self, consumer_id: int, topic: str | None = None) -> list[PartitionLag]:
        """Return how far a consumer is in every partition that it is registered for, or in those of one topic."""
        return self._run(self._cluster.lag(consumer_id, topic))

    def reset(
        self,
        consumer_id: int,
        topic: str,
        offset: SeekTarget | None = None,
        *,
        timestamp: int | datetime | None = None,
        partitions: Iterable[int] = (),
    ) -> None:
        """Set where a consumer goes on: an offset, "earliest", "latest", or the first record since a timestamp.

        One that runs goes on where it is, and stores its own place with its next commit: stop it first.
        """
        self._run(self._cluster.reset(consumer_id, topic, offset, timestamp=timestamp, partitions=partitions))

    # -- records ---------------------------------------------------------------------------------

    def producer(
        self,
        topic: str,
        name: str | None = None,
        *,
        partitions: Iterable[int] = (),
        linger_ms: int = 0,
        batch_bytes: int = 1 << 20,
        buffer_bytes: int = 64 << 20,
        compression: Literal["lz4", "zstd"] | None = None,
        delivery_timeout: float = 60.0,
        digests: bool = False,
    ) -> Producer:
        """Register a producer for a topic and return it.

        Under a `name` it goes on where an earlier one of that name ended, and fences that one off. `partitions` are
        those that records without key and partition go to; none named, all meant. With `digests` it states what was
        acknowledged, for audits.
        """
        opening = self._cluster.producer(
            topic,
            name,
            partitions=partitions,
            linger_ms=linger_ms,
            batch_bytes=batch_bytes,
            buffer_bytes=buffer_bytes,
            compression=compression,
            delivery_timeout=delivery_timeout,
            digests=digests,
        )
        return Producer(self._run(opening), self._thread, timeout_ms=self._cluster.options.timeout_ms)

    def consumer(
        self,
        topic: str,
        name: str | None = None,
        *,
        consumer_id: int | None = None,
        partitions: Iterable[int] = (),
        start: Literal["earliest", "latest"] = "earliest",
        auto_commit: float | None = None,
        on_trimmed: Literal["error", "earliest"] = "error",
        idle_timeout: float | None = None,
        fetch_bytes: int = 4 << 20,
        prefetch_bytes: int = 16 << 20,
        digests: bool = False,
    ) -> Consumer:
        """Return a consumer of a topic's records.

        With a `name`, or the `consumer_id` of an earlier one, the cluster keeps its cursors: it begins where that one
        last committed, a new one at `start`. Without, it leaves nothing behind and begins at `start`. With
        `auto_commit` (seconds) it commits by itself what the application has asked to go on from. `idle_timeout`
        (seconds) ends an iteration when nothing came for so long. With `digests` it states under its name what it was
        given, for audits.
        """
        opening = self._cluster.consumer(
            topic,
            name,
            consumer_id=consumer_id,
            partitions=partitions,
            start=start,
            auto_commit=auto_commit,
            on_trimmed=on_trimmed,
            idle_timeout=idle_timeout,
            fetch_bytes=fetch_bytes,
            prefetch_bytes=prefetch_bytes,
            digests=digests,
        )
        return Consumer(self._run(opening), self._thread)

    # -- ranges of offsets -----------------------------------------------------------------------

    def offsets(
        self, topic: str, at: OffsetSpecs = "latest", *, topic_id: int | None = None, max_age_ms: int = 0
    ) -> TopicOffsets:
        """Return the topic's id and, for every partition or those named, its first offset, its end, or that of a time.

        `at` is "earliest", "latest" or a timestamp (ms), for all partitions or by partition. With a `topic_id`, a topic
        that was made anew since is refused (`topic_recreated`). Added partitions are seen within `max_age_ms`.
        """
        return self._run(self._cluster.offsets(topic, at, topic_id=topic_id, max_age_ms=max_age_ms))

    def read_range(
        self,
        topic: str,
        partition: int,
        first_offset: int,
        end_offset: int,
        *,
        topic_id: int | None = None,
        fetch_bytes: int = 4 << 20,
    ) -> Generator[Batch, None, None]:
        """Yield the batches of a partition that hold a range of offsets; leaves nothing behind in the cluster.

        The first and last batch may reach beyond the range. Raises `TrimmedError` if retention was quicker.
        """
        reader = RangeReader(
            self._cluster.router,
            topic,
            partition,
            first_offset=first_offset,
            end_offset=end_offset,
            topic_id=topic_id,
            fetch_bytes=fetch_bytes,
        )
        return self._read(reader)

    def read_replica(
        self,
        topic: str,
        partition: int,
        node: int,
        first_offset: int,
        end_offset: int,
        *,
        topic_id: int | None = None,
        fetch_bytes: int = 4 << 20,
    ) -> Generator[Batch, None, None]:
        """Yield the batches that one node itself stores of a range of offsets, leader or not, as they are.

        For comparing replicas: unlike `read_range` it leaves a gap a gap. Raises `OutOfRangeError` (`past_end`) if the
        replica ends before the range does and does not catch up, `NotFoundError` (`no_replica`) if there is none.
        """
        reader = ReplicaReader(
            self._cluster.router,
            topic,
            partition,
            node=node,
            first_offset=first_offset,
            end_offset=end_offset,
            topic_id=topic_id,
            fetch_bytes=fetch_bytes,
        )
        return self._read(reader)

    def _read(self, reader: RangeReader) -> Generator[Batch, None, None]:
        async def close() -> None:
            reader.close()

        try:
            while batches := self._run(reader.read_next()):
                yield from batches
        finally:
            self._run(close())

    def move_cursors(self, topic: str, name: str, offsets: Mapping[int, int]) -> None:
        """Set the cursors of a named consumer, by partition, for a program that keeps its own place elsewhere."""
        self._run(self._cluster.move_cursors(topic, name, offsets))

    # -- holds -----------------------------------------------------------------------------------

    def hold(
        self,
        topic: str,
        name: str,
        offsets: Mapping[int, int],
        *,
        lasting: float = 60.0,
        owner: str = "",
        topic_id: int | None = None,
    ) -> None:
        """Keep a topic's records, by partition from an offset on, whatever its retention says, for `lasting` seconds.

        For a program that keeps its own place: hold again, from further on, well before the time is over. The hold of
        that `name` on the topic gives way to it. `owner` tells people who it is for.
        """
        self._run(self._cluster.hold(topic, name, offsets, lasting=lasting, owner=owner, topic_id=topic_id))

    def release_hold(self, name: str, topic: str | None = None) -> None:
        """Let a hold go, on one topic or on all that it is on; one that is gone already is no error."""
        self._run(self._cluster.release_hold(name, topic))

    def holds(self) -> list[HoldInfo]:
        """Return who holds records, by topic and name."""
        return self._run(self._cluster.holds())

    # -- within ----------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work)

    async def _open(self) -> None:
        """Open the cluster in a task that also closes it: connections belong to the task that made them."""
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner_task = asyncio.get_running_loop().create_task(self._own_cluster(opened), name="own-cluster")
        await asyncio.wait((opened, self._owner_task), return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            self._owner_task.result()  # it failed in a way that nobody foresaw
        opened.result()

    async def _own_cluster(self, opened: asyncio.Future[None]) -> None:
        try:
            await self._cluster.open()
        except QuiverError as error:
            opened.set_exception(error)
            return
        opened.set_result(None)
        try:
            await self._ending.wait()
        finally:
            await self._cluster.close()

    async def _close(self, timeout_s: float | None) -> None:
        self._ending.set()
        if self._owner_task is not None:
            async with timeout(timeout_s):
                await self._owner_task


class Producer:
    """Send records to a topic; made by `Cluster.producer`.

    Example:
        producer = cluster.producer("logs", name="web-1")
        position = producer.send("hello").result()
        producer.send_many(f"line {number}" for number in range(1000))
        producer.flush()
    """

    def __init__(self, producer: AsyncProducer, thread: LoopThread, *, timeout_ms: int) -> None:
        self._producer = producer
        self._thread = thread
        self._timeout_s = timeout_ms / 1000
        self._add = producer.core.add

    @property
    def producer_id(self) -> ProducerId:
        """The id that the cluster gave it; the same again for the same name."""
        return self._producer.producer_id

    @property
    def topic(self) -> str:
        """The topic that it sends to."""
        return self._producer.topic

    @property
    def pending_bytes(self) -> int:
        """Bytes accepted whose outcome is not known yet."""
        return self._producer.pending_bytes

    def send(
        self,
        value: Value,
        key: Value = None,
        partition: int | None = None,
        timestamp: int | None = None,
        headers: RecordHeaders | None = None,
    ) -> Delivery:
        """Accept a record and return a promise; `.result()` waits for the record's place.

        The partition is the given one, or by the key's hash, or any. Waits only while `buffer_bytes` are under way.

        Raises:
            OverloadedError: the buffer stayed full for `timeout`; the record was not accepted.
            FencedError: another producer registered under the same name.
            RequestError: the record can never be accepted as it is.
        """
        delivery = self._add(value, key, partition, timestamp, headers)
        while delivery is None:
            self._wait_room(record_bytes(value, key))
            delivery = self._add(value, key, partition, timestamp, headers)
        return delivery

    def send_many(self, values: Any, key: Value = None, partition: int | None = None) -> Deliveries:
        """Accept many records, waiting for room where there is none; return one promise for all of them.

        `values` is an iterable of text and bytes, an Arrow array, or columns: an Arrow table, a pandas or polars frame,
        or a mapping, with `value` and optionally `key`, `timestamp` and `headers`. A batch that was read is sent
        unchanged. Without a partition or key they are spread over the partitions batch by batch.
        """
        parts: list[tuple[Outcome, int, int]] = []
        for put, size_bytes, count in self._producer.core.chunks(values, key, partition):
            while (placed := put()) is None:
                self._wait_room(size_bytes)
            parts.append((*placed, count))
        return Deliveries(parts)

    def next_sequence(self, partition: int) -> int:
        """Return the sequence that the next record for a partition gets: how many this producer has sent there, ever.

        Asked right after a restart under the same name it says how many records the partition has got before: what an
        application must skip to go on exactly.
        """
        return self._thread.run(self._producer.next_sequence(partition))

    def flush(self) -> None:
        """Send everything that was accepted before and wait until all of it is settled.

        Raises:
            QuiverError: the first failure of any record since the last flush.
        """
        self._thread.run(self._producer.flush())

    def close(self) -> None:
        """Flush, then end; idempotent. Raises as `flush`."""
        self._thread.run(self._producer.close())

    def abort(self) -> None:
        """End without sending what still waits; its deliveries fail, truthfully."""
        self._thread.run(self._producer.abort())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.run(self._producer.__aexit__(kind, error, trace))

    def _wait_room(self, size_bytes: int) -> None:
        if not self._producer.core.accumulator.wait_room(size_bytes, self._timeout_s):
            raise OverloadedError(f"the buffer was full for {self._timeout_s} s", code="buffer_full")


class Consumer:
    """Read a topic's records; made by `Cluster.consumer`.

    Example:
        consumer = cluster.consumer("logs", name="report", idle_timeout=5)
        for record in consumer:
            print(record.partition, record.offset, record.text)
        consumer.commit()
    """

    def __init__(self, consumer: AsyncConsumer, thread: LoopThread) -> None:
        self._consumer = consumer
        self._thread = thread
        self._consuming = threading.Lock()

    @property
    def consumer_id(self) -> ConsumerId | None:
        """The id that the cluster gave it; None for one without a name."""
        return self._consumer.consumer_id

    @property
    def topic(self) -> str:
        """The topic that it reads."""
        return self._consumer.topic

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions that it reads."""
        return self._consumer.partitions

    @property
    def skipped_count(self) -> int:
        """Records that retention removed before they were read (with `on_trimmed="earliest"`)."""
        return self._consumer.skipped_count

    def __iter__(self) -> Iterator[Record]:
        """Yield records as they come, for ever, or until none came for `idle_timeout`."""
        while (found := self._thread.run(self._consumer.wait_batch())) is not None:
            yield from iterate(*found)

    def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[Record]:
        """Return the records that are there, at most `max_records`; wait at most `timeout` seconds for the first."""
        with self._consuming:
            return self._thread.run(self._consumer.poll(max_records, timeout))

    def fetch_arrow(
        self, max_records: int = 1_000_000, timeout: float = 5.0, *, with_headers: bool = False
    ) -> pa.Table:
        """Return records as a `pyarrow.Table`: topic, partition, offset, timestamp, key, value, perhaps headers.

        Returns when there are `max_records`, or all that there are at the time, or after `timeout` seconds with what
        came until then.
        """
        with self._consuming:
            return self._thread.run(self._consumer.fetch_arrow(max_records, timeout, with_headers=with_headers))

    def commit(self) -> None:
        """Store how far the application has come: everything handed out until now counts as done."""
        self._thread.run(self._consumer.commit())

    def seek(
        self, partition: int, offset: SeekTarget | None = None, *, timestamp: int | datetime | None = None
    ) -> None:
        """Go on in a partition at an offset, "earliest", "latest", or the first record not older than a timestamp."""
        self._thread.run(self._consumer.seek(partition, offset, timestamp=timestamp))

    def position(self, partition: int) -> Offset:
        """Return the offset of the record that comes next in a partition."""
        return self._consumer.position(partition)

    def size(self) -> int:
        """Return how many records there are that were not handed out yet, exactly."""
        return self._thread.run(self._consumer.size())

    def end_offsets(self) -> dict[PartitionId, Offset]:
        """Return where each partition that it reads ends now: the offset that the next record there gets."""
        return self._thread.run(self._consumer.end_offsets())

    def close(self) -> None:
        """Commit if `auto_commit` is on, then end; idempotent."""
        self._thread.run(self._consumer.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.run(self._consumer.__aexit__(kind, error, trace))
