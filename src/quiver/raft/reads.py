"""Reads that wait until their leader is known to be the leader still (dissertation §6.4).

A read waits for a round of heartbeats that *began after it arrived* and was answered by a quorum. Reads
that arrive while a round is on its way share the next one. A round's number is never used twice, so a
late answer cannot vouch for a later read (R11).
"""

from __future__ import annotations

from collections import deque

from quiver.model import Index
from quiver.raft.output import ReadReady


class ReadQueue:
    """The reads of one leadership, in order of arrival."""

    __slots__ = ("_unready", "_waiting")

    def __init__(self) -> None:
        self._unready: list[int] = []
        self._waiting: deque[tuple[int, int, Index]] = deque()

    def __len__(self) -> int:
        return len(self._unready) + len(self._waiting)

    def hold(self, context: int) -> None:
        """Keep a read back until the leader has committed in its own term (R10)."""
        self._unready.append(context)

    def add(self, context: int, *, index: Index, needed_round: int) -> None:
        """Let a read of everything up to `index` wait for `needed_round`."""
        self._waiting.append((needed_round, context, index))

    def make_ready(self, *, index: Index, needed_round: int) -> bool:
        """Let the reads that were kept back wait for a round; tell whether there were any."""
        for context in self._unready:
            self.add(context, index=index, needed_round=needed_round)
        released = bool(self._unready)
        self._unready.clear()
        return released

    def needs_round_after(self, latest_round: int) -> bool:
        """Tell whether a read waits for a round later than the latest one begun."""
        return bool(self._waiting) and self._waiting[-1][0] > latest_round

    def has_round_on_its_way(self, latest_round: int) -> bool:
        """Tell whether a read waits for a round that has begun."""
        return bool(self._waiting) and self._waiting[0][0] <= latest_round

    def release(self, confirmed_round: int) -> list[ReadReady]:
        """Remove and return the reads whose round a quorum has answered."""
        ready: list[ReadReady] = []
        waiting = self._waiting
        while waiting and waiting[0][0] <= confirmed_round:
            _, context, index = waiting.popleft()
            ready.append(ReadReady(context, index))
        return ready

    def contexts(self) -> list[int]:
        """Return every read that still waits, in order of arrival."""
        return [*(context for _, context, _ in self._waiting), *self._unready]
