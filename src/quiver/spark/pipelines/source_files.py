"""Find files to ingest, identify them by content, and read them as columns of records.

A line ends with a line feed, which is not part of it; the last line may lack it. Lines are processed as whole columns,
unless a key or time is parsed from them. Memory is bounded: one block, plus the incomplete line at its end.
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
    from quiver.client.batching import ArrowColumns

BLOCK_BYTES: Final = 4 << 20
"""Bytes per read: about one batch."""
PARQUET_RECORDS: Final = 65_536
RECORD_COLUMNS: Final = frozenset(("value", "key", "timestamp", "headers"))
IGNORED_COLUMNS: Final = frozenset(("topic", "partition", "offset", "hour"))
_LINE_FEED: Final = 10

Format = Literal["lines", "parquet"]
Compression = Literal["", "gz", "zst"]


class LineFields(msgspec.Struct, frozen=True):
    """Names of the JSON fields that are the record's key and time; empty: none."""

    key: str = ""
    time: str = ""


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file when it was scanned: its size and digest."""

    path: str
    size_bytes: int
    mtime_ns: int
    digest: str
    first_byte: int = 0
    """Start of the new content, after what was ingested before."""

    @property
    def format(self) -> Format:
        """Return the format, by file name."""
        return "parquet" if self.path.endswith(".parquet") else "lines"

    @property
    def compression(self) -> Compression:
        """Return the compression, by file name."""
        return "gz" if self.path.endswith(".gz") else "zst" if self.path.endswith((".zst", ".zstd")) else ""


def find_files(paths: Iterable[str]) -> list[str]:
    """Return the named files and all files in the named directories, sorted; hidden files are skipped.

    Raises:
        NotFoundError: a path does not exist (`no_file`).
    """
    found: set[str] = set()
    for path in map(os.path.abspath, paths):
        if os.path.isdir(path):
            found.update(_walk(path))
        elif os.path.isfile(path):
            found.add(path)
        else:
            raise NotFoundError(f"no such file or directory: {path}", code="no_file")
    return sorted(found)


def _walk(folder: str) -> Iterator[str]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        paths = (os.path.join(place, name) for name in names if not name.startswith((".", "_")))
        yield from (path for path in paths if os.path.isfile(path))


class FilePrefix(msgspec.Struct, frozen=True):
    """The digest of a file's first bytes, and whether they end with a line feed."""

    digest: str
    ends_line: bool


class FileScan(msgspec.Struct, frozen=True, kw_only=True):
    """The result of scanning a file: its content, and its prefixes by size."""

    file: SourceFile
    prefixes: dict[int, FilePrefix] = {}


def scan_file(path: str, prefix_sizes: Iterable[int] = ()) -> FileScan:
    """Read a file up to its current end; return its digest, and the digests of prefixes of the given sizes."""
    prefixes: dict[int, FilePrefix] = {}
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        edges = deque(sorted(size for size in set(prefix_sizes) if 0 < size <= status.st_size))
        digest = hashlib.sha256()
        done = 0
        while done < status.st_size and (block := file.read(min(BLOCK_BYTES, status.st_size - done))):
            at = 0
            while edges and edges[0] <= done + len(block):
                edge = edges.popleft()
                digest.update(block[at : edge - done])
                at = edge - done
                prefixes[edge] = FilePrefix(digest.copy().hexdigest(), block[at - 1] == _LINE_FEED)
            digest.update(block[at:])
            done += len(block)
    found = SourceFile(path=path, size_bytes=done, mtime_ns=status.st_mtime_ns, digest=digest.hexdigest())
    _check_content(found)
    return FileScan(file=found, prefixes=prefixes)


def check_unchanged(file: SourceFile) -> None:
    """Raise if a file no longer starts with the content that was scanned."""
    prefix = scan_file(file.path, [file.size_bytes]).prefixes.get(file.size_bytes)
    if prefix is None or prefix.digest != file.digest:
        message = f"{file.path} changed while its batch was partly ingested, so the batch cannot be resumed"
        raise ConflictError(f"{message}: restore the file, or ingest under another name", code="file_changed")


def _check_content(file: SourceFile) -> None:
    """Read a file to its end once, so that a bad file fails before anything of its batch is sent."""
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
        names_found = ", ".join(sorted(names))
        message = f"{path} has the columns {names_found}; expected value and optionally key, timestamp, headers"
        raise RequestError(message, code="bad_file")


# -- records -----------------------------------------------------------------------------------------


def read_records(file: SourceFile, fields: LineFields) -> Iterator[ArrowColumns]:
    """Yield the records of a file's new content, in order, about one batch at a time."""
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
    stream = open(file.path, "rb")  # noqa: SIM115 - the caller closes it
    if file.compression == "zst":
        return zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True, closefd=True)
    stream.seek(file.first_byte)
    return stream


def _blocks(stream: IO[bytes], file: SourceFile) -> Iterator[bytes]:
    """Yield the bytes that the file had when it was scanned, without bytes appended since."""
    if file.compression:
        try:
            while block := stream.read(BLOCK_BYTES):
                yield block
        except (EOFError, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise RequestError(f"{file.path} cannot be decompressed: {error}", code="bad_file") from None
        return
    left = file.size_bytes - file.first_byte
    while left:
        block = stream.read(min(BLOCK_BYTES, left))
        if not block:
            raise ConflictError(f"{file.path} was truncated while it was ingested", code="file_changed")
        left -= len(block)
        yield block


def _whole_lines(blocks: Iterable[bytes], path: str) -> Iterator[bytes]:
    """Yield blocks that end with a line feed; add one to the last block if it is missing."""
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
            raise TooLargeError(f"a line of {path} exceeds the maximum of {PAYLOAD_BYTES_MAX} bytes")
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
    """Add key and time columns, parsed from the lines; null where a line does not have them."""
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
    """Return a timestamp in milliseconds from a number of milliseconds or an ISO 8601 string, UTC by default."""
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
