"""Put many small files of a Delta lake together into few large ones, with records in the order of their offsets.

Delta's own compaction appends files as it finds them; these stay sorted, so that a replay or an audit reads them once,
front to back. Readers see either the old files or the new ones; the old ones stay for who reads an older version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from quiver.spark.pipelines.delta_lake import DeltaLake
from quiver.spark.pipelines.lake import LakeFile
from quiver.spark.pipelines.lake_files import LakeWriter, read_in_order

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILE_BYTES: Final = 128 << 20
"""Size that files are put together to, about; larger ones are left as they are."""


def compact(spark: SparkSession, lake: DeltaLake, topic: str) -> tuple[int, int]:
    """Put the files of a topic together, in one commit; return how many there were of them, and how many are left."""
    bins = plan_bins(lake.files(topic))
    if not bins:
        return 0, 0
    merge = partial(merge_files, lake.root)
    new = [file for files in spark.sparkContext.parallelize(bins, len(bins)).map(merge).collect() for file in files]
    lake.replace([file for files in bins for file in files], new)
    return sum(map(len, bins)), len(new)


def plan_bins(files: Iterable[LakeFile], file_bytes: int = FILE_BYTES) -> list[list[LakeFile]]:
    """Return which files to put together: neighbours of one partition and hour, at least two each time."""
    folders: dict[tuple[int, str], list[LakeFile]] = defaultdict(list)
    for file in sorted(files, key=lambda file: file.first_offset):
        folders[file.partition, file.hour].append(file)
    bins: list[list[LakeFile]] = []
    for folder in folders.values():
        size_bytes = file_bytes
        for file in folder:
            if size_bytes + file.size_bytes > file_bytes:
                bins.append([])
                size_bytes = 0
            bins[-1].append(file)
            size_bytes += file.size_bytes
    return [files for files in bins if len(files) > 1]


def merge_files(root: str, files: list[LakeFile]) -> list[LakeFile]:
    """Write the records of several files into one; in a task."""
    first = files[0]
    writer = LakeWriter(root, topic=first.topic, partition=first.partition, is_hidden=False)
    return writer.write(read_in_order(root, files))
