"""Records as DataFrame rows: fetched batches to Arrow (read), rows to topics and partitions (write).

Read: Spark accepts Arrow batches from Python only if their schema matches exactly: order, nullability, units. Small
batches are joined, because each batch has a fixed cost on its way into the JVM.

Write: columns are `value` (string or binary) and optionally `key`, `timestamp`, `headers`, `topic`, `partition`;
`offset` is ignored, since partitions assign their own. The option `topic` overrides the column, as in Spark's Kafka
sink. A row goes to the partition in its column, else to the partition of its key's hash, else to any partition.

Both directions work on whole columns, never on single records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, Final, TypeAlias, cast

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from quiver.client.batching import split_by_key
from quiver.errors import RequestError
from quiver.model import Offset
from quiver.record import Batch
from quiver.record.arrow import to_arrow
from quiver.spark.offsets import OffsetRange

BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
"""Joining of small batches stops at this size, even if it yields few records."""

_HEADER = StructType([StructField("key", StringType(), nullable=False), StructField("value", BinaryType())])
_TYPES: Final[dict[str, tuple[DataType, bool]]] = {
    "topic": (StringType(), False),
    "partition": (IntegerType(), False),
    "offset": (LongType(), False),
    "timestamp": (TimestampType(), False),
    "key": (BinaryType(), True),
    "value": (BinaryType(), True),
    "headers": (ArrayType(_HEADER, containsNull=False), True),
}


def spark_schema(columns: Iterable[str]) -> StructType:
    """Return the Spark schema for the given columns."""
    return StructType([StructField(name, *_TYPES[name]) for name in columns])


def arrow_schema(columns: Iterable[str]) -> pa.Schema:
    """Return the Arrow schema that Spark requires for the given columns."""
    return to_arrow_schema(spark_schema(columns), timezone="UTC")


def arrow_batches(
    batches: Iterable[Batch], offset_range: OffsetRange, columns: tuple[str, ...], *, records_max: int
) -> Iterator[pa.RecordBatch]:
    """Yield the records of fetched batches within a range, in order, about `records_max` per Arrow batch."""
    schema = arrow_schema(columns)
    waiting: list[pa.RecordBatch] = []
    count = size_bytes = 0
    for batch in batches:
        part = to_record_batch(batch, offset_range, schema)
        waiting.append(part)
        count, size_bytes = count + len(part), size_bytes + len(batch.data)
        if count >= records_max or size_bytes >= BATCH_BYTES_MAX:
            yield from _join(waiting, schema, records_max)
            waiting, count, size_bytes = [], 0, 0
    yield from _join(waiting, schema, records_max)


def to_record_batch(batch: Batch, offset_range: OffsetRange, schema: pa.Schema) -> pa.RecordBatch:
    """Return the records of one batch that are within a range."""
    records = to_arrow(batch, Offset(offset_range.first_offset), Offset(offset_range.end_offset))
    return pa.RecordBatch.from_arrays([_column(field, records, offset_range) for field in schema], schema=schema)


def _column(field: pa.Field[Any], records: pa.RecordBatch, offset_range: OffsetRange) -> pa.Array[Any]:
    column: pa.Array[Any]
    if field.name in ("topic", "partition"):
        column = pa.repeat(pa.scalar(getattr(offset_range, field.name), field.type), len(records))
        return column
    column = records.column(field.name)
    # Milliseconds become microseconds; safe=False: one overflowing timestamp must not fail the whole batch.
    return column if column.type == field.type else column.cast(field.type, safe=False)


def _join(parts: list[pa.RecordBatch], schema: pa.Schema, records_max: int) -> Iterator[pa.RecordBatch]:
    found = [part for part in parts if len(part)]
    if not found:
        return
    joined = found[0] if len(found) == 1 else pa.Table.from_batches(found, schema).combine_chunks().to_batches()[0]
    # round(): a batch slightly above the limit is not split.
    pieces = max(1, round(len(joined) / records_max))
    edges = [len(joined) * number // pieces for number in range(pieces + 1)]
    for first, end in pairwise(edges):
        if first < end:
            yield joined.slice(first, end - first)


_ALLOWED: Final[dict[str, tuple[type[DataType], ...]]] = {
    "value": (StringType, BinaryType),
    "key": (StringType, BinaryType),
    "timestamp": (TimestampType, LongType),
    "headers": (ArrayType, MapType),
    "topic": (StringType,),
    "partition": (IntegerType, LongType, ShortType),
    "offset": (LongType, IntegerType),
}
RECORD_COLUMNS: Final = ("value", "key", "timestamp", "headers")

ArrowColumns: TypeAlias = "dict[str, pa.Array[Any] | pa.ChunkedArray[Any]]"
Target = tuple[str, int | None]
"""A topic and one of its partitions; None: any partition."""
PartitionCount = Callable[[str], int]
"""Returns the partition count of a topic."""


def check_row_schema(schema: StructType, topic: str) -> None:
    """Raise `RequestError` (`bad_rows`) if rows of this schema cannot be written."""
    names = schema.fieldNames()
    for field in schema:
        allowed = _ALLOWED.get(field.name)
        if allowed is None:
            raise _bad(f"unknown column {field.name!r}: a record has {', '.join(_ALLOWED)}")
        if not isinstance(field.dataType, allowed):
            kinds = " or ".join(kind.__name__.removesuffix("Type").lower() for kind in allowed)
            raise _bad(f"column {field.name} must be {kinds}, not {field.dataType.simpleString()}")
    if "value" not in names:
        raise _bad(f"column value is missing; the DataFrame has {', '.join(names)}")
    if not topic and "topic" not in names:
        raise _bad("no topic given: set the option topic or add a column topic")


def split_rows(
    batch: pa.RecordBatch, topic: str, partition_count: PartitionCount
) -> Iterator[tuple[Target, ArrowColumns]]:
    """Yield the rows of each target topic and partition, in order."""
    columns: ArrowColumns = dict(zip(batch.schema.names, batch.columns, strict=True))
    by_topic = [(topic, columns)] if topic else list(_split_topics(columns))
    for name, own in by_topic:
        for partition, part in _split_partitions(own):
            records: ArrowColumns = {column: part[column] for column in RECORD_COLUMNS if column in part}
            if partition is not None:
                yield (name, partition), records
                continue
            for target, rest in split_by_key(records, partition_count(name)):
                yield (name, target), rest


def _split_topics(columns: ArrowColumns) -> Iterator[tuple[str, ArrowColumns]]:
    if columns["topic"].null_count:
        raise _bad("column topic is null in at least one row: set it in every row or use the option topic")
    encoded = cast("Any", columns["topic"]).dictionary_encode()
    for number, name in enumerate(encoded.dictionary.to_pylist()):
        chosen = np.flatnonzero(encoded.indices.to_numpy(zero_copy_only=False) == number)
        yield name, {column: array.take(chosen) for column, array in columns.items()}


def _split_partitions(columns: ArrowColumns) -> Iterator[tuple[int | None, ArrowColumns]]:
    """Yield the rows of each named partition; None for rows without a partition."""
    named = columns.get("partition")
    if named is None or named.null_count == len(named):
        yield None, columns
        return
    numbers = cast("Any", named).cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    for number in np.unique(numbers):
        chosen = np.flatnonzero(numbers == number)
        yield (
            (None if number < 0 else int(number)),
            {column: array.take(chosen) for column, array in columns.items()},
        )


def _bad(sentence: str) -> RequestError:
    return RequestError(sentence, code="bad_rows")
