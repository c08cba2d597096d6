"""A lake that is a Delta table: every engine that reads Delta reads it, at any of its versions.

How far a topic is archived is kept in Delta's own *application transactions*, numbers under names that a commit sets
along with the files that it adds: `quiver:TOPIC` is a digest of the topic's incarnation, `quiver:TOPIC:PARTITION` the
offset behind the last archived record. Two commits that set the same name at the same time conflict, and the second
is refused: that is what keeps two jobs from archiving the same records.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction

from quiver.errors import StorageError
from quiver.spark.pipelines.lake import (
    FOLDER_COLUMNS,
    LAKE_SCHEMA,
    ArchivedRanges,
    LakeFile,
    LakeWriter,
    archive_conflict,
    check_incarnation,
    check_not_archived,
    in_order,
    read_in_order,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PREFIX: Final = "quiver:"


class DeltaLake:
    """A Delta table with the records of topics."""

    hides_uncommitted = False

    def __init__(self, root: str) -> None:
        self.root = root
        with _translating_errors(root):
            if not self.is_at(root):
                DeltaTable.create(root, LAKE_SCHEMA, mode="ignore", partition_by=list(FOLDER_COLUMNS), name="quiver")
            self._table = DeltaTable(root)

    @staticmethod
    def is_at(root: str) -> bool:
        """Tell whether there is a Delta table in a folder."""
        return DeltaTable.is_deltatable(root)

    @property
    def identity(self) -> str:
        """Return the id that the table was made with."""
        return str(self._table.metadata().id)

    @property
    def version(self) -> int:
        """Return the number of the commit that is seen."""
        return self._table.version()

    def refresh(self) -> None:
        """See what was committed meanwhile."""
        with _translating_errors(self.root):
            self._table.update_incremental()

    def archived(self, topic: str, incarnation: str, partitions: Sequence[int]) -> dict[int, int] | None:
        """Return how far partitions are archived, those that are; None if nothing of the topic is."""
        known = self._table.transaction_version(_PREFIX + topic)
        if known is None:
            return None
        check_incarnation(topic, known, _number(incarnation), self.root)
        ends = {part: self._table.transaction_version(f"{_PREFIX}{topic}:{part}") for part in partitions}
        return {part: end for part, end in ends.items() if end is not None}

    def commit(self, files: Sequence[LakeFile], archived: ArchivedRanges) -> None:
        """Add files and move the place to behind them, in one step."""
        # What others committed before this version is checked here, what they commit behind it Delta checks.
        check_not_archived(
            self.archived(archived.topic, archived.incarnation, list(archived.ends)), archived, self.root
        )
        places = [Transaction(_PREFIX + archived.topic, _number(archived.incarnation))]
        places += [Transaction(f"{_PREFIX}{archived.topic}:{part}", end) for part, end in archived.ends.items()]
        try:
            self._write([_to_action(file, is_new=True) for file in files], places)
        except CommitFailedError as error:
            if "oncurrent" in str(error):
                raise archive_conflict(archived.topic, self.root) from None
            raise StorageError(f"{self.root} took no commit: {error}", code="lake_failed") from None
        # From here on the records are archived: the commit is a file that is there as a whole or not at all.

    def replace(self, old: Sequence[LakeFile], new: Sequence[LakeFile]) -> None:
        """Put files in the place of others that hold the same records; a reader sees the ones or the others."""
        now_ms = int(time.time() * 1000)
        removed = [
            RemoveAction(file.path, False, now_ms, file.size_bytes, _folder(file))  # noqa: FBT003 - its signature
            for file in old
        ]
        with _translating_errors(self.root):
            self._write([*removed, *(_to_action(file, is_new=False) for file in new)], [])

    def vacuum(self, keep: timedelta) -> int:
        """Remove files that no version of so long ago and later needs, and what crashes left; return how many."""
        hours = -(-int(keep.total_seconds()) // 3600)
        with _translating_errors(self.root):
            return len(self._table.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True))

    def files(self, topic: str) -> list[LakeFile]:
        """Return the files of a topic, by partition and offset."""
        return in_order([_to_file(action) for action in self._actions() if action["partition.topic"] == topic])

    def topics(self) -> list[str]:
        """Return the topics of which there are records."""
        return sorted({action["partition.topic"] for action in self._actions()})

    def _actions(self) -> list[dict[str, Any]]:
        return pa.table(self._table.get_add_actions(flatten=True)).to_pylist()

    def _write(self, actions: list[AddAction | RemoveAction], places: list[Transaction]) -> None:
        properties = CommitProperties(app_transactions=places)
        self._table.create_write_transaction(
            actions, "append", LAKE_SCHEMA, list(FOLDER_COLUMNS), commit_properties=properties
        )
        self.refresh()


@contextmanager
def _translating_errors(root: str) -> Iterator[None]:
    try:
        yield
    except DeltaError as error:
        raise StorageError(f"the Delta table in {root} cannot be used: {error}", code="lake_failed") from None


def _number(incarnation: str) -> int:
    """Return an incarnation as a transaction can hold it: 63 bits."""
    return int.from_bytes(hashlib.blake2b(incarnation.encode(), digest_size=8).digest(), "big") >> 1


def _folder(file: LakeFile) -> dict[str, str | None]:
    return {"topic": file.topic, "partition": str(file.partition), "hour": file.hour}


def _to_action(file: LakeFile, *, is_new: bool) -> AddAction:
    stats = {
        "numRecords": file.count,
        "minValues": {"offset": file.first_offset},
        "maxValues": {"offset": file.last_offset},
        "nullCount": {"offset": 0},
    }
    return AddAction(
        path=file.path,
        size=file.size_bytes,
        partition_values=_folder(file),
        modification_time=int(time.time() * 1000),
        data_change=is_new,
        stats=msgspec.json.encode(stats).decode(),
    )


def _to_file(action: dict[str, Any]) -> LakeFile:
    return LakeFile(
        path=action["path"],
        topic=action["partition.topic"],
        partition=action["partition.partition"],
        hour=action["partition.hour"],
        size_bytes=action["size_bytes"],
        count=action["num_records"],
        first_offset=action["min.offset"],
        last_offset=action["max.offset"],
    )


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
