"""Converts consumed batches to one Arrow table, without a loop over records.

It imports pyarrow, so the SDK loads it only when a table is first requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from quiver.model import Offset, PartitionId
from quiver.record import Batch
from quiver.record.arrow import ARROW_SCHEMA, to_arrow

Slice = tuple[PartitionId, Batch, Offset, Offset]
"""The records of a batch from the first offset up to the second."""

_ORIGIN: list[pa.Field[Any]] = [
    pa.field("topic", pa.string(), nullable=False),
    pa.field("partition", pa.int32(), nullable=False),
]
TABLE_SCHEMA: Final = pa.schema([*_ORIGIN, *ARROW_SCHEMA])
"""The schema of a consumer's tables: the origin of a record, then its content."""


def build_table(topic: str, slices: Sequence[Slice], *, is_with_headers: bool) -> pa.Table:
    """Return the records as a table; their bytes are not copied."""
    longest = max((end_offset - first_offset for _, _, first_offset, end_offset in slices), default=0)
    # Built once for the largest batch; the others share its beginning.
    topics = pa.repeat(pa.scalar(topic, pa.string()), longest)
    partitions = {
        partition: pa.repeat(pa.scalar(partition, pa.int32()), longest)
        for partition in {partition for partition, _, _, _ in slices}
    }
    batches: list[pa.RecordBatch] = []
    for partition, batch, first_offset, end_offset in slices:
        records = to_arrow(batch, first_offset, end_offset)
        count = records.num_rows
        columns: list[pa.Array[Any]] = [topics[:count], partitions[partition][:count], *records.columns]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA))
    table = pa.Table.from_batches(batches, TABLE_SCHEMA)
    return table if is_with_headers else table.drop_columns(["headers"])
