"""The page and the charts of `run_peers.py`, made from its figures: `benchmarks.md` and `images/peers-*.svg`.

A page for docs/ is made only of a whole run on an idle machine; `objections` says what is against it. The charts are
plain SVG with their own light and dark colors, so that they need no program to draw and none to look at.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from peer_fetch import CLIENTS
from peer_servers import SETTINGS, Setup, setups
from svg import number, picture

PEERS = ("quiver", "kafka", "nats", "redis", "rabbitmq", "postgresql", "pysyncobj")
TITLES = {
    "quiver": "Quiver",
    "kafka": "Kafka",
    "nats": "NATS JetStream",
    "redis": "Redis Streams",
    "rabbitmq": "RabbitMQ",
    "postgresql": "PostgreSQL",
    "pysyncobj": "PySyncObj",
}
ROWS = ("bulk", "awaited", "paced", "batches", "single")
ROUNDS_MIN = 5
FAILURES_MAX = 1
"""Parts of a setup that may fail in a whole run: a client that timed out once is named, and its other rounds count."""
SHARE_MIN = 0.25
"""Share of the records with which each part of the work still takes long enough, and p99 has enough values."""
OTHER_LOAD_MAX = 0.1
"""Share of all cores that other programs may have taken during a run whose figures are published."""


DASH = (
    "A dash is something that a system does not offer: only Quiver reads Arrow; RabbitMQ replicates no queue without a "
    "sync; PySyncObj is a library whose nodes hold what is read in their own memory, and it never syncs. Kafka's share "
    "groups are not measured: their client for Python is a preview."
)


@dataclass(frozen=True)
class Figure:
    """One figure of each setup, and how it is shown."""

    name: str
    row: str
    title: str
    unit: str
    scale: float = 1.0

    @property
    def is_rate(self) -> bool:
        return self.unit.endswith("/s")


FIGURES = (
    Figure("produce", "bulk", "Bulk produce", "k records/s", 1e-3),
    Figure("consume", "bulk", "Bulk consume, objects", "k records/s", 1e-3),
    Figure("consume_arrow", "bulk", "Bulk consume, Arrow", "k records/s", 1e-3),
    Figure("server_cpu", "bulk", "CPU of all servers per million produced", "s"),
    Figure("awaited_p50", "awaited", "Awaited produce, p50", "ms"),
    Figure("awaited_p99", "awaited", "Awaited produce, p99", "ms"),
    Figure("paced_p50", "paced", "End to end at 1,000/s, p50", "ms"),
    Figure("paced_p99", "paced", "End to end at 1,000/s, p99", "ms"),
    Figure("batches", "batches", "Work queue, batches of 100", "k records/s", 1e-3),
    Figure("single", "single", "Work queue, single, 64 workers", "k records/s", 1e-3),
)


@dataclass
class Results:
    """What a run found, and how it was made."""

    date: str
    machine: str
    command: str
    rounds: int
    share: float
    rows: list[str]
    setups: list[str]
    versions: dict[str, str]
    missing: dict[str, str]
    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """By setup and figure: one value for each round."""
    failures: list[str] = field(default_factory=list)
    sync_ms: list[float] = field(default_factory=list)
    """A write of 4 KiB and its fdatasync, for each round."""
    other_load: float = 0.0
    """Share of all cores that other programs took."""
    seconds: float = 0.0
    """How long the run took so far."""
    finished: list[list[int | str]] = field(default_factory=list)
    """Round and setup of each part that has run."""

    @classmethod
    def load(cls, path: Path) -> Results:
        return cls(**json.loads(path.read_text()))

    def save(self, path: Path) -> None:
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(asdict(self), indent=1))
        unfinished.replace(path)

    def values(self, setup: Setup, figure: Figure) -> list[float]:
        return [figure.scale * value for value in self.figures.get(setup.name, {}).get(figure.name, ())]

    def failures_of(self, setup: str) -> int:
        return sum(failure.startswith(f"{setup}, ") for failure in self.failures)

    def has_failed(self, setup: Setup, figure: Figure) -> bool:
        if figure.name == "consume_arrow" and setup.peer != "quiver":
            return False
        return any(
            failure.startswith((f"{setup.name}, {figure.row}:", f"{setup.name}, servers:")) for failure in self.failures
        )


def objections(results: Results) -> list[str]:
    """Say why the figures must not be published; nothing if they may."""
    against = []
    if results.rounds < ROUNDS_MIN:
        against.append(f"{results.rounds} of {ROUNDS_MIN} rounds")
    if results.share < SHARE_MIN:
        against.append(f"only a share of {results.share:g} of the records")
    if set(results.rows) < set(ROWS) or set(results.setups) < {setup.name for peer in PEERS for setup in setups(peer)}:
        against.append("only some rows or setups")
    if results.other_load > OTHER_LOAD_MAX:
        against.append(f"other programs took {results.other_load:.0%} of the cores")
    against += [f"{name} failed too often" for name in results.setups if results.failures_of(name) > FAILURES_MAX]
    return against


# -- the page ----------------------------------------------------------------------------------------


def write_page(results: Results, directory: Path) -> list[Path]:
    """Write the page and its charts; return their paths."""
    images = directory / "images"
    images.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in FIGURES:
        if figure.row in results.rows:
            path = images / f"peers-{figure.name.replace('_', '-')}.svg"
            path.write_text(chart(results, figure))
            written.append(path)
    page = directory / "benchmarks.md"
    page.write_text("\n".join(_page_lines(results)) + "\n")
    return [page, *written]


def _page_lines(results: Results) -> list[str]:
    lines = ["# Quiver next to other systems", ""]
    if against := objections(results):
        lines += [f"**These figures are not for publication: {'; '.join(against)}.**", ""]
    how = (
        f"Made on {results.date} by `make bench-peers` (`{results.command}`), which fetches the systems and repeats "
        "all of this; [`run_peers.py`](../benches/run_peers.py) says what each row does. "
        f"Medians of {results.rounds} alternating rounds, with the least and the most of them in parentheses; log "
        "lines of 100 bytes; every system from an empty disk, on loopback, warmed up with the whole work before it is "
        "measured; clients and servers share the cores."
    )
    if results.share < 1:
        how += f" The work was {results.share:.0%} of what the command does without `--share`."
    where = (
        f"Machine: {results.machine}. A write of 4 KiB with fdatasync takes {_spread(results.sync_ms)} ms on its disk; "
        f"other programs took {results.other_load:.1%} of the cores during the run."
    )
    lines += [how, "", where, ""]
    for nodes in (1, 3):
        for is_synced in (True, False):
            lines += _table_lines(results, nodes, is_synced=is_synced)
    lines += _notes_lines(results)
    lines += ["## Charts", ""]
    for figure in FIGURES:
        if figure.row in results.rows:
            lines += [f"![{figure.title}](images/peers-{figure.name.replace('_', '-')}.svg)", ""]
    return lines[:-1]


def _table_lines(results: Results, nodes: int, *, is_synced: bool) -> list[str]:
    columns = [Setup(peer, nodes, is_synced) for peer in PEERS]
    columns = [setup for setup in columns if setup.name in results.setups and setup.peer not in results.missing]
    if not columns:
        return []
    how = "synced to disk before it is acknowledged" if is_synced else "acknowledged before it is synced"
    lines = [f"## {'One node' if nodes == 1 else 'Three nodes'}, {how}", ""]
    lines.append(f"| | {' | '.join(TITLES[setup.peer] for setup in columns)} |")
    lines.append(f"|---|{'---:|' * len(columns)}")
    for figure in FIGURES:
        if figure.row in results.rows:
            cells = [_cell(results, setup, figure) for setup in columns]
            lines.append(f"| {figure.title}, {figure.unit} | {' | '.join(cells)} |")
    return [*lines, ""]


def _cell(results: Results, setup: Setup, figure: Figure) -> str:
    if values := results.values(setup, figure):
        return _spread(values)
    return "failed" if results.has_failed(setup, figure) else "–"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{number(statistics.median(values))} ({number(min(values))}–{number(max(values))})"


def _notes_lines(results: Results) -> list[str]:
    lines = ["## Versions and settings", ""]
    for peer in PEERS:
        if peer in results.missing:
            lines.append(f"- **{TITLES[peer]}** was not measured: {results.missing[peer]}")
        elif peer in results.versions:
            client = CLIENTS.get(peer)
            by = f" with {client} {results.versions.get(client, 'unknown')}" if client else ""
            lines.append(f"- **{TITLES[peer]}** {results.versions[peer]}{by}: {SETTINGS[peer]}.")
    lines += [f"- failed: {failure}" for failure in results.failures]
    return [*lines, "", DASH, ""]


# -- the charts --------------------------------------------------------------------------------------

_WIDTH, _LEFT, _RIGHT = 760, 150, 110
_TOP, _BAR, _GAP = 56, 13, 10
_KINDS = (
    (1, True, "one node, synced", "a"),
    (1, False, "one node", "b"),
    (3, True, "three nodes, synced", "c"),
    (3, False, "three nodes", "d"),
)


def chart(results: Results, figure: Figure) -> str:
    """Return a chart of one figure: a bar for each setup that has it, with a line from the least to the most."""
    groups = []
    for peer in PEERS:
        bars = [(kind, results.values(Setup(peer, kind[0], kind[1]), figure)) for kind in _KINDS]
        if found := [(kind, values) for kind, values in bars if values]:
            groups.append((peer, found))
    most = max((max(values) for _, bars in groups for _, values in bars), default=1.0) or 1.0
    per_unit = (_WIDTH - _LEFT - _RIGHT) / most
    parts, y = [], _TOP
    for peer, bars in groups:
        middle = y + len(bars) * _BAR / 2 + 4
        parts.append(f'<text x="{_LEFT - 8}" y="{middle:.0f}" text-anchor="end">{escape(TITLES[peer])}</text>')
        for kind, values in bars:
            parts.append(_bar(values, y, kind[3], per_unit))
            y += _BAR
        y += _GAP
    better = "more is better" if figure.is_rate else "less is better"
    title = f"{figure.title}, {figure.unit} ({better})"
    return picture(title, _legend() + "".join(parts), width=_WIDTH, height=y)


def _legend() -> str:
    parts, x = [], 8
    for _, _, text, shade in _KINDS:
        parts.append(f'<rect class="{shade}" x="{x}" y="31" width="10" height="10"/>')
        parts.append(f'<text class="s" x="{x + 14}" y="40">{escape(text)}</text>')
        x += 34 + 6 * len(text)
    return "".join(parts)


def _bar(values: Sequence[float], y: int, shade: str, per_unit: float) -> str:
    median, middle = statistics.median(values), y + _BAR / 2 - 0.5
    first, last = (_LEFT + per_unit * value for value in (min(values), max(values)))
    return (
        f'<rect class="{shade}" x="{_LEFT}" y="{y}" width="{max(1.0, per_unit * median):.1f}" height="{_BAR - 2}"/>'
        f'<line x1="{first:.1f}" x2="{last:.1f}" y1="{middle}" y2="{middle}"/>'
        f'<text class="s" x="{last + 5:.1f}" y="{y + _BAR - 3}">{number(median)}</text>'
    )
