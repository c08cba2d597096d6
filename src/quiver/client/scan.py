"""Bounded reads of a topic as a stream of Arrow batches: `cluster.scan`.

A scan fixes its offsets when it is made, so reading it twice gives the same records. If retention removes some of them,
it raises `TrimmedError` instead of skipping them. It leaves no state in the cluster. Memory holds a few fetches at a
time, however large the topic is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from quiver.client.frames import require_arrow, require_library, to_pandas, to_polars
from quiver.client.presentation import describe, html_table
from quiver.client.ranges import OffsetSpecs, OnProgress, RangeReader, ReadProgress, TopicOffsets, find_offsets
from quiver.errors import NotFoundError, OutOfRangeError
from quiver.model import Offset, PartitionId
from quiver.record import Batch
from quiver.routing.router import Router

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

T = TypeVar("T")
ScanBound = Literal["earliest", "latest"] | int | datetime | Mapping[int, int]
"""One end of a scan: a word, an offset in every partition, a time, or an offset by partition."""


class ScanRange(msgspec.Struct, frozen=True):
    """The offsets to read of one partition."""

    partition: int
    first_offset: int
    end_offset: int


class ScanPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a scan reads, and how it presents it."""

    topic: str
    topic_id: int
    ranges: tuple[ScanRange, ...]
    is_with_headers: bool
    value_schema: Any
    """A `pyarrow.Schema` of JSON values; None: values stay bytes."""
    fetch_bytes: int
    on_progress: OnProgress | None = None

    @property
    def total(self) -> int:
        """Number of records."""
        return sum(one.end_offset - one.first_offset for one in self.ranges)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the batches."""
        from quiver.client.tables import table_schema

        return table_schema(is_with_headers=self.is_with_headers, schema=self.value_schema)

    def reader(self, router: Router, one: ScanRange) -> RangeReader:
        """Return a reader of one range."""
        return RangeReader(
            router,
            self.topic,
            one.partition,
            first_offset=one.first_offset,
            end_offset=one.end_offset,
            topic_id=self.topic_id,
            fetch_bytes=self.fetch_bytes,
        )

    def convert(self, one: ScanRange, batches: Sequence[Batch]) -> list[pa.RecordBatch]:
        """Return the records of batches that are in a range."""
        from quiver.client.tables import build_table, parse_values

        bounds = Offset(one.first_offset), Offset(one.end_offset)
        table = build_table(
            [(self.topic, PartitionId(one.partition), batch, *bounds) for batch in batches],
            is_with_headers=self.is_with_headers,
        )
        return (table if self.value_schema is None else parse_values(table, self.value_schema)).to_batches()


async def plan_scan(
    router: Router,
    topic: str,
    *,
    start: ScanBound,
    end: ScanBound,
    partitions: Sequence[int],
    schema: pa.Schema | None,
    is_with_headers: bool,
    fetch_bytes: int,
    on_progress: OnProgress | None,
) -> ScanPlan:
    """Find the offsets of a scan; its end is at most the current end of each partition.

    Raises:
        NotFoundError: unknown topic or partition.
        RequestError: pyarrow is missing, or the schema cannot be used.
    """
    require_arrow()
    firsts, ends = await find_offsets(router, topic, "earliest"), await find_offsets(router, topic, "latest")
    first_offsets = await _resolve(router, firsts, start, "earliest")
    end_offsets = await _resolve(router, ends, end, "latest")
    if unknown := set(partitions) - set(ends.offsets):
        raise NotFoundError(f"not done: topic {topic!r} has no partition {min(unknown)}", code="unknown_partition")
    ranges = []
    for partition in sorted(set(partitions) or ends.offsets):
        end_offset = min(end_offsets[partition], ends.offsets[partition])
        ranges.append(ScanRange(partition, min(first_offsets[partition], end_offset), end_offset))
    plan = ScanPlan(
        topic=topic,
        topic_id=ends.topic_id,
        ranges=tuple(ranges),
        is_with_headers=is_with_headers,
        value_schema=schema,
        fetch_bytes=fetch_bytes,
        on_progress=on_progress,
    )
    assert plan.schema  # raises for a schema that cannot be used
    return plan


async def _resolve(
    router: Router, known: TopicOffsets, bound: ScanBound, default: Literal["earliest", "latest"]
) -> Mapping[int, int]:
    """Return the offset of a bound in every partition; `known` are those of its default."""
    if bound == default:
        return known.offsets
    if isinstance(bound, Mapping):
        if unknown := set(bound) - set(known.offsets):
            raise NotFoundError(
                f"not done: topic {known.topic!r} has no partition {min(unknown)}", code="unknown_partition"
            )
        found = {**known.offsets, **bound}
    elif isinstance(bound, datetime | str):
        at: OffsetSpecs = bound if isinstance(bound, str) else round(bound.timestamp() * 1000)
        found = (await find_offsets(router, known.topic, at, topic_id=known.topic_id)).offsets
    else:
        found = dict.fromkeys(known.offsets, bound)
    if any(type(offset) is not int or offset < 0 for offset in found.values()):
        raise OutOfRangeError(
            f"not done: not a position of a scan: {bound!r}; use 'earliest', 'latest', an offset, a datetime"
        )
    return found


class _ScanFace:
    """What both faces of a scan show."""

    def __init__(self, plan: ScanPlan) -> None:
        self._plan = plan

    @property
    def topic(self) -> str:
        """The topic that it reads."""
        return self._plan.topic

    @property
    def ranges(self) -> tuple[ScanRange, ...]:
        """The offsets that it reads, by partition."""
        return self._plan.ranges

    @property
    def schema(self) -> pa.Schema:
        """The schema of its batches."""
        return self._plan.schema

    def __len__(self) -> int:
        """Return the number of records."""
        return self._plan.total

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return describe(type(self), self._facts())

    def _repr_html_(self) -> str:
        return html_table(type(self), self._facts())

    def _facts(self) -> dict[str, object]:
        ranges = ", ".join(f"{one.partition}: {one.first_offset} to {one.end_offset}" for one in self.ranges)
        return {"topic": self.topic, "records": len(self), "offsets": ranges}


class AsyncScan(_ScanFace):
    """A bounded read of a topic; made by `AsyncCluster.scan`.

    Example:
        scan = await cluster.scan("logs", start=datetime.now(UTC) - timedelta(hours=1))
        async for batch in scan:
            print(batch.num_rows)
    """

    def __init__(self, plan: ScanPlan, router: Router) -> None:
        super().__init__(plan)
        self._router = router

    async def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        """Yield the records as Arrow batches, partition by partition, in order within each."""
        count = size_bytes = 0
        for one in self._plan.ranges:
            reader = self._plan.reader(self._router, one)
            try:
                while batches := await reader.read_next():
                    for converted in self._plan.convert(one, batches):
                        count += converted.num_rows
                        yield converted
                    size_bytes += sum(len(batch.data) for batch in batches)
                    _report(self._plan, count, size_bytes)
            finally:
                reader.close()

    async def to_arrow(self) -> pa.Table:
        """Return all records as a `pyarrow.Table`."""
        import pyarrow as pa

        return pa.Table.from_batches([batch async for batch in self], self.schema)

    async def to_pandas(self) -> pd.DataFrame:
        """Return all records as a pandas frame."""
        require_library("pandas")
        return to_pandas(await self.to_arrow())

    async def to_polars(self) -> pl.DataFrame:
        """Return all records as a polars frame."""
        require_library("polars")
        return to_polars(await self.to_arrow())


class Scan(_ScanFace):
    """A bounded read of a topic; made by `Cluster.scan`.

    Everything that takes an Arrow stream takes it: `polars.DataFrame(scan)`, `duckdb.sql("SELECT … FROM scan")`,
    `pyarrow.table(scan)`. Each use reads the topic again.

    Example:
        scan = cluster.scan("logs", start=datetime.now(UTC) - timedelta(hours=1))
        print(len(scan), polars.DataFrame(scan))
    """

    def __init__(self, plan: ScanPlan, router: Router, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        super().__init__(plan)
        self._router = router
        self._run = run

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield the records as Arrow batches, partition by partition, in order within each."""
        count = size_bytes = 0
        for one in self._plan.ranges:
            reader = self._plan.reader(self._router, one)
            try:
                while batches := self._run(reader.read_next()):
                    for converted in self._plan.convert(one, batches):
                        count += converted.num_rows
                        yield converted
                    size_bytes += sum(len(batch.data) for batch in batches)
                    _report(self._plan, count, size_bytes)
            finally:
                self._run(_close(reader))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the records as an Arrow stream of the PyCapsule interface."""
        return self.to_reader().__arrow_c_stream__(requested_schema)  # type: ignore[no-untyped-call] # of pyarrow

    def to_reader(self) -> pa.RecordBatchReader:
        """Return a reader that reads the records as they are needed."""
        import pyarrow as pa

        return pa.RecordBatchReader.from_batches(self.schema, iter(self))

    def to_arrow(self) -> pa.Table:
        """Return all records as a `pyarrow.Table`."""
        return self.to_reader().read_all()

    def to_pandas(self) -> pd.DataFrame:
        """Return all records as a pandas frame."""
        require_library("pandas")
        return to_pandas(self.to_arrow())

    def to_polars(self) -> pl.DataFrame:
        """Return all records as a polars frame."""
        require_library("polars")
        return to_polars(self.to_arrow())


async def _close(reader: RangeReader) -> None:
    reader.close()


def _report(plan: ScanPlan, count: int, size_bytes: int) -> None:
    if plan.on_progress is not None:
        plan.on_progress(ReadProgress(records=count, bytes=size_bytes, total=plan.total))
