"""What of a queue's outstanding records can be delivered again, and when: expired leases, due retries, orders of keys.

Only the leader has it; it is rebuilt from the window when a term begins. Entries are *hints*: spans of records with a
time. A hint is compared with the window when it is used, and dropped if the records are settled, leased, or not due any
more. So the schedule never decides anything alone, and a change of the window costs at most one new hint.

Where a queue keeps the order of keys, a record is delivered only if no earlier record of its key is outstanding. The
others are parked, and get their turn when the one before is settled (`release_keys`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator

from quiver.partition.queue_operations import LEASED, WAITING, Run
from quiver.partition.queue_window import QueueWindow

HINTS_MIN = 1_024
"""Fewer hints are never rebuilt: the scan would cost more than the memory."""


def is_due(run: Run, now_ms: int) -> bool:
    """Return whether records can be delivered again: their lease has ended, or their delay is over."""
    return run.time_ms <= now_ms


class LeaseSchedule:
    """The hints of one queue."""

    def __init__(self, window: QueueWindow) -> None:
        self._later: list[tuple[int, int, int]] = []
        """(time, first, count): hints that are not due yet, as a heap."""
        self._expired: list[tuple[int, int]] = []
        """(first, count) of leases that have ended, as a heap."""
        self._waited: list[tuple[int, int]] = []
        """(first, count) of records whose delay is over, as a heap."""
        self._keys: dict[int, deque[int]] = {}
        """Offsets of the outstanding records of each key, ascending; settled ones are dropped when they are met."""
        self._rebuild(window)

    @property
    def has_keys(self) -> bool:
        """Return whether records with keys may be outstanding."""
        return bool(self._keys)

    def next_ms(self) -> int | None:
        """Return when the next hint is due; None if there is none."""
        if self._expired or self._waited:
            return 0
        return self._later[0][0] if self._later else None

    def add(self, first: int, count: int, time_ms: int) -> None:
        """Add a hint for records whose time has changed."""
        heapq.heappush(self._later, (time_ms, first, count))

    def add_keys(self, first: int, count: int, key: int) -> None:
        """Note fresh records of a key."""
        self._keys.setdefault(key, deque()).extend(range(first, first + count))

    def release_keys(self, window: QueueWindow, keys: Iterable[int]) -> None:
        """Give the next record of each key its turn, after records of these keys were settled."""
        for key in keys:
            head = self._head(window, key)
            if head is not None:
                self.add(head.first, 1, head.time_ms)

    def take(self, window: QueueWindow, now_ms: int) -> Iterator[Run]:
        """Yield runs to deliver again now, as parts of the window's: expired leases first, then those that waited.

        What is yielded is no hint any more: the caller leases it, kills it, or puts it back, once it has ended this
        iteration.
        """
        self._advance(window, now_ms)
        for hints, state in ((self._expired, LEASED), (self._waited, WAITING)):
            position = 0
            while hints:
                first, count = heapq.heappop(hints)
                first, end = max(first, position), first + count
                run = next(window.overlapping(first, end), None)
                if run is None:
                    continue
                low, high = max(run.first, first), min(run.end, end)
                is_ready = run.state == state and is_due(run, now_ms) and self._is_in_turn(window, run, low)
                if is_ready and run.key:
                    high = low + 1  # the next one has its turn when this one is settled
                position = high
                if high < end:
                    heapq.heappush(hints, (high, end - high))
                if is_ready:
                    yield Run(low, high - low, run.state, run.attempt, run.grant, run.time_ms, run.key)

    def put_back(self, run: Run) -> None:
        """Return a run that `take` yielded and that is still to be delivered."""
        heapq.heappush(self._expired if run.state == LEASED else self._waited, (run.first, run.count))

    def has_due(self, window: QueueWindow, now_ms: int) -> bool:
        """Return whether there may be something to deliver again."""
        self._advance(window, now_ms)
        return bool(self._expired or self._waited)

    def _advance(self, window: QueueWindow, now_ms: int) -> None:
        """Move hints that are due to those that can be used."""
        if len(self._later) > HINTS_MIN and len(self._later) > 4 * len(window.runs):
            self._rebuild(window)
        later = self._later
        while later and later[0][0] <= now_ms:
            _, first, count = heapq.heappop(later)
            for run in window.overlapping(first, first + count):
                if is_due(run, now_ms):
                    low, high = max(run.first, first), min(run.end, first + count)
                    heapq.heappush(self._expired if run.state == LEASED else self._waited, (low, high - low))

    def _is_in_turn(self, window: QueueWindow, run: Run, offset: int) -> bool:
        if not run.key:
            return True
        head = self._head(window, run.key)
        return head is None or head.first == offset

    def is_free(self, window: QueueWindow, key: int) -> bool:
        """Return whether no record of a key is outstanding."""
        return self._head(window, key) is None

    def _head(self, window: QueueWindow, key: int) -> Run | None:
        """Return the first outstanding record of a key, as a run of one."""
        offsets = self._keys.get(key)
        while offsets:
            found = next(window.overlapping(offsets[0], offsets[0] + 1), None)
            if found is not None and found.key == key:
                return Run(offsets[0], 1, found.state, found.attempt, found.grant, found.time_ms, key)
            offsets.popleft()
        self._keys.pop(key, None)
        return None

    def _rebuild(self, window: QueueWindow) -> None:
        self._later = [(run.time_ms, run.first, run.count) for run in window.runs]
        heapq.heapify(self._later)
        self._expired, self._waited, self._keys = [], [], {}
        for run in window.runs:
            if run.key:
                self.add_keys(run.first, run.count, run.key)
