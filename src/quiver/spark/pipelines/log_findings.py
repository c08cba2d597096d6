"""What a summary of log lines says: what is new, what changed, bursts of errors. Pure.

Every finding has the numbers that it was decided by, so that a person can check it:

- *New*: a template whose first line is not before `since`. Where there is nothing before, nothing is new.
- *Burst*: neighbouring windows with many more errors than usual, `lines` against `usual` in as many windows. The usual
  number is the median window; its spread is the larger of its square root, as for independent events, and of the
  distance to the 16th percentile. `score` is how many spreads the largest window is above usual, in single windows or
  in sums of several, for bursts that are slow. What recurs is no burst, unless it is much larger than the others.
- *Changed*: a template that came up in a burst of its own (`surged`), whose rate after `since` differs from the rate
  before (`rose`, `fell`), or that stopped (`vanished`). A template vanished if it was regular, and its silence at the
  end is at least twice the longest silence before: the score is the number of lines that the usual rate would have
  given. If all lines of a source stopped together, this is one finding, of the source.

Windows without any line at all are left out: a pause of everything is a pause of the log, not of its templates.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final, Literal

import msgspec
import numpy as np

from quiver.spark.pipelines.log_summary import ERRORS, LEVELS, NO_LEVEL, LogSummary, position_of, total_by

Counts = np.ndarray[Any, np.dtype[np.int64]]

SINCE_SHARE: Final = 0.25
"""Share of the time range that is only learned from, if no time is given."""
WINDOWS_MIN: Final = 4
"""With fewer windows nothing is usual yet, and no burst or change is reported."""
SCORE_MIN: Final = 6.0
FACTOR_MIN: Final = 3.0
BURST_ERRORS_MIN: Final = 10
SURGE_LINES_MIN: Final = 50
SURGE_SHARE_MIN: Final = 0.0005
"""A burst of lines that are no errors is reported if it is also this share of all lines."""
MISSED_MIN: Final = 20.0
"""Lines that the usual rate gives in a silence that is reported."""
REGULAR_WINDOWS_MIN: Final = 8
"""Windows in which a template must have occurred for its end to be noticed."""
FINDINGS_MAX: Final = 20

Change = Literal["surged", "rose", "fell", "vanished"]


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbouring windows with many more lines than usual."""

    start_ms: int
    end_ms: int
    lines: int
    usual: float
    """Lines that are usual in as many windows."""
    peak: int
    """Lines in the largest window."""
    score: float
    template_ids: tuple[str, ...]
    """Templates of the lines, most frequent first."""
    partition: int
    offset: int
    """Position of the first line of its most frequent template."""

    @property
    def excess(self) -> float:
        """The number of lines more than usual."""
        return self.lines - self.usual


class TemplateChange(msgspec.Struct, frozen=True, kw_only=True):
    """A template, or a whole source, whose rate changed."""

    change: Change
    template_id: str = ""
    source: str = ""
    """Set if it is a source that changed."""
    start_ms: int
    """When it changed."""
    before: float
    """Lines per minute before."""
    after: float
    """Lines per minute after, or during a surge."""
    lines: int
    """Lines after the change, or before it if there are none after."""
    score: float
    """Spreads from usual; for what vanished, the lines that are missing."""


class NewTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """A template that was never seen before."""

    template_id: str
    level: str
    first_ms: int
    lines: int


class TemplateTotal(msgspec.Struct, frozen=True, kw_only=True):
    """A template and how often it occurred."""

    template_id: str
    template: str
    level: str
    """The most frequent level."""
    source: str
    """The most frequent source."""
    lines: int
    first_ms: int | None
    last_ms: int | None
    example: str
    by_window: tuple[int, ...] = ()
    """Lines in each window of `LogFindings.windows`."""
    parameters: tuple[tuple[tuple[str, int], ...], ...] = ()
    """Sampled values of each parameter, most frequent first."""


class LogFindings(msgspec.Struct, frozen=True, kw_only=True):
    """All that is said about a summary."""

    lines: int
    without_time: int
    undecodable: int
    window_ms: int
    windows: tuple[int, ...]
    """Starts of the windows that have lines, in order."""
    since_ms: int | None
    levels: dict[str, tuple[int, ...]]
    """Lines by level, gravest first, and window."""
    level_totals: dict[str, int]
    """Lines by level, gravest first, with and without a time."""
    sources: dict[str, tuple[int, ...]]
    """Lines by source and window, for the sources with most lines."""
    source_totals: dict[str, int]
    templates: dict[str, TemplateTotal]
    """All templates by id, most frequent first."""
    new: tuple[NewTemplate, ...]
    """Gravest first, then by time."""
    changes: tuple[TemplateChange, ...]
    """By score."""
    bursts: tuple[Burst, ...]
    """Largest first."""
    latency: dict[int, tuple[float, int]] = {}
    """Average and maximum by window, in ms, if it was measured."""


SOURCES_MAX: Final = 10


def find(summary: LogSummary, *, since_ms: int | None = None, with_latency: bool = False) -> LogFindings:
    """Return what a summary says; without `since_ms`, what comes first is only learned from."""
    grid = _Grid(summary)
    if since_ms is None and len(grid.windows) >= WINDOWS_MIN:
        first_ms, last_ms = int(grid.windows[0]), int(grid.windows[-1]) + summary.window_ms
        since_ms = first_ms + int((last_ms - first_ms) * SINCE_SHARE)
    has_past = since_ms is not None and len(grid.windows) > 0 and int(grid.windows[0]) < since_ms
    templates = _template_totals(summary, grid)
    bursts = _error_bursts(grid)
    source_totals = dict(sorted(total_by(summary.counts, ["source"]).items(), key=lambda item: (-item[1], item[0])))
    level_totals = total_by(summary.counts, ["level"])
    shown = list(source_totals)[:SOURCES_MAX]
    return LogFindings(
        lines=summary.lines,
        without_time=summary.without_time,
        undecodable=summary.undecodable,
        window_ms=summary.window_ms,
        windows=tuple(map(int, grid.windows)),
        since_ms=since_ms,
        levels={level: _ints(grid.by_level[level]) for level in _gravest_first(grid.by_level)},
        level_totals={level: level_totals[level] for level in _gravest_first(level_totals)},
        sources={name: _ints(grid.by_source[name]) for name in shown if name in grid.by_source},
        source_totals=source_totals,
        templates=templates,
        new=_new_templates(templates, since_ms if has_past else None),
        changes=_changes(grid, bursts, since_ms),
        bursts=tuple(bursts[:FINDINGS_MAX]),
        latency=_latency(summary) if with_latency else {},
    )


def _gravest_first(levels: Any) -> list[str]:
    order = {level: at for at, level in enumerate(LEVELS)}
    return sorted(levels, key=lambda level: (order.get(level, len(order)), level))


class _Grid:
    """Counts as arrays over the windows that have lines."""

    def __init__(self, summary: LogSummary) -> None:
        timed = summary.counts
        self.window_ms = summary.window_ms
        self.windows: Counts = np.unique(timed["window_ms"].to_numpy())
        self._at = np.searchsorted(self.windows, timed["window_ms"].to_numpy())
        self._count: Counts = timed["count"].to_numpy()
        self.first: Counts = timed["first"].to_numpy()
        self.template, self.template_ids = _codes(timed["template_id"])
        self.level, self.levels = _codes(timed["level"])
        self.source, self.sources = _codes(timed["source"])
        self.by_level = self._series(self.level, self.levels)
        self.by_source = self._series(self.source, self.sources)
        self.by_template = self._series(self.template, self.template_ids)
        self.total = int(self._count.sum())
        self.is_error: np.ndarray[Any, np.dtype[np.bool_]] = np.isin(
            self.level, [at for at, name in enumerate(self.levels) if name in ERRORS]
        )

    def _series(self, codes: Counts, names: list[str]) -> dict[str, Counts]:
        width = len(self.windows)
        flat = np.bincount(codes * width + self._at, weights=self._count, minlength=len(names) * width)
        rows = flat.astype(np.int64).reshape(len(names), width) if width else np.zeros((len(names), 0), np.int64)
        return dict(zip(names, rows, strict=True))

    def errors(self) -> Counts:
        """Return the lines of grave levels by window."""
        chosen = self.is_error
        flat = np.bincount(self._at[chosen], weights=self._count[chosen], minlength=len(self.windows))
        return flat.astype(np.int64)

    def main(self, codes: Counts, names: list[str]) -> dict[str, str]:
        """Return for each template the name under which most of its lines are counted."""
        flat = np.bincount(
            self.template * len(names) + codes, weights=self._count, minlength=len(self.template_ids) * len(names)
        )
        best = flat.reshape(len(self.template_ids), len(names)).argmax(axis=1) if len(names) else []
        return {own: names[at] for own, at in zip(self.template_ids, best, strict=True)}

    def inside(self, first: int, end: int, *, errors_only: bool) -> tuple[tuple[str, ...], int]:
        """Return the templates between two windows, most frequent first, and the position of the first line of one."""
        chosen = (self._at >= first) & (self._at < end)
        if errors_only:
            chosen &= self.is_error
        totals = np.bincount(self.template[chosen], weights=self._count[chosen], minlength=len(self.template_ids))
        best = [int(at) for at in np.argsort(-totals, kind="stable")[:5] if totals[at]]
        return tuple(self.template_ids[at] for at in best), int(self.first[chosen & (self.template == best[0])].min())


def _codes(column: Any) -> tuple[Counts, list[str]]:
    encoded = column.combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _ints(series: Counts) -> tuple[int, ...]:
    return tuple(map(int, series))


# -- bursts ----------------------------------------------------------------------------------------


def usual(series: Counts) -> tuple[float, float]:
    """Return the usual number of lines in a window, and its spread."""
    middle = float(np.median(series))
    lower = middle - float(np.percentile(series, 16))
    return middle, max(1.0, math.sqrt(middle), lower)


SCALES: Final = (1, 4, 16)
"""Windows that are looked at together: a slow burst is unusual over minutes, not in any single window."""
SCALED_WINDOWS_MIN: Final = 12
"""With fewer windows of a scale, there is nothing usual to compare with."""


def find_runs(series: Counts, lines_min: float) -> list[tuple[int, int, float]]:
    """Return neighbouring windows with unusually many lines: first, end, and score of the largest window."""
    middle, _ = usual(series)

    def excess(run: tuple[int, int, float]) -> float:
        return float(series[run[0] : run[1]].sum()) - middle * (run[1] - run[0])

    runs: list[tuple[int, int, float]] = []
    for scale in SCALES:
        if scale > 1 and len(series) < SCALED_WINDOWS_MIN * scale:
            break
        for run in _hot_runs(series, scale):
            inside = [own for own in runs if own[0] < run[1] and run[0] < own[1]]
            # A longer run replaces those in it only if it explains clearly more lines.
            if not inside or excess(run) > 1.25 * sum(map(excess, inside)):
                runs = [*(own for own in runs if own not in inside), run]
    sizes = np.array([excess(run) for run in runs])
    found = []
    for at, run in enumerate(runs):
        others = np.delete(sizes, at)
        is_habit = len(others) >= 2 and sizes[at] < FACTOR_MIN * np.percentile(others, 75)
        if sizes[at] >= lines_min and not is_habit:
            found.append(run)
    return sorted(found)


def _hot_runs(series: Counts, scale: int) -> list[tuple[int, int, float]]:
    """Return runs in sums of `scale` windows each, without the quiet windows at their edges."""
    own = np.add.reduceat(series, np.arange(0, len(series), scale))
    middle, spread = usual(own)
    hot = (own >= FACTOR_MIN * middle) & (own - middle >= SCORE_MIN * spread)
    edges = np.flatnonzero(np.diff(np.r_[0, hot.astype(np.int8), 0])).reshape(-1, 2)
    joined: list[tuple[int, int]] = []
    for first, end in edges.tolist():
        is_near = joined and first - joined[-1][1] <= 1
        joined[-1:] = [(joined[-1][0], end)] if is_near else [*joined[-1:], (first, end)]
    runs = []
    for first, end in joined:
        busy = np.flatnonzero(series[first * scale : end * scale] > middle / scale) + first * scale
        score = (float(own[first:end].max()) - middle) / spread
        runs.append((int(busy[0]), int(busy[-1]) + 1, round(score, 1)))
    return runs


def _error_bursts(grid: _Grid) -> list[Burst]:
    """Return bursts of errors; if no line has a grave level, bursts of any one template without a level."""
    if len(grid.windows) < WINDOWS_MIN:
        return []
    errors = grid.errors()
    if errors.any():
        found = [_burst(grid, errors, run, errors_only=True) for run in find_runs(errors, BURST_ERRORS_MIN)]
    else:
        levels = grid.main(grid.level, grid.levels)
        found = [
            _burst(grid, series, run, errors_only=False)
            for own, series in grid.by_template.items()
            if levels[own] == NO_LEVEL
            for run in find_runs(series, _surge_lines_min(grid))
        ]
    return sorted(found, key=lambda burst: (-burst.excess, burst.start_ms))


def _burst(grid: _Grid, series: Counts, run: tuple[int, int, float], *, errors_only: bool) -> Burst:
    first, end, score = run
    middle, _ = usual(series)
    ids, position = grid.inside(first, end, errors_only=errors_only)
    partition, offset = position_of(position)
    return Burst(
        start_ms=int(grid.windows[first]),
        end_ms=int(grid.windows[end - 1]) + grid.window_ms,
        lines=int(series[first:end].sum()),
        usual=round(middle * (end - first), 1),
        peak=int(series[first:end].max()),
        score=round(score, 1),
        template_ids=ids,
        partition=partition,
        offset=offset,
    )


def _surge_lines_min(grid: _Grid) -> float:
    return max(SURGE_LINES_MIN, SURGE_SHARE_MIN * grid.total)


# -- changes ---------------------------------------------------------------------------------------


def _changes(grid: _Grid, bursts: list[Burst], since_ms: int | None) -> tuple[TemplateChange, ...]:
    if len(grid.windows) < WINDOWS_MIN:
        return ()
    since = 0 if since_ms is None else int(np.searchsorted(grid.windows, since_ms))
    told = {own for burst in bursts for own in burst.template_ids[:1]}
    sources = grid.main(grid.source, grid.sources)
    of_source = Counter(sources.values())
    silent = {
        source: msgspec.structs.replace(found, source=source)
        for source, series in grid.by_source.items()
        if source and of_source[source] > 1 and (found := _silence(grid, series)) is not None
    }
    changes = list(silent.values())
    for own, series in grid.by_template.items():
        if sources[own] in silent and not series[-1]:
            continue  # it ended with its source
        changes += [
            msgspec.structs.replace(found, template_id=own)
            for found in _template_changes(grid, series, since, is_in_burst=own in told)
        ]
    grave = {"vanished": 0, "surged": 1, "rose": 2, "fell": 3}
    return tuple(sorted(changes, key=lambda one: (-one.score, grave[one.change], one.template_id))[:FINDINGS_MAX])


def _template_changes(grid: _Grid, series: Counts, since: int, *, is_in_burst: bool) -> list[TemplateChange]:
    silence = _silence(grid, series)
    if silence is not None:
        return [silence]
    if is_in_burst:
        return []
    surges = [_surge(grid, series, run) for run in find_runs(series, _surge_lines_min(grid))]
    if surges:
        return surges[:1]
    shift = _shift(grid, series, since)
    return [] if shift is None else [shift]


def _per_minute(grid: _Grid, lines: float, windows: float) -> float:
    return round(lines / max(1.0, windows) * 60_000 / grid.window_ms, 3)


def _surge(grid: _Grid, series: Counts, run: tuple[int, int, float]) -> TemplateChange:
    first, end, score = run
    middle, _ = usual(series)
    lines = int(series[first:end].sum())
    return TemplateChange(
        change="surged",
        start_ms=int(grid.windows[first]),
        before=_per_minute(grid, middle, 1),
        after=_per_minute(grid, lines, end - first),
        lines=lines,
        score=round(score, 1),
    )


def _silence(grid: _Grid, series: Counts) -> TemplateChange | None:
    """Return the end of something regular."""
    seen = np.flatnonzero(series)
    if len(seen) < REGULAR_WINDOWS_MIN:
        return None
    first, last = int(seen[0]), int(seen[-1])
    silent, active = len(series) - 1 - last, last + 1 - first
    longest = int(np.diff(seen).max()) - 1
    rate = float(series.sum()) / active
    missed = rate * silent
    if silent < 2 or silent < 2 * longest + 1 or missed < MISSED_MIN or active < silent / 4:
        return None
    return TemplateChange(
        change="vanished",
        start_ms=int(grid.windows[last]) + grid.window_ms,
        before=_per_minute(grid, series.sum(), active),
        after=0.0,
        lines=int(series.sum()),
        score=round(missed, 1),
    )


def _shift(grid: _Grid, series: Counts, since: int) -> TemplateChange | None:
    """Return a lasting change of the rate at `since`."""
    before, after = series[:since], series[since:]
    if len(before) < WINDOWS_MIN or len(after) < WINDOWS_MIN or not before.any():
        return None
    was, now = float(before.mean()), float(after.mean())
    spread = max(math.sqrt(was), float(before.std()), 1.0 / len(before)) * math.sqrt(1 / len(before) + 1 / len(after))
    score = (now - was) / spread
    is_large = max(was, now) >= FACTOR_MIN * min(was, now) and abs(now - was) * len(after) >= SURGE_LINES_MIN
    # Both halves after the change must show it: else it is one cluster of lines, not another rate.
    halves = (after[: len(after) // 2].mean(), after[len(after) // 2 :].mean())
    is_lasting = min(halves) >= FACTOR_MIN * was if now > was else max(halves) * FACTOR_MIN <= was
    if not is_large or not is_lasting or abs(score) < SCORE_MIN:
        return None
    return TemplateChange(
        change="rose" if now > was else "fell",
        start_ms=int(grid.windows[since]),
        before=_per_minute(grid, float(before.sum()), len(before)),
        after=_per_minute(grid, float(after.sum()), len(after)),
        lines=int(after.sum()),
        score=round(abs(score), 1),
    )


# -- templates -------------------------------------------------------------------------------------


def _template_totals(summary: LogSummary, grid: _Grid) -> dict[str, TemplateTotal]:
    main_level, main_source = (_main_of(summary, name) for name in ("level", "source"))
    parameters = _parameters(summary)
    rows = summary.templates.sort_by([("count", "descending"), ("template_id", "ascending")]).to_pylist()
    return {
        row["template_id"]: TemplateTotal(
            template_id=row["template_id"],
            template=row["template"],
            level=main_level.get(row["template_id"], NO_LEVEL),
            source=main_source.get(row["template_id"], ""),
            lines=row["count"],
            first_ms=row["first_ms"],
            last_ms=row["last_ms"],
            example=row["example"],
            by_window=_ints(grid.by_template.get(row["template_id"], np.zeros(len(grid.windows), np.int64))),
            parameters=parameters.get(row["template_id"], ()),
        )
        for row in rows
    }


def _main_of(summary: LogSummary, name: str) -> dict[str, str]:
    totals = total_by(summary.counts, ["template_id", name])
    best: dict[str, tuple[int, str]] = {}
    for (own, value), count in totals.items():
        best[own] = max(best.get(own, (0, "")), (count, value))
    return {own: value for own, (_, value) in best.items()}


def _parameters(summary: LogSummary) -> dict[str, tuple[tuple[tuple[str, int], ...], ...]]:
    found: dict[str, dict[int, list[tuple[str, int]]]] = {}
    for row in summary.parameters.to_pylist():
        found.setdefault(row["template_id"], {}).setdefault(row["position"], []).append((row["value"], row["count"]))
    return {
        own: tuple(tuple(sorted(values, key=lambda one: (-one[1], one[0]))) for _, values in sorted(positions.items()))
        for own, positions in found.items()
    }


def _new_templates(templates: dict[str, TemplateTotal], since_ms: int | None) -> tuple[NewTemplate, ...]:
    if since_ms is None:
        return ()
    order = {level: at for at, level in enumerate(LEVELS)}
    found = [
        NewTemplate(template_id=own.template_id, level=own.level, first_ms=own.first_ms, lines=own.lines)
        for own in templates.values()
        if own.first_ms is not None and own.first_ms >= since_ms
    ]
    return tuple(sorted(found, key=lambda one: (order.get(one.level, len(order)), one.first_ms, one.template_id)))


def _latency(summary: LogSummary) -> dict[int, tuple[float, int]]:
    found = summary.counts.group_by("window_ms").aggregate(
        [("count", "sum"), ("latency_ms_sum", "sum"), ("latency_ms_max", "max")]
    )
    return {
        row["window_ms"]: (round(row["latency_ms_sum_sum"] / row["count_sum"], 1), row["latency_ms_max_max"])
        for row in found.sort_by("window_ms").to_pylist()
    }
