"""Summarize a table of parsed lines in Spark's tasks: each reads some files, and returns one summary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from quiver.spark.pipelines import log_summary
from quiver.spark.pipelines.lake import LakeFile
from quiver.spark.pipelines.log_summary import LogSummary, summarize
from quiver.spark.pipelines.place import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

READ_LINES: Final = 65_536
COLUMNS: Final = [
    "offset",
    "timestamp",
    "time",
    "level",
    "source",
    "template_id",
    "template",
    "parameters",
    "line",
    "raw",
]
TASKS_PER_CORE: Final = 4


def summarize_table(spark: SparkSession, place: Place, files: Sequence[LakeFile], *, window_ms: int) -> LogSummary:
    """Return the summary of all lines of files."""
    context = spark.sparkContext
    count = min(len(files), TASKS_PER_CORE * context.defaultParallelism)
    # Every task gets files of all times, so that all take about as long.
    groups = [list(files[at::count]) for at in range(count)]
    work = partial(summarize_files, place, window_ms=window_ms)
    return log_summary.merge(context.parallelize(groups, count).map(work).collect())


def summarize_files(place: Place, files: Sequence[LakeFile], *, window_ms: int) -> LogSummary:
    """Return the summary of the lines of some files. Runs in a task."""
    parts = [log_summary.empty_summary(window_ms)]
    for file in files:
        path, filesystem = place.locate(file.path)
        with pq.ParquetFile(path, filesystem=filesystem) as opened:
            for batch in opened.iter_batches(READ_LINES, columns=COLUMNS):
                columns: list[Any] = [pa.repeat(pa.scalar(file.partition, pa.int32()), len(batch)), *batch.columns]
                rows = pa.RecordBatch.from_arrays(columns, names=["partition", *batch.schema.names])
                parts.append(summarize(rows, window_ms=window_ms))
    return log_summary.merge(parts)
