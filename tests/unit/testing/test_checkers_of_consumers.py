"""The checkers of consumers and trims: what is sound they leave alone, and each thing that is not they find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quiver.model import GroupId, Index, NodeId, Offset, ProducerId, Term
from quiver.partition import ConsumeResult
from quiver.partition.entries import StateSnapshot, StateSnapshotEntry, TrimEntry, build_entry
from quiver.record import Batch, build_batch, stamp
from quiver.testing.checkers.committed import CommittedLog, check_consumed, check_nothing_skipped
from quiver.testing.simulator.report import Violation

GROUP, N1 = GroupId(1), NodeId(1)


def stamped(data: bytes, index: int, offset: int) -> Batch:
    placed = stamp(data, term=Term(1), index=Index(index), base_offset=Offset(offset), append_timestamp=1)
    return Batch.decode(placed)


def batch(index: int, offset: int, *values: bytes) -> Batch:
    data = build_batch(values, timestamp=1, producer_id=ProducerId(5), base_sequence=offset)
    return stamped(data, index, offset)


BATCHES = (batch(1, 0, b"a", b"b"), batch(2, 2, b"c"), batch(3, 3, b"d", b"e"))
SUMMARY = stamped(build_entry(StateSnapshotEntry(StateSnapshot())), 4, 5)


def committed(*batches: Batch) -> CommittedLog:
    log = CommittedLog(GROUP)
    log.commit(N1, batches[-1].header.index, lambda _: Term(1))
    for found in batches:
        log.apply(N1, found)
    return log


def consumed(*batches: Batch, first: int, cursor: int) -> ConsumeResult:
    return ConsumeResult(list(batches), Offset(first), Offset(cursor), Offset(5))


def finds(invariant: str, act: Callable[[], object]) -> None:
    with pytest.raises(Violation) as caught:
        act()
    assert caught.value.invariant == invariant


@pytest.mark.parametrize(
    "sound",
    [
        consumed(first=5, cursor=5),
        consumed(BATCHES[0], first=1, cursor=2),
        consumed(*BATCHES, first=0, cursor=4),
        consumed(BATCHES[1], BATCHES[2], first=2, cursor=5),
    ],
)
def test_records_up_to_the_cursor_are_left_alone(sound: ConsumeResult) -> None:
    check_consumed(sound, committed(*BATCHES), node=N1)


@pytest.mark.parametrize(
    "unsound",
    [
        consumed(BATCHES[0], BATCHES[2], first=0, cursor=5),
        consumed(BATCHES[1], first=0, cursor=3),
        consumed(BATCHES[0], first=0, cursor=3),
        consumed(BATCHES[0], BATCHES[1], first=0, cursor=2),
        consumed(first=2, cursor=3),
    ],
)
def test_gaps_and_wrong_cursors_are_found(unsound: ConsumeResult) -> None:
    finds("I17", lambda: check_consumed(unsound, committed(*BATCHES), node=N1))


def test_records_that_are_not_committed_are_found() -> None:
    finds("I7", lambda: check_consumed(consumed(BATCHES[2], first=3, cursor=5), committed(*BATCHES[:2]), node=N1))


def test_skipped_records_are_found_unless_a_call_can_have_taken_them_along() -> None:
    log = committed(*BATCHES)
    seen = {Offset(0), Offset(1), Offset(4)}
    check_nothing_skipped(seen, log, first_offset=Offset(0), lost_max=2, consumer=1)
    check_nothing_skipped(seen, log, first_offset=Offset(3), lost_max=1, consumer=1)
    finds("I17", lambda: check_nothing_skipped(seen, log, first_offset=Offset(0), lost_max=1, consumer=1))


def test_trim_to_a_summary_moves_the_start() -> None:
    log = committed(*BATCHES, SUMMARY, stamped(build_entry(TrimEntry(Index(4), Offset(5))), 5, 5))
    assert log.first_offset == 5


@pytest.mark.parametrize(
    "trim", [TrimEntry(Index(3), Offset(3)), TrimEntry(Index(4), Offset(4)), TrimEntry(Index(5), Offset(5))]
)
def test_trim_to_anything_else_is_found(trim: TrimEntry) -> None:
    finds("I18", lambda: committed(*BATCHES, SUMMARY, stamped(build_entry(trim), 5, 5)))
