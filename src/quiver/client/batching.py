"""How records become batches: sources that a sender builds batches from, and bulk input cut into chunks of batch size.

A record source collects records of one partition and builds their batch once, when its epoch and sequence are known.
`RecordRows` grows record by record. `RecordColumns` is a slice of Arrow arrays. `StoredBatch` is a batch that was read
before and is sent unchanged, without being decoded.

Bulk input is cut without a step per record. Python values are cut by count, and the count follows from the sizes seen
so far. Arrow columns are sliced, and split by partition through their distinct keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from quiver.client.delivery import Outcome
from quiver.clock import Clock
from quiver.errors import RequestError
from quiver.model import PartitionId, ProducerId
from quiver.record import Batch, Compression, Value, build_batch, crc32c, reseal_batch
from quiver.record.delay import DELIVER_AT_HEADER, DELIVER_AT_MS_END, encode_deliver_at

if TYPE_CHECKING:
    from quiver.record.arrow import ArrowArray

RECORD_BYTES = 24
"""Overhead that a record is counted with beside its bytes: its lengths and its share of the batch header."""

RecordHeaders = Mapping[str, Value] | Iterable[tuple[str, Value]]
"""Headers as users give them: a mapping, or pairs, which may repeat a name."""
StoredHeaders = tuple[tuple[str, bytes | None], ...]
TIMESTAMP_END: Final = 1 << 63
"""Timestamps are signed numbers of 64 bits."""
DELAY_S_MAX: Final = 10 * 366 * 24 * 3600
"""Longest delay of a record: ten years; a longer one is a mistake in the unit."""


class RecordSource(Protocol):
    """Records for one partition that become one batch."""

    outcome: Outcome
    opened_ms: int
    """When the first record was accepted (monotonic clock)."""
    size_bytes: int

    def __len__(self) -> int: ...

    def build(self, *, compression: Compression, producer_id: ProducerId, epoch: int, sequence: int) -> bytes:
        """Return the batch."""
        ...


class RecordRows:
    """Records given as Python objects; unused columns stay None."""

    __slots__ = ("headers", "keys", "opened_ms", "outcome", "size_bytes", "timestamp", "timestamps", "values")

    def __init__(self, partition: PartitionId, *, opened_ms: int, timestamp: int) -> None:
        """Start without records; `timestamp` applies to all records without their own."""
        self.outcome = Outcome(partition)
        self.opened_ms = opened_ms
        self.timestamp = timestamp
        self.size_bytes = 0
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] | None = None
        self.timestamps: list[int | None] | None = None
        self.headers: list[StoredHeaders | None] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def add_rest(self, key: bytes | None, timestamp: int | None, headers: StoredHeaders | None) -> None:
        """Add key, timestamp and headers of the last added value; once called, call it for every record."""
        before = len(self.values) - 1
        if self.keys is None:
            self.keys = [None] * before
            self.timestamps = [None] * before
            self.headers = [None] * before
        assert self.timestamps is not None
        assert self.headers is not None
        self.keys.append(key)
        self.timestamps.append(timestamp)
        self.headers.append(headers)

    def extend(
        self, values: Sequence[bytes | None], key: bytes | None, headers: StoredHeaders | None, size_bytes: int
    ) -> None:
        """Add many values, all with the same key and headers."""
        before = len(self.values)
        self.values.extend(values)
        self.size_bytes += size_bytes
        if key is not None or headers is not None or self.keys is not None:
            self.keys = (self.keys or [None] * before) + [key] * len(values)
            self.timestamps = (self.timestamps or [None] * before) + [None] * len(values)
            self.headers = (self.headers or [None] * before) + [headers] * len(values)

    def build(self, *, compression: Compression, producer_id: ProducerId, epoch: int, sequence: int) -> bytes:
        """Return the batch."""
        return build_batch(
            self.values,
            timestamp=self.timestamp,
            keys=self.keys,
            timestamps=self.timestamps if self.timestamps and any(map(_is_given, self.timestamps)) else None,
            headers=self.headers if self.headers and any(map(_is_given, self.headers)) else None,
            compression=compression,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
        )


class RecordColumns:
    """Records given as Arrow arrays of equal length, by column name."""

    __slots__ = ("_columns", "opened_ms", "outcome", "size_bytes", "timestamp")

    def __init__(
        self, partition: PartitionId, columns: dict[str, ArrowArray], *, opened_ms: int, timestamp: int, size_bytes: int
    ) -> None:
        self.outcome = Outcome(partition)
        self.opened_ms = opened_ms
        self.timestamp = timestamp
        self.size_bytes = size_bytes
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns["value"])

    def build(self, *, compression: Compression, producer_id: ProducerId, epoch: int, sequence: int) -> bytes:
        """Return the batch."""
        from quiver.record.arrow import build_batch_from_arrow  # needs the extra, which made these columns

        return build_batch_from_arrow(
            self._columns["value"],
            timestamp=self.timestamp,
            keys=self._columns.get("key"),
            timestamps=self._columns.get("timestamp"),
            headers=self._columns.get("headers"),
            compression=compression,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
        )


class StoredBatch:
    """A batch that was read and verified: forwarded unchanged, with its timestamps and compression."""

    __slots__ = ("_batch", "opened_ms", "outcome", "size_bytes")

    def __init__(self, partition: PartitionId, batch: Batch, *, opened_ms: int) -> None:
        self.outcome = Outcome(partition)
        self.opened_ms = opened_ms
        self.size_bytes = len(batch.data)
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch)

    def build(self, *, compression: Compression, producer_id: ProducerId, epoch: int, sequence: int) -> bytes:  # noqa: ARG002 - the batch keeps its own compression
        """Return the batch."""
        return reseal_batch(self._batch.data, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)


def _is_given(value: Any) -> bool:
    return value is not None


# -- Python values ----------------------------------------------------------------------------------

FIRST_COUNT: Final = 1024
"""Values in the first chunk, before their size is known."""
COUNT_MAX: Final = 65536
"""Maximum values of one chunk, however small they are."""
OVERSIZE_FACTOR: Final = 2
"""A chunk is halved while it is larger than this many batches."""


def partition_of(key: bytes, partition_count: int) -> PartitionId:
    """Return the partition of a key: the same in every client while the number of partitions stays the same."""
    return PartitionId(crc32c(key) % partition_count)


def to_bytes(value: Value) -> bytes | None:
    """Return a value as stored bytes; raise `RequestError` if it cannot be stored."""
    match value:
        case None | bytes():
            return value
        case str():
            try:
                return value.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"not sent: the text cannot be encoded as UTF-8: {error}") from error
        case bytearray() | memoryview():
            return bytes(value)
        case _:
            message = f"not sent: a record is bytes, text or None, not {type(value).__name__}"
            raise RequestError(message, code="bad_record")


def to_headers(headers: object) -> StoredHeaders:
    """Return headers as stored, from a mapping or from pairs; refuse anything else.

    Raises:
        RequestError: not sent; a plain string, for example, would otherwise be read as a sequence of characters.
    """
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise _bad_headers(f"not {type(headers).__name__}")
    stored: list[tuple[str, bytes | None]] = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise _bad_headers(f"not an item {pair!r:.60}")
        stored.append((pair[0], to_bytes(pair[1])))
    return tuple(stored)


def _bad_headers(why: str) -> RequestError:
    message = f"not sent: headers are a mapping of text to bytes, or pairs of (text, bytes), {why}"
    return RequestError(message, code="bad_headers")


def check_timestamp(timestamp: object) -> None:
    """Raise `RequestError` if a timestamp is not a 64-bit number of milliseconds."""
    is_number = isinstance(timestamp, int) and not isinstance(timestamp, bool)
    if not is_number or not -TIMESTAMP_END <= timestamp < TIMESTAMP_END:  # type: ignore[operator] # a number by now
        message = f"not sent: a timestamp is milliseconds since 1970 as a 64-bit number, not {timestamp!r:.60}"
        raise RequestError(message, code="bad_timestamp")


def find_deliver_at_ms(delay: object, deliver_at: object, clock: Clock) -> int | None:
    """Return when a record is due for work queues, from the arguments of `send`; None: at once.

    Raises:
        RequestError: both are given, or one is not a time; not sent.
    """
    if deliver_at is None:
        if delay is None:
            return None
        is_number = isinstance(delay, int | float) and not isinstance(delay, bool)
        if not is_number or not 0 <= delay <= DELAY_S_MAX:  # type: ignore[operator] # a number by now
            message = f"not sent: a delay is 0 to {DELAY_S_MAX} seconds (int or float), not {delay!r:.60}"
            raise RequestError(message, code="bad_delay")
        return clock.wall_ms() + math.ceil(delay * 1000)  # type: ignore[operator] # as above
    if delay is not None:
        raise RequestError("not sent: give delay or deliver_at, not both", code="bad_delay")
    if isinstance(deliver_at, datetime):
        return max(0, math.ceil(deliver_at.timestamp() * 1000))
    if isinstance(deliver_at, int) and not isinstance(deliver_at, bool) and 0 <= deliver_at < DELIVER_AT_MS_END:
        return deliver_at
    message = f"not sent: deliver_at is a datetime or milliseconds since 1970, not {deliver_at!r:.60}"
    raise RequestError(message, code="bad_delay")


def delayed_headers(headers: StoredHeaders, deliver_at_ms: int) -> StoredHeaders:
    """Return the headers of a record that work queues deliver at a time or later."""
    others = (header for header in headers if header[0] != DELIVER_AT_HEADER)
    return (*others, (DELIVER_AT_HEADER, encode_deliver_at(deliver_at_ms)))


def cut_values(values: Iterable[Value], batch_bytes: int) -> Iterator[tuple[list[bytes | None], int]]:
    """Yield lists of stored values of about one batch, each with its size in the buffer."""
    if isinstance(values, str | bytes | bytearray | memoryview) or not isinstance(values, Iterable):
        message = f"not sent: send_many takes many values, not one {type(values).__name__}; use send for one"
        raise RequestError(message, code="bad_record")
    count = FIRST_COUNT
    left = iter(values)
    while chunk := list(islice(left, count)):
        stored = _to_bytes_each(chunk)
        size_bytes = _size(stored)
        count = max(1, min(COUNT_MAX, batch_bytes * len(stored) // max(1, size_bytes)))
        yield from _halve(stored, size_bytes, batch_bytes)


def _to_bytes_each(chunk: list[Value]) -> list[bytes | None]:
    kinds = set(map(type, chunk))
    if kinds == {bytes}:
        return cast("list[bytes | None]", chunk)
    if kinds == {str}:
        try:
            return list(map(str.encode, cast("list[str]", chunk)))
        except UnicodeEncodeError as error:
            raise RequestError(f"not sent: the text cannot be encoded as UTF-8: {error}") from error
    return list(map(to_bytes, chunk))


def _size(stored: list[bytes | None]) -> int:
    try:
        return RECORD_BYTES * len(stored) + sum(map(len, cast("list[bytes]", stored)))
    except TypeError:  # there are nulls
        return RECORD_BYTES * len(stored) + sum(len(value) for value in stored if value is not None)


def _halve(stored: list[bytes | None], size_bytes: int, batch_bytes: int) -> Iterator[tuple[list[bytes | None], int]]:
    if size_bytes <= OVERSIZE_FACTOR * batch_bytes or len(stored) == 1:
        yield stored, size_bytes
        return
    middle = len(stored) // 2
    for half in (stored[:middle], stored[middle:]):
        yield from _halve(half, _size(half), batch_bytes)


# -- Arrow -------------------------------------------------------------------------------------------

ArrowColumns = dict[str, "ArrowArray"]
"""Columns of equal length by name; `value` is always present."""


def is_columnar(values: object) -> bool:
    """Return whether values are Arrow data, a data frame or a mapping of columns, without importing pyarrow."""
    is_arrow = type(values).__module__.split(".")[0] == "pyarrow"
    return is_arrow or isinstance(values, Mapping) or any(hasattr(values, name) for name in _COLUMNAR)


_COLUMNAR: Final = ("__arrow_c_stream__", "__arrow_c_array__", "__dataframe__")
"""Methods that mark an object as columnar: those of pandas, polars, DuckDB and others."""


def arrow_columns(values: Any) -> ArrowColumns:
    """Return the columns of a table, record batch, data frame or mapping; an array is the column `value`."""
    import pyarrow as pa

    values = _to_arrow(values)
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return {"value": _without_views(values)}
    if not isinstance(values, pa.Table | pa.RecordBatch):
        message = f"not sent: send_many takes Arrow arrays, tables and record batches, not {type(values).__name__}"
        raise RequestError(message, code="bad_record")
    columns: ArrowColumns = dict(zip(values.schema.names, cast("list[ArrowArray]", values.columns), strict=True))
    given = set(columns) - {"topic", "partition", "offset"}
    if "value" not in columns or given - {"value", "key", "timestamp", "headers"}:
        raise RequestError(
            f"not sent: the columns must be value and optionally key, timestamp, headers; got {sorted(columns)}"
        )
    return {name: _without_views(columns[name]) for name in given}


def _without_views(column: Any) -> ArrowArray:
    """Return a text or bytes column without the view layout of polars, which few Arrow functions support."""
    import pyarrow as pa

    if pa.types.is_string_view(column.type):
        return cast("ArrowArray", column.cast(pa.large_string()))
    return cast("ArrowArray", column.cast(pa.large_binary()) if pa.types.is_binary_view(column.type) else column)


def _to_arrow(values: Any) -> Any:
    """Convert a mapping of columns, a data frame or a series to Arrow; return Arrow data unchanged."""
    import pyarrow as pa

    if type(values).__module__.split(".")[0] == "pyarrow":
        return values
    try:
        if isinstance(values, Mapping):
            return pa.table(dict(values))
        if hasattr(values, "columns"):
            is_pandas = type(values).__module__.split(".")[0] == "pandas"
            return pa.Table.from_pandas(values, preserve_index=False) if is_pandas else pa.table(values)
        return pa.chunked_array(values)
    except (pa.ArrowException, TypeError, ValueError) as error:
        message = f"not sent: {type(values).__name__} cannot be read as columns: {error}"
        raise RequestError(message, code="bad_record") from error


def split_by_key(columns: ArrowColumns, partition_count: int) -> Iterator[tuple[PartitionId | None, ArrowColumns]]:
    """Yield the records by the partition of their key, in order; None for records without a key."""
    keys = columns.get("key")
    if keys is None or keys.null_count == len(keys):
        yield None, columns
        return
    import numpy as np
    import pyarrow as pa

    whole = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
    encoded: Any = whole.cast(pa.large_binary()).dictionary_encode()
    by_key = [partition_of(key, partition_count) for key in encoded.dictionary.to_pylist()]
    targets = np.array([*by_key, -1])[encoded.indices.fill_null(len(by_key)).to_numpy(zero_copy_only=False)]
    for target in np.unique(targets):
        chosen = np.flatnonzero(targets == target)
        part: ArrowColumns = {name: column.take(chosen) for name, column in columns.items()}
        yield (None if target < 0 else PartitionId(int(target))), part


def cut_columns(columns: ArrowColumns, batch_bytes: int) -> Iterator[tuple[ArrowColumns, int]]:
    """Yield slices of the columns of about one batch, each with its size in the buffer."""
    total = len(columns["value"])
    if not total:
        return
    count = max(1, min(COUNT_MAX, batch_bytes * total // max(1, _columns_bytes(columns))))
    for first in range(0, total, count):
        yield from _halve_columns(_slice(columns, first, count), batch_bytes)


def _halve_columns(columns: ArrowColumns, batch_bytes: int) -> Iterator[tuple[ArrowColumns, int]]:
    size_bytes, count = _columns_bytes(columns), len(columns["value"])
    if size_bytes <= OVERSIZE_FACTOR * batch_bytes or count == 1:
        yield columns, size_bytes
        return
    for first in (0, count // 2):
        length = count // 2 if not first else count - count // 2
        yield from _halve_columns(_slice(columns, first, length), batch_bytes)


def _slice(columns: ArrowColumns, first: int, count: int) -> ArrowColumns:
    return {name: column.slice(first, count) for name, column in columns.items()}


def _columns_bytes(columns: ArrowColumns) -> int:
    return RECORD_BYTES * len(columns["value"]) + sum(column.nbytes for column in columns.values())
