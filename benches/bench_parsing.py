"""Measure how well and how fast lines are understood: ``python benches/bench_parsing.py --data DIR``.

`DIR` has pairs of files of one system each, as Loghub publishes them: `NAME_2k.log` with the lines and
`NAME_2k.log_structured.csv` with the true parts of each line, with or without `.gz`. Without `--data` only the speed is
measured, on lines that are made up.

*Grouping accuracy* is the share of lines whose group of lines with the same template is exactly the true group. All
systems are parsed with the same settings: once as they are, and once with the headers cut off by hand. A time is right
if it is the one that `strptime` reads from the columns of the true structure; a level counts where there is one. Speed
is by processor time: other programs on the machine do not disturb it.

For comparison with Drain install it: ``pip install drain3``.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import process_time
from typing import Any

import pyarrow as pa

from quiver.spark.logs import learn
from quiver.spark.logs.levels import LETTERS, WORDS, level_of
from table import MISSED, Row, show

FORMATS = (
    "%a %b %d %H:%M:%S %Y",
    "%y%m%d %H%M%S",
    "%Y-%m-%d %H:%M:%S,%f",
    "%Y-%m-%d %H:%M:%S.%f",
    "%Y-%m-%d %H:%M:%S",
    "%Y-%m-%d-%H.%M.%S.%f",
    "%y/%m/%d %H:%M:%S",
    "%Y%m%d-%H:%M:%S:%f",
    "%b %d %H:%M:%S",
    "%m-%d %H:%M:%S.%f",
    "%m.%d %H:%M:%S",
)
"""How the true structures write times."""
SPEED_LINES = 100_000
SPEED_TARGET = 0.15


def main(arguments: Sequence[str]) -> int:
    """Measure; return the exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, help="folder with lines and their true structure")
    data: Path | None = options.parse_args(arguments).data
    if data is None:
        print("grouping is not measured: name a folder of lines with --data", flush=True)
        return show(speed_rows(made_up_lines()), title="speed, made-up lines")
    systems = {
        path.name.split("_2k.log")[0]: path for path in sorted(data.glob("*_2k.log*")) if "structured" not in path.name
    }
    if not systems:
        print(f"error: {data} has no files NAME_2k.log or NAME_2k.log.gz", file=sys.stderr)
        return 1
    results = {name: measure(path) for name, path in systems.items()}
    passed = show_accuracy(results)
    status = show(speed_rows([line for own in results.values() for line in own["lines"]]), title="speed")
    return status or (0 if passed else MISSED)


def measure(path: Path) -> dict[str, Any]:
    """Parse the lines of one system, with their headers and without."""
    name = path.name.removesuffix(".gz")
    structure = [own for own in (path.with_name(f"{name}_structured.csv{end}") for end in ("", ".gz")) if own.exists()]
    csv.field_size_limit(1 << 24)
    with read(structure[0]) as file:
        truth = list(csv.DictReader(file))
    with read(path) as file:
        lines = file.read().splitlines()[: len(truth)]
    events = [row["EventId"] for row in truth]
    contents = [row["Content"] for row in truth]
    rows = parse(lines)
    drain = drain_groups()
    return {
        "lines": lines,
        "raw": grouping_accuracy(events, rows.column("template_id").to_pylist()),
        "cut": grouping_accuracy(events, parse(contents).column("template_id").to_pylist()),
        "time": time_share(truth, rows.column("time").to_pylist()),
        "level": level_share(truth, rows.column("level").to_pylist()),
        "drain raw": grouping_accuracy(events, drain(lines)) if drain else None,
        "drain cut": grouping_accuracy(events, drain(contents)) if drain else None,
    }


def read(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return open(path, encoding="utf-8", errors="replace")


def parse(lines: Sequence[str]) -> pa.RecordBatch:
    texts = pa.array(lines)
    return learn(texts).parse(texts)


def grouping_accuracy(truth: Sequence[Hashable], found: Sequence[Hashable]) -> float:
    """Return the share of lines whose group is exactly the true one."""
    true_groups, groups = defaultdict(set), defaultdict(set)
    for line, (event, template) in enumerate(zip(truth, found, strict=True)):
        true_groups[event].add(line)
        groups[template].add(line)
    right = sum(len(group) for group in groups.values() if true_groups[truth[next(iter(group))]] == group)
    return right / len(truth)


def time_share(truth: Sequence[dict[str, str]], times: Sequence[datetime | None]) -> float | None:
    """Return the share of lines whose time is the true one; without a year only the rest of it counts."""
    right = count = 0
    for row, time in zip(truth, times, strict=True):
        expected = true_time(row)
        if expected is None:
            continue
        count += 1
        if time is not None and expected.year == 1900:
            time = time.replace(year=1904)
            expected = expected.replace(year=1904)
        right += time is not None and abs((time - expected).total_seconds()) < 1
    return right / count if count else None


def true_time(row: dict[str, str]) -> datetime | None:
    stamp = row.get("Timestamp", "") or (row.get("Time", "") if row.get("Time", "").isdigit() else "")
    if stamp.isdigit() and len(stamp) == 10:
        return datetime.fromtimestamp(int(stamp), UTC)
    text = " ".join(row[name] for name in ("Month", "Date", "Day", "Time") if row.get(name))
    for form in FORMATS:
        try:
            # 1904 is a leap year: a day of February without a year is valid.
            return datetime.strptime(text, form).replace(tzinfo=UTC)
        except ValueError:
            continue
    return None


def level_share(truth: Sequence[dict[str, str]], levels: Sequence[str | None]) -> float | None:
    """Return the share of lines whose level is the true one, of those that have one."""
    known = [(row["Level"], level) for row, level in zip(truth, levels, strict=True) if is_level(row.get("Level"))]
    return sum(level_of(own) == level for own, level in known) / len(known) if known else None


def is_level(word: str | None) -> bool:
    return bool(word) and (str(word).upper() in WORDS or word in LETTERS)


def drain_groups() -> Callable[[Sequence[str]], list[Hashable]] | None:
    """Return what groups lines with Drain and its default settings; None if it is not installed."""
    try:
        from drain3 import TemplateMiner  # type: ignore[import-not-found]
        from drain3.template_miner_config import TemplateMinerConfig  # type: ignore[import-not-found]
    except ImportError:
        return None

    def group(lines: Sequence[str]) -> list[Hashable]:
        miner = TemplateMiner(config=TemplateMinerConfig())
        return [miner.add_log_message(line)["cluster_id"] for line in lines]

    return group


COLUMNS = ("raw", "cut", "time", "level", "drain raw", "drain cut")
GOALS = {"raw": (0.90, 0.75), "cut": (0.92, 0.0), "time": (0.99, 0.0), "level": (0.99, 0.0)}
"""Least mean and least worst value of each column."""


def show_accuracy(results: dict[str, dict[str, Any]]) -> bool:
    """Print a row for each system, the mean and the worst; return whether all goals are reached."""
    print(f"\n{'system':14s}" + "".join(f"{name:>11s}" for name in COLUMNS))
    for name, own in results.items():
        print(f"{name:14s}" + "".join(f"{_shown(own[column]):>11s}" for column in COLUMNS))
    columns = {name: [own[name] for own in results.values() if own[name] is not None] for name in COLUMNS}
    means = {name: sum(own) / len(own) if own else None for name, own in columns.items()}
    worst = {name: min(own, default=None) for name, own in columns.items()}
    for title, line in (("mean", means), ("worst", worst)):
        print(f"{title:14s}" + "".join(f"{_shown(line[name]):>11s}" for name in COLUMNS))
    print(
        f"{'goal, mean':14s}" + "".join(f"{_shown(GOALS.get(name, (None,))[0]):>11s}" for name in COLUMNS), flush=True
    )
    return all(
        (means[name] or 0) >= mean and (worst[name] or 0) >= least
        for name, (mean, least) in GOALS.items()
        if means[name] is not None
    )


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def speed_rows(lines: Sequence[str]) -> list[Row]:
    """Measure parsing alone, by the time of one processor, after the parser has seen each form."""
    pa.set_cpu_count(1)
    many = list(lines) * max(1, SPEED_LINES // len(lines))
    texts = pa.array(many).cast(pa.binary())
    stamps = pa.array([datetime(2024, 5, 1, tzinfo=UTC)] * len(many))
    parser = learn(pa.array(lines)).parser()
    parser.parse(texts, timestamps=stamps)
    best = float("inf")
    for _ in range(3):
        start = process_time()
        parser.parse(texts, timestamps=stamps)
        best = min(best, process_time() - start)
    return [Row("parse, one core", len(many) / best / 1e6, "M lines/s", target=SPEED_TARGET)]


def made_up_lines() -> list[str]:
    chance = random.Random(1)
    texts = ("served /item/{} in {} ms", "cache miss for key {} after {} tries", "flushed {} records to segment {}")
    return [
        f"2024-05-01 10:{n % 3600 // 60:02d}:{n % 60:02d},{chance.randint(100, 999)} INFO [worker-{n % 8}] app.Store: "
        + chance.choice(texts).format(chance.randint(1, 10**6), chance.randint(1, 500))
        for n in range(5000)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
