"""The files of a lake: written by tasks from ranges of offsets, and read back in the order of offsets.

A file is on disk as a whole before anybody is told of it. Records never pass through Spark itself: a task fetches its
range and writes it. Reading merges files that overlap, as those of neighbouring hours do where timestamps are not in
the order of offsets; it holds one batch of each file that overlaps, never a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quiver.spark.pipelines.lake import FILE_SCHEMA, LakeFile

HOURS_OPEN_MAX: Final = 16
"""How many hours a task writes at once; where timestamps jump about more than that, there are more files."""
READ_RECORDS: Final = 65_536
"""Records of one batch that is read back."""
_OFFSET_COLUMN: Final = FILE_SCHEMA.names.index("offset")
_HOUR_US: Final = 3_600_000_000
_OPTIONS: Final[dict[str, Any]] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": ["key"],
    "column_encoding": {"offset": "DELTA_BINARY_PACKED", "timestamp": "DELTA_BINARY_PACKED"},
    "write_statistics": ["offset", "timestamp"],
}


def hidden(path: str) -> str:
    """Return the name under which a file is written that readers of plain folders must not see yet."""
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}")


def sync(path: str) -> None:
    """Bring a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LakeWriter:
    """Write records of one partition, in their order, into files by hour."""

    def __init__(self, root: str, *, topic: str, partition: int, is_hidden: bool) -> None:
        self._root, self._topic, self._partition = root, topic, partition
        self._is_hidden = is_hidden
        self._open: dict[str, _Writing] = {}
        self._done: list[LakeFile] = []

    def write(self, batches: Iterable[pa.RecordBatch]) -> list[LakeFile]:
        """Write everything; return the files, all of them on disk."""
        for batch in batches:
            for hour, part in split_hours(batch):
                self._writing(hour).write(part)
        for hour in list(self._open):
            self._close(hour)
        return self._done

    def _writing(self, hour: str) -> _Writing:
        if hour not in self._open:
            if len(self._open) == HOURS_OPEN_MAX:
                self._close(next(iter(self._open)))
            folder = f"topic={self._topic}/partition={self._partition}/hour={hour}"
            self._open[hour] = _Writing(self._root, f"{folder}/part-{uuid4().hex}.parquet", is_hidden=self._is_hidden)
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


class _Writing:
    """One file that is being written."""

    def __init__(self, root: str, path: str, *, is_hidden: bool) -> None:
        self.path = path
        self.count = 0
        self.first_offset = self.last_offset = -1
        whole = os.path.join(root, path)
        self._place = hidden(whole) if is_hidden else whole
        os.makedirs(os.path.dirname(whole), exist_ok=True)
        self._writer = pq.ParquetWriter(self._place, FILE_SCHEMA, **_OPTIONS)

    def write(self, batch: pa.RecordBatch) -> None:
        if not self.count:
            self.first_offset = batch["offset"][0].as_py()
        self.last_offset = batch["offset"][-1].as_py()
        self.count += len(batch)
        self._writer.write_batch(batch)

    def close(self) -> int:
        self._writer.close()
        sync(self._place)
        sync(os.path.dirname(self._place))
        return os.path.getsize(self._place)


def split_hours(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield the records of each hour, in their order; hours as they first appear."""
    hours = batch["timestamp"].cast(pa.int64()).to_numpy() // _HOUR_US
    if len(hours) and (hours == hours[0]).all():
        yield hour_name(int(hours[0])), batch
        return
    for hour in dict.fromkeys(hours.tolist()):
        yield hour_name(hour), batch.take(np.flatnonzero(hours == hour))


def hour_name(hour: int) -> str:
    """Return an hour since 1970, in UTC, as it stands in a path: 2026-11-15T14."""
    return str(np.datetime64(hour, "h"))


def read_in_order(
    root: str, files: Sequence[LakeFile], offsets: tuple[int, int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the records of files of one partition in the order of their offsets.

    With `offsets`, from one up to another, what surely lies outside of them is not read; other records may be yielded.
    """
    waiting = sorted(files, key=lambda file: file.first_offset)
    streams: list[_Stream] = []
    while waiting or streams:
        # Whatever begins before the first of the heads ends may belong before it.
        while waiting and (not streams or waiting[0].first_offset <= min(one.head_end for one in streams)):
            opened = _Stream(os.path.join(root, waiting.pop(0).path), offsets)
            if not opened.is_over:
                streams.append(opened)
        if not streams:
            return
        bound = min(one.head_end for one in streams)
        parts = [part for one in streams if len(part := one.take_up_to(bound))]
        streams = [one for one in streams if not one.is_over]
        if len(parts) == 1:
            yield parts[0]
        elif parts:
            joined = pa.Table.from_batches(parts).combine_chunks().sort_by("offset")
            yield from joined.to_batches()


class _Stream:
    """One file, batch by batch."""

    def __init__(self, path: str, offsets: tuple[int, int] | None) -> None:
        self._file = pq.ParquetFile(path)
        groups = _row_groups(self._file.metadata, offsets)
        self._batches = self._file.iter_batches(READ_RECORDS, row_groups=groups, columns=FILE_SCHEMA.names)
        self._head: pa.RecordBatch | None = None
        self._advance()

    @property
    def is_over(self) -> bool:
        """Tell whether everything was taken."""
        return self._head is None

    @property
    def head_end(self) -> int:
        """Return the last offset of what is at hand."""
        assert self._head is not None
        return int(self._head["offset"][-1].as_py())

    def take_up_to(self, last_offset: int) -> pa.RecordBatch:
        """Return what is at hand up to an offset, and get more when all of it is taken."""
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
    """Return the row groups that may hold some offsets."""
    chosen = list(range(metadata.num_row_groups))
    if offsets is None:
        return chosen
    spans: list[Any] = [metadata.row_group(group).column(_OFFSET_COLUMN).statistics for group in chosen]
    return [group for group, span in enumerate(spans) if span.max >= offsets[0] and span.min < offsets[1]]
