"""What people are shown of log lines: a few lines, or a page that nobody can break with what they log."""

from __future__ import annotations

import random
from html.parser import HTMLParser
from typing import Any

import pytest
from test_log_findings import Line, an_hour, events

from quiver.cli.pipeline import ProgressDisplay
from quiver.errors import RequestError
from quiver.spark.pipelines import JobProgress, make_job
from quiver.spark.pipelines.log_charts import duration, make_axis, short
from quiver.spark.pipelines.log_findings import LogFindings, find
from quiver.spark.pipelines.log_report import ShownLine, render_lines, render_page
from quiver.spark.pipelines.log_summary import empty_summary, summarize

HOSTILE = "<script>alert('x')</script>\x1b[2J & \"quoted\""


@pytest.fixture(scope="module")
def found() -> LogFindings:
    """An hour with a burst, a new template and one that stops."""
    rng = random.Random(3)
    lines = an_hour(rng, until_s={"slow query <*>": 2400})
    lines += [(1500 + rng.uniform(0, 40), "ERROR", "db", "disk <*> is full", "sda1") for _ in range(700)]
    lines.append((3000.0, "WARN", "db", "failover to <*>", "db-2"))
    return find(summarize(events(sorted(lines, key=lambda line: line[0] or 0))))


def hostile() -> LogFindings:
    lines: list[Line] = [(float(at), "ERROR", HOSTILE, f"{HOSTILE} <*>", HOSTILE) for at in range(40)]
    return find(summarize(events([*lines, *[(30.0, "ERROR", HOSTILE, HOSTILE, "1")] * 50])))


class Tags(HTMLParser):
    """The tags of a page, and whether they close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.targets: set[str] = set()
        self.links: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        given = dict(attrs)
        self.targets |= {given["id"]} if "id" in given else set()
        self.links |= {given["href"]} if "href" in given else set()
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_terminal_shows_totals_and_findings(found: LogFindings) -> None:
    lines = render_lines(found)
    words = [line.split()[0] for line in lines]
    assert words[:5] == ["lines", "time", "newest", "levels", "sources"]
    assert lines[1] == "time      2023-11-14 22:13:20 to 2023-11-14 23:13:20 UTC"
    [burst] = [line for line in lines if line.startswith("burst")]
    assert burst.startswith("burst     2023-11-14 22:38:20, 40 s: 71")
    assert burst.endswith(": disk <*> is full")
    assert [line.split(" x ")[1] for line in lines if line.startswith("new ")] == [
        "disk <*> is full",
        "failover to <*>",
    ]
    [gone] = [line for line in lines if line.startswith("vanished")]
    assert gone.endswith(": slow query <*>")
    assert "latency" not in words
    assert render_lines(find(empty_summary())) == ("no lines yet",)


def test_lines_without_a_time_are_told() -> None:
    lines = render_lines(find(summarize(events([(None, "INFO", "a", "x", "1"), (1.0, "INFO", "a", "x", "1")]))))
    assert lines[0] == "lines     2, 1 without a time of their own"


def test_what_is_logged_cannot_move_the_cursor() -> None:
    assert not any("\x1b" in line for line in render_lines(hostile()))


def test_lines_are_shown_below_the_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay("analyze") as progress:
        progress.report_progress(JobProgress("analyzing logs", 7, lines=("INFO 4.0/s", "sources   web 7")))
    assert capsys.readouterr().err == "analyze: analyzing logs, 7 records\n  INFO 4.0/s\n  sources   web 7\n"


def test_lines_of_a_terminal_are_text_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    board = ProgressDisplay("analyze")._bar
    board.lines = ("[bold]not bold[/bold]",)
    board.console.print(*board.get_renderables())
    assert "[bold]not bold[/bold]" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["found", "hostile", "empty"])
def test_page_is_well_formed_and_has_nothing_from_elsewhere(found: LogFindings, which: str) -> None:
    shown = {"found": found, "hostile": hostile(), "empty": find(empty_summary())}[which]
    page = render_page("logs & more", shown, {0: [ShownLine(HOSTILE, is_in_burst=True)]})
    tags = Tags(page)
    assert tags.open == []
    assert not {"script", "link", "img", "iframe", "object"}.intersection(tags.seen)
    assert "http" not in page
    assert "url(" not in page
    assert tags.links <= {f"#{target}" for target in tags.targets}
    assert "<h1>logs &amp; more</h1>" in page
    assert "prefers-color-scheme: dark" in page


def test_page_has_what_was_found(found: LogFindings) -> None:
    around = {0: [ShownLine("before it", is_in_burst=False), ShownLine("disk sda1 is full", is_in_burst=True)]}
    page = render_page("logs", found, around)
    assert "2023-11-14 22:13:20 to 2023-11-14 23:13:20 UTC, 1 h, in windows of 5 s" in page
    assert "lines</b> in 40 s from 2023-11-14 22:38:20; usual" in page
    assert "before it\n<b>disk sda1 is full</b>" in page
    assert page.count('class="mark"') == 1
    assert "<pre>failover to db-2</pre>" in page
    assert "<td>vanished<br>" in page
    assert "<code>sda1</code> 100%" in page
    assert "From produce to processing" not in page


def test_latency_is_shown_where_it_was_measured() -> None:
    table = events([(float(at), "INFO", "a", "x", "1") for at in range(5)])
    summary = summarize(table, now_ms=1_700_000_000_000 + 250)
    shown = find(summary, with_latency=True)
    assert shown.latency[shown.windows[-1]] == (250.0, 250)
    assert "Average 250 ms, maximum 250 ms." in render_page("logs", shown)


def test_axis_has_whole_windows_and_few_bars() -> None:
    axis = make_axis([0, 10_000, 990_000], 10_000, 30)
    assert (axis.bar_ms, axis.count, axis.end_ms) == (40_000, 25, 1_000_000)
    assert axis.add_up([0, 10_000, 990_000], [1, 2, 3]) == [3, *[0] * 23, 3]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (0.25, "0.25"), (7, "7"), (999, "999"), (1054, "1.05k"), (2_000_000, "2M")]
)
def test_numbers_are_short(number: float, text: str) -> None:
    assert short(number) == text


def test_durations_have_units() -> None:
    assert [duration(ms) for ms in (5, 1500, 90_000, 3_600_000, 129_600_000)] == [
        "5 ms",
        "1.5 s",
        "1.5 min",
        "1 h",
        "1.5 d",
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"to-topic": "counts", "to-postgres": "x", "checkpoint": "c"}, "set only one of"),
        ({"to-postgres": "postgresql://x"}, "needs a checkpoint"),
        ({"to-topic": "counts"}, "needs a checkpoint"),
        ({"to-delta": "./counts"}, "to-delta needs a checkpoint"),
        ({"to-topic": "logs", "checkpoint": "c"}, "would be counted"),
        ({"window": "0s"}, "window must be at least 1s"),
        ({"watermark": "soon"}, "must be a duration such as"),
        ({"since": "yesterday"}, "since"),
        ({"table": "./events", "checkpoint": "c"}, "analyzed as a whole"),
        ({"format": ["{nothing}"]}, "unknown"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        make_job("analyze", {"topic": "logs", **options})
