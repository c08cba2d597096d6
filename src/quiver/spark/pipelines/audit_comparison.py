"""Compare two sources that should have the same records, and classify the differences. Pure.

First by digests: find the *segments* of offsets whose digests differ. Then, only in those, record by record: explain
the records by as few faults as possible, first by offset (which record is at each offset), then, if that needs fewer
faults, by order (a missing or doubled record shifts all that follow). A *fault* names the offset and the problem.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Final, Literal

import msgspec

from quiver.record.digest import BLOCK_RECORDS, Digest, Lanes

SEQUENCE_RECORDS_MAX: Final = 4096
"""Maximum records between the first and last difference for a comparison by order, which is slow."""

FaultKind = Literal["lost", "doubled", "altered", "swapped", "unexpected", "unreadable", "unreachable"]
Digests = Mapping[int, Digest]
"""Digests of the segments between adjacent edges, by first offset; absent: no records."""


class RecordFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fault in a range of offsets.

    lost: no record. unexpected: a record that should not exist. altered: a different record. swapped: the record of
    `other`. doubled: another copy of the record of `other`. unreadable, unreachable: content unknown.
    """

    kind: FaultKind
    offset: int
    end_offset: int
    other: int | None = None
    detail: str = ""

    @property
    def count(self) -> int:
        """The number of offsets."""
        return self.end_offset - self.offset


class RecordDigests(msgspec.Struct, frozen=True):
    """Offsets and content digests of records, in the order found."""

    offsets: list[int]
    contents: list[bytes]

    @classmethod
    def of(cls, offsets: Iterable[int], contents: Lanes) -> RecordDigests:
        """Create it from offsets and their content digests."""
        raw = contents.T.tobytes()
        return cls(list(offsets), [raw[at : at + 16] for at in range(0, len(raw), 16)])


class DifferingRange(msgspec.Struct, frozen=True):
    """A range of offsets where a source differs from the reference."""

    first_offset: int
    end_offset: int


# -- digests -----------------------------------------------------------------------------------------


def choose_reference(edges: Sequence[int], copies: Sequence[Digests]) -> dict[int, tuple[Digest, int]]:
    """Return for each segment the digest of most copies, and the index of the first copy with it."""
    chosen: dict[int, tuple[Digest, int]] = {}
    for first in edges[:-1]:
        held = [copy.get(first, Digest()) for copy in copies]
        digest = Counter(held).most_common(1)[0][0]
        chosen[first] = (digest, held.index(digest))
    return chosen


def find_differences(edges: Sequence[int], reference: Digests, found: Digests) -> list[DifferingRange]:
    """Return the ranges where digests differ; adjacent segments are joined up to the size of a block."""
    differences: list[DifferingRange] = []
    for first, end in pairwise(edges):
        if reference.get(first, Digest()) == found.get(first, Digest()):
            continue
        last = differences[-1] if differences else None
        if last is not None and last.end_offset == first and end - last.first_offset <= BLOCK_RECORDS:
            differences[-1] = DifferingRange(last.first_offset, end)
        else:
            differences.append(DifferingRange(first, end))
    return differences


def check_runs(
    runs: Sequence[tuple[int, int, Digest]], edges: Sequence[int], reference: Digests, *, is_gapless: bool
) -> list[RecordFault]:
    """Check the runs that a client stated for a partition; return their faults.

    `edges` contains the ends of all runs. Runs before the first edge are skipped: retention removed their records.
    With `is_gapless` the client must have seen every record between its first and its last.
    """
    faults: list[RecordFault] = []
    reached: int | None = None
    for first, end, digest in sorted(runs, key=lambda run: run[:2]):
        if not edges or first < edges[0]:
            reached = end if reached is None else max(reached, end)
            continue
        if reached is not None and first < reached:
            detail = "seen more than once"
            faults.append(
                RecordFault(kind="doubled", offset=first, end_offset=min(end, reached), other=first, detail=detail)
            )
        elif reached is not None and first > reached and is_gapless:
            faults.append(RecordFault(kind="lost", offset=reached, end_offset=first, detail="never seen"))
        reached = end if reached is None else max(reached, end)
        if end > edges[-1]:
            detail = f"seen, but the partition ends at {edges[-1]}"
            faults.append(RecordFault(kind="lost", offset=max(first, edges[-1]), end_offset=end, detail=detail))
        elif _sum(edges, reference, first, end) != digest:
            faults.append(
                RecordFault(
                    kind="altered",
                    offset=first,
                    end_offset=end,
                    detail="the client saw different content in this range",
                )
            )
    return faults


def _sum(edges: Sequence[int], reference: Digests, first: int, end: int) -> Digest:
    total = Digest()
    for at in edges[bisect_left(edges, first) : bisect_left(edges, end)]:
        total += reference.get(at, Digest())
    return total


# -- records -----------------------------------------------------------------------------------------


def find_faults(expected: RecordDigests, found: RecordDigests) -> list[RecordFault]:
    """Compare records with the expected ones; return the faults by offset."""
    by_place = _by_place(expected, found)
    is_plain = len(by_place) < 2 or all(fault.kind != "altered" for fault in by_place)
    if is_plain:
        return by_place
    by_order = _by_order(expected, found)
    if by_order is None or len(by_order) > len(by_place):
        return by_place
    is_same_length = len(by_order) == len(by_place)
    return by_place if is_same_length and all(fault.kind != "doubled" for fault in by_order) else by_order


def _by_place(expected: RecordDigests, found: RecordDigests) -> list[RecordFault]:
    """Explain the differences by offset."""
    right = dict(zip(expected.offsets, expected.contents, strict=True))
    places = {content: offset for offset, content in right.items()}
    seen: dict[int, bytes] = {}
    faults: list[RecordFault] = []
    for offset, content in zip(found.offsets, found.contents, strict=True):
        if offset in seen or offset not in right:
            faults.append(_surplus(offset, places.get(content)))
        seen.setdefault(offset, content)
    faults += [_at("lost", offset) for offset in right if offset not in seen]
    wrong = {offset: content for offset, content in seen.items() if right.get(offset, content) != content}
    owners = {right[offset]: offset for offset in wrong}
    for offset, content in wrong.items():
        owner = owners.get(content)
        if owner is None:
            faults.append(_at("altered", offset))
        elif offset < owner or wrong[owner] != right[offset]:  # a swapped pair is reported once
            faults.append(_at("swapped", offset, owner))
    return sorted(faults, key=lambda fault: (fault.offset, fault.kind))


def _by_order(expected: RecordDigests, found: RecordDigests) -> list[RecordFault] | None:
    """Explain the differences by order; None if there are too many records to compare."""
    left, right = expected.contents, found.contents
    first = next((at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)
    first = min(len(left), len(right)) if first is None else first
    tail = 0
    while tail < min(len(left), len(right)) - first and left[-1 - tail] == right[-1 - tail]:
        tail += 1
    middle_left, middle_right = left[first : len(left) - tail], right[first : len(right) - tail]
    if max(len(middle_left), len(middle_right)) > SEQUENCE_RECORDS_MAX:
        return None
    places = dict(zip(left, expected.offsets, strict=True))
    faults: list[RecordFault] = []
    for _, left_first, left_end, right_first, right_end in SequenceMatcher(
        None, middle_left, middle_right, autojunk=False
    ).get_opcodes():
        if middle_left[left_first:left_end] == middle_right[right_first:right_end]:
            continue
        gone, new = expected.offsets[first:][left_first:left_end], range(first + right_first, first + right_end)
        both = min(len(gone), len(new))
        faults += [_at("altered", offset) for offset in gone[:both]]
        faults += [_at("lost", offset) for offset in gone[both:]]
        faults += [_surplus(found.offsets[at], places.get(right[at])) for at in new[both:]]
    return faults


def _at(kind: FaultKind, offset: int, other: int | None = None) -> RecordFault:
    return RecordFault(kind=kind, offset=offset, end_offset=offset + 1, other=other)


def _surplus(offset: int, owner: int | None) -> RecordFault:
    return _at("unexpected", offset) if owner is None else _at("doubled", offset, owner)
