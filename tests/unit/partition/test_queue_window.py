"""The window of a work queue: its runs against a model that keeps a state for every record."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.model import ConsumerId, Offset, PartitionId, ProducerId, TopicId
from quiver.partition.queue_operations import (
    LEASED,
    NOT_PARKED,
    WAITING,
    DeadTarget,
    QueueAcks,
    QueueBurial,
    QueueExtends,
    QueueKills,
    QueueLeases,
    QueueOpen,
    QueueOperation,
    QueuePart,
    QueueReturns,
    QueueTarget,
)
from quiver.partition.queue_window import (
    PART_RUNS,
    QueueWindow,
    add_part,
    apply_operation,
    count_parts,
    freeze_windows,
    frozen_parts,
)

GROUP = ConsumerId(7)

RecordState = tuple[int, int, int, int, int]
"""State, attempt, grant, time, key."""


class NaiveWindow:
    """The same rules, record by record."""

    def __init__(self) -> None:
        self.next_offset = 0
        self.grants = 0
        self.records: dict[int, RecordState] = {}
        self.dead: list[tuple[int, int, int, int, int, str]] = []
        """Sequence, offset, attempt, grant, time, reason."""
        self.dead_next = 0
        self.settled: set[int] = set()
        """What the last operation was to settle and was settled before."""

    def apply(self, operation: QueueOperation) -> set[int]:
        match operation:
            case QueueLeases():
                self._lease(operation)
            case QueueAcks(_, spans):
                return self._settle(spans, None)
            case QueueReturns(_, spans, not_before_ms, is_counted):
                return self._return(spans, not_before_ms, is_counted=is_counted)
            case QueueExtends(_, spans, deadline_ms):
                return self._extend(spans, deadline_ms)
            case QueueKills():
                return self._settle(operation.spans, operation)
            case QueueBurial(_, end_sequence):
                self.dead = [one for one in self.dead if one[0] >= end_sequence]
            case _:
                pass
        return set()

    def _lease(self, operation: QueueLeases) -> None:
        if operation.grant <= self.grants or (operation.fresh and operation.first > self.next_offset):
            return
        self.grants = operation.grant
        for first, count in operation.again:
            for offset in range(first, first + count):
                if offset in self.records:
                    _, attempt, _, _, key = self.records[offset]
                    self.records[offset] = (LEASED, attempt + 1, operation.grant, operation.deadline_ms, key)
        position = operation.first
        for count, not_before_ms, key in operation.fresh:
            for offset in range(position, position + count):
                if offset >= self.next_offset:
                    leased = (LEASED, 1, operation.grant, operation.deadline_ms, key)
                    parked = (WAITING, 0, 0, not_before_ms, key)
                    self.records[offset] = leased if not_before_ms == NOT_PARKED else parked
                    self.next_offset = offset + 1
            position = Offset(position + count)

    def _settle(self, spans: Iterable[tuple[int, int, int]], kills: QueueKills | None) -> set[int]:
        stale = set()
        for first, count, grant in spans:
            dying: dict[int, set[int]] = {}
            for _, offset, _, dead_grant, _, _ in self.dead:
                dying.setdefault(offset, set()).add(dead_grant)
            killed = []
            for offset in range(first, first + count):
                known = self.records.get(offset)
                if known is None:
                    is_stale = offset >= self.next_offset
                    if offset in dying and offset < self.next_offset:
                        is_stale = kills is None or grant not in dying[offset]
                    if is_stale:
                        stale.add(offset)
                    elif offset not in dying:
                        self.settled.add(offset)
                elif known[2] == grant and (known[0] == LEASED or (kills is not None and kills.is_final)):
                    del self.records[offset]
                    killed.append((offset, known[1]))
                else:
                    stale.add(offset)
            for offset, attempt in killed if kills is not None else ():
                assert kills is not None
                self.dead.append((self.dead_next, offset, attempt, grant, kills.time_ms, kills.reason))
                self.dead_next += 1
        return stale

    def _return(self, spans: Iterable[tuple[int, int, int]], not_before_ms: int, *, is_counted: bool) -> set[int]:
        stale = set()
        for first, count, grant in spans:
            for offset in range(first, first + count):
                state, attempt, own, _, key = self.records.get(offset, (None, 0, 0, 0, 0))
                if state == LEASED and own == grant:
                    attempt = attempt if is_counted else max(0, attempt - 1)
                    self.records[offset] = (WAITING, attempt, grant, not_before_ms, key)
                elif not (state == WAITING and own == grant != 0):
                    stale.add(offset)
        return stale

    def _extend(self, spans: Iterable[tuple[int, int, int]], deadline_ms: int) -> set[int]:
        stale = set()
        for first, count, grant in spans:
            for offset in range(first, first + count):
                state, attempt, own, _, key = self.records.get(offset, (None, 0, 0, 0, 0))
                if state == LEASED and own == grant:
                    self.records[offset] = (LEASED, attempt, grant, deadline_ms, key)
                else:
                    stale.add(offset)
        return stale

    def reset(self, offset: int) -> None:
        self.next_offset, self.records = offset, {}

    def trim(self, first_offset: int) -> None:
        self.records = {offset: state for offset, state in self.records.items() if offset >= first_offset}
        self.next_offset = max(self.next_offset, first_offset)


def records_of(window: QueueWindow) -> dict[int, RecordState]:
    return {
        offset: (run.state, run.attempt, run.grant, run.time_ms, run.key)
        for run in window.runs
        for offset in range(run.first, run.end)
    }


def dead_of(window: QueueWindow) -> list[tuple[int, int, int, int, int, str]]:
    return [
        (run.sequence + at, run.first + at, run.attempt, run.grant, run.time_ms, run.reason)
        for run in window.dead
        for at in range(run.count)
    ]


def encode(window: QueueWindow) -> bytes:
    return msgspec.msgpack.encode(list(frozen_parts(freeze_windows({GROUP: window}))))


def check_canonical(window: QueueWindow) -> None:
    for run, following in zip(window.runs, window.runs[1:], strict=False):
        assert run.end <= following.first
        if run.end == following.first:
            assert msgspec.structs.astuple(run)[2:] != msgspec.structs.astuple(following)[2:]
    assert all(run.first < window.next_offset >= run.end for run in window.runs)
    assert window.outstanding == sum(run.count for run in window.runs)
    assert [run.first for run in window.runs] == window._firsts


def check_equal(window: QueueWindow, naive: NaiveWindow) -> None:
    assert records_of(window) == naive.records
    assert dead_of(window) == naive.dead
    assert (window.next_offset, window.grants, window.dead_next) == (naive.next_offset, naive.grants, naive.dead_next)
    offsets = [*naive.records, naive.next_offset, *(one[1] for one in naive.dead)]
    assert window.first_unsettled == min(offsets)
    assert window.in_flight == len(naive.records) + len(naive.dead)
    check_canonical(window)


def offsets_of(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {offset for first, end in ranges for offset in range(first, end)}


def rebuild(window: QueueWindow) -> QueueWindow:
    """Return the window that a snapshot restores."""
    windows: dict[ConsumerId, QueueWindow] = {}
    for part in msgspec.msgpack.decode(encode(window), type=list[QueuePart]):
        add_part(windows, part)
    return windows[GROUP]


def choose_operation(rng: random.Random, window: QueueWindow) -> QueueOperation:
    """Return an operation that concerns records of the window, with grants that are right or nearly so."""

    def span() -> tuple[int, int]:
        return rng.randint(0, max(1, window.next_offset)), rng.randint(1, 8)

    def granted() -> tuple[tuple[int, int, int], ...]:
        found = []
        for _ in range(rng.randint(1, 3)):
            first, count = span()
            run = next(window.overlapping(first, first + count), None)
            grant = run.grant if run is not None and rng.random() < 0.6 else rng.randint(0, window.grants + 1)
            found.append((first, count, grant))
        return tuple(found)

    time_ms, kind = rng.randint(0, 3), rng.random()
    if kind < 0.35:
        fresh = [
            (rng.randint(1, 6), rng.choice((NOT_PARKED, NOT_PARKED, time_ms)), rng.choice((0, 0, 1, 2)))
            for _ in range(rng.randint(0, 3))
        ]
        first = Offset(max(0, window.next_offset + rng.choice((0, 0, 0, -2, 1))))
        again = tuple(span() for _ in range(rng.randint(0, 2)))
        return QueueLeases(GROUP, max(1, window.grants + rng.choice((0, 1, 1, 2))), time_ms, again, first, tuple(fresh))
    if kind < 0.55:
        return QueueAcks(GROUP, granted())
    if kind < 0.7:
        return QueueReturns(GROUP, granted(), time_ms, rng.random() < 0.5)
    if kind < 0.8:
        return QueueExtends(GROUP, granted(), time_ms)
    if kind < 0.95:
        return QueueKills(GROUP, granted(), time_ms, rng.choice(("", "bad")), rng.random() < 0.5)
    return QueueBurial(GROUP, rng.randint(0, window.dead_next))


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_runs_are_equal_to_a_state_for_every_record(rng: random.Random, steps: int) -> None:
    windows = {GROUP: QueueWindow(Offset(0))}
    window, naive = windows[GROUP], NaiveWindow()
    for _ in range(steps):
        if rng.random() < 0.06:
            name, offset = rng.choice(("reset", "trim")), Offset(rng.randint(0, window.next_offset + 3))
            getattr(window, name)(offset)
            getattr(naive, name)(offset)
        else:
            operation = choose_operation(rng, window)
            naive.settled.clear()
            settled: list[tuple[int, int]] = []
            stale = apply_operation(windows, operation, settled)
            assert offsets_of(stale) == naive.apply(operation)
            assert offsets_of(settled) == naive.settled
        check_equal(window, naive)
    assert encode(rebuild(window)) == encode(window)
    check_equal(rebuild(window), naive)


def leased(count: int, *, at_a_time: int = 0) -> QueueWindow:
    windows = {GROUP: QueueWindow(Offset(0))}
    for grant, first in enumerate(range(0, count, at_a_time or count), start=1):
        taken = min(at_a_time or count, count - first)
        fresh = ((taken, NOT_PARKED, 0),)
        apply_operation(windows, QueueLeases(GROUP, grant, 1_000, (), Offset(first), fresh))
    return windows[GROUP]


def test_state_is_bounded_by_the_records_under_way_whatever_is_acknowledged() -> None:
    window = leased(10_000)
    for offset in range(0, 10_000, 2):
        assert window.acknowledge(offset, 1, 1) == []
    assert len(window.runs) == window.outstanding == 5_000
    assert len(encode(window)) < 5_000 * 40
    for offset in range(1, 10_000, 2):
        window.acknowledge(offset, 1, 1)
    assert (window.runs, window.outstanding, window.first_unsettled) == ([], 0, 10_000)
    assert len(encode(window)) < 100


def test_order_of_acknowledgements_leaves_no_trace() -> None:
    forward, backward = leased(500, at_a_time=50), leased(500, at_a_time=50)
    for offset in range(300):
        forward.acknowledge(offset, 1, offset // 50 + 1)
    for offset in reversed(range(300)):
        backward.acknowledge(offset, 1, offset // 50 + 1)
    assert encode(forward) == encode(backward)


def test_receipt_is_stale_once_the_record_is_leased_again() -> None:
    window = leased(10)
    window.lease(QueueLeases(GROUP, 2, 2_000, again=((3, 2),)))
    assert window.acknowledge(0, 10, 1) == [(3, 5)]
    assert [(run.first, run.count, run.attempt, run.grant) for run in window.runs] == [(3, 2, 2, 2)]
    assert window.acknowledge(3, 2, 2) == []
    assert window.acknowledge(0, 10, 1) == []  # all of them are settled: a repeat is done
    assert window.give_back(3, 2, 2, not_before_ms=0, is_counted=True) == [(3, 5)]


def test_receipt_of_a_record_that_was_never_leased_is_stale() -> None:
    window = leased(3)
    assert window.acknowledge(2, 5, 1) == [(3, 7)]
    assert window.first_unsettled == 0
    assert window.next_offset == 3


def test_return_may_be_repeated_but_not_followed_by_an_acknowledgement() -> None:
    window = leased(2)
    assert window.give_back(0, 2, 1, not_before_ms=50, is_counted=True) == []
    assert window.give_back(0, 2, 1, not_before_ms=90, is_counted=True) == []
    assert [run.time_ms for run in window.runs] == [50]
    assert window.acknowledge(0, 2, 1) == [(0, 2)]


def test_dead_letters_get_dense_sequences_and_survive_a_reset() -> None:
    window = leased(6)
    assert window.kill(4, 1, 1, time_ms=9, reason="bad", is_final=False) == []
    assert window.kill(0, 2, 1, time_ms=9, reason="bad", is_final=False) == []
    assert window.kill(0, 2, 1, time_ms=10, reason="bad", is_final=False) == []  # a repeat
    assert window.acknowledge(0, 1, 1) == [(0, 1)]  # dead, and not acknowledged
    assert [(one.sequence, one.first, one.count) for one in window.dead] == [(0, 4, 1), (1, 0, 2)]
    window.reset(Offset(6))
    assert (window.first_unsettled, window.in_flight) == (0, 3)
    window.bury(2)
    assert [(one.sequence, one.first, one.count) for one in window.dead] == [(2, 1, 1)]
    window.bury(3)
    assert (window.first_unsettled, window.in_flight, window.dead_next) == (6, 0, 3)


def test_operations_of_a_queue_without_a_window_change_nothing() -> None:
    windows: dict[ConsumerId, QueueWindow] = {}
    target = DeadTarget(TopicId(1), PartitionId(0), ProducerId(4), 0)
    assert apply_operation(windows, QueueAcks(GROUP, ((0, 1, 1),))) == []
    assert apply_operation(windows, QueueTarget(GROUP, target)) == []
    assert windows == {}
    apply_operation(windows, QueueOpen(GROUP, Offset(5)))
    apply_operation(windows, QueueOpen(GROUP, Offset(9)))
    apply_operation(windows, QueueTarget(GROUP, target))
    assert windows[GROUP].head().next_offset == 5
    assert rebuild(windows[GROUP]).target == target


def test_large_window_is_stored_in_small_rows() -> None:
    window = leased(3 * PART_RUNS, at_a_time=1)
    frozen = freeze_windows({GROUP: window, ConsumerId(3): QueueWindow(Offset(0))})
    parts = list(frozen_parts(frozen))
    assert len(parts) == count_parts(frozen) == 4
    assert max(len(part.runs) for part in parts) == PART_RUNS
    assert encode(rebuild(window)) == encode(window)
