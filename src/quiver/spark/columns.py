"""Records as Spark sees them: the schema, and fetched batches as Arrow batches of exactly that schema.

Spark takes Arrow batches from Python only if they equal the schema's Arrow form to the letter: order, nullability,
units. No record is looked at one by one: columns are cast whole, and small batches are joined until a batch is worth
the way into the JVM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from quiver.model import Offset
from quiver.record import Batch
from quiver.record.arrow import to_arrow
from quiver.spark.offsets import Range

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
    batches: Iterable[Batch], what: Range, columns: tuple[str, ...], *, records_max: int
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


def to_record_batch(batch: Batch, what: Range, schema: pa.Schema) -> pa.RecordBatch:
    """Return the records of a range that one batch holds."""
    records = to_arrow(batch, Offset(what.first_offset), Offset(what.end_offset))
    return pa.RecordBatch.from_arrays([_column(field, records, what) for field in schema], schema=schema)


def _column(field: pa.Field[Any], records: pa.RecordBatch, what: Range) -> pa.Array[Any]:
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
