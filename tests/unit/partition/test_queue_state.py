"""Windows of work queues in a partition's state: entries, derived cursors, snapshots and what drops them."""

from __future__ import annotations

import msgspec
import pytest

from quiver.errors import ConflictError
from quiver.model import ConsumerId, Index, Offset, Term
from quiver.partition import PartitionState
from quiver.partition.entries import (
    CursorsEntry,
    ForgetEntry,
    PartitionEntry,
    QueueEntry,
    StateSnapshot,
    TrimEntry,
    build_entry,
)
from quiver.partition.queue_operations import NOT_PARKED, QueueAcks, QueueKills, QueueLeases, QueueOpen
from quiver.partition.state import _SavedState
from quiver.record import Batch, build_batch

WORKERS, OTHERS = ConsumerId(4), ConsumerId(9)


class Log:
    """Applies entries to a state, as a replica does."""

    def __init__(self, state: PartitionState | None = None) -> None:
        self.state = state or PartitionState()

    def apply(self, *entries: PartitionEntry) -> None:
        for entry in entries:
            self.add(build_entry(entry))

    def add(self, data: bytes) -> None:
        state = self.state
        stamped = Batch.stamped(
            bytearray(data),
            term=Term(1),
            index=Index(state.applied_index + 1),
            base_offset=state.end_offset,
            append_timestamp=1,
        )
        state.apply([stamped])


def leased(count: int = 10) -> Log:
    """Return a state in which all of some records are leased by grant 1."""
    log = Log()
    log.add(build_batch([b"v"] * count, timestamp=1))
    lease = QueueLeases(WORKERS, 1, 1_000, (), Offset(0), ((count, NOT_PARKED, 0),))
    log.apply(QueueEntry((QueueOpen(WORKERS, Offset(0)), lease)))
    return log


def test_cursor_is_the_first_record_that_is_not_settled() -> None:
    log = leased()
    assert log.state.cursors == {WORKERS: 0}
    log.apply(QueueEntry((QueueAcks(WORKERS, ((1, 9, 1),)),)))
    assert log.state.cursors == {WORKERS: 0}
    log.apply(QueueEntry((QueueAcks(WORKERS, ((0, 1, 1),)),)))
    assert log.state.cursors == {WORKERS: 10}


def test_dead_letter_that_is_not_moved_holds_the_cursor() -> None:
    log = leased()
    kill = QueueKills(WORKERS, ((2, 1, 1),), 5, "bad", is_final=False)
    log.apply(QueueEntry((kill, QueueAcks(WORKERS, ((0, 10, 1),)))))
    assert log.state.cursors == {WORKERS: 2}


@pytest.mark.parametrize("is_saved", [True, False])
def test_windows_are_in_snapshots(*, is_saved: bool) -> None:
    log = leased(2_000)
    acks = tuple((offset, 1, 1) for offset in range(0, 2_000, 2))
    kill = QueueKills(WORKERS, ((5, 1, 1), (9, 1, 1)), 5, "bad", is_final=False)
    log.apply(QueueEntry((QueueAcks(WORKERS, acks), kill, QueueOpen(OTHERS, Offset(7)))))
    restored = PartitionState()
    if is_saved:
        restored.restore(log.state.snapshot())
    else:
        whole = _SavedState(log.state.applied_index, log.state.end_offset, True, log.state.contents())
        restored.restore(msgspec.msgpack.encode(whole))
    assert restored.contents() == log.state.contents()
    assert restored.snapshot() == log.state.snapshot()
    following = QueueEntry((QueueAcks(WORKERS, ((1, 3, 1),)),))
    log.apply(following)
    Log(restored).apply(following)
    assert restored.snapshot() == log.state.snapshot()


def test_snapshot_of_a_program_without_queues_is_read() -> None:
    state = PartitionState()
    contents = msgspec.structs.astuple(StateSnapshot(first_offset=Offset(3), cursors=((WORKERS, Offset(4)),)))[:-1]
    state.restore(msgspec.msgpack.encode((5, 6, True, contents)))
    assert (state.cursors, state.queues, state.first_offset) == ({WORKERS: 4}, {}, 3)


def test_moved_cursor_begins_the_queue_again() -> None:
    log = leased()
    log.apply(CursorsEntry(((WORKERS, Offset(4)), (OTHERS, Offset(1)))))
    window = log.state.queues[WORKERS]
    assert (window.next_offset, window.runs, log.state.cursors) == (4, [], {WORKERS: 4, OTHERS: 1})
    assert window.acknowledge(5, 1, 1) == [(5, 6)]
    assert log.state.queue_resets == 1


def test_forgotten_group_has_no_window() -> None:
    log = leased()
    log.apply(ForgetEntry(Index(3), consumers=(WORKERS,)))
    assert (log.state.queues, log.state.cursors) == ({}, {})
    log.apply(QueueEntry((QueueAcks(WORKERS, ((0, 10, 1),)),)))
    assert (log.state.queues, log.state.cursors) == ({}, {})


def test_trimmed_records_are_settled() -> None:
    log = leased()
    log.apply(TrimEntry(Index(1), Offset(6)))
    assert [(run.first, run.count) for run in log.state.queues[WORKERS].runs] == [(6, 4)]
    assert log.state.cursors == {WORKERS: 6}
    log.apply(QueueEntry((QueueAcks(WORKERS, ((0, 10, 1),)),)))
    assert log.state.cursors == {WORKERS: 10}


def test_entry_is_refused_below_its_feature_level() -> None:
    with pytest.raises(ConflictError, match="upgrade"):
        build_entry(QueueEntry((QueueOpen(WORKERS, Offset(0)),)), level=1)
