"""What differs between two places that should hold the same records, and how. Pure.

First by digests: *segments* of offsets whose sums differ. Then, in those alone, record by record: what is there is
explained by as few faults as possible, first by place (what stands at each offset), then, if that says less, by order
(a record that is missing or there twice moves all that follow). A *fault* names the offset and what is wrong there.
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
"""Most records between the first and the last difference that are compared by their order, which takes long."""

FaultKind = Literal["lost", "doubled", "altered", "swapped", "unexpected", "unreadable", "unreachable"]
Digests = Mapping[int, Digest]
"""What stands between each two neighbouring edges, by the first offset; nothing: no records."""


class RecordFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is wrong at some offsets.

    lost: not there. unexpected: there, and should not be. altered: something else is there. swapped: the record of
    `other` is there. doubled: the record of `other` is there once more. unreadable, unreachable: nobody knows.
    """

    kind: FaultKind
    offset: int
    end_offset: int
    other: int | None = None
    detail: str = ""

    @property
    def count(self) -> int:
        """How many offsets it is about."""
        return self.end_offset - self.offset


class RecordDigests(msgspec.Struct, frozen=True):
    """Records as they were found: their offsets and content digests, in order."""

    offsets: list[int]
    contents: list[bytes]

    @classmethod
    def of(cls, offsets: Iterable[int], contents: Lanes) -> RecordDigests:
        """Take offsets and the content digests that belong to them."""
        raw = contents.T.tobytes()
        return cls(list(offsets), [raw[at : at + 16] for at in range(0, len(raw), 16)])


class DifferingRange(msgspec.Struct, frozen=True):
    """Offsets at which somebody has other records than the reference."""

    first_offset: int
    end_offset: int


# -- digests -----------------------------------------------------------------------------------------


def choose_reference(edges: Sequence[int], copies: Sequence[Digests]) -> dict[int, tuple[Digest, int]]:
    """Return for each segment what most copies hold, and the number of the first copy that holds it."""
    chosen: dict[int, tuple[Digest, int]] = {}
    for first in edges[:-1]:
        held = [copy.get(first, Digest()) for copy in copies]
        digest = Counter(held).most_common(1)[0][0]
        chosen[first] = (digest, held.index(digest))
    return chosen


def find_differences(edges: Sequence[int], reference: Digests, found: Digests) -> list[DifferingRange]:
    """Return where digests differ; neighbouring segments count as one, up to the size of a block."""
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
    """Return what is wrong with the runs that a client has stated for a partition.

    `edges` has the ends of all runs among them. Runs that begin before the first edge cannot be checked any more. With
    `is_gapless` the client should have seen everything between its first and its last record.
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
            detail = f"seen, and the partition ends at {edges[-1]}"
            faults.append(RecordFault(kind="lost", offset=max(first, edges[-1]), end_offset=end, detail=detail))
        elif _sum(edges, reference, first, end) != digest:
            faults.append(
                RecordFault(kind="altered", offset=first, end_offset=end, detail="seen otherwise, somewhere in it")
            )
    return faults


def _sum(edges: Sequence[int], reference: Digests, first: int, end: int) -> Digest:
    total = Digest()
    for at in edges[bisect_left(edges, first) : bisect_left(edges, end)]:
        total += reference.get(at, Digest())
    return total


# -- records -----------------------------------------------------------------------------------------


def find_faults(expected: RecordDigests, found: RecordDigests) -> list[RecordFault]:
    """Return what is wrong with the records that were found, by offset."""
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
    """Explain what stands at each offset."""
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
        elif offset < owner or wrong[owner] != right[offset]:  # a pair is told once
            faults.append(_at("swapped", offset, owner))
    return sorted(faults, key=lambda fault: (fault.offset, fault.kind))


def _by_order(expected: RecordDigests, found: RecordDigests) -> list[RecordFault] | None:
    """Explain what follows what; None if there is too much to compare."""
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
