"""Digests: the vectorised ones against the definition, spelled out; and that no single fault goes unseen."""

from __future__ import annotations

from hashlib import blake2b
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quiver.errors import RequestError
from quiver.model import Index, Offset, Term
from quiver.record import Batch, build_batch, stamp
from quiver.record.arrow import ARROW_SCHEMA, to_arrow
from quiver.record.digest import BLOCK_RECORDS, Digest, block_edges, digest_ranges

MASK = (1 << 64) - 1
SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)
FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)

BYTES = st.binary(max_size=40) | st.integers(0, 600).map(lambda count: bytes(count % 251 for _ in range(count)))
NULLABLE = st.none() | BYTES
TIMESTAMP = st.integers(-(2**62), 2**62)
HEADERS = st.lists(st.tuples(st.text(max_size=9), NULLABLE), max_size=3)
ROW = st.tuples(TIMESTAMP, NULLABLE, NULLABLE, HEADERS)
ROWS = st.lists(ROW, min_size=1, max_size=30)
Row = tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]


def table(rows: list[Row], first: int = 0) -> pa.RecordBatch:
    """Records one behind the other, from an offset on."""
    timestamps, keys, values, headers = zip(*rows, strict=True)
    pairs = [[{"key": key, "value": value} for key, value in own] or None for own in headers]
    columns: list[Any] = [list(range(first, first + len(rows))), list(timestamps), list(keys), list(values), pairs]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, ARROW_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)


def digest(records: pa.RecordBatch | pa.Table) -> Digest:
    return digest_ranges(records, [0, 1 << 40]).get(0, Digest())


# -- the definition, one record and one word at a time -----------------------------------------------


def step(state: int, word: int, lane: int) -> int:
    state = (state ^ word & MASK) * FACTORS[lane] & MASK
    return state ^ state >> 32


def finish(state: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        state = (state ^ state >> 33) * factor & MASK
    return state ^ state >> 33


def hash_bytes(data: bytes, lane: int) -> int:
    if len(data) > 512:
        return int.from_bytes(blake2b(data, digest_size=16).digest()[8 * lane : 8 * lane + 8], "little")
    state = (len(data) + 1) * SEEDS[lane] & MASK
    whole = len(data) // 8 * 8
    for at in range(0, whole + 8, 8):
        state = step(state, int.from_bytes(data[at : at + 8], "little"), lane)
    return state


def hash_headers(headers: list[tuple[str, bytes | None]], lane: int) -> int:
    total = 0
    for number, (key, value) in enumerate(headers):
        state = step(SEEDS[lane], number, lane)
        for word in (hash_bytes(key.encode(), lane), int(value is not None), hash_bytes(value or b"", lane)):
            state = step(state, word, lane)
        total += finish(state)
    return total & MASK


def spelled_out(rows: list[Row], first: int = 0) -> Digest:
    sums = [0, 0]
    for offset, (timestamp, key, value, headers) in enumerate(rows, first):
        for lane in range(2):
            state = SEEDS[lane]
            for word in (
                timestamp,
                int(key is not None) | int(value is not None) << 1,
                hash_bytes(key or b"", lane),
                hash_bytes(value or b"", lane),
                len(headers),
                hash_headers(headers, lane),
                offset,
            ):
                state = step(state, word, lane)
            sums[lane] = sums[lane] + finish(state) & MASK
    return Digest(len(rows), *sums)


@settings(deadline=None)
@given(ROWS, st.integers(0, 2**40 - 100))
@example([(0, b"x" * 512, b"y" * 513, [])], 0)
@example([(-1, None, b"", [("", None), ("", b"")])], 3)
def test_digest_is_what_its_definition_says(rows: list[Row], first: int) -> None:
    assert digest(table(rows, first)) == spelled_out(rows, first)


def test_digest_of_a_known_record_never_changes() -> None:
    """Digests are stored: a change here makes every audit of what was stored before fail."""
    rows: list[Row] = [(1_700_000_000_123, b"k", b"a line of a log", [("h", b"x")]), (0, None, None, [])]
    assert digest(table(rows)).text == "03743bdeecad1b5809eb4f4b85c6c004"


# -- what it must tell apart, and what it must not ---------------------------------------------------


@settings(deadline=None)
@given(ROWS, st.data())
def test_any_cut_and_any_order_of_the_parts_adds_up_to_the_same(rows: list[Row], data: st.DataObject) -> None:
    whole = table(rows)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows)), max_size=4)) | {0, len(rows)})
    parts = data.draw(st.permutations([whole.slice(first, end - first) for first, end in pairwise(cuts)]))
    total = Digest()
    for part in parts:
        total += digest(part)
    assert total == digest(whole)
    assert digest(pa.Table.from_batches(parts)) == digest(whole)


@settings(deadline=None)
@given(st.lists(ROW, min_size=2, max_size=20, unique_by=repr), st.data())
def test_single_fault_changes_the_digest(rows: list[Row], data: st.DataObject) -> None:
    whole = table(rows)
    at = data.draw(st.integers(0, len(rows) - 1))
    other = data.draw(st.integers(0, len(rows) - 1).filter(lambda number: number != at))
    swapped = list(rows)
    swapped[at], swapped[other] = swapped[other], swapped[at]
    altered = list(rows)
    altered[at] = data.draw(ROW.filter(lambda row: repr(row) != repr(rows[at])))
    lost = [*range(at), *range(at + 1, len(rows))]
    faults = [
        table(swapped),
        table(altered),
        whole.take(pa.array(lost)),
        whole.take(pa.array([*range(len(rows)), at])),
        table(rows[:at] + rows[at + 1 :]),
        table([*rows[:at], rows[at], *rows[at:]]),
        table(rows, first=1),
    ]
    for fault in faults:
        found, right = digest(fault), digest(whole)
        assert (found.low, found.high) != (right.low, right.high)
        assert found.low != right.low
        assert found.high != right.high


@pytest.mark.parametrize(
    ("one", "another"),
    [
        ((0, None, b"a", []), (0, b"", b"a", [])),
        ((0, b"a", None, []), (0, b"a", b"", [])),
        ((0, None, b"a", []), (0, b"a", None, [])),
        ((0, b"ab", b"c", []), (0, b"a", b"bc", [])),
        ((0, b"", b"a", []), (0, b"", b"a\0", [])),
        ((0, b"", b"a", [("k", None)]), (0, b"", b"a", [("k", b"")])),
        ((0, b"", b"a", [("k", b"v"), ("l", b"w")]), (0, b"", b"a", [("l", b"w"), ("k", b"v")])),
        ((0, b"", b"a", [("k", b"v")]), (0, b"", b"a", [("kv", b"")])),
    ],
)
def test_records_that_look_alike_differ(one: Row, another: Row) -> None:
    assert digest(table([one])) != digest(table([another]))


@settings(deadline=None)
@given(ROWS)
def test_batches_and_tables_of_other_types_have_the_same_digest(rows: list[Row]) -> None:
    timestamps, keys, values, headers = zip(*rows, strict=True)
    built = build_batch(values, timestamp=0, keys=keys, timestamps=timestamps, headers=headers)
    stamped = stamp(built, term=Term(1), index=Index(1), base_offset=Offset(7), append_timestamp=0)
    assert digest(to_arrow(Batch.decode(stamped))) == digest(table(rows, 7))
    wide = pa.table(table(rows, 7)).set_column(3, "value", pa.array(values, pa.large_binary()))
    assert digest(wide) == digest(table(rows, 7))


def test_timestamps_in_other_units_count_as_milliseconds() -> None:
    rows: list[Row] = [(1_700_000_000_123, None, b"a", []), (-1, None, b"b", [])]
    plain = pa.table(table(rows))
    for kind in (pa.timestamp("us", tz="UTC"), pa.timestamp("ns"), pa.int64()):
        stamps = plain.column("timestamp").cast(kind)
        assert digest(plain.set_column(1, "timestamp", stamps)) == digest(plain)
    with pytest.raises(RequestError, match="timestamps cannot be"):
        digest(plain.set_column(1, "timestamp", pa.array([1.5, 2.5])))
    with pytest.raises(RequestError, match="without a column key"):
        digest(plain.drop_columns(["key"]))
    assert digest(plain.drop_columns(["headers"])) == digest(plain)


def test_ranges_are_added_up_between_their_edges() -> None:
    rows: list[Row] = [(number, None, b"%d" % number, []) for number in range(10)]
    found = digest_ranges(table(rows, 100), [102, 105, 107])
    assert {first: own.count for first, own in found.items()} == {102: 3, 105: 2}
    assert found[102] == spelled_out(rows[2:5], 102)
    assert found[102] + found[105] == spelled_out(rows[2:7], 102)
    assert digest_ranges(table(rows).slice(0, 0), [0, 10]) == {}


def test_blocks_begin_at_multiples_whatever_range_is_cut() -> None:
    assert block_edges(0, 0) == []
    assert block_edges(5, 10) == [5, 10]
    assert block_edges(0, BLOCK_RECORDS) == [0, BLOCK_RECORDS]
    assert block_edges(7, 25, 10) == [7, 10, 20, 25]
    assert block_edges(10, 20, 10) == [10, 20]


def test_digest_is_read_back_from_its_text() -> None:
    some = Digest(3, 0x123, MASK)
    assert Digest.from_text(3, some.text) == some
    assert some + Digest(1, 1, 1) == Digest(4, 0x124, 0)
    with pytest.raises(ValueError, match="32 digits"):
        Digest.from_text(1, "12")
