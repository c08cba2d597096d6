"""The lines around a burst, from records or from a table of parsed lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from quiver.spark.logs import Model
from quiver.spark.pipelines.events import join_records, parse_joined
from quiver.spark.pipelines.lake import LakeFile
from quiver.spark.pipelines.log_findings import Burst
from quiver.spark.pipelines.log_report import ShownLine
from quiver.spark.pipelines.log_summary import EXAMPLE_CHARACTERS_MAX
from quiver.spark.pipelines.place import Place

LINES_BEFORE: Final = 4
LINES_AFTER: Final = 12


def lines_around(records: Iterator[pa.RecordBatch], model: Model, burst: Burst) -> list[ShownLine]:
    """Return parsed lines of records."""
    parser = model.parser()
    return [
        _shown(row, burst)
        for batch in records
        for parsed in parse_joined(join_records(batch), parser)
        for row in parsed.rows.select(["line", "template_id"]).to_pylist()
    ]


def table_lines(place: Place, files: Sequence[LakeFile], burst: Burst) -> list[ShownLine]:
    """Return lines of a table."""
    first, end = burst.offset - LINES_BEFORE, burst.offset + LINES_AFTER
    rows: list[dict[str, Any]] = []
    for file in files:
        if file.partition != burst.partition or file.first_offset >= end or file.last_offset < first:
            continue
        path, filesystem = place.locate(file.path)
        columns = ["offset", "line", "template_id"]
        with pq.ParquetFile(path, filesystem=filesystem) as opened:
            for batch in opened.iter_batches(columns=columns):
                rows += [row for row in batch.to_pylist() if first <= row["offset"] < end]
    return [_shown(row, burst) for row in sorted(rows, key=lambda row: row["offset"])]


def _shown(row: dict[str, Any], burst: Burst) -> ShownLine:
    return ShownLine(row["line"][:EXAMPLE_CHARACTERS_MAX], row["template_id"] in burst.template_ids)
