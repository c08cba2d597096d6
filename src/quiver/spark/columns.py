"""Records as Spark sees them: the schema, and fetched batches as Arrow batches of exactly that schema.

Spark takes Arrow batches from Python only if they equal the schema's Arrow form to the letter: order, nullability,
units. No record is looked at one by one: columns are cast whole, and small batches are joined until a batch is worth
the way into the JVM.
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

from quiver.client.chunks import split_by_key
from quiver.errors import RequestError
from quiver.model import Offset
from quiver.record import Batch
from quiver.record.arrow import to_arrow
from quiver.spark.offsets import OffsetRange

BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes at which small batches are joined no further, however few records they have."""

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
    """Return the schema of a read of some columns."""
    return StructType([StructField(name, *_TYPES[name]) for name in columns])


def arrow_schema(columns: Iterable[str]) -> pa.Schema:
    """Return the Arrow schema that Spark expects of a read of some columns."""
    return to_arrow_schema(spark_schema(columns), timezone="UTC")


def arrow_batches(
    batches: Iterable[Batch], what: OffsetRange, columns: tuple[str, ...], *, records_max: int
) -> Iterator[pa.RecordBatch]:
    """Yield the records of a range that fetched batches hold, in order, about `records_max` at a time."""
    schema = arrow_schema(columns)
    waiting: list[pa.RecordBatch] = []
    count = size_bytes = 0
    for batch in batches:
        part = to_record_batch(batch, what, schema)
        waiting.append(part)
        count, size_bytes = count + len(part), size_bytes + len(batch.data)
        if count >= records_max or size_bytes >= BATCH_BYTES_MAX:
            yield from _join(waiting, schema, records_max)
            waiting, count, size_bytes = [], 0, 0
    yield from _join(waiting, schema, records_max)


def to_record_batch(batch: Batch, what: OffsetRange, schema: pa.Schema) -> pa.RecordBatch:
    """Return the records of a range that one batch holds."""
    records = to_arrow(batch, Offset(what.first_offset), Offset(what.end_offset))
    return pa.RecordBatch.from_arrays([_column(field, records, what) for field in schema], schema=schema)


def _column(field: pa.Field[Any], records: pa.RecordBatch, what: OffsetRange) -> pa.Array[Any]:
    column: pa.Array[Any]
    if field.name in ("topic", "partition"):
        column = pa.repeat(pa.scalar(getattr(what, field.name), field.type), len(records))
        return column
    column = records.column(field.name)
    # Milliseconds become microseconds; one beyond what Spark can hold is no reason to lose the rest.
    return column if column.type == field.type else column.cast(field.type, safe=False)


def _join(parts: list[pa.RecordBatch], schema: pa.Schema, records_max: int) -> Iterator[pa.RecordBatch]:
    found = [part for part in parts if len(part)]
    if not found:
        return
    joined = found[0] if len(found) == 1 else pa.Table.from_batches(found, schema).combine_chunks().to_batches()[0]
    # A batch that is a little too large is not cut for that.
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
"""A topic, and a partition of it; None: any."""
PartitionCount = Callable[[str], int]
"""How many partitions a topic has."""


def check_row_schema(schema: StructType, topic: str) -> None:
    """Raise `RequestError` (`bad_rows`) unless rows of this schema can be written."""
    names = schema.fieldNames()
    for field in schema:
        allowed = _ALLOWED.get(field.name)
        if allowed is None:
            raise _bad(f"there is no column {field.name!r} in a record; there are {', '.join(_ALLOWED)}")
        if not isinstance(field.dataType, allowed):
            kinds = " or ".join(kind.__name__.removesuffix("Type").lower() for kind in allowed)
            raise _bad(f"column {field.name} is {kinds}, not {field.dataType.simpleString()}")
    if "value" not in names:
        raise _bad(f"a record needs a column value; there are {', '.join(names)}")
    if not topic and "topic" not in names:
        raise _bad("name the topic: by the option topic, or in a column topic")


def split_rows(
    batch: pa.RecordBatch, topic: str, partition_count: PartitionCount
) -> Iterator[tuple[Target, ArrowColumns]]:
    """Yield the rows of each topic and partition, in order."""
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
        raise _bad("a row names no topic: its column topic is null")
    encoded = cast("Any", columns["topic"]).dictionary_encode()
    for number, name in enumerate(encoded.dictionary.to_pylist()):
        chosen = np.flatnonzero(encoded.indices.to_numpy(zero_copy_only=False) == number)
        yield name, {column: array.take(chosen) for column, array in columns.items()}


def _split_partitions(columns: ArrowColumns) -> Iterator[tuple[int | None, ArrowColumns]]:
    """Yield the rows that name each partition; None for those that name none."""
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
