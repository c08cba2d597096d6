"""Find files to ingest, identify them by content, and read them as columns of records.

The *content* of a file is what it has after decompression: a file keeps its content when it is compressed, renamed or
copied. Sizes and digests of content identify files; sizes, dates and inodes only save reading files that are unchanged.

A line ends with a line feed, which is not part of it. A plain file may be written right now, so its content ends after
its last line feed; a compressed file is finished, and its last line may lack it. Lines are processed as whole columns,
unless a key or time is parsed from them. Memory is bounded: one block, plus the incomplete line at its end.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
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

from quiver.errors import ConflictError, QuiverError, RequestError, TooLargeError
from quiver.record.header import PAYLOAD_BYTES_MAX
from quiver.spark.pipelines.place import parse_path

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
    """The content of a file when it was scanned, up to the end of what is ingested of it."""

    path: str
    size_bytes: int
    """Size of the file itself."""
    mtime_ns: int
    digest: str
    """Digest of the content up to its end."""
    first_byte: int = 0
    """Start of the new content, after what was ingested before."""
    end_byte: int = -1
    """End of the content; -1 in entries of older releases: the file's size, and `digest` is of the file itself."""
    inode: int = 0
    continues: str = ""
    """Digest of the content before `first_byte`."""

    @property
    def format(self) -> Format:
        """Return the format, by file name."""
        return "parquet" if self.path.endswith(".parquet") else "lines"

    @property
    def compression(self) -> Compression:
        """Return the compression, by file name."""
        return "gz" if self.path.endswith(".gz") else "zst" if self.path.endswith((".zst", ".zstd")) else ""

    @property
    def content_end(self) -> int | None:
        """Return the end of the content; None if it is not known."""
        if self.end_byte >= 0:
            return self.end_byte
        return None if self.compression else self.size_bytes

    @property
    def is_at_end(self) -> bool:
        """Return whether the content ends where the file ended: there was no incomplete line after it."""
        return bool(self.compression) or self.content_end == self.size_bytes

    @property
    def new_bytes(self) -> int:
        """Return the approximate size of the new content, before decompression."""
        return self.size_bytes if self.compression else (self.content_end or 0) - self.first_byte


def find_files(paths: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the named files and all files in the named directories, sorted, and the paths that cannot be read.

    Hidden files are skipped. The second result has the reason by path.
    """
    found: set[str] = set()
    problems: dict[str, str] = {}
    for path in (parse_path(path, option="path") for path in paths):
        if os.path.isdir(path):
            found.update(_walk(path, problems))
        elif os.path.isfile(path):
            found.add(path)
        else:
            problems[path] = "no such file or directory"
    return sorted(found), problems


def _walk(folder: str, problems: dict[str, str]) -> Iterator[str]:
    def report(error: OSError) -> None:
        problems[str(error.filename)] = error.strerror or str(error)

    for place, folders, names in os.walk(folder, onerror=report):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        paths = (os.path.join(place, name) for name in names if not name.startswith((".", "_")))
        yield from (path for path in paths if os.path.isfile(path))


class FileScan(msgspec.Struct, frozen=True, kw_only=True):
    """The result of scanning a file: its content, or the reason why it cannot be read."""

    file: SourceFile
    prefixes: dict[int, str] = {}
    """Digests of the first bytes of the content, by their number."""
    whole_digest: str = ""
    """Digest of the file itself, for entries of older releases."""
    problem: str = ""

    def starts_with(self, known: SourceFile) -> bool:
        """Return whether the content starts with the known content."""
        if known.content_end is None:
            return self.whole_digest == known.digest
        return self.prefixes.get(known.content_end) == known.digest


def scan_file(path: str, prefix_sizes: Iterable[int] = (), *, is_final: bool = False) -> FileScan:
    """Read a file to its current end; return its content, and digests of prefixes of the content.

    With `is_final`, a last line without a line feed is part of the content. A file that cannot be read, now or when it
    would be sent, is a result with a `problem`.
    """
    file = SourceFile(path=path, size_bytes=0, mtime_ns=0, digest="")
    try:
        status = os.stat(path)
        file = msgspec.structs.replace(
            file, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino
        )
        return _scan(file, prefix_sizes, is_final=is_final)
    except (QuiverError, OSError, pa.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return FileScan(file=file, problem=reason)


def _scan(file: SourceFile, prefix_sizes: Iterable[int], *, is_final: bool) -> FileScan:
    digests = _ContentDigests(prefix_sizes)
    whole_digest = ""
    if not file.size_bytes:
        return FileScan(file=msgspec.structs.replace(file, end_byte=0))
    if file.format == "parquet":
        _check_parquet(file.path)
        with open(file.path, "rb") as raw:
            for block in _plain_blocks(raw, file.size_bytes):
                digests.add(block)
    else:
        for _ in _whole_lines(digests.adding(_content_blocks(file, 0, None))):
            pass
        if file.compression:
            with open(file.path, "rb") as raw:
                whole_digest = hashlib.file_digest(raw, hashlib.sha256).hexdigest()
    is_whole = is_final or file.compression or file.format == "parquet"
    end_byte, digest = (digests.size, digests.whole()) if is_whole else (digests.line_end, digests.lines())
    found = msgspec.structs.replace(file, end_byte=end_byte, digest=digest)
    return FileScan(file=found, prefixes=digests.prefixes, whole_digest=whole_digest)


class _ContentDigests:
    """Digests of a content: of prefixes, up to the last line feed, and of all of it."""

    def __init__(self, prefix_sizes: Iterable[int]) -> None:
        self._edges = deque(sorted(size for size in set(prefix_sizes) if size > 0))
        self._digest = hashlib.sha256()
        self._lines = hashlib.sha256()
        self.prefixes: dict[int, str] = {}
        self.size = self.line_end = 0

    def add(self, block: bytes) -> None:
        """Add the next bytes."""
        line_end = block.rfind(b"\n") + 1
        edges = set()
        while self._edges and self._edges[0] <= self.size + len(block):
            edges.add(self._edges.popleft() - self.size)
        at = 0
        for cut in sorted(edges | ({line_end} if line_end else set())):
            self._digest.update(block[at:cut])
            at = cut
            if cut in edges:
                self.prefixes[self.size + cut] = self._digest.hexdigest()
            if cut == line_end:
                self._lines, self.line_end = self._digest.copy(), self.size + cut
        self._digest.update(block[at:])
        self.size += len(block)

    def adding(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield blocks, each after it was added."""
        for block in blocks:
            self.add(block)
            yield block

    def lines(self) -> str:
        """Return the digest up to the last line feed."""
        return self._lines.hexdigest()

    def whole(self) -> str:
        """Return the digest of everything."""
        return self._digest.hexdigest()


def _check_parquet(path: str) -> None:
    """Read a file to its end once, so that a bad file fails before anything of its batch is sent."""
    try:
        with pq.ParquetFile(path) as source:
            names = set(source.schema_arrow.names)
            if "value" not in names or names - RECORD_COLUMNS - IGNORED_COLUMNS:
                names_found = ", ".join(sorted(names))
                message = f"it has the columns {names_found}; expected value and optionally key, timestamp, headers"
                raise RequestError(message, code="bad_file")
            for _ in source.iter_batches(PARQUET_RECORDS, columns=sorted(names & RECORD_COLUMNS)):
                pass
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"it is not a whole Parquet file: {error}", code="bad_file") from None


# -- records -----------------------------------------------------------------------------------------


def read_records(file: SourceFile, fields: LineFields) -> Iterator[ArrowColumns]:
    """Yield the records of a file's new content, in order, about one batch at a time."""
    if file.format == "parquet":
        yield from _read_parquet(file)
        return
    try:
        for block in _whole_lines(_content_blocks(file, file.first_byte, file.content_end)):
            lines = split_lines(block)
            yield _with_fields(lines, fields) if fields.key or fields.time else {"value": lines}
    except ConflictError as error:
        raise ConflictError(f"{file.path}: {error}", code="file_changed") from None


def _content_blocks(file: SourceFile, first: int, end: int | None) -> Iterator[bytes]:
    """Yield the content between two positions; without an end, up to the size that the file had when it was scanned."""
    if not file.compression:
        with open(file.path, "rb") as stream:
            # The path may have another file by now: logs are rotated at any time.
            if file.inode and os.fstat(stream.fileno()).st_ino != file.inode:
                raise ConflictError("it was replaced while it was ingested", code="file_changed")
            stream.seek(first)
            yield from _plain_blocks(stream, (file.size_bytes if end is None else end) - first)
        return
    position = 0
    for block in _decompressed_blocks(file):
        own = block[max(0, first - position) : None if end is None else max(0, end - position)]
        position += len(block)
        if own:
            yield own
    if end is not None and position < end:
        raise ConflictError("it was truncated while it was ingested", code="file_changed")


def _decompressed_blocks(file: SourceFile) -> Iterator[bytes]:
    try:
        with closing(_open_compressed(file)) as stream:
            while block := stream.read(BLOCK_BYTES):
                yield block
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise RequestError(f"it cannot be decompressed: {error}", code="bad_file") from None


def _open_compressed(file: SourceFile) -> IO[bytes]:
    if file.compression == "gz":
        return cast("IO[bytes]", gzip.open(file.path))
    stream = open(file.path, "rb")  # noqa: SIM115 - the reader closes it
    return zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True, closefd=True)


def _plain_blocks(stream: IO[bytes], left: int) -> Iterator[bytes]:
    while left:
        block = stream.read(min(BLOCK_BYTES, left))
        if not block:
            raise ConflictError("it was truncated while it was ingested", code="file_changed")
        left -= len(block)
        yield block


def _whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
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
            raise TooLargeError(f"a line exceeds the maximum of {PAYLOAD_BYTES_MAX} bytes")
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
