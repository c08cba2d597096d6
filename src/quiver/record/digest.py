"""Digests of records: 128 bits and a count that tell whether two places hold the same records at the same offsets.

A record's *content digest* is over its timestamp, key, value and headers; bound to its offset it becomes its digest.
The digest of many is the sum of theirs, so that it comes out the same however they are split and in whatever order the
parts are added up; a record that is lost, doubled, altered or has changed places with another changes the sum. There
is no loop over records, except over those with a key or value of more than `SHORT_BYTES_MAX` bytes.

Two lanes of 64 bits run beside each other, with constants of their own. Each step of a lane is a bijection of its
state for any given word, and of the word for any given state: two records that differ in one word of eight bytes
differ in both lanes. The digests detect accidents and defects, not attacks: collisions can be constructed.

`docs/protocol/digest.md` has the definition: digests are stored and compared across versions, so it never changes.
Needs the extra `arrow`, as `quiver.record.arrow` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final, TypeAlias, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quiver.errors import RequestError

BLOCK_RECORDS: Final = 65_536
"""Offsets that one digest is usually over: those from a multiple of this to the next."""
SHORT_BYTES_MAX: Final = 512
"""Byte strings up to here go through the lanes word by word, all together; longer ones are hashed one at a time."""

Lanes: TypeAlias = "npt.NDArray[np.uint64]"
"""Two rows, one per lane, and a column for each record."""
_Words: TypeAlias = "npt.NDArray[Any]"

_MASK = (1 << 64) - 1
_SEEDS = np.array([[0x243F6A8885A308D3], [0x13198A2E03707344]], np.uint64)
_FACTORS = np.array([[0x9E3779B97F4A7C15], [0xC2B2AE3D27D4EB4F]], np.uint64)
_SHIFT = np.uint64(32)
_FINAL_SHIFT = np.uint64(33)
_FINAL_FACTORS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_TAIL_MASKS = np.array([(1 << 8 * count) - 1 for count in range(8)], np.uint64)
_WORD_BYTES = 8


class Digest(msgspec.Struct, frozen=True, gc=False):
    """The digest of some records; zero for no records."""

    count: int = 0
    low: int = 0
    high: int = 0

    def __add__(self, other: Digest) -> Digest:
        low, high = self.low + other.low & _MASK, self.high + other.high & _MASK
        return Digest(self.count + other.count, low, high)

    @property
    def text(self) -> str:
        """The 128 bits as 32 hexadecimal digits."""
        return f"{self.high:016x}{self.low:016x}"

    @classmethod
    def from_text(cls, count: int, text: str) -> Digest:
        """Parse the text form; raises `ValueError` if it is malformed."""
        if len(text) != 32:
            raise ValueError(f"a digest has 32 digits, not {text!r}")
        return cls(count, int(text[16:], 16), int(text[:16], 16))


def digest_contents(records: pa.RecordBatch | pa.Table) -> Lanes:
    """Return every record's content digest.

    Columns are `timestamp` (any Arrow timestamp, cut to milliseconds, or integers), `key`, `value` and perhaps
    `headers`, as `quiver.record.arrow` and tables made from it have them; others are ignored. Raises `RequestError` for
    other types.
    """
    count = len(records)
    key, value = _column(records, "key"), _column(records, "value")
    lanes = np.repeat(_SEEDS, count, axis=1)
    _step(lanes, _milliseconds(_column(records, "timestamp")))
    _step(lanes, _is_valid(key) | _is_valid(value) << np.uint64(1))
    _step(lanes, _hash_column(key))
    _step(lanes, _hash_column(value))
    header_counts, headers = _hash_headers(records)
    _step(lanes, header_counts)
    _step(lanes, headers)
    return lanes


def bind(contents: Lanes, offsets: npt.NDArray[np.int64]) -> Lanes:
    """Return every record's digest, given its content digest and its offset."""
    lanes = contents.copy()
    _step(lanes, offsets.astype(np.uint64))
    _finish(lanes)
    return lanes


def offsets_of(records: pa.RecordBatch | pa.Table) -> npt.NDArray[np.int64]:
    """Return the column `offset`."""
    return cast("npt.NDArray[np.int64]", _column(records, "offset").cast(pa.int64()).to_numpy())


def digest_ranges(records: pa.RecordBatch | pa.Table, edges: Sequence[int]) -> dict[int, Digest]:
    """Return what records add up to between each two neighbours of `edges`, by the offset at which the range begins.

    `edges` are sorted. Records before the first and from the last on are left out, and so are ranges without records.
    """
    if not len(records):
        return {}
    offsets = offsets_of(records)
    lanes = bind(digest_contents(records), offsets)
    ranges = np.searchsorted(np.asarray(edges, np.int64), offsets, side="right") - 1
    firsts = np.concatenate(([0], np.flatnonzero(np.diff(ranges)) + 1))
    sums = np.add.reduceat(lanes, firsts, axis=1)
    counts = np.diff(np.append(firsts, len(offsets)))
    found: dict[int, Digest] = {}
    for at, count, low, high in zip(
        ranges[firsts].tolist(), counts.tolist(), sums[0].tolist(), sums[1].tolist(), strict=True
    ):
        if 0 <= at < len(edges) - 1:
            found[edges[at]] = found.get(edges[at], Digest()) + Digest(count, low, high)
    return found


def block_edges(first_offset: int, end_offset: int, block_records: int = BLOCK_RECORDS) -> list[int]:
    """Return where blocks begin between two offsets, and these two: the edges of the blocks, whole or cut."""
    if first_offset >= end_offset:
        return []
    first_block = (first_offset // block_records + 1) * block_records
    return [first_offset, *range(first_block, end_offset, block_records), end_offset]


# -- lanes -------------------------------------------------------------------------------------------


def _step(lanes: Lanes, words: _Words) -> None:
    """Take one more word into each state: words for all lanes, or a row for each."""
    np.bitwise_xor(lanes, words, out=lanes)
    np.multiply(lanes, _FACTORS, out=lanes)
    np.bitwise_xor(lanes, lanes >> _SHIFT, out=lanes)


def _finish(lanes: Lanes) -> None:
    """Let every bit of a state bear on all others, so that sums of states do not cancel out."""
    for factor in _FINAL_FACTORS:
        np.bitwise_xor(lanes, lanes >> _FINAL_SHIFT, out=lanes)
        np.multiply(lanes, factor, out=lanes)
    np.bitwise_xor(lanes, lanes >> _FINAL_SHIFT, out=lanes)


def _hash_column(column: pa.Array[Any]) -> Lanes:
    """Return the lanes of every byte string of a column; a null's are those of the empty one."""
    count = len(column)
    if column.null_count == count:
        return np.repeat(_hash_short(np.zeros(_WORD_BYTES, np.uint8), *np.zeros((2, 1), np.int64)), count, axis=1)
    starts, lengths, data = _bytes_of(column)
    is_long = lengths > SHORT_BYTES_MAX
    if not is_long.any():
        return _hash_short(data, starts, lengths)
    lanes = np.empty((2, count), np.uint64)
    short, long = np.flatnonzero(~is_long), np.flatnonzero(is_long)
    lanes[:, short] = _hash_short(data, starts[short], lengths[short])
    lanes[:, long] = _hash_long(data, starts[long], lengths[long])
    return lanes


def _bytes_of(column: pa.Array[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return where each byte string begins, how long it is, and the bytes, a word longer than they are."""
    array = column.cast(pa.large_binary())
    _, offset_buffer, data_buffer = array.buffers()
    assert offset_buffer is not None
    offsets = np.frombuffer(memoryview(offset_buffer), np.int64, len(array) + 1, 8 * array.offset)
    first, end = int(offsets[0]), int(offsets[-1])
    data = np.zeros(end - first + _WORD_BYTES, np.uint8)
    if data_buffer is not None:
        data[: end - first] = np.frombuffer(memoryview(data_buffer), np.uint8, end - first, first)
    lengths = np.diff(offsets)
    if array.null_count:
        lengths *= array.is_valid().to_numpy(zero_copy_only=False)  # a null may hide bytes
    return offsets[:-1] - first, lengths, data


def _hash_short(data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Lanes:
    """Hash byte strings beside each other, a word of each at a time; the longest first, so that who is done drops out.

    `data` extends one word beyond the last of them.
    """
    # A word at every byte: where a string begins is not aligned.
    words = np.ndarray(len(data) - _WORD_BYTES + 1, "<u8", data.data, strides=(1,))
    word_counts = (lengths >> 3).astype(np.int16)
    order = np.argsort(-word_counts, kind="stable")
    at, lengths = starts[order], lengths[order]
    lanes = (lengths + 1).astype(np.uint64) * _SEEDS
    left = len(order) - np.cumsum(np.bincount(word_counts))
    for active in left[:-1].tolist():
        _step(lanes[:, :active], words[at[:active]])
        at[:active] += _WORD_BYTES
    _step(lanes, words[at] & _TAIL_MASKS[lengths & 7])
    hashed = np.empty_like(lanes)
    hashed[:, order] = lanes
    return hashed


def _hash_long(data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Lanes:
    view = data.data
    hashes = [
        blake2b(view[start : start + length], digest_size=2 * _WORD_BYTES).digest()
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]
    return np.frombuffer(b"".join(hashes), "<u8").reshape(-1, 2).T.astype(np.uint64)


def _hash_headers(records: pa.RecordBatch | pa.Table) -> tuple[_Words, _Words]:
    """Return how many headers each record has, and the lanes of all of them; no headers, empty or null: none."""
    none = np.zeros(len(records), np.uint64)
    if "headers" not in records.schema.names:
        return none, none
    column: Any = _column(records, "headers")
    counts = np.asarray(column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), np.int64)
    ends = np.cumsum(counts)
    if not ends[-1]:
        return none, none
    keys, values = cast("pa.StructArray", column.flatten()).flatten()
    lanes = np.repeat(_SEEDS, len(keys), axis=1)
    _step(lanes, (np.arange(len(keys)) - np.repeat(ends - counts, counts)).astype(np.uint64))
    _step(lanes, _hash_column(keys))
    _step(lanes, _is_valid(values))
    _step(lanes, _hash_column(values))
    _finish(lanes)
    sums = np.concatenate((np.zeros((2, 1), np.uint64), np.cumsum(lanes, axis=1)), axis=1)
    return counts.astype(np.uint64), sums[:, ends] - sums[:, ends - counts]


# -- columns -----------------------------------------------------------------------------------------


def _column(records: pa.RecordBatch | pa.Table, name: str) -> pa.Array[Any]:
    if name not in records.schema.names:
        raise RequestError(f"records without a column {name} have no digest; there are {records.schema.names}")
    column: Any = records.column(name)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # as some versions return what consists of one piece
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    return cast("pa.Array[Any]", column)


def _is_valid(column: pa.Array[Any]) -> npt.NDArray[np.uint64]:
    return cast("npt.NDArray[np.uint64]", column.is_valid().to_numpy(zero_copy_only=False).astype(np.uint64))


def _milliseconds(column: pa.Array[Any]) -> npt.NDArray[np.uint64]:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False)
    elif not pa.types.is_integer(column.type):
        raise RequestError(f"timestamps cannot be {column.type}")
    return cast("npt.NDArray[np.uint64]", column.cast(pa.int64()).to_numpy().view(np.uint64))
