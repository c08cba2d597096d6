"""What is found in parsed log lines: planted faults are found first, and little else is."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from quiver.spark.pipelines import log_summary
from quiver.spark.pipelines.log_findings import LogFindings, find, find_runs
from quiver.spark.pipelines.log_summary import LogSummary, merge, summarize

START_S = 1_700_000_000
HOUR_S = 3600
TEMPLATES = [
    ("INFO", "api", "request <*> took <*> ms", 10.0),
    ("INFO", "api", "user <*> logged in", 4.0),
    ("INFO", "db", "checkpoint <*> written", 0.5),
    ("DEBUG", "db", "page <*> read", 1.5),
    ("WARN", "db", "slow query <*>", 0.2),
    ("ERROR", "api", "no route to <*>", 0.3),
    ("ERROR", "db", "deadlock on <*>", 0.02),
    ("INFO", "cron", "job <*> done", 0.05),
    ("TRACE", "api", "cache <*>", 0.4),
]
"""Level, source, template and lines per second: about 61,000 lines in an hour."""

Line = tuple[float | None, str | None, str, str, str]


def events(lines: list[Line], *, first_offset: int = 0, partition: int = 0) -> pa.Table:
    """Parsed lines: seconds after the start, level, source, template, parameter."""
    times = [None if at is None else round((START_S + at) * 1_000_000) for at, *_ in lines]
    templates = [line[3] for line in lines]
    return pa.table(
        {
            "partition": pa.array([partition] * len(lines), pa.int32()),
            "offset": pa.array(range(first_offset, first_offset + len(lines)), pa.int64()),
            "timestamp": pa.array([START_S * 1_000_000] * len(lines), pa.timestamp("us", "UTC")),
            "time": pa.array(times, pa.timestamp("us", "UTC")),
            "level": pa.array([line[1] for line in lines], pa.string()),
            "source": pa.array([line[2] for line in lines], pa.string()),
            "template_id": pa.array([f"id of {template}" for template in templates], pa.string()),
            "template": pa.array(templates, pa.string()),
            "parameters": pa.array([[line[4]] * line[3].count("<*>") for line in lines], pa.list_(pa.string())),
            "line": pa.array([line[3].replace("<*>", line[4]) for line in lines], pa.string()),
            "raw": pa.nulls(len(lines), pa.binary()),
        }
    )


def an_hour(rng: random.Random, *, until_s: dict[str, float] | None = None) -> list[Line]:
    """Lines at random times; templates in `until_s` stop there."""
    lines: list[Line] = []
    for level, source, template, rate in TEMPLATES:
        end_s, at = (until_s or {}).get(template, HOUR_S), 0.0
        while (at := at + rng.expovariate(rate)) < end_s:
            lines.append((at, level, source, template, str(rng.randrange(50))))
    return sorted(lines, key=lambda line: line[0] or 0)


def findings(lines: list[Line], **options: Any) -> LogFindings:
    return find(summarize(events(lines)), **options)


def templates_of(found: LogFindings) -> list[str]:
    named = [own.template_id for own in found.new]
    named += [own.template_id or own.source for own in found.changes]
    return [*named, *(own.template_ids[0] for own in found.bursts)]


@pytest.mark.parametrize("seed", range(3))
def test_an_ordinary_hour_raises_no_alarm(seed: int) -> None:
    found = findings(an_hour(random.Random(seed)))
    assert 55_000 < found.lines < 67_000
    assert (found.window_ms, len(found.windows)) == (5000, 720)
    assert templates_of(found) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("seconds", [5, 60, 300])
def test_planted_burst_comes_first(seed: int, seconds: float) -> None:
    rng = random.Random(seed)
    at = rng.uniform(0, HOUR_S - seconds)
    burst: list[Line] = [(at + rng.uniform(0, seconds), "ERROR", "db", "disk <*> is full", "7") for _ in range(700)]
    found = findings(sorted([*an_hour(rng), *burst], key=lambda line: line[0] or 0))
    first = found.bursts[0]
    assert first.template_ids[0] == "id of disk <*> is full"
    assert abs(first.lines - 700) < 60 + seconds
    assert first.start_ms / 1000 == pytest.approx(START_S + at, abs=10)
    assert first.end_ms / 1000 == pytest.approx(START_S + at + seconds, abs=15)
    others = [own for own in templates_of(found) if own != "id of disk <*> is full"]
    assert len(others) <= 1


@pytest.mark.parametrize("seed", range(3))
def test_one_new_template_is_found(seed: int) -> None:
    rng = random.Random(seed)
    lines = an_hour(rng)
    at = rng.uniform(HOUR_S * 0.3, HOUR_S)
    found = findings(sorted([*lines, (at, "INFO", "db", "failover to <*>", "b")], key=lambda line: line[0] or 0))
    assert [own.template_id for own in found.new] == ["id of failover to <*>"]
    assert found.new[0].first_ms == int((START_S + at) * 1000)
    assert templates_of(found) == ["id of failover to <*>"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("template", "lines_per_minute"), [("user <*> logged in", 240), ("slow query <*>", 12)])
def test_template_that_stops_is_found(seed: int, template: str, lines_per_minute: float) -> None:
    found = findings(an_hour(random.Random(seed), until_s={template: 2400}))
    first = found.changes[0]
    assert (first.change, first.template_id) == ("vanished", f"id of {template}")
    assert first.before == pytest.approx(lines_per_minute, rel=0.2)
    assert first.score == pytest.approx(1200 / 60 * lines_per_minute, rel=0.2)
    assert len(templates_of(found)) == 1


def test_source_that_stops_is_one_finding() -> None:
    stops = {template: 2000.0 for _, source, template, _ in TEMPLATES if source == "db"}
    found = findings(an_hour(random.Random(5), until_s=stops))
    assert [(own.change, own.source, own.template_id) for own in found.changes] == [("vanished", "db", "")]


def test_lasting_change_of_a_rate_is_found() -> None:
    rng = random.Random(8)
    lines = an_hour(rng)
    more: list[Line] = [(rng.uniform(1800, HOUR_S), "INFO", "cron", "job <*> done", "1") for _ in range(900)]
    found = findings(sorted([*lines, *more], key=lambda line: line[0] or 0), since_ms=(START_S + 1800) * 1000)
    [change] = found.changes
    assert change.template_id == "id of job <*> done"
    assert change.change in ("rose", "surged")
    assert change.after > 5 * change.before


def test_what_recurs_is_no_burst() -> None:
    rng = random.Random(1)
    batch: list[Line] = [
        (start + rng.uniform(0, 5), "ERROR", "cron", "file <*> skipped", "1")
        for start in range(200, HOUR_S, 600)
        for _ in range(200)
    ]
    found = findings(sorted([*an_hour(rng), *batch], key=lambda line: line[0] or 0))
    assert found.bursts == ()
    larger: list[Line] = [(3000 + rng.uniform(0, 5), "ERROR", "cron", "file <*> skipped", "1") for _ in range(900)]
    found = findings(sorted([*an_hour(rng), *batch, *larger], key=lambda line: line[0] or 0))
    assert [own.template_ids[0] for own in found.bursts] == ["id of file <*> skipped"]


def test_lines_without_levels_have_bursts_too() -> None:
    lines: list[Line] = [(float(at), None, "", "tick <*>", "1") for at in range(HOUR_S)]
    lines += [(1000.5, None, "", "refused <*>", "2")] * 300
    found = findings(sorted(lines, key=lambda line: line[0] or 0))
    assert [own.template_ids[0] for own in found.bursts] == ["id of refused <*>"]
    assert found.level_totals == {"NONE": HOUR_S + 300}


def test_lines_without_a_time_are_counted_and_belong_to_the_line_before() -> None:
    found = findings([(0.0, "INFO", "a", "x", "1"), (None, "INFO", "a", "y", "1"), (9.0, None, "b", "y", "1")])
    assert (found.lines, found.without_time, len(found.windows)) == (3, 1, 2)
    assert found.levels == {"INFO": (2, 0), "NONE": (0, 1)}
    assert found.templates["id of y"].first_ms == START_S * 1000


def test_lines_of_which_none_has_a_time_are_counted_by_their_timestamps() -> None:
    found = findings([(None, "INFO", "a", "x", "1"), (None, "INFO", "a", "x", "1")])
    assert (found.without_time, found.windows) == (2, (START_S * 1000,))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_lines_say_little_and_break_nothing(count: int) -> None:
    found = findings([(float(at), "ERROR", "a", "x <*>", "1") for at in range(count)])
    assert (found.lines, templates_of(found)) == (count, [])


def test_parameters_are_sampled_by_position() -> None:
    lines: list[Line] = [(float(at), "INFO", "a", "<*> then <*>", "often" if at % 3 else "rare") for at in range(40)]
    own = findings(lines).templates["id of <*> then <*>"]
    assert own.parameters == ((("often", 26), ("rare", 14)),) * 2
    assert own.example == "rare then rare"


# -- summaries merge ---------------------------------------------------------------------------------


def as_rows(summary: LogSummary) -> tuple[Any, ...]:
    tables = [summary.counts, summary.templates]
    return (summary.window_ms, *(sorted(map(repr, table.to_pylist())) for table in tables))


def test_summaries_merge_in_any_order_and_grouping() -> None:
    rng = random.Random(4)
    lines = an_hour(rng)[:9000]
    edges = sorted(rng.sample(range(1, len(lines)), 4))
    parts = [
        summarize(events(lines[first:end], first_offset=first))
        for first, end in zip([0, *edges], [*edges, len(lines)], strict=True)
    ]
    whole = as_rows(summarize(events(lines)))
    assert as_rows(merge(parts)) == whole
    assert as_rows(merge([merge(parts[3:]), merge([parts[1], merge([parts[2], parts[0]])])])) == whole
    assert as_rows(merge([merge(parts), log_summary.empty_summary()])) == whole


def test_windows_grow_with_the_time_range_unless_they_are_given() -> None:
    for span_s, length_s in ((100, 1), (HOUR_S, 5), (86_400, 300), (29 * 86_400, 3600), (3000 * 86_400, 864_000)):
        lines: list[Line] = [(float(at), "INFO", "a", "x", "1") for at in np.linspace(0, span_s - 1, 2000)]
        assert summarize(events(lines)).window_ms == length_s * 1000
        assert summarize(events(lines), window_ms=60_000).window_ms == 60_000


def test_summary_survives_its_encoding() -> None:
    summary = summarize(events(an_hour(random.Random(2))[:500]))
    assert as_rows(log_summary.from_bytes(log_summary.to_bytes(summary))) == as_rows(summary)
    assert log_summary.from_bytes(log_summary.to_bytes(log_summary.empty_summary())).lines == 0


def test_lines_of_a_merged_template_are_counted_under_its_successor() -> None:
    summary = summarize(events([(0.0, "INFO", "a", "x 1", "1"), (0.5, "INFO", "a", "x 2", "1")]))
    renamed = log_summary.rename_templates(summary, {"id of x 1": "both", "id of x 2": "both"}, {"both": "x <*>"})
    assert renamed.templates.select(["template_id", "template", "count", "example"]).to_pylist() == [
        {"template_id": "both", "template": "x <*>", "count": 2, "example": "x 1"}
    ]
    assert renamed.counts.num_rows == 1


def test_runs_are_joined_over_one_quiet_window() -> None:
    series = np.array([1, 1, 1, 50, 2, 60, 1, 1, 1, 1, 1])
    assert [(first, end) for first, end, _ in find_runs(series, 10)] == [(3, 6)]
