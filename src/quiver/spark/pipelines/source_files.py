"""Files of log lines on their way in: found, told apart by what they hold, and read as columns of records.

A line ends with a line feed, which is not part of it; the last one may lack it. No line is looked at by itself, unless
its key or time is wanted. What is in memory is one block and the line that it ends in the middle of, which has a bound.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any, Final, Literal, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from quiver.errors import ConflictError, NotFoundError, RequestError, TooLargeError
from quiver.record.header import PAYLOAD_BYTES_MAX

if TYPE_CHECKING:
    from quiver.client.chunks import ArrowColumns

BLOCK_BYTES: Final = 4 << 20
"""Bytes that are read at once: about a batch."""
PARQUET_RECORDS: Final = 65_536
RECORD_COLUMNS: Final = frozenset(("value", "key", "timestamp", "headers"))
IGNORED_COLUMNS: Final = frozenset(("topic", "partition", "offset", "hour"))
_LINE_FEED: Final = 10

Format = Literal["lines", "parquet"]
Compression = Literal["", "gz", "zst"]


class LineFields(msgspec.Struct, frozen=True):
    """Which fields of a line that is a JSON object are the record's key and time; empty: none."""

    key: str = ""
    time: str = ""


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a file held when it was looked at: `size_bytes` from its beginning, and their digest."""

    path: str
    size_bytes: int
    mtime_ns: int
    digest: str
    first_byte: int = 0
    """Where what is new in it begins: behind what was ingested of it before."""

    @property
    def format(self) -> Format:
        """Return what the name says about the content."""
        return "parquet" if self.path.endswith(".parquet") else "lines"

    @property
    def compression(self) -> Compression:
        """Return what the name says about how it is packed."""
        return "gz" if self.path.endswith(".gz") else "zst" if self.path.endswith((".zst", ".zstd")) else ""


def find_files(paths: Iterable[str]) -> list[str]:
    """Return the files that paths name, and all that lie in folders that they name, without hidden ones; sorted.

    Raises:
        NotFoundError: a path names nothing (`no_file`).
    """
    found: set[str] = set()
    for path in map(os.path.abspath, paths):
        if os.path.isdir(path):
            found.update(_walk(path))
        elif os.path.isfile(path):
            found.add(path)
        else:
            raise NotFoundError(f"there is no file or folder {path}", code="no_file")
    return sorted(found)


def _walk(folder: str) -> Iterator[str]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        paths = (os.path.join(place, name) for name in names if not name.startswith((".", "_")))
        yield from (path for path in paths if os.path.isfile(path))


class FilePrefix(msgspec.Struct, frozen=True):
    """What so many bytes at the beginning of a file are: their digest, and whether they end with a line."""

    digest: str
    ends_line: bool


class FileScan(msgspec.Struct, frozen=True, kw_only=True):
    """What a look at a file tells: what it holds, and what it begins with, by the sizes that were asked for."""

    file: SourceFile
    begins: dict[int, FilePrefix] = {}


def scan_file(path: str, begin_sizes: Iterable[int] = ()) -> FileScan:
    """Read a file as far as it goes now; tell what it holds, and what it begins with."""
    begins: dict[int, FilePrefix] = {}
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        edges = deque(sorted(size for size in set(begin_sizes) if 0 < size <= status.st_size))
        digest = hashlib.sha256()
        done = 0
        while done < status.st_size and (block := file.read(min(BLOCK_BYTES, status.st_size - done))):
            at = 0
            while edges and edges[0] <= done + len(block):
                edge = edges.popleft()
                digest.update(block[at : edge - done])
                at = edge - done
                begins[edge] = FilePrefix(digest.copy().hexdigest(), block[at - 1] == _LINE_FEED)
            digest.update(block[at:])
            done += len(block)
    found = SourceFile(path=path, size_bytes=done, mtime_ns=status.st_mtime_ns, digest=digest.hexdigest())
    _check_content(found)
    return FileScan(file=found, begins=begins)


def check_unchanged(file: SourceFile) -> None:
    """Raise unless a file still begins with what it held when it was looked at."""
    begin = scan_file(file.path, [file.size_bytes]).begins.get(file.size_bytes)
    if begin is None or begin.digest != file.digest:
        message = f"{file.path} has changed since a part of it was ingested, and the rest cannot be told any more"
        raise ConflictError(f"{message}: bring it back as it was, or ingest under another name", code="file_changed")


def _check_content(file: SourceFile) -> None:
    """Raise for what could not be read to its end: nothing of a round is sent when a file of it is bad."""
    if not file.size_bytes:
        return
    if file.format == "parquet":
        _check_columns(file.path)
        return
    with closing(_open(file)) as stream:
        for _ in _whole_lines(_blocks(stream, file), file.path):
            pass


def _check_columns(path: str) -> None:
    try:
        names = set(pq.read_schema(path).names)
    except pa.ArrowInvalid as error:
        raise RequestError(f"{path} is not a Parquet file: {error}", code="bad_file") from None
    if "value" not in names or names - RECORD_COLUMNS - IGNORED_COLUMNS:
        told = ", ".join(sorted(names))
        message = f"{path} has the columns {told}; they are to be value, and perhaps key, timestamp, headers"
        raise RequestError(message, code="bad_file")


# -- records -----------------------------------------------------------------------------------------


def read_records(file: SourceFile, fields: LineFields) -> Iterator[ArrowColumns]:
    """Yield the records of what is new in a file, in order, about a batch at a time."""
    if file.format == "parquet":
        yield from _read_parquet(file)
        return
    with closing(_open(file)) as stream:
        for block in _whole_lines(_blocks(stream, file), file.path):
            lines = split_lines(block)
            yield _with_fields(lines, fields) if fields.key or fields.time else {"value": lines}


def _open(file: SourceFile) -> IO[bytes]:
    if file.compression == "gz":
        return cast("IO[bytes]", gzip.open(file.path))
    stream = open(file.path, "rb")  # noqa: SIM115 - closed by who reads it
    if file.compression == "zst":
        return zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True, closefd=True)
    stream.seek(file.first_byte)
    return stream


def _blocks(stream: IO[bytes], file: SourceFile) -> Iterator[bytes]:
    """Yield the bytes that the file held when it was looked at, and none that were added since."""
    if file.compression:
        try:
            while block := stream.read(BLOCK_BYTES):
                yield block
        except (EOFError, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise RequestError(f"{file.path} cannot be unpacked: {error}", code="bad_file") from None
        return
    left = file.size_bytes - file.first_byte
    while left:
        block = stream.read(min(BLOCK_BYTES, left))
        if not block:
            raise ConflictError(f"{file.path} has become shorter while it was ingested", code="file_changed")
        left -= len(block)
        yield block


def _whole_lines(blocks: Iterable[bytes], path: str) -> Iterator[bytes]:
    """Yield blocks that end with a line feed; the last one gets its own."""
    begun: list[bytes] = []
    begun_bytes = 0
    for block in blocks:
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join((*begun, block[:end]))
            begun, begun_bytes = [], 0
        begun.append(block[end:])
        begun_bytes += len(block) - end
        if begun_bytes > PAYLOAD_BYTES_MAX:
            raise TooLargeError(f"a line of {path} is longer than {PAYLOAD_BYTES_MAX} bytes")
    if begun_bytes:
        yield b"".join((*begun, b"\n"))


def split_lines(block: bytes) -> pa.Array[Any]:
    """Return the lines of a block that ends with a line feed."""
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == _LINE_FEED)
    # Without the line feeds, each line begins one byte earlier for every line before it.
    offsets = np.concatenate(([0], ends - np.arange(len(ends)))).astype(np.int64)
    values = block.replace(b"\n", b"")
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.large_binary(), len(ends), buffers)


def _with_fields(lines: pa.Array[Any], fields: LineFields) -> ArrowColumns:
    """Return lines with the key and time that stand in them; a line without them has none."""
    decoder = msgspec.json.Decoder(dict[str, Any])
    keys: list[bytes | None] = []
    times: list[int | None] = []
    for line in cast("list[bytes]", lines.to_pylist()):
        try:
            found = decoder.decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError):
            found = {}
        keys.append(_to_key(found.get(fields.key)))
        times.append(to_ms(found.get(fields.time)))
    columns: ArrowColumns = {"value": lines}
    if fields.key:
        columns["key"] = pa.array(keys, pa.large_binary())
    if fields.time:
        columns["timestamp"] = pa.array(times, pa.int64())
    return columns


def _to_key(value: object) -> bytes | None:
    if value is None or isinstance(value, dict | list):
        return None
    return value.encode() if isinstance(value, str) else msgspec.json.encode(value)


def to_ms(value: object) -> int | None:
    """Return a time of a line in milliseconds: a number of them, or a text of ISO 8601, in UTC unless it says else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if 0 <= value < 1 << 53 else None
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


def _read_parquet(file: SourceFile) -> Iterator[ArrowColumns]:
    with pq.ParquetFile(file.path) as source:
        names = [name for name in source.schema_arrow.names if name in RECORD_COLUMNS]
        for batch in source.iter_batches(PARQUET_RECORDS, columns=names):
            yield {name: batch[name] for name in names}
