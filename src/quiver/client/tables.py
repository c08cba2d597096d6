"""Converts consumed batches to Arrow, without a loop over records, and JSON values to typed columns.

It imports pyarrow, so the SDK loads it only when a table is first requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import Any, Final

import pyarrow as pa
import pyarrow.json as pj

from quiver.errors import DecodeError, RequestError
from quiver.model import Offset, PartitionId
from quiver.record import Batch
from quiver.record.arrow import ARROW_SCHEMA, to_arrow

Slice = tuple[str, PartitionId, Batch, Offset, Offset]
"""The records of a batch from the first offset up to the second, with the topic and partition of the batch."""

_ORIGIN: list[pa.Field[Any]] = [
    pa.field("topic", pa.string(), nullable=False),
    pa.field("partition", pa.int32(), nullable=False),
]
TABLE_SCHEMA: Final = pa.schema([*_ORIGIN, *ARROW_SCHEMA])
"""The schema of a consumer's tables: the origin of a record, then its content."""
PARSED_BYTES_MAX: Final = 256 << 20
"""Bytes of JSON that are parsed at once."""
_AS_SPACES: Final = bytes.maketrans(b"\r\n", b"  ")
"""Ends of lines are white space in JSON outside of strings, and are not allowed inside of them."""


def table_schema(*, is_with_headers: bool, schema: pa.Schema | None) -> pa.Schema:
    """Return the schema of a table: with a schema of values, its fields in the place of `value`.

    Raises:
        RequestError: the schema has a field that every table has.
    """
    fields = [field for field in TABLE_SCHEMA if is_with_headers or field.name != "headers"]
    if schema is None:
        return pa.schema(fields)
    if taken := {field.name for field in fields if field.name != "value"} & set(schema.names):
        raise RequestError(
            f"not done: the schema names {', '.join(sorted(taken))}, which every table has", code="bad_schema"
        )
    at = next(number for number, field in enumerate(fields) if field.name == "value")
    return pa.schema([*fields[:at], *_nullable(schema), *fields[at + 1 :]])


def build_table(slices: Sequence[Slice], *, is_with_headers: bool) -> pa.Table:
    """Return the records as a table; their bytes are not copied."""
    longest = max((end_offset - first_offset for *_, first_offset, end_offset in slices), default=0)
    # Built once for the largest batch; the others share its beginning.
    topics = {topic: pa.repeat(pa.scalar(topic, pa.string()), longest) for topic in {topic for topic, *_ in slices}}
    partitions = {
        partition: pa.repeat(pa.scalar(partition, pa.int32()), longest)
        for partition in {partition for _, partition, *_ in slices}
    }
    batches: list[pa.RecordBatch] = []
    for topic, partition, batch, first_offset, end_offset in slices:
        records = to_arrow(batch, first_offset, end_offset)
        count = records.num_rows
        columns: list[pa.Array[Any]] = [topics[topic][:count], partitions[partition][:count], *records.columns]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA))
    table = pa.Table.from_batches(batches, TABLE_SCHEMA)
    return table if is_with_headers else table.drop_columns(["headers"])


def parse_values(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Replace `value` by the fields of a schema, parsed from JSON objects; a missing field is null, others are ignored.

    Raises:
        DecodeError: a value is not a JSON object of the schema; the message names its partition and offset.
        RequestError: the schema cannot be used.
    """
    wanted = table_schema(is_with_headers="headers" in table.column_names, schema=schema)
    parsed = [_parse_chunk(part, schema) for part in _parts(table)]
    columns = pa.concat_tables(parsed) if parsed else schema.empty_table()
    arrays = [columns[name] if name in schema.names else table[name] for name in wanted.names]
    return pa.Table.from_arrays(arrays, schema=wanted)


def _parts(table: pa.Table) -> Iterable[pa.Table]:
    """Yield parts whose JSON fits into one block."""
    for batch in table.to_batches():
        whole = pa.Table.from_batches([batch])
        rows = max(1, batch.num_rows * PARSED_BYTES_MAX // max(1, whole["value"].nbytes))
        yield from (whole.slice(first, rows) for first in range(0, batch.num_rows, rows))


def _parse_chunk(table: pa.Table, schema: pa.Schema) -> pa.Table:
    try:
        return _parse(table["value"], schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, IndexError) as error:
        for row in range(table.num_rows):
            try:
                _parse(table["value"].slice(row, 1), schema)
            except pa.ArrowException as cause:
                topic, partition, offset = (table[name][row].as_py() for name in ("topic", "partition", "offset"))
                place = f"topic {topic!r} partition {partition} offset {offset}"
                message = f"{place}: the value is not a JSON object of the schema: {cause}"
                raise DecodeError(message, code="bad_json") from None
        raise RequestError(f"not done: the schema cannot be read from JSON: {error}", code="bad_schema") from None


def _parse(values: pa.ChunkedArray[Any], schema: pa.Schema) -> pa.Table:
    lines = (b"{}" if value is None else value.translate(_AS_SPACES) for value in values.to_pylist())
    data = b"\n".join(lines)
    read_options = pj.ReadOptions(use_threads=False, block_size=max(1024, len(data) + 1))
    parse_options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    parsed = pj.read_json(BytesIO(data), read_options, parse_options)
    if parsed.num_rows != len(values):
        raise pa.ArrowInvalid(f"{len(values)} values hold {parsed.num_rows} JSON objects")
    return parsed.select(schema.names).cast(_nullable(schema))


def _nullable(schema: pa.Schema) -> pa.Schema:
    """Return the schema of values that may lack any of its fields."""
    return pa.schema([pa.field(field.name, field.type, metadata=field.metadata) for field in schema])
