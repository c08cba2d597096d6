"""`format("quiver")`: the data source that Spark sees.

Spark runs it in three places. The *driver's planners* (`schema`, `partitions`, offsets) are Python processes of their
own; *executors* run `read` and `write` in workers that are forked and reused; everything that passes between them is
pickled. So nothing here holds a connection or a lock: `connections` has those, one for each process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from quiver.errors import RequestError, TrimmedError
from quiver.logs import facts
from quiver.record import Batch
from quiver.spark.columns import arrow_batches, check_row_schema, spark_schema
from quiver.spark.connections import connection
from quiver.spark.filters import PushedFilters, is_filter_planner, push_filters
from quiver.spark.holds import QueryHold, exit_on_sigterm
from quiver.spark.offset_reader import OffsetReader
from quiver.spark.offsets import (
    OffsetRange,
    StreamOffset,
    limit_records,
    plan,
    ranges_between,
    records_between,
    uncounted_loss,
)
from quiver.spark.options import (
    STREAM_ONLY,
    OffsetBound,
    ReadOptions,
    SourceMode,
    WriteOptions,
    read_options,
    write_options,
)
from quiver.spark.sink import BatchWriter, StreamWriter

logger = logging.getLogger(__name__)


class RangePartition(InputPartition):
    """What one task reads."""

    def __init__(self, what: OffsetRange) -> None:
        super().__init__(what)
        self.what = what


class QuiverDataSource(DataSource):
    """Read topics into DataFrames and streams, and write them back.

    Example:
        quiver.spark.register(spark)
        frame = spark.read.format("quiver").option("servers", "127.0.0.1:8002").option("subscribe", "logs").load()
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self._given = dict(options)

    @classmethod
    def name(cls) -> str:
        """Return what stands in `format(...)`."""
        return "quiver"

    def schema(self) -> StructType:
        """Return the columns of a read, which options may choose; Spark does not tell which it needs."""
        use = SourceMode.STREAM_READ if _is_for_streams(self._given) else SourceMode.BATCH_READ
        return spark_schema(read_options(self._given, use).columns)

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - Spark's signature
        """Return a batch reader."""
        kind = FilteringReader if is_filter_planner() else BatchReader
        return kind(read_options(self._given, SourceMode.BATCH_READ))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802 - Spark's signature
        """Return a stream reader."""
        return StreamReader(read_options(self._given, SourceMode.STREAM_READ))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 - Spark's signature
        """Return a batch writer."""
        options = self._check_write(schema, SourceMode.BATCH_WRITE, is_overwriting=overwrite)
        return BatchWriter(options)

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001 - Spark's signature
    ) -> DataSourceStreamWriter:
        """Return a stream writer."""
        return StreamWriter(self._check_write(schema, SourceMode.STREAM_WRITE, is_overwriting=overwrite))

    def _check_write(self, schema: StructType, use: SourceMode, *, is_overwriting: bool) -> WriteOptions:
        options = write_options(self._given, use)
        if is_overwriting:
            message = "a topic cannot be overwritten: use mode append (batches) or output mode append (streams)"
            raise RequestError(message, code="bad_option")
        check_row_schema(schema, options.topic)
        return options


def _is_for_streams(given: Mapping[str, str]) -> bool:
    """Tell whether options can only be meant for a stream: the schema is asked for before the use is known."""
    return any(name.lower() in STREAM_ONLY for name in given)


class BatchReader(DataSourceReader):
    """Read what lies between two bounds, once."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._narrowing = PushedFilters()

    def partitions(self) -> Sequence[InputPartition]:
        """Find the bounds and share out what lies between them; on the driver."""
        progress = OffsetReader(self._options)
        start, end = progress.find(self._options.starting), progress.find(self._options.ending)
        oldest_ms = self._narrowing.timestamp
        not_older = None if oldest_ms is None else progress.find(OffsetBound(default=oldest_ms, is_time=True))
        ranges = progress.clip(self._narrowing.narrow(ranges_between(start, end), not_older))
        return [RangePartition(what) for what in plan(ranges, _tasks_min(self._options))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part; on an executor."""
        return read_range(self._options, partition)


class FilteringReader(BatchReader):
    """Read no more than what a query's filters let through, as far as they speak of places."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:  # noqa: N802 - Spark's name
        """Note what filters say; return those that Spark has to apply itself."""
        self._narrowing, rest = push_filters(filters)
        return rest


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Read what comes, in micro-batches; one object lives on the driver for as long as the query runs."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._progress = OffsetReader(options)
        self._hold: QueryHold | None = None
        """Made where the query lives: tasks get this reader, too."""
        self._target: StreamOffset | None = None
        """Where a query ends that is to read only what was there when it began."""
        self._latest: StreamOffset | None = None
        self._uncounted: dict[str, int] = {}
        """Records of a planned batch that turned out to be gone: the next place counts them."""
        self._shown: dict[str, Any] | None = None
        """How far the cluster was last told that the query has come."""
        self._triggered_s = time.monotonic()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where a new query begins; what was first while it was not held yet may be gone by now."""
        self._keep(found := self._progress.find(self._options.starting), found)
        return self._progress.find(self._options.starting).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit for each micro-batch that options set."""
        options = self._options
        if options.trigger_records_max is not None:
            return ReadMaxRows(options.trigger_records_max)
        if options.trigger_bytes_max is not None:
            return ReadMaxBytes(options.trigger_bytes_max)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Take what there is now for all that there will be."""
        self._target = self._progress.find(OffsetBound(default="latest"))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return how far the next micro-batch goes; `start` itself if there is to be none.

        What lies before `start` is done with: Spark asks only then, also after the last batch of a query.
        """
        self._show(start)
        begun, end = self._progress.advance(StreamOffset.from_json(start).with_lost(self._uncounted))
        self._latest = end
        self._keep(begun, end)
        if self._target is not None:
            end = end.up_to(self._target, begun)
        elif self._is_too_little(begun, end):
            return start
        limited = self._limit(begun, end, limit)
        self._triggered_s = time.monotonic()
        return limited.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return how far the topics go, for the query's progress."""
        return None if self._latest is None else self._latest.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Share out a micro-batch."""
        first, last = StreamOffset.from_json(start), StreamOffset.from_json(end)
        if self._hold is None:  # a query that goes on begins with the batch that it did not finish
            self._keep(first, last)
        ranges = ranges_between(first, last)
        clipped = self._progress.clip(ranges)
        self._uncounted = uncounted_loss(first, last, ranges, clipped)
        return [RangePartition(what) for what in plan(clipped, _tasks_min(self._options))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part; on an executor."""
        return read_range(self._options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Show how far the query has come; before a query's last batch, not after it."""
        self._show(end)

    def stop(self) -> None:
        """Let go of what was not read."""
        if self._hold is not None:
            self._hold.release()

    def _show(self, reached: dict[str, Any]) -> None:
        """Show how far the query has come, if it has a name to show it under and has moved."""
        if self._options.group_id and reached != self._shown:
            self._progress.publish(StreamOffset.from_json(reached))
            self._shown = reached

    def _keep(self, start: StreamOffset, end: StreamOffset) -> None:
        """Keep retention from what lies behind `start`."""
        if self._hold is None:
            exit_on_sigterm()
            self._hold = QueryHold(self._options)
        self._hold.move(start, end)

    def _is_too_little(self, start: StreamOffset, end: StreamOffset) -> bool:
        if not self._options.trigger_records_min:
            return False
        is_late = time.monotonic() - self._triggered_s >= self._options.trigger_delay_s_max
        return not is_late and records_between(start, end) < self._options.trigger_records_min

    def _limit(self, start: StreamOffset, end: StreamOffset, limit: ReadLimit) -> StreamOffset:
        records_max: int | None = None
        if isinstance(limit, ReadMaxRows):
            records_max = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            records_max = max(1, limit.max_bytes // self._progress.average_record_bytes(list(end.topics)))
        if isinstance(limit, ReadMaxRows) and self._options.trigger_bytes_max is not None:
            by_bytes = self._options.trigger_bytes_max // self._progress.average_record_bytes(list(end.topics))
            records_max = max(1, min(limit.max_rows, by_bytes))
        return end if records_max is None else limit_records(start, end, records_max)


def read_range(options: ReadOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Return the Arrow batches of one task."""
    if not isinstance(partition, RangePartition):
        return iter(())  # of a batch that has no tasks Spark makes one, with a partition of its own
    batches = fetch_range(options, partition.what)
    return arrow_batches(batches, partition.what, options.columns, records_max=options.batch_records)


def fetch_range(options: ReadOptions, what: OffsetRange) -> Iterator[Batch]:
    """Yield the stored batches that hold a range; go on behind what retention removes meanwhile, if that is wished."""
    cluster, position = connection(options.servers), what.first_offset
    while position < what.end_offset:
        try:
            for batch in cluster.read_range(
                what.topic, what.partition, position, what.end_offset, topic_id=what.topic_id
            ):
                yield batch
                position = batch.header.end_offset
        except TrimmedError:
            if options.fails_on_data_loss:
                raise
            found = cluster.offsets(what.topic, {what.partition: "earliest"}, topic_id=what.topic_id)
            first_offset = max(position, found.offsets[what.partition])
            gone = facts(topic=what.topic, partition=what.partition, first_offset=position, end_offset=first_offset)
            logger.warning("records are gone", extra=gone)
            position = first_offset


def _tasks_min(options: ReadOptions) -> int:
    return options.partitions_min or os.cpu_count() or 1
