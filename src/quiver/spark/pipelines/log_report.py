"""Render what is found in log lines: a self-contained HTML page, and lines for a terminal. Pure.

The page has no scripts and requests nothing; its charts are SVG, and a reader opens details by tapping them. It follows
the reader's light or dark colours, and is readable on a phone. All text that comes from a topic is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

import msgspec

from quiver.spark.pipelines.log_charts import (
    BARS_MAX,
    SPARKS_MAX,
    Axis,
    bar_chart,
    clock,
    duration,
    make_axis,
    short,
    sparkline,
)
from quiver.spark.pipelines.log_findings import Burst, LogFindings, TemplateChange, TemplateTotal
from quiver.spark.pipelines.log_summary import LEVELS

TOP_TEMPLATES_MAX: Final = 50
"""Templates that have details on the page, besides those that are found."""
NEW_MAX: Final = 30
TERMINAL_TEMPLATES_MAX: Final = 10
TERMINAL_FINDINGS_MAX: Final = 5
VALUES_SHOWN: Final = 5
_OTHERS: Final = 10
_LEVEL_CLASSES: Final = {level: f"l-{level.lower()}" for level in LEVELS}

_STYLE: Final = """
:root { color-scheme: light dark; --text: #1b2530; --soft: #5c6b7a; --line: #dde4ea; --card: #f6f8fa; --back: #fff;
  --fatal: #8e24aa; --error: #d9363e; --warn: #e8950c; --info: #2f74d0; --debug: #7d8c9a; --trace: #b3bec8;
  --none: #9aa7b3; --mark: #d9363e22; --link: #1f5fb8; }
@media (prefers-color-scheme: dark) { :root { --text: #dfe7ee; --soft: #93a3b2; --line: #2b3845; --card: #19222b;
  --back: #10161c; --fatal: #c678dd; --error: #f0656c; --warn: #f2b134; --info: #5aa0f2; --debug: #77879a;
  --trace: #516070; --none: #66768a; --mark: #f0656c33; --link: #7db4f5; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 64rem; padding: 1rem; color: var(--text);
  background: var(--back); }
h1 { font-size: 1.5rem; margin: .5rem 0 0; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
a { color: var(--link); text-decoration: none; } p { margin: .3rem 0; } .soft { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.tiles div, .card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .6rem .8rem; }
.tiles b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.card { margin: .6rem 0; } .card.grave { border-left: .3rem solid var(--error); }
code, pre { font: .85em/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { margin: .4rem 0; padding: .5rem .6rem; background: var(--back); border: 1px solid var(--line);
  border-radius: .4rem; overflow-x: auto; white-space: pre-wrap; }
pre b { color: var(--error); font-weight: 600; }
.level { display: inline-block; min-width: 3.6em; padding: 0 .4em; border-radius: .3em; color: #fff; font-size: .75em;
  font-weight: 600; text-align: center; vertical-align: .1em; }
summary { cursor: pointer; display: flex; gap: .6rem; align-items: baseline; flex-wrap: wrap; padding: .35rem 0; }
summary code { flex: 1 1 18rem; } summary .number { min-width: 4.5rem; text-align: right; }
details { border-bottom: 1px solid var(--line); } details > :not(summary) { margin-left: .8rem; }
.number { font-variant-numeric: tabular-nums; }
.legend span { display: inline-block; margin-right: 1rem; font-size: .85rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: .15em; }
svg.chart { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg line { stroke: var(--line); } svg.spark { width: 7.5rem; height: 1.5rem; flex: none; }
svg.spark rect { fill: var(--soft); }
.mark { fill: var(--mark); }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .3rem .5rem;
  border-bottom: 1px solid var(--line); vertical-align: baseline; } th { color: var(--soft); font-weight: 500; }
td.number, th.number { text-align: right; white-space: nowrap; }
.scroll { overflow-x: auto; }
@media (max-width: 40rem) { body { font-size: 14px; padding: .7rem; } svg text { font-size: 20px; }
  summary code { flex-basis: 100%; order: 9; } summary .number { margin-left: auto; } }
"""
_COLOURS: Final = "".join(
    f".{kind}, i.{kind} {{ fill: var(--{level.lower()}); background: var(--{level.lower()}); }}\n"
    for level, kind in _LEVEL_CLASSES.items()
)
_HUES: Final = (210, 30, 150, 275, 340, 185, 95, 250, 15, 60)
_SOURCE_COLOURS: Final = "".join(
    f".s-{at} {{ fill: hsl({hue} 55% 52%); background: hsl({hue} 55% 52%); }}\n" for at, hue in enumerate(_HUES)
)


class ShownLine(msgspec.Struct, frozen=True):
    """A line near a burst."""

    text: str
    is_in_burst: bool


# -- the terminal ----------------------------------------------------------------------------------


def render_lines(found: LogFindings) -> tuple[str, ...]:
    """Render the newest window, totals and findings for a terminal."""
    if not found.lines:
        return ("no lines yet",)
    lines = [f"lines     {found.lines:,}{_untimed(found)}"]
    if found.windows:
        newest, seconds = found.windows[-1], found.window_ms / 1000
        rates = [f"{level} {own[-1] / seconds:,.1f}/s" for level, own in found.levels.items() if own[-1]]
        lines.append(f"time      {clock(found.windows[0])} to {clock(newest + found.window_ms)} UTC")
        lines.append(f"newest    {clock(newest)[11:]}, {duration(found.window_ms)}: {'  '.join(rates)}")
    lines.append("levels    " + "  ".join(f"{level} {count:,}" for level, count in found.level_totals.items()))
    sources = list(found.source_totals.items())[:_OTHERS]
    lines.append("sources   " + "  ".join(f"{_flat(name) or '(none)'} {count:,}" for name, count in sources))
    if found.latency:
        average_ms, max_ms = found.latency[max(found.latency)]
        lines.append(f"latency   average {average_ms:,.0f} ms, maximum {max_ms:,} ms")
    lines += [f"burst     {_burst_text(found, own)}" for own in found.bursts[:TERMINAL_FINDINGS_MAX]]
    lines += [
        f"new       {clock(own.first_ms)}  {own.level}  {own.lines:,} x {_text(found, own.template_id)}"
        for own in found.new[:TERMINAL_FINDINGS_MAX]
    ]
    lines += [f"{own.change:9} {_change_text(found, own)}" for own in found.changes[:TERMINAL_FINDINGS_MAX]]
    top = list(found.templates.values())[:TERMINAL_TEMPLATES_MAX]
    lines += [f"{own.lines:>9,}  {own.level:5}  {_flat(own.template)}" for own in top]
    return tuple(lines)


def _untimed(found: LogFindings) -> str:
    parts = []
    if found.without_time:
        parts.append(f"{found.without_time:,} without a time of their own")
    if found.undecodable:
        parts.append(f"{found.undecodable:,} not UTF-8")
    return f", {', '.join(parts)}" if parts else ""


def _burst_text(found: LogFindings, own: Burst) -> str:
    where = f"{clock(own.start_ms)}, {duration(own.end_ms - own.start_ms)}"
    return f"{where}: {own.lines:,} lines, usual {own.usual:g}: {_text(found, own.template_ids[0])}"


def _change_text(found: LogFindings, own: TemplateChange) -> str:
    what = f"source {_flat(own.source)}" if own.source else _text(found, own.template_id)
    return f"{clock(own.start_ms)}  {own.before:g} to {own.after:g} lines a minute, score {own.score:g}: {what}"


def _text(found: LogFindings, template_id: str) -> str:
    return _flat(found.templates[template_id].template)


def _flat(text: str) -> str:
    """Replace control characters, which could move the cursor or start a line."""
    return "".join(character if character.isprintable() else " " for character in text)


# -- the page --------------------------------------------------------------------------------------


def render_page(topic: str, found: LogFindings, around: Mapping[int, Sequence[ShownLine]] | None = None) -> str:
    """Render an HTML page; `around` has the lines near each burst, by its number."""
    axis = make_axis(found.windows, found.window_ms, BARS_MAX)
    parts = [
        f"<h1>{escape(topic)}</h1>",
        _head(found),
        _tiles(found),
        "<h2>Lines by level</h2>",
        _levels(found, axis),
        *_bursts(found, around or {}),
        *_new(found),
        *_changed(found),
        "<h2>Templates</h2>",
        '<p class="soft">Most frequent first. Open one for an example and its parameters.</p>',
        *(_template(found, own) for own in _with_details(found)),
        *_sources(found, axis),
        *_latency(found),
    ]
    head = (
        f'<meta charset="utf-8"><title>{escape(topic)}: log report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
    )
    style = f"<style>{_STYLE}{_COLOURS}{_SOURCE_COLOURS}</style>"
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}{style}</head><body>\n{body}\n</body></html>\n'


def _head(found: LogFindings) -> str:
    if not found.windows:
        return '<p class="soft">No lines.</p>'
    start, end = found.windows[0], found.windows[-1] + found.window_ms
    since = f" New and changed: since {clock(found.since_ms)}." if found.since_ms is not None else ""
    span = f"{clock(start)} to {clock(end)} UTC, {duration(end - start)}"
    return f'<p class="soft">{span}, in windows of {duration(found.window_ms)}.{since}</p>'


def _tiles(found: LogFindings) -> str:
    tiles = [("lines", f"{found.lines:,}")]
    if found.windows:
        seconds = (found.windows[-1] + found.window_ms - found.windows[0]) / 1000
        tiles.append(("lines a second, average", short(found.lines / seconds)))
    errors = sum(count for level, count in found.level_totals.items() if level in ("FATAL", "ERROR"))
    tiles += [
        ("errors", f"{errors:,}"),
        ("templates", f"{len(found.templates):,}"),
        ("new templates", f"{len(found.new):,}"),
        ("bursts", f"{len(found.bursts):,}"),
        ("changed", f"{len(found.changes):,}"),
        ("lines without a time", f"{found.without_time:,}"),
    ]
    if found.undecodable:
        tiles.append(("lines not UTF-8", f"{found.undecodable:,}"))
    return '<div class="tiles">' + "".join(f"<div><b>{value}</b>{name}</div>" for name, value in tiles) + "</div>"


def _levels(found: LogFindings, axis: Axis) -> str:
    series = {level: axis.add_up(found.windows, own) for level, own in found.levels.items()}
    marks = [(own.start_ms, own.end_ms) for own in found.bursts[:5]]
    classes = {level: _LEVEL_CLASSES.get(level, "l-none") for level in series}
    totals = ", ".join(f"{escape(level)} {count:,}" for level, count in found.level_totals.items())
    note = " Shaded: bursts." if marks else ""
    return bar_chart(axis, series, classes, marks) + f'<p class="soft">{totals}.{note}</p>'


def _bursts(found: LogFindings, around: Mapping[int, Sequence[ShownLine]]) -> list[str]:
    parts = ["<h2>Bursts of errors</h2>"]
    if not found.bursts:
        return [*parts, '<p class="soft">None.</p>']
    parts.append(
        '<p class="soft">Largest first. The score is the distance from usual in units of the usual variation.</p>'
    )
    for at, own in enumerate(found.bursts):
        rows = "".join(f"<p>{_link(found, one)}</p>" for one in own.template_ids)
        lines = around.get(at, ())
        shown = "\n".join(
            f"<b>{escape(_flat(line.text))}</b>" if line.is_in_burst else escape(_flat(line.text)) for line in lines
        )
        details = (
            f"<details open><summary>lines around its start</summary><pre>{shown}</pre></details>" if lines else ""
        )
        parts.append(
            f'<div class="card grave"><p><b>{own.lines:,} lines</b> in {duration(own.end_ms - own.start_ms)} from '
            f"{clock(own.start_ms)}; usual {own.usual:g}, score {own.score:g}</p>{rows}{details}</div>"
        )
    return parts


def _new(found: LogFindings) -> list[str]:
    parts = ["<h2>New templates</h2>"]
    if found.since_ms is None or not found.windows or found.windows[0] >= found.since_ms:
        return [*parts, '<p class="soft">There are no earlier lines to compare with.</p>']
    if not found.new:
        return [*parts, f'<p class="soft">None since {clock(found.since_ms)}.</p>']
    parts.append(f'<p class="soft">Never seen before {clock(found.since_ms)}.</p>')
    for own in found.new[:NEW_MAX]:
        example = escape(_flat(found.templates[own.template_id].example))
        parts.append(
            f'<div class="card"><p>{_link(found, own.template_id)}</p><p class="soft">first {clock(own.first_ms)}, '
            f"{own.lines:,} lines</p><pre>{example}</pre></div>"
        )
    if len(found.new) > NEW_MAX:
        parts.append(f'<p class="soft">And {len(found.new) - NEW_MAX:,} more.</p>')
    return parts


def _changed(found: LogFindings) -> list[str]:
    parts = ["<h2>Changed</h2>"]
    if not found.changes:
        return [*parts, '<p class="soft">No template changed its rate.</p>']
    rows = []
    for own in found.changes:
        what = f"source <b>{escape(own.source)}</b>" if own.source else _link(found, own.template_id)
        rows.append(
            f"<tr><td>{own.change}<br><span class='soft'>{clock(own.start_ms)}</span></td><td>{what}</td>"
            f'<td class="number">{short(own.before)}</td><td class="number">{short(own.after)}</td>'
            f'<td class="number">{short(own.score)}</td></tr>'
        )
    head = (
        '<tr><th>change</th><th>what</th><th class="number">lines/min before</th>'
        '<th class="number">after</th><th class="number">score</th></tr>'
    )
    note = (
        '<p class="soft">Score: distance from the usual rate in units of its variation; of what vanished, the number '
        "of lines that are missing.</p>"
    )
    return [*parts, note, f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>']


def _with_details(found: LogFindings) -> list[TemplateTotal]:
    told = {one for own in found.bursts for one in own.template_ids}
    told |= {own.template_id for own in found.new[:NEW_MAX]} | {own.template_id for own in found.changes}
    return [own for at, own in enumerate(found.templates.values()) if at < TOP_TEMPLATES_MAX or own.template_id in told]


def _template(found: LogFindings, own: TemplateTotal) -> str:
    axis = make_axis(found.windows, found.window_ms, SPARKS_MAX)
    chart = sparkline(axis.add_up(found.windows, own.by_window)) if found.windows else ""
    times = (
        f"{clock(own.first_ms)} to {clock(own.last_ms)}" if own.first_ms is not None and own.last_ms is not None else ""
    )
    share = f"{own.lines / max(1, found.lines):.1%} of lines"
    facts = ", ".join(part for part in (share, times, escape(own.source)) if part)
    return (
        f'<details id="t-{escape(own.template_id)}"><summary>{_level(own.level)}'
        f"<code>{escape(_flat(own.template))}</code>"
        f'{chart}<span class="number">{own.lines:,}</span></summary><p class="soft">{facts}</p>'
        f"<pre>{escape(_flat(own.example))}</pre>{_parameters(own)}</details>"
    )


def _parameters(own: TemplateTotal) -> str:
    if not own.parameters:
        return ""
    rows = []
    for at, values in enumerate(own.parameters):
        total = sum(count for _, count in values)
        shown = ", ".join(
            f"<code>{escape(_flat(value))}</code> {count / max(1, total):.0%}" for value, count in values[:VALUES_SHOWN]
        )
        rows.append(f"<tr><td>{at + 1}</td><td>{shown}</td></tr>")
    return f"<table><tr><th>parameter</th><th>frequent values, in a sample</th></tr>{''.join(rows)}</table>"


def _sources(found: LogFindings, axis: Axis) -> list[str]:
    if not found.sources:
        return []
    series = {name or "(none)": axis.add_up(found.windows, own) for name, own in found.sources.items()}
    classes = {name: f"s-{at}" for at, name in enumerate(series)}
    total = len(found.source_totals)
    note = f"The {len(series)} largest of {total:,} sources." if total > len(series) else f"{total:,} sources."
    return ["<h2>Lines by source</h2>", bar_chart(axis, series, classes), f'<p class="soft">{note}</p>']


def _latency(found: LogFindings) -> list[str]:
    if not found.latency:
        return []
    average = sum(own[0] for own in found.latency.values()) / len(found.latency)
    longest = max(own[1] for own in found.latency.values())
    return [
        "<h2>From produce to processing</h2>",
        f"<p>Average {duration(average)}, maximum {duration(longest)}.</p>",
    ]


def _level(level: str) -> str:
    return f'<span class="level {_LEVEL_CLASSES.get(level, "l-none")}">{escape(level)}</span>'


def _link(found: LogFindings, template_id: str) -> str:
    own = found.templates[template_id]
    return f'{_level(own.level)} <a href="#t-{escape(template_id)}"><code>{escape(_flat(own.template))}</code></a>'
