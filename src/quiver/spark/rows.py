"""Rows of a DataFrame on their way out: what columns they may have, and which topic and partition each goes to.

Columns: `value` (text or binary) and perhaps `key`, `timestamp`, `headers`, `topic`, `partition`; `offset` is left out,
since partitions give their own. The option `topic` comes before the column, as in Spark's Kafka sink. A row's
partition is the one in its column, else that of its key's hash, else any. No row is looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias, cast

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from quiver.client.chunks import split_by_key
from quiver.errors import RequestError

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


def check_rows(schema: StructType, topic: str) -> None:
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
