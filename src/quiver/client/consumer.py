"""The consumer: reads the records of a topic's partitions, commits its positions, and resumes from them.

`ConsumerCore` is shared by the asyncio and the blocking consumer. It runs on the event loop that opened it; the records
of a returned batch may be read in any thread. A position advances when the application receives a record, never when a
record is only prefetched. A commit stores positions, so after a crash records may repeat but none is skipped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from quiver.client.cursors import ConsumerCursors
from quiver.client.options import TIME_MS_MAX, ConsumerOptions, to_ms
from quiver.client.prefetch import PartitionPrefetcher, find_offset
from quiver.errors import (
    NotFoundError,
    OutcomeUnknownError,
    OutOfRangeError,
    QuiverError,
    RequestError,
    UnavailableError,
)
from quiver.model import ConsumerId, Offset, PartitionId
from quiver.record import Batch, Record
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.tasks import TaskSet, gather_first_error
from quiver.wire.messages import CursorsFound

if TYPE_CHECKING:
    import pyarrow as pa

    from quiver.client.digest_reporter import DigestReporter

logger = logging.getLogger(__name__)

SeekTarget = int | Literal["earliest", "latest"]
Slice = tuple[PartitionPrefetcher, Batch, Offset, Offset]


class ConsumerCore:
    """One consumer of one topic; `open` it on the loop that reads."""

    def __init__(
        self,
        topic: str,
        cursors: ConsumerCursors,
        *,
        router: Router,
        options: ConsumerOptions,
        digest_reporter: DigestReporter | None,
    ) -> None:
        self.topic = topic
        self.cursors = cursors
        self.options = options
        self.readers: dict[PartitionId, PartitionPrefetcher] = {}
        self._router = router
        self._digest_reporter = digest_reporter
        self._tasks = TaskSet(self._crashed)
        self._changed = asyncio.Event()
        self._turn = 0
        self._failure: QuiverError | None = None
        self._committed_ms = router.clock.monotonic_ms()

    @classmethod
    async def open(
        cls,
        router: Router,
        *,
        topic: str,
        name: str,
        consumer_id: int | None,
        partitions: Sequence[PartitionId],
        options: ConsumerOptions,
        deadline: Deadline,
        digest_reporter: DigestReporter | None = None,
    ) -> ConsumerCore:
        """Register a consumer, find its position in every partition and start prefetching."""
        cursors = ConsumerCursors(router, topic)
        if name or consumer_id is not None:
            await cursors.register(
                name=name, consumer_id=consumer_id, partitions=partitions, start=options.start, deadline=deadline
            )
        elif options.auto_commit_ms is not None:
            raise RequestError("auto_commit needs a consumer with a name: pass name=...", code="no_consumer_name")
        # Partitions given by the caller are checked now: waiting for one that does not exist would never end.
        info = await router.find_topic(topic, deadline=deadline, age_ms_max=0 if partitions else None)
        if unknown := set(partitions) - {partition.partition_id for partition in info.partitions}:
            raise NotFoundError(f"topic {topic!r} has no partition {min(unknown)}", code="unknown_partition")
        core = cls(topic, cursors, router=router, options=options, digest_reporter=digest_reporter)
        try:
            wanted = partitions or [partition.partition_id for partition in info.partitions]
            await core._add(wanted, options.start, deadline=deadline)
        except BaseException:
            await core._tasks.close()
            raise
        if not partitions:
            core._tasks.start(core._follow_topic(), "follow-topic")
        return core

    # -- records ---------------------------------------------------------------------------------

    async def wait_batch(self, deadline: Deadline) -> tuple[PartitionPrefetcher, Batch] | None:
        """Wait for a batch with unread records, from the partitions in turn; None if the deadline passed."""
        while True:
            await self._commit_if_due()
            if (found := self.peek()) is not None:
                return found
            self._changed.clear()
            if self.peek() is None and not await self._wait_change(deadline):
                return None

    def peek(self) -> tuple[PartitionPrefetcher, Batch] | None:
        """Return a prefetched batch with unread records, if there is one.

        Raises:
            QuiverError: a partition cannot be read, or this consumer failed or is closed.
        """
        if self._failure is not None:
            raise self._failure
        readers = list(self.readers.values())
        for step in range(len(readers)):
            reader = readers[(self._turn + step) % len(readers)]
            if (batch := reader.peek()) is not None:
                self._turn += step + 1
                return reader, batch
            if (error := reader.pop_error()) is not None:
                raise error
        return None

    async def consume(self, records_max: int, deadline: Deadline, *, is_to_end: bool) -> list[Slice]:
        """Return records and advance the positions: the first available, or with `is_to_end` all up to the end."""
        slices: list[Slice] = []
        while records_max > 0:
            try:
                found = await self.wait_batch(deadline) if not slices else await self._wait_more(deadline, is_to_end)
            except QuiverError:
                if slices:
                    break  # positions have advanced past these records, so return them; the error is raised again later
                raise
            if found is None:
                break
            reader, batch = found
            first = Offset(max(reader.position, batch.header.base_offset))
            end = Offset(min(batch.header.end_offset, first + records_max))
            reader.position = end
            records_max -= end - first
            slices.append((reader, batch, first, end))
        return slices

    async def _wait_more(self, deadline: Deadline, is_to_end: bool) -> tuple[PartitionPrefetcher, Batch] | None:  # noqa: FBT001 - private
        while (found := self.peek()) is None:
            if not is_to_end or all(reader.is_caught_up for reader in self.readers.values()):
                return None
            self._changed.clear()
            if self.peek() is None and not await self._wait_change(deadline):
                return None
        return found

    async def _wait_change(self, deadline: Deadline) -> bool:
        """Wait until a reader changed or a commit is due; False if the deadline passed."""
        remaining_ms = deadline.remaining_ms
        if not remaining_ms:
            return False
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), min(remaining_ms, self._commit_due_in_ms()) / 1000)
        return True

    # -- positions and commits -------------------------------------------------------------------

    def reader(self, partition: int) -> PartitionPrefetcher:
        """Return the reader of a partition; raise `NotFoundError` if this consumer does not read it."""
        reader = self.readers.get(PartitionId(partition))
        if reader is None:
            message = f"this consumer does not read partition {partition} of topic {self.topic!r}"
            raise NotFoundError(message, code="unknown_partition")
        return reader

    async def commit(self, deadline: Deadline) -> None:
        """Store the position in every partition where it differs from the cursor."""
        if self.cursors.consumer_id is None:
            message = "not done: a consumer without a name has no cursor in the cluster; pass name=..."
            raise RequestError(message, code="no_consumer_name")
        self._committed_ms = self._router.clock.monotonic_ms()
        moved = [(reader, reader.position) for reader in self.readers.values() if reader.position != reader.committed]
        await self._publish_digests()  # before the cursors move: an audit must not miss a committed record
        results = await asyncio.gather(
            *(self._commit_one(reader, position, deadline) for reader, position in moved), return_exceptions=True
        )
        for result in results:
            if result is not None:
                raise result

    async def seek(self, partition: int, target: SeekTarget, *, is_timestamp: bool) -> None:
        """Continue at another offset of a partition."""
        reader = self.reader(partition)
        if isinstance(target, int) and not is_timestamp:
            if target < 0:
                raise OutOfRangeError(f"not done: offset {target} is negative")
            reader.seek(Offset(target))
            return
        reader.seek(await find_offset(self._router, self.topic, reader.partition_id, target))

    async def size(self, deadline: Deadline) -> int:
        """Return the number of committed records not returned yet, over all partitions."""
        founds = await self._find_bounds(deadline)
        return sum(
            max(0, found.end_offset - max(reader.position, found.first_offset)) for reader, found in founds.items()
        )

    async def end_offsets(self, deadline: Deadline) -> dict[PartitionId, Offset]:
        """Return the current high watermark of every partition."""
        founds = await self._find_bounds(deadline)
        return {reader.partition_id: found.end_offset for reader, found in founds.items()}

    async def close(self, *, is_committing: bool = True) -> None:
        """Commit if `auto_commit` is set and `is_committing`, then stop reading; idempotent."""
        try:
            if is_committing and self.options.auto_commit_ms is not None and self._failure is None:
                await self.commit(self._router.deadline())
            with (
                nullcontext() if is_committing else suppress(QuiverError)
            ):  # the application's own error must not be replaced
                await self._close_digest_reporter()
        finally:
            self._failure = self._failure or RequestError(
                f"the consumer of topic {self.topic!r} is closed", code="closed"
            )
            await self._tasks.close()
            self._changed.set()

    # -- internals -------------------------------------------------------------------------------

    async def _add(
        self, partitions: Sequence[PartitionId], start: Literal["earliest", "latest"], *, deadline: Deadline
    ) -> None:
        starts = await gather_first_error(
            self.cursors.find_start(partition, start, deadline=deadline) for partition in partitions
        )
        for partition, (position, is_cursor) in zip(partitions, starts, strict=True):
            reader = PartitionPrefetcher(
                self.topic,
                partition,
                position,
                router=self._router,
                options=self.options,
                tasks=self._tasks,
                on_change=self._changed.set,
                digest_reporter=self._digest_reporter,
            )
            reader.committed = position if is_cursor else None
            self.readers[partition] = reader
            reader.start()

    async def _follow_topic(self) -> None:
        """Check periodically for added partitions; they are read from their first record, whatever `start` is."""
        while True:
            await asyncio.sleep(self.options.refresh_ms / 1000)
            try:
                deadline = self._router.deadline()
                info = await self._router.find_topic(self.topic, deadline=deadline, age_ms_max=self.options.refresh_ms)
                known = {partition.partition_id for partition in info.partitions} - set(self.readers)
                if known:
                    await self._add(sorted(known), "earliest", deadline=deadline)
            except (UnavailableError, OutcomeUnknownError, NotFoundError):
                continue  # the partition readers report errors to the application

    async def _find_bounds(self, deadline: Deadline) -> dict[PartitionPrefetcher, CursorsFound]:
        readers = list(self.readers.values())
        finding = (self.cursors.find(reader.partition_id, deadline=deadline) for reader in readers)
        return dict(zip(readers, await gather_first_error(finding), strict=True))

    async def _publish_digests(self) -> None:
        """Publish digests of all returned records, if requested; call before a cursor moves past them."""
        if self._digest_reporter is None or self._failure is not None:
            return
        for reader in self.readers.values():
            reader.digest_delivered()
        await self._digest_reporter.flush()

    async def _close_digest_reporter(self) -> None:
        await self._publish_digests()
        if self._digest_reporter is not None:
            await self._digest_reporter.close()

    async def _commit_one(self, reader: PartitionPrefetcher, position: Offset, deadline: Deadline) -> None:
        await self.cursors.move(reader.partition_id, position, deadline=deadline)
        reader.committed = position

    async def _commit_if_due(self) -> None:
        if self._commit_due_in_ms() > 0:
            return
        try:
            await self.commit(self._router.deadline())
        except (UnavailableError, OutcomeUnknownError) as error:
            facts = {"topic": self.topic, "error": str(error)}
            logger.warning("automatic commit failed, it is retried", extra={"facts": facts})

    def _commit_due_in_ms(self) -> int:
        interval_ms = self.options.auto_commit_ms
        if interval_ms is None or all(reader.position == reader.committed for reader in self.readers.values()):
            return TIME_MS_MAX
        return max(0, self._committed_ms + interval_ms - self._router.clock.monotonic_ms())

    def _crashed(self, error: BaseException) -> None:
        failure = UnavailableError(
            f"the consumer of topic {self.topic!r} crashed: {error!r}; create a new one", code="consumer_failed"
        )
        failure.__cause__ = error
        self._failure = failure
        self._changed.set()


def iterate(reader: PartitionPrefetcher, batch: Batch) -> Iterator[Record]:
    """Yield a batch's records from the position on and advance it with each; stop after a seek."""
    generation = reader.generation
    for record in batch.records(reader.position, partition=reader.partition_id):
        reader.position = record.offset + 1  # type: ignore[assignment] # an Offset; this line runs for every record
        yield record
        if reader.generation != generation:
            return


def records_of(slices: Sequence[Slice]) -> list[Record]:
    """Return the records of slices."""
    found: list[Record] = []
    for reader, batch, first, end in slices:
        found.extend(batch.records(first, end, partition=reader.partition_id))
    return found


def table_of(topic: str, slices: Sequence[Slice], *, is_with_headers: bool) -> pa.Table:
    """Return the records of slices as a table; raise `RequestError` without pyarrow."""
    require_arrow()
    from quiver.client.tables import build_table

    parts = [(reader.partition_id, batch, first, end) for reader, batch, first, end in slices]
    return build_table(topic, parts, is_with_headers=is_with_headers)


def require_arrow() -> None:
    """Raise `RequestError` if pyarrow is not installed; call before any position advances."""
    try:
        import quiver.client.tables  # noqa: F401 - loads the optional libraries
    except ImportError as error:
        message = "Arrow tables need pyarrow and numpy: pip install 'quivermq[arrow]'"
        raise RequestError(message, code="arrow_not_installed") from error


def parse_seek_target(offset: SeekTarget | None, timestamp: int | datetime | None) -> tuple[SeekTarget, bool]:
    """Return the target of a seek, and whether it is a timestamp in milliseconds."""
    if (offset is None) == (timestamp is None):
        raise OutOfRangeError("not done: pass either an offset or a timestamp")
    if isinstance(timestamp, datetime):
        return round(timestamp.timestamp() * 1000), True
    if timestamp is not None:
        return timestamp, True
    if isinstance(offset, str) and offset not in ("earliest", "latest"):
        raise OutOfRangeError(f"not done: an offset is a number, 'earliest' or 'latest', not {offset!r}")
    assert offset is not None
    return offset, False


class AsyncConsumer:
    """Read a topic's records; made by `AsyncCluster.consumer`.

    Example:
        consumer = await cluster.consumer("logs", name="report")
        async for record in consumer:
            print(record.partition, record.offset, record.text)
            await consumer.commit()
    """

    def __init__(self, core: ConsumerCore, router: Router, *, idle_timeout_ms: int | None) -> None:
        self.core = core
        self._router = router
        self._idle_timeout_ms = idle_timeout_ms

    @property
    def consumer_id(self) -> ConsumerId | None:
        """The id that the cluster assigned; None for a consumer without a name."""
        return self.core.cursors.consumer_id

    @property
    def topic(self) -> str:
        """The topic of this consumer."""
        return self.core.topic

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions that this consumer reads, sorted."""
        return tuple(sorted(self.core.readers))

    @property
    def skipped_count(self) -> int:
        """Records that retention removed before they were read (with `on_trimmed="earliest"`)."""
        return sum(reader.skipped_count for reader in self.core.readers.values())

    async def __aiter__(self) -> AsyncIterator[Record]:
        """Yield records as they arrive, forever, or until none arrived for `idle_timeout`."""
        while (found := await self.wait_batch()) is not None:
            for record in iterate(*found):
                yield record

    async def wait_batch(self) -> tuple[PartitionPrefetcher, Batch] | None:
        """Wait for a batch to iterate over; None if none arrived for `idle_timeout`. For use inside the SDK only."""
        timeout_ms = TIME_MS_MAX if self._idle_timeout_ms is None else self._idle_timeout_ms
        while (found := await self.core.wait_batch(Deadline(self._router.clock, timeout_ms))) is None:
            if self._idle_timeout_ms is not None:
                return None
        return found

    async def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[Record]:  # noqa: ASYNC109 - of the wait for records, not of the call
        """Return the available records, at most `max_records`; wait at most `timeout` seconds for the first."""
        deadline = Deadline(self._router.clock, to_ms(timeout, "timeout"))
        return records_of(await self.core.consume(max_records, deadline, is_to_end=False))

    async def fetch_arrow(
        self,
        max_records: int = 1_000_000,
        timeout: float = 5.0,  # noqa: ASYNC109 - as above
        *,
        with_headers: bool = False,
    ) -> pa.Table:
        """Return records as a `pyarrow.Table`: topic, partition, offset, timestamp, key, value, optionally headers.

        Returns at `max_records`, at the current end of all partitions, or after `timeout` seconds with the records that
        arrived until then.
        """
        require_arrow()
        deadline = Deadline(self._router.clock, to_ms(timeout, "timeout"))
        slices = await self.core.consume(max_records, deadline, is_to_end=True)
        return table_of(self.topic, slices, is_with_headers=with_headers)

    async def commit(self) -> None:
        """Store the positions as cursors in the cluster: every record returned so far counts as processed."""
        await self.core.commit(self._router.deadline())

    async def seek(
        self, partition: int, offset: SeekTarget | None = None, *, timestamp: int | datetime | None = None
    ) -> None:
        """Continue in a partition at an offset, "earliest", "latest", or the first record since a timestamp."""
        target, is_timestamp = parse_seek_target(offset, timestamp)
        await self.core.seek(partition, target, is_timestamp=is_timestamp)

    def position(self, partition: int) -> Offset:
        """Return the offset of the next record to return from a partition."""
        return self.core.reader(partition).position

    async def size(self) -> int:
        """Return the exact number of committed records that this consumer has not returned yet."""
        return await self.core.size(self._router.deadline())

    async def end_offsets(self) -> dict[PartitionId, Offset]:
        """Return the current end offset of each partition: the offset that the next produced record gets."""
        return await self.core.end_offsets(self._router.deadline())

    async def close(self) -> None:
        """Commit if `auto_commit` is set, then close; idempotent."""
        await self.core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.core.close(is_committing=kind is None)
