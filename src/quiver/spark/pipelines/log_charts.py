"""Charts of log lines over time, as SVG for a page. Pure.

Colours are classes of the page's style, so that charts follow its light and dark colours. All text is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

import msgspec

BARS_MAX: Final = 96
SPARKS_MAX: Final = 48
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 200, 60, 22
_SPARK_WIDTH, _SPARK_HEIGHT = 120, 24


class Axis(msgspec.Struct, frozen=True):
    """Time divided into bars of equal length."""

    start_ms: int
    bar_ms: int
    count: int

    @property
    def end_ms(self) -> int:
        """The end of the last bar."""
        return self.start_ms + self.bar_ms * self.count

    def add_up(self, windows: Sequence[int], series: Sequence[int]) -> list[int]:
        """Return the sums of a series over bars."""
        sums = [0] * self.count
        for start, number in zip(windows, series, strict=True):
            sums[(start - self.start_ms) // self.bar_ms] += number
        return sums


def make_axis(windows: Sequence[int], window_ms: int, bars_max: int) -> Axis:
    """Return at most `bars_max` bars, each of whole windows, that cover all windows."""
    if not windows:
        return Axis(0, max(1, window_ms), 0)
    count = (windows[-1] - windows[0]) // window_ms + 1
    each = -(-count // bars_max)
    return Axis(windows[0], each * window_ms, -(-count // each))


def bar_chart(
    axis: Axis, series: Mapping[str, Sequence[int]], classes: Mapping[str, str], marks: Sequence[tuple[int, int]] = ()
) -> str:
    """Render stacked bars, the first series on top; `marks` are times that are highlighted."""
    totals = [sum(own[at] for own in series.values()) for at in range(axis.count)]
    highest = max(totals, default=0)
    step = (_WIDTH - _LEFT) / max(1, axis.count)
    drawn: list[str] = []
    for start_ms, end_ms in marks:
        left, right = (
            _LEFT + (min(max(at, axis.start_ms), axis.end_ms) - axis.start_ms) / axis.bar_ms * step
            for at in (start_ms, end_ms)
        )
        drawn.append(
            f'<rect class="mark" x="{left:.1f}" y="-8" width="{max(3, right - left):.1f}" height="{_HEIGHT + 8}"/>'
        )
    for at in range(axis.count):
        top = float(_HEIGHT)
        for name in reversed(list(series)):
            number = series[name][at]
            if not number:
                continue
            height = _HEIGHT * number / highest
            top -= height
            title = escape(f"{clock(axis.start_ms + at * axis.bar_ms)} {name}: {number:,}")
            drawn.append(
                f'<rect class="{classes[name]}" x="{_LEFT + at * step:.1f}" y="{top:.1f}"'
                f' width="{max(0.5, step - 1):.1f}" height="{height:.1f}"><title>{title}</title></rect>'
            )
    return _frame(axis, highest, "".join(drawn)) + _legend({name: classes[name] for name in series})


def _frame(axis: Axis, highest: int, drawn: str) -> str:
    lines = [
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{short(number)}</text>'
        for y, number in ((0, highest), (_HEIGHT // 2, highest // 2), (_HEIGHT, 0))
    ]
    times = []
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        at_ms = axis.start_ms + int(share * axis.bar_ms * axis.count)
        x = _LEFT + share * (_WIDTH - _LEFT)
        times.append(f'<text x="{x:.0f}" y="{_HEIGHT + 17}" text-anchor="{anchor}">{clock(at_ms, axis)}</text>')
    box = f"0 -10 {_WIDTH} {_HEIGHT + _BOTTOM + 10}"
    name = f"lines in bars of {duration(axis.bar_ms)}"
    inside = f"{''.join(lines)}{drawn}{''.join(times)}"
    return f'<svg class="chart" viewBox="{box}" role="img" aria-label="{name}">{inside}</svg>'


def _legend(classes: Mapping[str, str]) -> str:
    items = "".join(f'<span><i class="{kind}"></i>{escape(name)}</span>' for name, kind in classes.items())
    return f'<p class="legend">{items}</p>'


def sparkline(numbers: Sequence[int]) -> str:
    """Render a small chart without axes."""
    highest = max(numbers, default=0) or 1
    step = _SPARK_WIDTH / max(1, len(numbers))
    bars = "".join(
        f'<rect x="{at * step:.1f}" y="{_SPARK_HEIGHT * (1 - number / highest):.1f}" width="{max(0.5, step - 0.5):.1f}"'
        f' height="{max(1.0, _SPARK_HEIGHT * number / highest):.1f}"/>'
        for at, number in enumerate(numbers)
        if number
    )
    box = f"0 0 {_SPARK_WIDTH} {_SPARK_HEIGHT}"
    return f'<svg class="spark" viewBox="{box}" role="img" aria-label="over time">{bars}</svg>'


# -- words for numbers -----------------------------------------------------------------------------


def clock(ms: int, axis: Axis | None = None) -> str:
    """Return a time of day in UTC, with its date unless the axis is within a day."""
    moment = datetime.fromtimestamp(ms / 1000, UTC)
    if axis is not None and axis.end_ms - axis.start_ms <= 86_400_000:
        return f"{moment:%H:%M:%S}" if axis.bar_ms < 60_000 else f"{moment:%H:%M}"
    return f"{moment:%Y-%m-%d %H:%M:%S}" if axis is None else f"{moment:%Y-%m-%d %H:%M}"


def duration(ms: float) -> str:
    """Return a duration with its unit."""
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms >= length:
            return f"{round(ms / length, 1):g} {unit}"
    return f"{round(ms)} ms"


def short(number: float) -> str:
    """Return a number in few characters."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.2g}"
