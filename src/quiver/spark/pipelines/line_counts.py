"""Counts of log lines by window, and statistics of them: rates, top messages, error bursts, latency. Pure.

While a window is open, its counts are updated with larger values; the last value is valid. Only the newest windows are
kept.
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
"""Maximum number of windows kept."""
BURST_ERRORS_MIN: Final = 5
BURST_FACTOR: Final = 3.0
"""A burst has at least `BURST_ERRORS_MIN` errors, and `BURST_FACTOR` times the usual number."""
USUAL_WINDOWS: Final = 10
"""Number of preceding windows whose average is the usual number of errors."""
USUAL_WINDOWS_MIN: Final = 3
"""With fewer preceding windows no burst is reported: the first window may be partial."""
ERRORS: Final = frozenset(("FATAL", "ERROR"))


class LineCount(msgspec.Struct, frozen=True, kw_only=True):
    """The count of one message in a window, by level and source."""

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
        """The identity of the count: window, level, source, message."""
        return (self.window_start_ms, self.level, self.source, self.message)


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """A window with many more errors than usual."""

    window_start_ms: int
    errors: int
    usual: float
    message: str
    """The most frequent message."""


class LineLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Time from the lines' timestamps to their processing, in one window."""

    average_ms: float
    max_ms: int


class LineCounts:
    """The counts of the newest windows."""

    def __init__(self, windows_max: int = WINDOWS_MAX) -> None:
        self._windows_max = windows_max
        self._counts: dict[int, dict[tuple[int, str, str, str], LineCount]] = {}

    def update(self, counts: Iterable[LineCount]) -> None:
        """Add counts, or replace older values of them; drop the oldest windows."""
        for count in counts:
            self._counts.setdefault(count.window_start_ms, {})[count.key] = count
        for start in sorted(self._counts)[: -self._windows_max]:
            del self._counts[start]

    @property
    def windows(self) -> list[int]:
        """The start times of all windows with counts, in order."""
        return sorted(self._counts)

    @property
    def window_ms(self) -> int:
        """The length of a window; 0 if there are no counts."""
        return next((own.window_end_ms - own.window_start_ms for own in self.all()), 0)

    def all(self) -> list[LineCount]:
        """Return all counts."""
        return [count for own in self._counts.values() for count in own.values()]

    def by_level(self) -> dict[str, dict[int, int]]:
        """Return line counts by level, gravest first, and window."""
        rates = self._rates("level")
        return {level: rates[level] for level in (*LEVELS, *sorted(set(rates) - set(LEVELS))) if level in rates}

    def by_source(self, sources_max: int) -> dict[str, dict[int, int]]:
        """Return line counts by source and window, for the sources with most lines."""
        rates = self._rates("source")
        most = sorted(rates, key=lambda source: (-sum(rates[source].values()), source))[:sources_max]
        return {source: rates[source] for source in most}

    def top_messages(self, messages_max: int) -> list[tuple[str, str, int]]:
        """Return the most frequent messages, with level and count."""
        totals: Counter[tuple[str, str]] = Counter()
        for own in self.all():
            totals[own.message, own.level] += own.count
        most = sorted(totals.items(), key=lambda item: (-item[1], item[0]))[:messages_max]
        return [(message, level, count) for (message, level), count in most]

    def bursts(self) -> list[Burst]:
        """Return the windows with many more errors than the windows before; a window without lines has no errors."""
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
        """Return the latency of lines by window."""
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
