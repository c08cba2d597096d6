"""A lake stored as a Delta table, and its compaction.

Archived offsets are stored as Delta *application transactions*, named numbers that a commit sets together with the
files it adds: `quiver:TOPIC` is a digest of the topic's incarnation, `quiver:TOPIC:PARTITION` the end offset of the
archived records, and `quiver:TOPIC:model` names the model of a table of parsed lines. Of two concurrent commits that
set the same name Delta rejects the second, so two jobs never archive
the same records.

Compaction merges small files of one partition and hour into large ones, sorted by offset; Delta's own compaction does
not sort. Sorted files let a replay or an audit read each file once. Readers see the old files or the new ones; old
files stay for readers of older versions until a vacuum.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction

from quiver.errors import StorageError
from quiver.spark.pipelines.lake import (
    RECORDS,
    ArchivedRanges,
    LakeFile,
    LakeLayout,
    LakeWriter,
    archive_conflict,
    check_incarnation,
    check_not_archived,
    in_order,
    incarnation_digest,
    other_layout,
    read_in_order,
)
from quiver.spark.pipelines.place import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PREFIX: Final = "quiver:"


class DeltaLake:
    """A Delta table with the records of topics."""

    hides_uncommitted = False

    def __init__(self, place: Place, layout: LakeLayout = RECORDS) -> None:
        self.place, self.layout = place, layout
        options = place.storage_options()
        with _translating_errors(place):
            if not self.is_at(place):
                DeltaTable.create(
                    place.url,
                    layout.schema,
                    mode="ignore",
                    partition_by=list(layout.folders),
                    name="quiver",
                    storage_options=options,
                )
            self._table = DeltaTable(place.url, storage_options=options)
        if {field.name for field in self._table.schema().fields} != set(layout.schema.names):
            raise other_layout(place, layout)

    @staticmethod
    def is_at(place: Place) -> bool:
        """Return whether a place contains a Delta table."""
        with _translating_errors(place):
            return DeltaTable.is_deltatable(place.url, place.storage_options())

    @property
    def identity(self) -> str:
        """Return the id that the table was created with."""
        return str(self._table.metadata().id)

    @property
    def version(self) -> int:
        """Return the loaded version of the table."""
        return self._table.version()

    def refresh(self) -> None:
        """Load the latest version."""
        with _translating_errors(self.place):
            self._table.update_incremental()

    def archived(self, topic: str, incarnation: str, partitions: Sequence[int]) -> dict[int, int] | None:
        """Return the archived end offsets by partition; None if the topic is not in the lake."""
        known = self._table.transaction_version(_PREFIX + topic)
        if known is None:
            return None
        check_incarnation(topic, known, incarnation_digest(incarnation), self.place)
        ends = {part: self._table.transaction_version(f"{_PREFIX}{topic}:{part}") for part in partitions}
        return {part: end for part, end in ends.items() if end is not None}

    def commit(self, files: Sequence[LakeFile], archived: ArchivedRanges) -> None:
        """Add files and advance the archived offsets atomically."""
        # This checks commits up to the loaded version; Delta itself checks commits after it.
        check_not_archived(
            self.archived(archived.topic, archived.incarnation, list(archived.ends)), archived, self.place
        )
        transactions = [Transaction(_PREFIX + archived.topic, incarnation_digest(archived.incarnation))]
        transactions += [Transaction(f"{_PREFIX}{archived.topic}:{part}", end) for part, end in archived.ends.items()]
        if archived.model:
            transactions.append(Transaction(f"{_PREFIX}{archived.topic}:model", int(archived.model, 16)))
        try:
            self._write([_to_action(file, self.layout, is_new=True) for file in files], transactions)
        except CommitFailedError as error:
            if "oncurrent" in str(error):
                if self._has(files):
                    return  # this very commit: the store stored it, its response was lost, and the retry was refused
                raise archive_conflict(archived.topic, self.place) from None
            raise StorageError(
                f"the commit to the Delta table {self.place} failed; nothing was archived by it: {_plain(error)}",
                code="lake_failed",
            ) from None
        # The records are archived: Delta creates the commit file atomically.

    def incarnation(self, topic: str) -> str:
        """Return a digest of the incarnation of a topic that is in the lake."""
        return str(self._table.transaction_version(_PREFIX + topic))

    def model(self, topic: str) -> str:
        """Return the name of the model that the last commit of a topic set; empty if there is none."""
        number = self._table.transaction_version(f"{_PREFIX}{topic}:model")
        return "" if number is None else f"{number:016x}"

    def _has(self, files: Sequence[LakeFile]) -> bool:
        """Return whether the latest version has all these files, whose names are unique."""
        self.refresh()
        return bool(files) and {file.path for file in files} <= {action["path"] for action in self._actions()}

    def replace(self, old: Sequence[LakeFile], new: Sequence[LakeFile]) -> None:
        """Replace files by others with the same records, atomically for readers."""
        now_ms = int(time.time() * 1000)
        removed = [
            RemoveAction(file.path, False, now_ms, file.size_bytes, _folder(file, self.layout))  # noqa: FBT003 - its signature
            for file in old
        ]
        with _translating_errors(self.place):
            self._write([*removed, *(_to_action(file, self.layout, is_new=False) for file in new)], [])

    def vacuum(self, keep: timedelta) -> int:
        """Delete files that no version within `keep` uses, and uncommitted files; return the number deleted."""
        hours = -(-int(keep.total_seconds()) // 3600)
        with _translating_errors(self.place):
            return len(self._table.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True))

    def files(self, topic: str) -> list[LakeFile]:
        """Return the files of a topic, by partition and offset."""
        return in_order([_to_file(action) for action in self._actions() if action["partition.topic"] == topic])

    def topics(self) -> list[str]:
        """Return the topics that have records in the lake."""
        return sorted({action["partition.topic"] for action in self._actions()})

    def partition_count(self, topic: str) -> int:
        """Return the partitions that a topic had when it was last archived, with records or without."""
        # Every commit sets the end offsets of all partitions, also of those without records.
        return next(part for part in count() if self._table.transaction_version(f"{_PREFIX}{topic}:{part}") is None)

    def _actions(self) -> list[dict[str, Any]]:
        return pa.table(self._table.get_add_actions(flatten=True)).to_pylist()

    def _write(self, actions: list[AddAction | RemoveAction], transactions: list[Transaction]) -> None:
        properties = CommitProperties(app_transactions=transactions)
        self._table.create_write_transaction(
            actions, "append", self.layout.schema, list(self.layout.folders), commit_properties=properties
        )
        self.refresh()


@contextmanager
def _translating_errors(place: Place) -> Iterator[None]:
    try:
        yield
    except (DeltaError, OSError) as error:
        raise StorageError(f"the Delta table {place} cannot be used: {_plain(error)}", code="lake_failed") from None


def _plain(error: Exception) -> str:
    """Return an error of Delta, which draws its causes as a coloured tree, as one line."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|\u21b3", " ", str(error)).split())


def _folder(file: LakeFile, layout: LakeLayout) -> dict[str, str | None]:
    values = {"topic": file.topic, "partition": str(file.partition), "hour": file.hour}
    return {name: values[name] for name in layout.folders}


def _to_action(file: LakeFile, layout: LakeLayout, *, is_new: bool) -> AddAction:
    stats = {
        "numRecords": file.count,
        "minValues": {"offset": file.first_offset},
        "maxValues": {"offset": file.last_offset},
        "nullCount": {"offset": 0},
    }
    return AddAction(
        path=file.path,
        size=file.size_bytes,
        partition_values=_folder(file, layout),
        modification_time=int(time.time() * 1000),
        data_change=is_new,
        stats=msgspec.json.encode(stats).decode(),
    )


def _to_file(action: dict[str, Any]) -> LakeFile:
    return LakeFile(
        path=action["path"],
        topic=action["partition.topic"],
        partition=action["partition.partition"],
        hour=action.get("partition.hour", ""),
        size_bytes=action["size_bytes"],
        count=action["num_records"],
        first_offset=action["min.offset"],
        last_offset=action["max.offset"],
    )


FILE_BYTES: Final = 128 << 20
"""Approximate target size of compacted files; larger files are not changed."""


def compact(spark: SparkSession, lake: DeltaLake, topic: str) -> tuple[int, int]:
    """Merge a topic's small files in one commit; return the numbers of files before and after."""
    bins = plan_bins(lake.files(topic))
    if not bins:
        return 0, 0
    merge = partial(merge_files, lake.place)
    new = [file for files in spark.sparkContext.parallelize(bins, len(bins)).map(merge).collect() for file in files]
    lake.replace([file for files in bins for file in files], new)
    return sum(map(len, bins)), len(new)


def plan_bins(files: Iterable[LakeFile], file_bytes: int = FILE_BYTES) -> list[list[LakeFile]]:
    """Group adjacent files of one partition and hour for merging; each group has at least two files."""
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


def merge_files(place: Place, files: list[LakeFile]) -> list[LakeFile]:
    """Write the records of several files into one. Runs in a task."""
    first = files[0]
    writer = LakeWriter(place, topic=first.topic, partition=first.partition, is_hidden=False)
    return writer.write(read_in_order(place, files))
