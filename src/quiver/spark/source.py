"""`format("quiver")`: the data source that Spark sees.

Spark runs it in three places. The *driver's planners* (`schema`, `partitions`, offsets) are separate Python processes;
*executors* run `read` and `write` in forked, reused workers; objects that pass between them are pickled. So no class
here holds a connection or a lock when it is pickled: `connections` caches one connection per process.
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
    """The records that one task reads."""

    def __init__(self, offset_range: OffsetRange) -> None:
        super().__init__(offset_range)
        self.offset_range = offset_range


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
        """Return the name for `format(...)`."""
        return "quiver"

    def schema(self) -> StructType:
        """Return the columns of a read; the option `columns` reduces them, since Spark does not say which it needs."""
        mode = SourceMode.STREAM_READ if _is_for_streams(self._given) else SourceMode.BATCH_READ
        return spark_schema(read_options(self._given, mode).columns)

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

    def _check_write(self, schema: StructType, mode: SourceMode, *, is_overwriting: bool) -> WriteOptions:
        options = write_options(self._given, mode)
        if is_overwriting:
            message = "a topic cannot be overwritten: use mode append (batches) or output mode append (streams)"
            raise RequestError(message, code="bad_option")
        check_row_schema(schema, options.topic)
        return options


def _is_for_streams(given: Mapping[str, str]) -> bool:
    """Return whether an option is valid for streams only: Spark asks for the schema before the mode is known."""
    return any(name.lower() in STREAM_ONLY for name in given)


class BatchReader(DataSourceReader):
    """Read the records between two bounds, once."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._pushed = PushedFilters()

    def partitions(self) -> Sequence[InputPartition]:
        """Resolve the bounds and split the ranges into tasks. Runs on the driver."""
        reader = OffsetReader(self._options)
        start, end = reader.find(self._options.starting), reader.find(self._options.ending)
        oldest_ms = self._pushed.timestamp
        not_older = None if oldest_ms is None else reader.find(OffsetBound(default=oldest_ms, is_time=True))
        ranges = reader.clip(self._pushed.prune(ranges_between(start, end), not_older))
        return [RangePartition(offset_range) for offset_range in plan(ranges, _tasks_min(self._options))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the records of one task. Runs on an executor."""
        return read_range(self._options, partition)


class FilteringReader(BatchReader):
    """A batch reader that fetches only partitions and offsets that can match the query's filters."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:  # noqa: N802 - Spark's name
        """Apply filters on topic, partition, offset and time; return those that Spark must still apply."""
        self._pushed, rest = push_filters(filters)
        return rest


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Read new records in micro-batches; one instance lives on the driver while the query runs."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._offsets = OffsetReader(options)
        self._hold: QueryHold | None = None
        """Created on the driver only: tasks receive a pickled copy of this reader."""
        self._target: StreamOffset | None = None
        """The end of a query with `Trigger.AvailableNow`."""
        self._latest: StreamOffset | None = None
        self._uncounted: dict[str, int] = {}
        """Missing records of a planned batch, by topic: the next offset counts them as lost."""
        self._published: dict[str, Any] | None = None
        """The offsets last stored as cursors of `groupId`."""
        self._triggered_s = time.monotonic()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the first offset of a new query."""
        # Resolve again once the hold is placed: retention may have removed the first records before that.
        self._move_hold(found := self._offsets.find(self._options.starting), found)
        return self._offsets.find(self._options.starting).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the configured limit per micro-batch."""
        options = self._options
        if options.trigger_records_max is not None:
            return ReadMaxRows(options.trigger_records_max)
        if options.trigger_bytes_max is not None:
            return ReadMaxBytes(options.trigger_bytes_max)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Set the end of the query to the current end of the topics."""
        self._target = self._offsets.find(OffsetBound(default="latest"))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the end of the next micro-batch; `start` itself if there is none.

        Everything before `start` is processed: Spark calls this only then, also after a query's last batch.
        """
        self._publish_cursors(start)
        begun, end = self._offsets.advance(StreamOffset.from_json(start).with_lost(self._uncounted))
        self._latest = end
        self._move_hold(begun, end)
        if self._target is not None:
            end = end.up_to(self._target, begun)
        elif self._waits_for_more(begun, end):
            return start
        limited = self._limit(begun, end, limit)
        self._triggered_s = time.monotonic()
        return limited.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return the end of the topics, for the query's progress report."""
        return None if self._latest is None else self._latest.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split a micro-batch into tasks."""
        first, last = StreamOffset.from_json(start), StreamOffset.from_json(end)
        if self._hold is None:  # a restarted query first repeats its unfinished batch, without latestOffset
            self._move_hold(first, last)
        ranges = ranges_between(first, last)
        clipped = self._offsets.clip(ranges)
        self._uncounted = uncounted_loss(first, last, ranges, clipped)
        return [RangePartition(offset_range) for offset_range in plan(clipped, _tasks_min(self._options))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the records of one task. Runs on an executor."""
        return read_range(self._options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Store the query's offsets as cursors; `latestOffset` does it for the last batch, where Spark skips this."""
        self._publish_cursors(end)

    def stop(self) -> None:
        """Release the hold on unread records."""
        if self._hold is not None:
            self._hold.release()

    def _publish_cursors(self, reached: dict[str, Any]) -> None:
        """Store the query's offsets as cursors of `groupId`, if set and changed."""
        if self._options.group_id and reached != self._published:
            self._offsets.publish(StreamOffset.from_json(reached))
            self._published = reached

    def _move_hold(self, start: StreamOffset, end: StreamOffset) -> None:
        """Hold all records from `start` on."""
        if self._hold is None:
            exit_on_sigterm()
            self._hold = QueryHold(self._options)
        self._hold.move(start, end)

    def _waits_for_more(self, start: StreamOffset, end: StreamOffset) -> bool:
        if not self._options.trigger_records_min:
            return False
        is_late = time.monotonic() - self._triggered_s >= self._options.trigger_delay_s_max
        return not is_late and records_between(start, end) < self._options.trigger_records_min

    def _limit(self, start: StreamOffset, end: StreamOffset, limit: ReadLimit) -> StreamOffset:
        records_max: int | None = None
        if isinstance(limit, ReadMaxRows):
            records_max = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            records_max = max(1, limit.max_bytes // self._offsets.average_record_bytes(list(end.topics)))
        if isinstance(limit, ReadMaxRows) and self._options.trigger_bytes_max is not None:
            by_bytes = self._options.trigger_bytes_max // self._offsets.average_record_bytes(list(end.topics))
            records_max = max(1, min(limit.max_rows, by_bytes))
        return end if records_max is None else limit_records(start, end, records_max)


def read_range(options: ReadOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Return the Arrow batches of one task."""
    if not isinstance(partition, RangePartition):
        return iter(())  # Spark creates one task with a partition of its own for an empty batch
    batches = fetch_range(options, partition.offset_range)
    return arrow_batches(batches, partition.offset_range, options.columns, records_max=options.batch_records)


def fetch_range(options: ReadOptions, offset_range: OffsetRange) -> Iterator[Batch]:
    """Yield the stored batches of a range; skip what retention removes meanwhile if `failOnDataLoss` is false."""
    cluster, position = connection(options.servers), offset_range.first_offset
    while position < offset_range.end_offset:
        try:
            for batch in cluster.read_range(
                offset_range.topic,
                offset_range.partition,
                position,
                offset_range.end_offset,
                topic_id=offset_range.topic_id,
            ):
                yield batch
                position = batch.header.end_offset
        except TrimmedError:
            if options.fails_on_data_loss:
                raise
            found = cluster.offsets(
                offset_range.topic, {offset_range.partition: "earliest"}, topic_id=offset_range.topic_id
            )
            first_offset = max(position, found.offsets[offset_range.partition])
            gone = facts(
                topic=offset_range.topic,
                partition=offset_range.partition,
                first_offset=position,
                end_offset=first_offset,
            )
            logger.warning("unread records were removed", extra=gone)
            position = first_offset


def _tasks_min(options: ReadOptions) -> int:
    return options.partitions_min or os.cpu_count() or 1
