"""A sealed segment is compared with its footer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from log_world import DIRECTORY, append, open_log

from quiver.model import Index, Offset, Term
from quiver.storage.inspection import check_segment
from quiver.storage.recovery import read_footer
from quiver.storage.segment import Segment, segment_name
from quiver.testing import SimulatedDisk


def sealed_segment() -> tuple[SimulatedDisk, Segment]:
    disk = SimulatedDisk()

    async def write() -> None:
        log = open_log(disk)
        await append(log, *(b"%050d" % n for n in range(12)))
        await log.close()

    asyncio.run(write())
    footer = read_footer(disk.open(f"{DIRECTORY}/{segment_name(1)}"))
    assert footer is not None
    return disk, Segment.from_footer(segment_name(1), footer)


def reasons(disk: SimulatedDisk, segment: Segment) -> list[str]:
    file = disk.open(f"{DIRECTORY}/{segment.name}")
    _, findings = check_segment(file, segment, end_position=segment.size_bytes)
    return [finding.reason for finding in findings]


def test_segment_that_is_what_its_footer_says_has_no_findings() -> None:
    assert reasons(*sealed_segment()) == []


def _one_entry_more(segment: Segment) -> None:
    segment.end_index = Index(segment.end_index + 1)


def _one_offset_less(segment: Segment) -> None:
    segment.end_offset = Offset(segment.end_offset - 1)


def _another_term(segment: Segment) -> None:
    segment.terms = [(Index(1), Term(9))]


@pytest.mark.parametrize("change", [_one_entry_more, _one_offset_less, _another_term])
def test_footer_that_disagrees_with_the_batches_is_found(change: Callable[[Segment], None]) -> None:
    disk, segment = sealed_segment()
    change(segment)
    (reason,) = reasons(disk, segment)
    assert reason.startswith("the footer does not match the batches")


def test_index_that_names_no_batch_is_found() -> None:
    disk, segment = sealed_segment()
    segment.index.positions[1] += 1
    (reason,) = reasons(disk, segment)
    assert reason == f"the footer's index points to byte {segment.index.positions[1]}, where no such batch begins"


def test_index_that_names_another_entry_is_found() -> None:
    disk, segment = sealed_segment()
    segment.index.indexes[1] += 1
    assert len(reasons(disk, segment)) == 1
