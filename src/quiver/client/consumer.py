"""The asyncio consumer: reads the records of topics, as records, Arrow tables or frames, and commits its positions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from quiver.client.arguments import check_arguments
from quiver.client.consumer_core import ConsumerCore, SeekTarget, Slice, iterate, records_of, rewind
from quiver.client.frames import require_arrow, require_library, table_of, to_pandas, to_polars
from quiver.client.group_consumer import GroupConsumerCore
from quiver.client.options import TIME_MS_MAX, to_ms
from quiver.client.prefetch import PartitionPrefetcher
from quiver.client.presentation import describe, html_table
from quiver.client.ranges import OnProgress, ReadProgress
from quiver.client.unpacking import BatchUnpacker
from quiver.errors import OutOfRangeError, QuiverError
from quiver.model import ConsumerId, Offset, PartitionId
from quiver.record import Batch, Record
from quiver.routing.retry import Deadline
from quiver.routing.router import Router

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

    from quiver.tracing import Tracing


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


def trace_consumer(consumer: AsyncConsumer, tracing: Tracing) -> None:
    """Make spans of what a consumer receives from now on."""
    consumer.wait_batch = tracing.trace_wait_batch(consumer.wait_batch)  # type: ignore[method-assign]
    consumer.core.consume = tracing.trace_consume(consumer.core.consume)  # type: ignore[method-assign]


class _Receiving:
    """What happens to the records of a table as they arrive: they are decompressed, and their progress is reported."""

    def __init__(self, unpacker: BatchUnpacker, on_progress: OnProgress | None) -> None:
        self._unpacker, self._on_progress = unpacker, on_progress
        self._records = self._bytes = 0

    def __call__(self, received: Slice) -> None:
        _, batch, first, end = received
        self._unpacker.add(batch)
        if self._on_progress is not None:
            self._records += end - first
            self._bytes += len(batch.data)
            self._on_progress(ReadProgress(records=self._records, bytes=self._bytes))


@check_arguments
class AsyncConsumer:
    """Read the records of topics; made by `AsyncCluster.consumer`.

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
        return self.core.consumer_id

    @property
    def member_id(self) -> str | None:
        """The id of this member of its group, which changes when it joins again; None if it is not a member now."""
        return self.core.view.member_id or None if isinstance(self.core, GroupConsumerCore) else None

    @property
    def topic(self) -> str:
        """The topic of this consumer; raises `RequestError` if it reads several."""
        return self.core.topic

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that this consumer reads now."""
        return self.core.topics

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions of its topic that this consumer reads, sorted; of several topics, see `assignment`."""
        topic = self.core.topic
        return tuple(partition for name, partition in self.core.places if name == topic)

    @property
    def assignment(self) -> tuple[tuple[str, int], ...]:
        """The topics and partitions that this consumer reads now, sorted."""
        return tuple(self.core.places)

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
        schema: pa.Schema | None = None,
        progress: OnProgress | None = None,
    ) -> pa.Table:
        """Return records as a `pyarrow.Table`: topic, partition, offset, timestamp, key, value, optionally headers.

        Returns at `max_records`, at the current end of all partitions, or after `timeout` seconds with the records that
        arrived until then. With a `schema`, values are JSON objects and become its columns; if one does not fit, no
        record is consumed. `progress` is called with a `ReadProgress` after each batch.

        Raises:
            DecodeError: a value is not a JSON object of the schema (`bad_json`).
        """
        require_arrow()
        deadline = Deadline(self._router.clock, to_ms(timeout, "timeout"))
        with BatchUnpacker() as unpacker:
            on_slice = _Receiving(unpacker, progress)
            slices = await self.core.consume(max_records, deadline, is_to_end=True, on_slice=on_slice)
            try:
                unpacker.finish()
                return table_of(slices, is_with_headers=with_headers, schema=schema)
            except QuiverError:
                rewind(slices)
                raise

    async def fetch_pandas(
        self,
        max_records: int = 1_000_000,
        timeout: float = 5.0,  # noqa: ASYNC109 - as above
        *,
        with_headers: bool = False,
        schema: pa.Schema | None = None,
        progress: OnProgress | None = None,
    ) -> pd.DataFrame:
        """Return records as a pandas frame; otherwise as `fetch_arrow`."""
        require_library("pandas")
        options: dict[str, Any] = {"with_headers": with_headers, "schema": schema, "progress": progress}
        return to_pandas(await self.fetch_arrow(max_records, timeout, **options))

    async def fetch_polars(
        self,
        max_records: int = 1_000_000,
        timeout: float = 5.0,  # noqa: ASYNC109 - as above
        *,
        with_headers: bool = False,
        schema: pa.Schema | None = None,
        progress: OnProgress | None = None,
    ) -> pl.DataFrame:
        """Return records as a polars frame; otherwise as `fetch_arrow`."""
        require_library("polars")
        options: dict[str, Any] = {"with_headers": with_headers, "schema": schema, "progress": progress}
        return to_polars(await self.fetch_arrow(max_records, timeout, **options))

    async def commit(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the deadline of all attempts
        """Store the positions as cursors in the cluster: every record returned so far counts as processed.

        `timeout` (seconds) replaces the cluster's.

        Raises:
            FencedError: another consumer of this name has been opened since, or another member of the group has got
                partitions of this one; it reads them now. Nothing was moved there.
        """
        await self.core.commit(self._router.deadline(None if timeout is None else to_ms(timeout, "timeout")))

    async def seek(
        self,
        partition: int | None = None,
        offset: SeekTarget | None = None,
        *,
        timestamp: int | datetime | None = None,
        topic: str | None = None,
    ) -> None:
        """Continue at an offset, "earliest", "latest", or the first record since a timestamp.

        Without a `partition`, in all partitions of the `topic`; without a `topic`, of all topics.
        """
        target, is_timestamp = parse_seek_target(offset, timestamp)
        await self.core.seek(partition, target, is_timestamp=is_timestamp, topic=topic)

    def position(self, partition: int, topic: str | None = None) -> Offset:
        """Return the offset of the next record to return from a partition."""
        return self.core.reader(partition, topic).position

    async def size(self) -> int:
        """Return the exact number of committed records that this consumer has not returned yet."""
        return await self.core.size(self._router.deadline())

    async def end_offsets(self, topic: str | None = None) -> dict[PartitionId, Offset]:
        """Return the current end offset of each partition: the offset that the next produced record gets."""
        return await self.core.end_offsets(topic, self._router.deadline())

    async def close(self) -> None:
        """Commit if `auto_commit` is set, or as a member of a group, which it leaves; then close. Idempotent."""
        await self.core.close()

    def __repr__(self) -> str:
        return describe(type(self), self.facts())

    def _repr_html_(self) -> str:
        return html_table(type(self), self.facts())

    def facts(self) -> dict[str, object]:
        """Return what this consumer knows of itself. For use inside the SDK only."""
        places = self.assignment
        positions = ", ".join(f"{topic}/{part}: {self.position(part, topic)}" for topic, part in places)
        return {
            "topics": self.topics,
            "name": self.core.name or None,
            "consumer_id": self.consumer_id,
            "positions": positions,
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.core.close(is_committing=kind is None)
