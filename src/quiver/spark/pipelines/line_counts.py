"""Counts of log lines by window, and what they say: rates, top messages, bursts of errors, latency. Pure.

Counts come again with larger numbers while their window is open; the last one counts. Only the newest windows are
kept: what is shown is what has happened lately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

NO_LEVEL: Final = "NONE"
LEVELS: Final = ("FATAL", "ERROR", "WARN", "INFO", "DEBUG", "TRACE", NO_LEVEL)
"""All levels, gravest first."""
WINDOWS_MAX: Final = 360
"""How many windows are kept."""
BURST_ERRORS_MIN: Final = 5
BURST_FACTOR: Final = 3.0
"""A burst is so many errors at least, and so many times as many as usual."""
USUAL_WINDOWS: Final = 10
"""How many windows before it tell what is usual."""
USUAL_WINDOWS_MIN: Final = 3
"""With fewer nobody knows yet: the first window may be half of one."""
ERRORS: Final = frozenset(("FATAL", "ERROR"))


class LineCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often a message came in a window, by level and source."""

    window_start_ms: int
    window_end_ms: int
    level: str
    source: str
    message: str
    count: int
    latency_ms_sum: int = 0
    latency_ms_max: int = 0

    @property
    def key(self) -> tuple[int, str, str, str]:
        """What it is the count of."""
        return (self.window_start_ms, self.level, self.source, self.message)


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """A window with many more errors than usual."""

    window_start_ms: int
    errors: int
    usual: float
    message: str
    """The one that came most often."""


class LineLatency(msgspec.Struct, frozen=True, kw_only=True):
    """How long lines of a window were under way, from their timestamps to their processing."""

    average_ms: float
    max_ms: int


class LineCounts:
    """The counts of the newest windows."""

    def __init__(self, windows_max: int = WINDOWS_MAX) -> None:
        self._windows_max = windows_max
        self._counts: dict[int, dict[tuple[int, str, str, str], LineCount]] = {}

    def take(self, counts: Iterable[LineCount]) -> None:
        """Take counts that are new, or newer than those that are known."""
        for count in counts:
            self._counts.setdefault(count.window_start_ms, {})[count.key] = count
        for start in sorted(self._counts)[: -self._windows_max]:
            del self._counts[start]

    @property
    def windows(self) -> list[int]:
        """Where the windows begin that there are counts of, in order."""
        return sorted(self._counts)

    @property
    def window_ms(self) -> int:
        """How long a window is; 0 without any."""
        return next((own.window_end_ms - own.window_start_ms for own in self.all()), 0)

    def all(self) -> list[LineCount]:
        """Return all counts."""
        return [count for own in self._counts.values() for count in own.values()]

    def by_level(self) -> dict[str, dict[int, int]]:
        """Return lines by level, gravest first, and window."""
        rates = self._rates("level")
        return {level: rates[level] for level in (*LEVELS, *sorted(set(rates) - set(LEVELS))) if level in rates}

    def by_source(self, sources_max: int) -> dict[str, dict[int, int]]:
        """Return lines by source and window, of those with most lines."""
        rates = self._rates("source")
        most = sorted(rates, key=lambda source: (-sum(rates[source].values()), source))[:sources_max]
        return {source: rates[source] for source in most}

    def top_messages(self, messages_max: int) -> list[tuple[str, str, int]]:
        """Return the messages that came most often, with their level and how often."""
        totals: Counter[tuple[str, str]] = Counter()
        for own in self.all():
            totals[own.message, own.level] += own.count
        most = sorted(totals.items(), key=lambda item: (-item[1], item[0]))[:messages_max]
        return [(message, level, count) for (message, level), count in most]

    def bursts(self) -> list[Burst]:
        """Return the windows with many more errors than those before them; a window without lines has no errors."""
        window_ms, found = self.window_ms, list[Burst]()
        errors = {start: self._errors(start) for start in self.windows}
        for start, messages in errors.items():
            count = messages.total()
            before = range(max(self.windows[0], start - USUAL_WINDOWS * window_ms), start, window_ms or 1)
            usual = sum(errors[at].total() if at in errors else 0 for at in before) / len(before) if before else 0.0
            is_known = len(before) >= USUAL_WINDOWS_MIN
            if is_known and count >= BURST_ERRORS_MIN and count >= BURST_FACTOR * usual:
                message = messages.most_common(1)[0][0]
                found.append(Burst(window_start_ms=start, errors=count, usual=round(usual, 2), message=message))
        return found

    def latency(self) -> dict[int, LineLatency]:
        """Return how late lines were, by window."""
        found: dict[int, LineLatency] = {}
        for start, own in sorted(self._counts.items()):
            count = sum(one.count for one in own.values())
            average_ms = sum(one.latency_ms_sum for one in own.values()) / max(1, count)
            max_ms = max(one.latency_ms_max for one in own.values())
            found[start] = LineLatency(average_ms=round(average_ms, 1), max_ms=max_ms)
        return found

    def _rates(self, name: str) -> dict[str, dict[int, int]]:
        rates: dict[str, dict[int, int]] = {}
        for own in self.all():
            by_window = rates.setdefault(getattr(own, name), {})
            by_window[own.window_start_ms] = by_window.get(own.window_start_ms, 0) + own.count
        return rates

    def _errors(self, start: int) -> Counter[str]:
        errors: Counter[str] = Counter()
        for own in self._counts[start].values():
            if own.level in ERRORS:
                errors[own.message] += own.count
        return errors
