"""What people are shown of log lines: a few lines, or a page that nobody can break with what they log."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from quiver.cli.pipeline import ProgressDisplay
from quiver.errors import RequestError
from quiver.spark.pipelines import JobProgress, make_job
from quiver.spark.pipelines.line_counts import LineCount, LineCounts
from quiver.spark.pipelines.line_report import render_lines, render_page

HOSTILE = "<script>alert('x')</script>\x1b[2J & \"quoted\""


def counts(**fields: Any) -> LineCounts:
    found = LineCounts()
    for window in range(12):
        start = 1_700_000_000_000 + window * 10_000
        for level, number in (("INFO", 40), ("ERROR", 50 if window == 11 else 1)):
            own = LineCount(
                window_start_ms=start,
                window_end_ms=start + 10_000,
                level=level,
                source="web",
                message="user # logged in",
                count=number,
                latency_ms_sum=400,
                latency_ms_max=90,
            )
            found.update([msgspec.structs.replace(own, **fields)])
    return found


class Tags(HTMLParser):
    """The tags of a page, and whether they close in order."""

    VOID = frozenset(("meta", "rect", "line", "polyline"))

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_terminal_shows_the_newest_window_and_what_is_frequent() -> None:
    lines = render_lines(counts())
    assert lines[0] == "22:15:10  ERROR 5.0/s  INFO 4.0/s"
    assert lines[1] == "sources   web 541"
    assert lines[2] == "latency   average 9 ms, maximum 90 ms"
    assert lines[3].split() == ["480", "INFO", "user", "#", "logged", "in"]
    assert lines[-1] == "burst     22:15:10  50 errors, usually 1: user # logged in"
    assert render_lines(LineCounts()) == ("no lines yet",)


def test_what_is_logged_cannot_move_the_cursor() -> None:
    assert not any("\x1b" in line for line in render_lines(counts(message=HOSTILE, source=HOSTILE)))


def test_lines_are_shown_below_the_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay("analyze") as progress:
        progress.report_progress(JobProgress("analyzing logs", 7, lines=("INFO 4.0/s", "sources   web 7")))
    assert capsys.readouterr().err == "analyze: analyzing logs, 7 records\n  INFO 4.0/s\n  sources   web 7\n"


def test_lines_of_a_terminal_are_text_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    board = ProgressDisplay("analyze")._bar
    board.lines = ("[bold]not bold[/bold]",)
    board.console.print(*board.get_renderables())
    assert "[bold]not bold[/bold]" in capsys.readouterr().err


@pytest.mark.parametrize("found", [counts(), counts(message=HOSTILE, source=HOSTILE), LineCounts()])
def test_page_is_well_formed_and_has_nothing_from_elsewhere(found: LineCounts) -> None:
    page = render_page("logs & more", found)
    tags = Tags(page)
    assert tags.open == []
    assert not {"script", "link", "img", "iframe"}.intersection(tags.seen)
    assert tags.seen.count("svg") == 3
    assert "http" not in page
    assert "<h1>Log lines of logs &amp; more</h1>" in page


def test_page_draws_a_bar_for_each_window_and_level() -> None:
    page = render_page("logs", counts())
    assert page.count("<rect") == 12 * 2 + 12
    assert page.count("<polyline") == 2
    assert "2023-11-14 22:15:10 ERROR: 50 lines" in page
    assert '<td class="number">50</td>' in page


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"to-topic": "counts", "to-postgres": "x", "checkpoint": "c"}, "set only one of"),
        ({"to-postgres": "postgresql://x"}, "need a checkpoint"),
        ({"to-topic": "counts"}, "need a checkpoint"),
        ({"to-topic": "logs", "checkpoint": "c"}, "would be counted"),
        ({"window": "0s"}, "window must be at least 1s"),
        ({"watermark": "soon"}, "must be a duration such as"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        make_job("analyze", {"topic": "logs", **options})
