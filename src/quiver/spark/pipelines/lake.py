"""A lake: Parquet files with the records of topics, and commits that list the valid files, at one `Place`.

Files are in `topic=T/partition=P/hour=H/`, where `H` is the hour of the records' timestamps in UTC; each has records of
one partition, sorted by offset. The archived offsets of a topic are part of the commit that adds its files, so they
always agree: a crash before the commit archived nothing, a crash after it archived everything of it.

There are two formats: `DeltaLake`, a Delta table, and `ParquetLake`, plain files and a directory of commits.

Tasks write files from ranges of offsets; a file is durable before its name leaves the task. Records never pass through
Spark itself. `read_in_order` merges files that overlap, as those of adjacent hours do if timestamps are not in offset
order; it holds one batch of each overlapping file in memory, never a whole file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Protocol
from uuid import uuid4

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quiver.errors import ConflictError, NotFoundError
from quiver.spark.columns import arrow_schema
from quiver.spark.pipelines.place import Place

RECORD_COLUMNS: Final = ("offset", "timestamp", "key", "value", "headers")
FILE_SCHEMA: Final[pa.Schema] = arrow_schema(RECORD_COLUMNS)
"""What each file holds; topic, partition and hour stand in its path."""
FOLDER_COLUMNS: Final = ("topic", "partition", "hour")
_FOLDER_FIELDS: Final[list[pa.Field[Any]]] = [
    pa.field("topic", pa.string(), nullable=False),
    pa.field("partition", pa.int32(), nullable=False),
    pa.field("hour", pa.string(), nullable=False),
]

LakeFormat = Literal["delta", "parquet"]


class LakeLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of a lake hold, and which columns stand in their paths instead."""

    name: str
    """What a lake of this layout is called, with its article."""
    file_schema: pa.Schema
    folders: tuple[str, ...]

    @property
    def schema(self) -> pa.Schema:
        """All columns: those in paths first."""
        return pa.schema([*(field for field in _FOLDER_FIELDS if field.name in self.folders), *self.file_schema])


RECORDS: Final = LakeLayout(name="an archive", file_schema=FILE_SCHEMA, folders=FOLDER_COLUMNS)
LAKE_SCHEMA: Final = RECORDS.schema


class LakeFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file with records of one partition, and of one hour if the layout has hours, sorted by offset."""

    path: str
    """Relative to the lake."""
    topic: str
    partition: int
    hour: str = ""
    size_bytes: int
    count: int
    first_offset: int
    last_offset: int


class ArchivedRanges(msgspec.Struct, frozen=True, kw_only=True):
    """The offsets that a commit archives of one incarnation of a topic, by partition."""

    topic: str
    incarnation: str
    begins: Mapping[int, int]
    ends: Mapping[int, int]
    model: str = ""
    """Name of the stored model that made the files, set by the same commit; empty: the lake has no models."""


class Lake(Protocol):
    """The interface of a lake. It shows one version until `refresh`."""

    place: Place
    layout: LakeLayout
    hides_uncommitted: bool
    """Whether uncommitted files have hidden names, which readers skip."""

    @property
    def identity(self) -> str:
        """Return the unique id of this lake; a lake recreated at the same path has another."""

    def refresh(self) -> None:
        """Load the latest version."""

    def archived(self, topic: str, incarnation: str, partitions: Sequence[int]) -> dict[int, int] | None:
        """Return the archived end offsets by partition; None if the topic is not in the lake.

        Raises:
            ConflictError: the lake has another incarnation of the topic (`topic_recreated`).
        """

    def commit(self, files: Sequence[LakeFile], archived: ArchivedRanges) -> None:
        """Add files and advance the archived offsets atomically.

        Raises:
            ConflictError: another job archived the topic meanwhile (`archive_conflict`); nothing was added.
        """

    def incarnation(self, topic: str) -> str:
        """Return a digest of the incarnation of a topic that is in the lake."""

    def model(self, topic: str) -> str:
        """Return the name of the model that the last commit of a topic set; empty if there is none."""

    def files(self, topic: str) -> list[LakeFile]:
        """Return the files of a topic, by partition and offset."""

    def topics(self) -> list[str]:
        """Return the topics that have records in the lake."""

    def partition_count(self, topic: str) -> int:
        """Return the partitions that a topic had when it was last archived, with records or without."""


def open_lake(place: Place, kind: LakeFormat | None = None, layout: LakeLayout = RECORDS) -> Lake:
    """Open the lake at a place; with a `kind`, create it if it does not exist.

    Raises:
        NotFoundError: there is no lake, and no kind is given (`no_lake`).
        ConflictError: the lake has another format or another layout (`other_lake`).
    """
    from quiver.spark.pipelines.delta_lake import DeltaLake
    from quiver.spark.pipelines.parquet_lake import ParquetLake

    kinds: dict[LakeFormat, type[DeltaLake] | type[ParquetLake]] = {"delta": DeltaLake, "parquet": ParquetLake}
    found = next((own for own in kinds if kinds[own].is_at(place)), None)
    if found is None and kind is None:
        raise NotFoundError(f"{place} has no {layout.name.split(' ', 1)[1]}", code="no_lake")
    if found is not None and kind not in (None, found):
        message = f"{place} has {layout.name} of format {found}, not {kind}: set format to {found}"
        raise ConflictError(f"{message}, or use another lake", code="other_lake")
    return kinds[found or kind or "delta"](place, layout)


def incarnation_digest(incarnation: str) -> int:
    """Return a 63-bit digest of an incarnation: a Delta transaction stores a signed 64-bit number."""
    return int.from_bytes(hashlib.blake2b(incarnation.encode(), digest_size=8).digest(), "big") >> 1


def other_layout(place: Place, layout: LakeLayout) -> ConflictError:
    """Return the error for a lake that holds something else."""
    return ConflictError(
        f"{place} has a table that is not {layout.name}: nothing was done; use another place", code="other_lake"
    )


def check_incarnation(topic: str, known: object, found: object, place: Place) -> None:
    """Raise if a lake has records of another incarnation of the topic."""
    if known != found:
        message = (
            f"topic {topic!r} is not the topic archived in {place}: it was recreated, or is in another cluster. "
            "Nothing was archived; use another lake"
        )
        raise ConflictError(message, code="topic_recreated")


def check_not_archived(known: Mapping[int, int] | None, archived: ArchivedRanges, place: Place) -> None:
    """Raise if a lake already has some of the records to archive."""
    if any(end > archived.begins[part] for part, end in (known or {}).items() if part in archived.begins):
        raise archive_conflict(archived.topic, place)


def archive_conflict(topic: str, place: Place) -> ConflictError:
    """Return the error for two jobs that archive one topic into one lake."""
    message = f"another job archives topic {topic!r} into {place}: this batch was not added. Stop one of the jobs"
    return ConflictError(message, code="archive_conflict")


def in_order(files: Sequence[LakeFile]) -> list[LakeFile]:
    """Sort files by partition and offset."""
    return sorted(files, key=lambda file: (file.partition, file.first_offset))


HOURS_OPEN_MAX: Final = 16
"""Maximum files that a task writes at once; timestamps that span more hours give more files."""
READ_RECORDS: Final = 65_536
"""Records per batch when reading files."""
_OFFSET_COLUMN: Final = FILE_SCHEMA.names.index("offset")
_HOUR_US: Final = 3_600_000_000
_OPTIONS: Final[dict[str, Any]] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": ["key"],
    "column_encoding": {"offset": "DELTA_BINARY_PACKED", "timestamp": "DELTA_BINARY_PACKED"},
    "write_statistics": ["offset", "timestamp"],
}


def hidden_path(path: str) -> str:
    """Return the hidden path of a file that is not committed yet."""
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}")


def fsync_path(path: str) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LakeWriter:
    """Write records of one partition, in order, to one file per hour."""

    def __init__(self, place: Place, *, topic: str, partition: int, is_hidden: bool) -> None:
        self._place, self._topic, self._partition = place, topic, partition
        self._is_hidden = is_hidden
        self._open: dict[str, FileWriter] = {}
        self._done: list[LakeFile] = []

    def write(self, batches: Iterable[pa.RecordBatch]) -> list[LakeFile]:
        """Write all batches; return the files, all durable."""
        for batch in batches:
            for hour, part in split_hours(batch):
                self._writing(hour).write(part)
        for hour in list(self._open):
            self._close(hour)
        return self._done

    def _writing(self, hour: str) -> FileWriter:
        if hour not in self._open:
            if len(self._open) == HOURS_OPEN_MAX:
                self._close(next(iter(self._open)))
            folder = f"topic={self._topic}/partition={self._partition}/hour={hour}"
            self._open[hour] = FileWriter(
                self._place, f"{folder}/part-{uuid4().hex}.parquet", is_hidden=self._is_hidden
            )
        return self._open[hour]

    def _close(self, hour: str) -> None:
        writing = self._open.pop(hour)
        size_bytes = writing.close()
        self._done.append(
            LakeFile(
                path=writing.path,
                topic=self._topic,
                partition=self._partition,
                hour=hour,
                size_bytes=size_bytes,
                count=writing.count,
                first_offset=writing.first_offset,
                last_offset=writing.last_offset,
            )
        )


class FileWriter:
    """A file of a lake that is being written."""

    def __init__(
        self,
        place: Place,
        path: str,
        *,
        is_hidden: bool,
        schema: pa.Schema = FILE_SCHEMA,
        options: Mapping[str, Any] = _OPTIONS,
    ) -> None:
        self.path = path
        self.count = 0
        self.first_offset = self.last_offset = -1
        self._path, self._filesystem = place.locate(hidden_path(path) if is_hidden else path)
        if self._filesystem is None:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self._writer = pq.ParquetWriter(self._path, schema, filesystem=self._filesystem, **options)

    def write(self, batch: pa.RecordBatch) -> None:
        """Add records, which are sorted by offset and come after those before."""
        if not self.count:
            self.first_offset = batch["offset"][0].as_py()
        self.last_offset = batch["offset"][-1].as_py()
        self.count += len(batch)
        self._writer.write_batch(batch)

    def close(self) -> int:
        """Finish the file; return its size. It is durable."""
        self._writer.close()
        if self._filesystem is not None:  # the store has the whole object, or none
            return int(self._filesystem.get_file_info(self._path).size)
        fsync_path(self._path)
        fsync_path(os.path.dirname(self._path))
        return os.path.getsize(self._path)


def split_hours(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield the records of each hour, in order; hours in order of appearance."""
    hours = batch["timestamp"].cast(pa.int64()).to_numpy() // _HOUR_US
    if len(hours) and (hours == hours[0]).all():
        yield hour_name(int(hours[0])), batch
        return
    for hour in dict.fromkeys(hours.tolist()):
        yield hour_name(hour), batch.take(np.flatnonzero(hours == hour))


def hour_name(hour: int) -> str:
    """Return the name of an hour since 1970 in UTC, as used in paths: 2026-11-15T14."""
    return str(np.datetime64(hour, "h"))


def read_in_order(
    place: Place, files: Sequence[LakeFile], offsets: tuple[int, int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the records of one partition's files, sorted by offset.

    With `offsets`, row groups outside that half-open range are skipped; some records outside it may still be yielded.
    """
    waiting = sorted(files, key=lambda file: file.first_offset)
    streams: list[_FileReader] = []
    while waiting or streams:
        # Open every file that may have records before the end of the earliest current batch.
        while waiting and (not streams or waiting[0].first_offset <= min(one.head_end for one in streams)):
            opened = _FileReader(place, waiting.pop(0).path, offsets)
            if not opened.is_done:
                streams.append(opened)
        if not streams:
            return
        bound = min(one.head_end for one in streams)
        parts = [part for one in streams if len(part := one.pop_up_to(bound))]
        streams = [one for one in streams if not one.is_done]
        if len(parts) == 1:
            yield parts[0]
        elif parts:
            joined = pa.Table.from_batches(parts).combine_chunks().sort_by("offset")
            yield from joined.to_batches()


class _FileReader:
    """Read one file batch by batch."""

    def __init__(self, place: Place, path: str, offsets: tuple[int, int] | None) -> None:
        where, filesystem = place.locate(path)
        self._file = pq.ParquetFile(where, filesystem=filesystem)
        groups = _row_groups(self._file.metadata, offsets)
        self._batches = self._file.iter_batches(READ_RECORDS, row_groups=groups, columns=FILE_SCHEMA.names)
        self._head: pa.RecordBatch | None = None
        self._advance()

    @property
    def is_done(self) -> bool:
        """Return whether all records were returned."""
        return self._head is None

    @property
    def head_end(self) -> int:
        """Return the last offset of the current batch."""
        assert self._head is not None
        return int(self._head["offset"][-1].as_py())

    def pop_up_to(self, last_offset: int) -> pa.RecordBatch:
        """Return the current batch up to an offset; read the next batch when it is used up."""
        head = self._head
        assert head is not None
        count = int(np.searchsorted(head["offset"].to_numpy(), last_offset, side="right"))
        self._head = head.slice(count)
        if count == len(head):
            self._advance()
        return head.slice(0, count)

    def _advance(self) -> None:
        self._head = next((batch.cast(FILE_SCHEMA) for batch in self._batches if len(batch)), None)
        if self._head is None:
            self._file.close()


def _row_groups(metadata: pq.FileMetaData, offsets: tuple[int, int] | None) -> list[int]:
    """Return the row groups that may have some of the offsets."""
    chosen = list(range(metadata.num_row_groups))
    if offsets is None:
        return chosen
    spans: list[Any] = [metadata.row_group(group).column(_OFFSET_COLUMN).statistics for group in chosen]
    return [group for group, span in enumerate(spans) if span.max >= offsets[0] and span.min < offsets[1]]
