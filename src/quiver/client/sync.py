"""The blocking interface: the same objects as in asyncio, with blocking methods.

All work runs on the event loop of a `LoopThread`, except two hot paths: `send` appends to the accumulator in the
caller's thread, and a consumer decodes records in the caller's thread. All methods are safe to call from any thread,
but only one thread at a time may consume records of one consumer.
"""

from __future__ import annotations

import asyncio
import atexit
import re
from collections.abc import Coroutine, Generator, Iterable, Mapping
from contextlib import suppress
from copy import copy
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from quiver.client.arguments import check_arguments
from quiver.client.cluster import AsyncCluster
from quiver.client.group_options import OnPartitions, run_in_thread
from quiver.client.ranges import OffsetSpecs, OnProgress, RangeReader, ReplicaReader, TopicOffsets
from quiver.client.scan import Scan, ScanBound, plan_scan
from quiver.client.sync_administration import ClusterAdministration
from quiver.client.sync_consumer import Consumer
from quiver.client.sync_producer import Producer
from quiver.client.sync_queues import ClusterQueues
from quiver.client.thread import LoopThread
from quiver.client.topics import TopicDescription
from quiver.errors import QuiverError, RequestError
from quiver.record import Batch
from quiver.tasks import timeout
from quiver.wire.messages import RetentionInfo

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Cluster", "Consumer", "Producer"]

T = TypeVar("T")

EXIT_TIMEOUT_S = 5.0
"""How long a program that exits without closing its clients waits for its pending records."""


@check_arguments
class Cluster(ClusterQueues, ClusterAdministration):
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
        """Close all producers, consumers and queues of this cluster object, then the connections; idempotent."""
        self._end(timeout_s=None)

    def _close_at_exit(self) -> None:
        """Close a cluster that the program left open, without delaying its exit for long."""
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
        self._cluster.is_left_cleanly = kind is None
        self.close()

    @property
    def cluster_id(self) -> str:
        """The id of the cluster, empty until a node has answered."""
        return self._cluster.cluster_id

    def with_timeout(self, timeout: float) -> Self:
        """Return this cluster with another timeout of its calls: `cluster.with_timeout(2).list_topics()`.

        Both use the same connections; closing one closes the other. Producers and consumers keep the timeout of the
        object that made them.
        """
        other = copy(self)
        other._cluster = self._cluster.with_timeout(timeout)
        return other

    def __repr__(self) -> str:
        return repr(self._cluster).replace("<AsyncCluster", "<Cluster", 1)

    def _repr_html_(self) -> str:
        return self._cluster._repr_html_()

    # -- topics ----------------------------------------------------------------------------------

    def create_topic(
        self,
        topic: str,
        partitions: int = 3,
        *,
        replicas: int | None = None,
        retention: RetentionInfo | None = None,
        encrypted: bool | None = None,
        exist_ok: bool = False,
    ) -> None:
        """Create a topic; its partitions accept records when this returns or soon after.

        `encrypted` says whether its replicas encrypt their files, which cannot be changed later; None: as the cluster
        is set up.

        Raises:
            ConflictError: the topic exists (`topic_exists`) and `exist_ok` is false; the cluster has no key for an
                encrypted one (`no_encryption_key`), or it is there without encryption (`not_encrypted`).
        """
        self._run(
            self._cluster.create_topic(
                topic, partitions, replicas=replicas, retention=retention, encrypted=encrypted, exist_ok=exist_ok
            )
        )

    def delete_topic(self, topic: str) -> None:
        """Delete a topic; `restore_topic` can undo it for a while."""
        self._run(self._cluster.delete_topic(topic))

    def restore_topic(self, topic: str) -> None:
        """Restore the topic of that name that was deleted last."""
        self._run(self._cluster.restore_topic(topic))

    def add_partitions(self, topic: str, partitions: int) -> None:
        """Raise the number of a topic's partitions to `partitions`; keys then map to different partitions."""
        self._run(self._cluster.add_partitions(topic, partitions))

    def configure_topic(self, topic: str, *, retention: RetentionInfo) -> None:
        """Change the retention of a topic."""
        self._run(self._cluster.configure_topic(topic, retention=retention))

    def list_topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        return self._run(self._cluster.list_topics())

    def describe_topic(self, topic: str) -> TopicDescription:
        """Return a topic with the state of every partition, as reported by its leader."""
        return self._run(self._cluster.describe_topic(topic))

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
        delivery_timeout: float | None = None,
        digests: bool = False,
        create_topic: bool = True,
    ) -> Producer:
        """Register a producer for a topic and return it.

        With a `name` it continues the sequence of an earlier producer of that name, and fences that one. `partitions`
        receive the records without key and partition; empty means all. A record fails `delivery_timeout` seconds after
        it was accepted (default: 60, or the cluster's `timeout` if less than 30 were asked for). With `digests` it
        publishes digests of acknowledged records, for audits. A missing topic is created, unless `create_topic` is
        false or the cluster's setting `manager.creates_topics` is: then it is an error (`unknown_topic`).
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
            create_topic=create_topic,
        )
        return Producer(self._run(opening), self._thread, timeout_ms=self._cluster.options.timeout_ms)

    def consumer(
        self,
        topic: str | re.Pattern[str] | Iterable[str],
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
        group: str | None = None,
        instance: str = "",
        rack: str = "",
        session_timeout: float = 10.0,
        max_processing_time: float | None = None,
        commit_on_release: bool = True,
        on_assign: OnPartitions | None = None,
        on_revoke: OnPartitions | None = None,
    ) -> Consumer:
        """Return a consumer of the records of a topic, of several topics, or of all topics that match a pattern.

        A pattern (`re.compile("logs-.*")`) matches whole names, also of topics that are created later. With a `name`,
        or the `consumer_id` of an earlier one, the cluster stores its cursors: it resumes at the last commit, a new
        consumer at `start`. A name has one user at a time: the newest one, and earlier ones get `FencedError`. Without
        a name it starts at `start` and leaves no state in the cluster.

        With a `group` it is a member: members share the partitions of their topics and the cursors of the consumer
        with that name, and each reads what is assigned to it at the time. The SDK's own thread shows that it lives; if
        its process is gone for `session_timeout` seconds, or it takes longer than `max_processing_time` for what it
        received, others get its partitions. Positions are committed before a partition is released and at the end, with
        `commit_on_release`. `on_assign` and `on_revoke` get topics and partitions, while it waits for records or
        closes; in threads they run in one of the SDK's. An `instance` is restarted without a rebalance; partitions with
        leaders in the `rack` are preferred.
        `auto_commit` (seconds) is the interval of automatic commits of the records that the application has finished.
        `idle_timeout` (seconds) ends an iteration after so long without a record. With `digests` it publishes digests
        of received records under its name, for audits.
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
            group=group,
            instance=instance,
            rack=rack,
            session_timeout=session_timeout,
            max_processing_time=max_processing_time,
            commit_on_release=commit_on_release,
            on_assign=run_in_thread(on_assign, "on_assign"),
            on_revoke=run_in_thread(on_revoke, "on_revoke"),
        )
        return Consumer(self._run(opening), self._thread)

    # -- ranges of offsets -----------------------------------------------------------------------

    def offsets(
        self, topic: str, at: OffsetSpecs = "latest", *, topic_id: int | None = None, max_age_ms: int = 0
    ) -> TopicOffsets:
        """Return the topic's id and, by partition, its first offset, its end offset, or the offset of a timestamp.

        `at` is "earliest", "latest" or a timestamp (ms), for all partitions or by partition. With a `topic_id`, a topic
        that was deleted and created again is refused (`topic_recreated`). Added partitions show within `max_age_ms`.
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
        """Yield the batches of a partition that hold a range of offsets; leaves no state in the cluster.

        The first and last batch may extend beyond the range. Raises `TrimmedError` if retention removed some of it.
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
        """Yield the batches of a range of offsets as one node stores them, whether it leads the partition or not.

        For comparing replicas: unlike `read_range` it does not fill gaps. Raises `OutOfRangeError` (`past_end`) if the
        replica ends before the range and does not catch up, `NotFoundError` (`no_replica`) if the node has no replica.
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

    def scan(
        self,
        topic: str,
        *,
        start: ScanBound = "earliest",
        end: ScanBound = "latest",
        partitions: Iterable[int] = (),
        schema: pa.Schema | None = None,
        with_headers: bool = False,
        progress: OnProgress | None = None,
        fetch_bytes: int = 4 << 20,
    ) -> Scan:
        """Return a bounded read of a topic, as a stream of Arrow batches; leaves no state in the cluster.

        `start` and `end` are "earliest", "latest", an offset, a `datetime`, or an offset by partition; the end is at
        most the current one. With a `schema`, values are JSON objects and become its columns. `progress` is called with
        a `ReadProgress` after each fetch.
        """
        planning = plan_scan(
            self._cluster.router,
            topic,
            start=start,
            end=end,
            partitions=tuple(partitions),
            schema=schema,
            is_with_headers=with_headers,
            fetch_bytes=fetch_bytes,
            on_progress=progress,
        )
        return Scan(self._run(planning), self._cluster.router, self._run)

    def move_cursors(self, topic: str, name: str, offsets: Mapping[int, int]) -> None:
        """Set the cursors of a named consumer, by partition, for a program that stores its own offsets."""
        self._run(self._cluster.move_cursors(topic, name, offsets))

    # -- internals -------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work)

    async def _open(self) -> None:
        """Open the cluster in a task that also closes it: connections belong to the task that opened them."""
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner_task = asyncio.get_running_loop().create_task(self._own_cluster(opened), name="own-cluster")
        await asyncio.wait((opened, self._owner_task), return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            self._owner_task.result()  # raises its unexpected error
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
