"""Render counts of log lines: text for a terminal, and an HTML page with charts. Pure.

The page is one self-contained file; its charts are SVG. All text that comes from a topic is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

from quiver.spark.pipelines.line_counts import LineCounts

SOURCES_MAX: Final = 10
MESSAGES_MAX: Final = 10
BURSTS_MAX: Final = 20
BARS_MAX: Final = 120
"""Maximum bars of a chart: the newest windows."""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 220, 60, 24
_COLOURS: Final = {
    "FATAL": "#7b1fa2",
    "ERROR": "#d32f2f",
    "WARN": "#f9a825",
    "INFO": "#1976d2",
    "DEBUG": "#78909c",
    "TRACE": "#b0bec5",
    "NONE": "#90a4ae",
}
_OTHERS: Final = (
    "#1976d2",
    "#00897b",
    "#f9a825",
    "#8e24aa",
    "#d81b60",
    "#6d4c41",
    "#3949ab",
    "#7cb342",
    "#fb8c00",
    "#546e7a",
)
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
body { color: #1c2733; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #e0e6eb; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; } code { overflow-wrap: anywhere; }
.legend span { display: inline-block; margin-right: 1rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: #5b6b7a; }
@media (prefers-color-scheme: dark) { body { color: #dbe4ec; background: #12181f; } th, td { border-color: #2a3744; } }
"""


def render_lines(counts: LineCounts) -> tuple[str, ...]:
    """Render the newest window and the top messages for a terminal."""
    if not counts.windows:
        return ("no lines yet",)
    newest, seconds = counts.windows[-1], max(1, counts.window_ms) / 1000
    rates = [f"{level} {by_window.get(newest, 0) / seconds:,.1f}/s" for level, by_window in counts.by_level().items()]
    lines = [f"{_clock(newest)}  {'  '.join(rates)}"]
    sources = counts.by_source(SOURCES_MAX).items()
    lines.append("sources   " + "  ".join(f"{_flat(name)} {sum(own.values()):,}" for name, own in sources))
    latency = counts.latency()[newest]
    lines.append(f"latency   average {latency.average_ms:,.0f} ms, maximum {latency.max_ms:,} ms")
    lines += [
        f"{count:>9,}  {level:5}  {_flat(message)}" for message, level, count in counts.top_messages(MESSAGES_MAX)
    ]
    lines += [
        f"burst     {_clock(own.window_start_ms)}  {own.errors:,} errors, usually {own.usual:g}: {_flat(own.message)}"
        for own in counts.bursts()[-3:]
    ]
    return tuple(lines)


def render_page(topic: str, counts: LineCounts) -> str:
    """Render an HTML page with charts."""
    windows = counts.windows[-BARS_MAX:]
    seconds = max(1, counts.window_ms) / 1000
    levels, sources = counts.by_level(), counts.by_source(SOURCES_MAX)
    colours = dict(zip(sources, _OTHERS, strict=False))
    latency = {
        name: {start: round(getattr(own, f"{name}_ms")) for start, own in counts.latency().items()}
        for name in ("average", "max")
    }
    total = sum(own.count for own in counts.all())
    span = f"{_time(windows[0])} to {_time(windows[-1] + counts.window_ms)}" if windows else "no lines"
    messages = [
        (level, f"<code>{escape(message)}</code>", count) for message, level, count in counts.top_messages(MESSAGES_MAX)
    ]
    bursts = [
        (_time(own.window_start_ms), own.errors, own.usual, f"<code>{escape(own.message)}</code>")
        for own in counts.bursts()[-BURSTS_MAX:]
    ]
    parts = [
        f"<h1>Log lines of {escape(topic)}</h1>",
        f"<p>{total:,} lines in windows of {seconds:g} s, {span}, UTC.</p>",
        "<h2>Lines by level</h2>",
        _stacked(windows, levels, {level: _COLOURS.get(level, "#90a4ae") for level in levels}, "lines"),
        "<h2>Lines by source</h2>",
        _stacked(windows, sources, colours, "lines"),
        "<h2>Bursts of errors</h2>",
        _table(("window", "errors", "usual", "most of them"), bursts) if bursts else "<p>None.</p>",
        "<h2>Top messages</h2>",
        _table(("level", "message", "count"), messages),
        "<h2>From produce to processing</h2>",
        _curves(windows, latency, {"max": "#d32f2f", "average": "#1976d2"}, "ms"),
    ]
    head = f'<meta charset="utf-8"><title>{escape(topic)}</title><meta name="viewport" content="width=device-width">'
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n'
    )


# -- charts ------------------------------------------------------------------------------------------

Series = Mapping[str, Mapping[int, int]]
"""Values by name and window."""


def _stacked(windows: Sequence[int], series: Series, colours: Mapping[str, str], unit: str) -> str:
    """Render a stacked bar chart: one bar per window, one segment per name."""
    highest = max((sum(own.get(start, 0) for own in series.values()) for start in windows), default=0)
    step = (_WIDTH - _LEFT) / max(1, len(windows))
    bars: list[str] = []
    for at, start in enumerate(windows):
        top = float(_HEIGHT)
        for name, own in reversed(list(series.items())):
            height = _HEIGHT * own.get(start, 0) / max(1, highest)
            top -= height
            if height:
                title = escape(f"{_time(start)} {name}: {own[start]:,} {unit}")
                bars.append(
                    f'<rect x="{_LEFT + at * step:.1f}" y="{top:.1f}" width="{max(0.5, step - 1):.1f}"'
                    f' height="{height:.1f}" fill="{colours.get(name, "#90a4ae")}"><title>{title}</title></rect>'
                )
    return _chart(windows, highest, "".join(bars), unit) + _legend(series, colours)


def _curves(windows: Sequence[int], series: Series, colours: Mapping[str, str], unit: str) -> str:
    """Render a line chart: one line per name."""
    highest = max((number for own in series.values() for number in own.values()), default=0)
    step = (_WIDTH - _LEFT) / max(1, len(windows))
    lines: list[str] = []
    for name, own in series.items():
        points = " ".join(
            f"{_LEFT + (at + 0.5) * step:.1f},{_HEIGHT - _HEIGHT * own.get(start, 0) / max(1, highest):.1f}"
            for at, start in enumerate(windows)
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
    return _chart(windows, highest, "".join(lines), unit) + _legend(series, colours)


def _chart(windows: Sequence[int], highest: int, drawn: str, unit: str) -> str:
    marks = [
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="#cfd8dc" stroke-width="0.5"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{number:,}</text>'
        for y, number in ((0, highest), (_HEIGHT // 2, highest // 2), (_HEIGHT, 0))
    ]
    times = ""
    if windows:
        times = (
            f'<text x="{_LEFT}" y="{_HEIGHT + 18}">{_clock(windows[0])}</text>'
            f'<text x="{_WIDTH}" y="{_HEIGHT + 18}" text-anchor="end">{_clock(windows[-1])}</text>'
        )
    box = f"0 -10 {_WIDTH} {_HEIGHT + _BOTTOM + 10}"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(unit)} by window">{"".join(marks)}{drawn}{times}</svg>'


def _legend(series: Series, colours: Mapping[str, str]) -> str:
    items = (f'<span><i style="background:{colours.get(name, "#90a4ae")}"></i>{escape(name)}</span>' for name in series)
    return f'<p class="legend">{"".join(items)}</p>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Render a table; text cells must be HTML already."""
    kinds = [' class="number"' if rows and isinstance(rows[0][at], int | float) else "" for at in range(len(columns))]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(columns, kinds, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{_cell(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(cell: object) -> str:
    return f"{cell:,}" if isinstance(cell, int | float) else str(cell)


def _flat(text: str) -> str:
    """Replace control characters, which could move the cursor or start a line."""
    return "".join(character if character.isprintable() else " " for character in text)


def _time(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _clock(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%H:%M:%S}"
