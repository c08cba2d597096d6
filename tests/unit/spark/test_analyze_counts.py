"""What counts of log lines say."""

from __future__ import annotations

from typing import Any

from quiver.spark.pipelines.line_counts import Burst, LineCount, LineCounts, LineLatency

WINDOW_MS = 10_000


def count(window: int, level: str = "INFO", number: int = 1, **fields: Any) -> LineCount:
    start = window * WINDOW_MS
    given = {"source": "web", "message": "hello", **fields}
    return LineCount(window_start_ms=start, window_end_ms=start + WINDOW_MS, level=level, count=number, **given)


def counts(*given: LineCount, windows_max: int = 100) -> LineCounts:
    found = LineCounts(windows_max)
    found.update(given)
    return found


def test_later_count_of_the_same_replaces_the_earlier() -> None:
    found = counts(count(0, number=3))
    found.update([count(0, number=5), count(0, "ERROR", 2)])
    assert found.by_level() == {"ERROR": {0: 2}, "INFO": {0: 5}}
    assert (found.windows, found.window_ms) == ([0], WINDOW_MS)


def test_only_the_newest_windows_are_kept() -> None:
    found = counts(*(count(window) for window in range(10)), windows_max=3)
    assert found.windows == [70_000, 80_000, 90_000]
    assert counts().windows == []
    assert (counts().bursts(), counts().window_ms) == ([], 0)


def test_levels_come_gravest_first_and_sources_with_most_lines() -> None:
    found = counts(
        count(0, "DEBUG"), count(0, "FATAL"), count(0, "NONE"), count(1, "WARN", 4, source="db"), count(1, source="x")
    )
    assert list(found.by_level()) == ["FATAL", "WARN", "INFO", "DEBUG", "NONE"]
    assert found.by_source(2) == {"db": {10_000: 4}, "web": {0: 3}}


def test_top_messages_are_counted_over_sources_and_windows() -> None:
    found = counts(
        count(0, message="a", number=2),
        count(1, message="a", number=2, source="db"),
        count(0, message="b", number=3),
        count(0, "ERROR", message="a"),
    )
    assert found.top_messages(2) == [("a", "INFO", 4), ("b", "INFO", 3)]


def test_burst_is_many_more_errors_than_usual() -> None:
    calm = [count(window, "ERROR", 2) for window in range(5)]
    found = counts(*calm, count(5, "ERROR", 4, message="down"), count(5, "FATAL", 2), count(6, "ERROR", 5))
    (burst,) = found.bursts()
    assert burst == Burst(window_start_ms=50_000, errors=6, usual=2.0, message="down")


def test_windows_without_lines_count_as_calm_and_the_first_windows_are_no_bursts() -> None:
    found = counts(count(0, "ERROR", 50), count(9, "ERROR", 18))
    assert [(burst.window_start_ms, burst.usual) for burst in found.bursts()] == [(90_000, 5.56)]
    assert counts(count(0, "ERROR", 50)).bursts() == []
    assert counts(count(0), count(2, "ERROR", 50)).bursts() == []
    assert counts(count(0), count(3, "ERROR", 4)).bursts() == []
    assert len(counts(count(0), count(3, "ERROR", 5)).bursts()) == 1


def test_latency_is_the_average_over_all_lines_and_the_greatest() -> None:
    found = counts(
        count(0, number=3, latency_ms_sum=30, latency_ms_max=20),
        count(0, "ERROR", 1, latency_ms_sum=70, latency_ms_max=70),
        count(1, number=0),
    )
    assert found.latency() == {
        0: LineLatency(average_ms=25.0, max_ms=70),
        10_000: LineLatency(average_ms=0.0, max_ms=0),
    }
