"""Parse ranges of records in Spark's tasks: read, join, parse, and give the rows to whoever wants them.

The driver plans a batch as ranges of offsets; a task reads its range, and a few records beyond its edges, because a
line belongs to the range that has its first record: a stack trace is never cut between two tasks. At the end of a batch
it is: what continues it comes later, and becomes a row of its own.

Learning: without a model, tasks first learn from a part of each range. Then all lines are parsed, and tasks return a
model of the lines whose form was not known. If a range has many of those, such as after a change of the format, it is
parsed once more with all that was learned. What was learned is part of the model from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from quiver.spark.columns import arrow_batches
from quiver.spark.logs import Model
from quiver.spark.offsets import OffsetRange, plan
from quiver.spark.options import ReadOptions
from quiver.spark.pipelines.events import (
    RECORD_COLUMNS,
    ParsedBatch,
    join_records,
    learn_records,
    merge_models,
    parse_joined,
    parser_of,
)
from quiver.spark.pipelines.lake import LakeFile, read_in_order
from quiver.spark.pipelines.place import Place
from quiver.spark.source import fetch_range

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_RECORDS_MAX: Final = 400_000
TASK_BYTES_MAX: Final = 64 << 20
"""A task holds its range in memory."""
BATCH_TASKS_MAX: Final = 16
"""Tasks of one batch: the most that is parsed again after a crash."""
EDGE_RECORDS: Final = 1000
"""Records that may continue a line beyond the edge of its range."""
SAMPLE_LINES: Final = 20_000
"""Lines of each range that are learned from if there is no model."""
NEW_SHARE_MAX: Final = 0.002
"""A range with a larger share of lines of unknown form is parsed again."""
_READ_RECORDS: Final = 100_000


class RecordReader(Protocol):
    """Where records come from. Picklable."""

    def read(self, own: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Yield the records of a range, in order, with the columns `RECORD_COLUMNS`. Runs in a task."""


class TopicReader(msgspec.Struct, frozen=True):
    """Reads records from a cluster."""

    options: ReadOptions

    def read(self, own: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Yield the records of a range."""
        return arrow_batches(fetch_range(self.options, own), own, RECORD_COLUMNS, records_max=_READ_RECORDS)


class LakeReader(msgspec.Struct, frozen=True):
    """Reads records from an archive."""

    place: Place
    files: tuple[LakeFile, ...]

    def read(self, own: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Yield the records of a range."""
        files = [
            file
            for file in self.files
            if file.partition == own.partition
            and file.first_offset < own.end_offset
            and file.last_offset >= own.first_offset
        ]
        for batch in read_in_order(self.place, files, (own.first_offset, own.end_offset)):
            offsets = batch["offset"].to_numpy()
            first, end = np.searchsorted(offsets, [own.first_offset, own.end_offset])
            if first < end:
                yield batch.slice(int(first), int(end - first))


class BatchRange(msgspec.Struct, frozen=True, kw_only=True):
    """The range of a task, and the range of its partition in the whole batch, beyond which nothing is read."""

    own: OffsetRange
    first_offset: int
    end_offset: int


class RangeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a task returns."""

    output: Any
    """What its consumer of rows returned."""
    lines: int
    new_lines: int
    learned: bytes
    """A stored model of new lines; empty without one."""


Consumer = Callable[[OffsetRange, Iterator[pa.RecordBatch]], Any]
"""Uses the rows of a range and returns what the driver needs of them. Runs in a task; picklable."""


class BatchParser:
    """Parses batches, and keeps the model. Runs on the driver."""

    def __init__(self, spark: SparkSession, reader: RecordReader, model: Model, *, formats: Sequence[str] = ()) -> None:
        self._context = spark.sparkContext
        self._reader = reader
        self._formats = tuple(formats)
        self.model = model if set(formats) <= set(model.formats) else model.merge(Model(formats=formats))
        """What was learned so far; it changes with each batch."""

    def run(
        self, ranges: Sequence[OffsetRange], consume: Consumer, discard: Callable[[Any], None], *, record_bytes: int
    ) -> list[RangeResult]:
        """Parse a batch; return the result of each task. `discard` gets outputs that another attempt replaces."""
        tasks = plan_tasks(ranges, self._context.defaultParallelism, record_bytes=record_bytes)
        if not self.model.form_count:
            models = self._map(partial(learn_range, self._reader, self._formats), tasks)
            self.model = merge_models([self.model, *map(Model.from_bytes, models)])
        results = self._parse(tasks, consume)
        again = [at for at, own in enumerate(results) if own.new_lines > NEW_SHARE_MAX * own.lines]
        self._learn(results)
        if again:
            fresh = self._parse([tasks[at] for at in again], consume)
            for at, own in zip(again, fresh, strict=True):
                discard(results[at].output)
                results[at] = own
            self._learn(fresh)
        return results

    def _parse(self, tasks: list[BatchRange], consume: Consumer) -> list[RangeResult]:
        return self._map(partial(parse_range, self._reader, self.model.to_bytes(), consume), tasks)

    def _learn(self, results: Sequence[RangeResult]) -> None:
        learned = [Model.from_bytes(own.learned) for own in results if own.learned]
        if learned:
            self.model = self.model.merge(merge_models(learned))

    def _map(self, work: Callable[[BatchRange], Any], tasks: list[BatchRange]) -> list[Any]:
        return self._context.parallelize(tasks, len(tasks)).map(work).collect() if tasks else []


def task_records(record_bytes: int) -> int:
    """Return the most records of one task."""
    return max(1, min(TASK_RECORDS_MAX, TASK_BYTES_MAX // max(1, record_bytes)))


def plan_tasks(ranges: Sequence[OffsetRange], cores: int, *, record_bytes: int) -> list[BatchRange]:
    """Divide the ranges of a batch, one for each partition, into tasks."""
    total = sum(map(len, ranges))
    count = max(cores, -(-total // task_records(record_bytes)))
    bounds = {one.partition: one for one in ranges}
    return [
        BatchRange(
            own=own, first_offset=bounds[own.partition].first_offset, end_offset=bounds[own.partition].end_offset
        )
        for own in plan(list(ranges), count)
    ]


def learn_range(reader: RecordReader, formats: tuple[str, ...], task: BatchRange) -> bytes:
    """Return a stored model of a part of a range. Runs in a task."""
    end = min(task.own.end_offset, task.own.first_offset + SAMPLE_LINES)
    part = msgspec.structs.replace(task.own, end_offset=end)
    return merge_models([learn_records(batch, formats) for batch in reader.read(part)]).to_bytes()


def parse_range(reader: RecordReader, model: bytes, consume: Consumer, task: BatchRange) -> RangeResult:
    """Parse a range, and give its rows to `consume`. Runs in a task."""
    seen = _Seen()
    output = consume(task.own, seen.rows(_parse(reader, model, task)))
    learned = seen.model.to_bytes() if seen.model.form_count else b""
    return RangeResult(output=output, lines=seen.lines, new_lines=seen.new_lines, learned=learned)


class _Seen:
    """Counts lines, and learns the new ones."""

    def __init__(self) -> None:
        self.lines = self.new_lines = 0
        self.model = Model()

    def rows(self, batches: Iterator[ParsedBatch]) -> Iterator[pa.RecordBatch]:
        new: list[ParsedBatch] = []
        for batch in batches:
            self.lines += len(batch.rows)
            self.new_lines += batch.new_count
            if batch.new_count:
                new.append(batch)
            yield batch.rows
        self.model = merge_models([batch.learn() for batch in new])


def _parse(reader: RecordReader, model: bytes, task: BatchRange) -> Iterator[ParsedBatch]:
    own = task.own
    wide = msgspec.structs.replace(
        own,
        first_offset=max(task.first_offset, own.first_offset - 1),
        end_offset=min(task.end_offset, own.end_offset + EDGE_RECORDS),
    )
    batches = list(reader.read(wide))
    if not batches:
        return
    records = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
    # What continues the record before this range belongs to the task before, as far as that one reads.
    is_after = wide.first_offset < own.first_offset
    joined = join_records(records, first_max=EDGE_RECORDS if is_after else None)
    offsets = records["offset"].to_numpy()[joined.firsts]
    first, end = np.searchsorted(offsets, [own.first_offset, own.end_offset])
    yield from parse_joined(joined, parser_of(model), int(first), int(end))
