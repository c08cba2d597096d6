"""Make a failing schedule short: leave faults out while the run still fails.

First halves, then smaller parts, then one by one, as delta debugging does; bounded by a number of runs. The
finding may change on the way, as long as there is one: a shorter schedule that shows another symptom of the
same fault is as good, and the full one is always at hand.
"""

from __future__ import annotations

from collections.abc import Callable

from quiver.testing.report import Report, Run

RUNS_MAX = 60

Rerun = Callable[[frozenset[int]], Report]
"""Run a seed without the faults of these numbers."""


def shrink(report: Report, run: Run, *, runs_max: int = RUNS_MAX) -> Report | None:
    """Return the report of the shortest schedule found that fails as the seed of a report does; None if it does not."""
    if report.finding is None:
        return None
    numbers = list(range(len(report.schedule)))
    return Shrinking(numbers, lambda left_out: run(report.seed, left_out=left_out), runs_max).shorten()


class Shrinking:
    """One search for a short schedule."""

    def __init__(self, numbers: list[int], run: Rerun, runs_max: int) -> None:
        self._all = frozenset(numbers)
        self._kept = numbers
        self._run = run
        self._runs_left = runs_max
        self._best: Report | None = None

    def shorten(self) -> Report | None:
        """Search until nothing can be left out any more, or the runs are used up."""
        if not self._still_fails(self._kept):
            return None
        part = len(self._kept)
        while part and self._runs_left:
            if not self._drop_one_part(part):
                part //= 2
            part = min(part, len(self._kept))
        return self._best

    def _drop_one_part(self, part: int) -> bool:
        """Leave the first part out that is not needed; tell whether there was one."""
        return any(
            self._still_fails(self._kept[:first] + self._kept[first + part :])
            for first in range(0, len(self._kept), part)
        )

    def _still_fails(self, kept: list[int]) -> bool:
        if not self._runs_left:
            return False
        self._runs_left -= 1
        report = self._run(self._all.difference(kept))
        if report.finding is None:
            return False
        self._kept, self._best = kept, report
        return True
