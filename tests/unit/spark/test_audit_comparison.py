"""What differs is found by digests, and told by as few faults as possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.record.digest import BLOCK_RECORDS, Digest
from quiver.spark.pipelines.audit_comparison import (
    DifferingRange,
    RecordDigests,
    RecordFault,
    check_runs,
    choose_reference,
    find_differences,
    find_faults,
)


def seen(*contents: str, offsets: list[int] | None = None) -> RecordDigests:
    return RecordDigests(
        list(range(len(contents))) if offsets is None else offsets, [text.encode() for text in contents]
    )


def told(faults: list[RecordFault]) -> list[tuple[str, int, int | None]]:
    assert all(fault.count == 1 for fault in faults)
    return [(fault.kind, fault.offset, fault.other) for fault in faults]


WHOLE = seen(*"abcdefgh")


@pytest.mark.parametrize(
    ("found", "faults"),
    [
        (seen(*"abcdefgh"), []),
        # Rows of a file, which carry their offsets.
        (seen(*"abdefgh", offsets=[0, 1, 3, 4, 5, 6, 7]), [("lost", 2, None)]),
        (seen(*"abccdefgh", offsets=[0, 1, 2, 2, 3, 4, 5, 6, 7]), [("doubled", 2, 2)]),
        (seen(*"abxdefgh"), [("altered", 2, None)]),
        (seen(*"abedcfgh"), [("swapped", 2, 4)]),
        (seen(*"abdcefgh"), [("swapped", 2, 3)]),
        (seen(*"xbcdefgy"), [("altered", 0, None), ("altered", 7, None)]),
        (seen(*"abcdefghx"), [("unexpected", 8, None)]),
        (seen(*"abcdefgha"), [("doubled", 8, 0)]),
        (seen(*"abcdefg"), [("lost", 7, None)]),
        (seen(), [("lost", at, None) for at in range(8)]),
        # A log, in which what is lost or doubled moves what follows.
        (seen(*"abdefgh"), [("lost", 2, None)]),
        (seen(*"abccdefg"), [("doubled", 3, 2), ("lost", 7, None)]),
        (seen(*"aabcdefgh"), [("doubled", 1, 0)]),
        (seen(*"axbcdefgh"), [("unexpected", 1, None)]),
        # Three that have moved round: each is told where its record is from.
        (seen(*"abecdfgh"), [("swapped", 2, 4), ("swapped", 3, 2), ("swapped", 4, 3)]),
    ],
)
def test_faults_are_named(found: RecordDigests, faults: list[tuple[str, int, int | None]]) -> None:
    assert told(find_faults(WHOLE, found)) == faults


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_faults_are_found_exactly_where_there_are_some(expected: list[str], found: list[str]) -> None:
    faults = find_faults(seen(*expected), seen(*found))
    assert (not faults) == (expected == found)


def test_much_that_differs_is_told_by_place() -> None:
    count = 10_000
    expected = seen(*map(str, range(count)))
    shifted = seen(*map(str, range(1, count)), "x")
    assert len(find_faults(expected, shifted)) >= count - 1


def test_contents_are_the_bytes_of_both_lanes() -> None:
    lanes = np.array([[1, 2], [3, 4]], np.uint64)
    found = RecordDigests.of([5, 6], lanes)
    assert found.offsets == [5, 6]
    assert found.contents == [np.array(pair, np.uint64).tobytes() for pair in ([1, 3], [2, 4])]


# -- digests -----------------------------------------------------------------------------------------

A, B, C = Digest(10, 1, 1), Digest(10, 2, 2), Digest(10, 3, 3)


def test_reference_is_what_most_hold_and_the_first_if_nobody_agrees() -> None:
    edges = (0, 10, 20, 30)
    copies = [{0: A, 10: A, 20: A}, {0: A, 10: B, 20: B}, {0: A, 10: B}]
    assert choose_reference(edges, copies) == {0: (A, 0), 10: (B, 1), 20: (A, 0)}
    assert choose_reference((), copies) == {}


def test_neighbouring_differences_are_one_up_to_the_size_of_a_block() -> None:
    edges = (0, 10, 20, 30, 40)
    reference = {0: A, 10: A, 20: A, 30: A}
    assert find_differences(edges, reference, reference) == []
    assert find_differences(edges, reference, {0: A, 10: B, 30: C}) == [DifferingRange(10, 40)]
    assert find_differences(edges, reference, {0: B, 10: A, 20: B, 30: A}) == [
        DifferingRange(0, 10),
        DifferingRange(20, 30),
    ]
    blocks = (0, BLOCK_RECORDS, 2 * BLOCK_RECORDS)
    assert len(find_differences(blocks, {}, {0: A, BLOCK_RECORDS: A})) == 2


def runs_of(*bounds: tuple[int, int]) -> list[tuple[int, int, Digest]]:
    sums = {(0, 10): A, (10, 20): B, (20, 30): C, (0, 20): A + B, (10, 30): B + C}
    return [(*own, sums.get(own, Digest())) for own in bounds]


@pytest.mark.parametrize(
    ("bounds", "faults"),
    [
        ([(0, 10), (10, 20), (20, 30)], []),
        ([(10, 30), (0, 10)], []),
        ([], []),
        ([(10, 20)], []),
        ([(0, 10), (20, 30)], [("lost", 10, 20)]),
        ([(0, 20), (10, 30)], [("doubled", 10, 20)]),
        ([(0, 10), (0, 10)], [("doubled", 0, 10)]),
        ([(-10, 0), (0, 10)], []),
        ([(-10, -5), (10, 20)], [("lost", -5, 10)]),
        ([(20, 30), (30, 40)], [("lost", 30, 40)]),
    ],
)
def test_runs_of_a_consumer_are_gapless_and_told_once(
    bounds: list[tuple[int, int]], faults: list[tuple[str, int, int]]
) -> None:
    found = check_runs(runs_of(*bounds), (0, 10, 20, 30), {0: A, 10: B, 20: C}, is_gapless=True)
    assert [(fault.kind, fault.offset, fault.end_offset) for fault in found] == faults


def test_producer_need_not_have_sent_everything_but_what_it_sent_is_there() -> None:
    edges, reference = (0, 10, 20, 30), {0: A, 10: B, 20: C}
    assert check_runs(runs_of((0, 10), (20, 30)), edges, reference, is_gapless=False) == []
    (fault,) = check_runs([(10, 20, C)], edges, reference, is_gapless=False)
    assert (fault.kind, fault.offset, fault.end_offset) == ("altered", 10, 20)
