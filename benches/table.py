"""The table that every bench prints: measured figures next to a raw limit and a target.

A raw limit is the speed of the minimum work of the task (a memory copy, a bare system call), measured in the same run,
so that figures from different machines can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

HEADINGS = ("what", "measured", "unit", "raw limit", "of raw", "target", "")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. Units that end in "/s" are rates, of which more is better; of all others less is better."""

    what: str
    measured: float
    unit: str
    raw_limit: float | None = None
    target: float | None = None

    @property
    def is_rate(self) -> bool:
        return self.unit.endswith("/s")

    @property
    def of_raw_limit(self) -> float | None:
        """The share of the raw limit that is reached; 1.0 is all of it."""
        if not self.raw_limit or not self.measured:
            return None
        return self.measured / self.raw_limit if self.is_rate else self.raw_limit / self.measured

    @property
    def passed(self) -> bool:
        if self.target is None:
            return True
        return self.measured >= self.target if self.is_rate else self.measured <= self.target


def best_seconds(work: Callable[[], object], *, loops: int = 5, repeats: int = 100) -> float:
    """Return the seconds that one call of `work` takes, in the run that other programs disturb least."""
    best = float("inf")
    for _ in range(repeats):
        start = perf_counter()
        for _ in range(loops):
            work()
        best = min(best, perf_counter() - start)
    return best / loops


MISSED = 2
"""Exit status of a bench that ran to its end and missed a target; a crash exits with 1."""


def show(rows: Sequence[Row], *, title: str) -> int:
    """Print the rows as an aligned table; return the exit status: 0 if every target is reached, else `MISSED`."""
    lines = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEADINGS))]
    print(f"\n{title}")
    for line in lines:
        first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join([line[0].ljust(len(first)), *rest]).rstrip())
    return 0 if all(row.passed for row in rows) else MISSED


def _cells(row: Row) -> tuple[str, ...]:
    share = row.of_raw_limit
    verdict = "" if row.target is None else "pass" if row.passed else "FAIL"
    return (
        row.what,
        _number(row.measured),
        row.unit,
        _number(row.raw_limit),
        "" if share is None else f"{share:.0%}",
        "" if row.target is None else f"{'≥' if row.is_rate else '≤'} {_number(row.target)}",
        verdict,
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
