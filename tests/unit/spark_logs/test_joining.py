"""Multi-line records: which lines belong to the line before."""

from __future__ import annotations

import pytest

from quiver.spark.logs import find_continuations, join_lines, learn
from quiver.spark.logs.columns import pa

JAVA = [
    "2024-05-01 10:00:00 ERROR app.Main: request failed",
    "java.lang.IllegalStateException: closed",
    "\tat app.Store.get(Store.java:17)",
    "\t... 3 more",
    "Caused by: java.io.IOException: gone",
    "\tat app.Disk.read(Disk.java:4)",
    "2024-05-01 10:00:01 INFO app.Main: going on",
]
PYTHON = [
    "2024-05-01 10:00:00 ERROR root: job failed",
    "Traceback (most recent call last):",
    '  File "job.py", line 3, in <module>',
    "    run()",
    "ValueError: bad input",
    "2024-05-01 10:00:01 INFO root: next job",
]


@pytest.mark.parametrize(("lines", "starts"), [(JAVA, [0, 6]), (PYTHON, [0, 5])])
def test_traces_are_joined(lines: list[str], starts: list[int]) -> None:
    """A stack trace is part of the line that it follows."""
    joined, firsts = join_lines(pa.array(lines))
    assert firsts.tolist() == starts
    assert joined.to_pylist() == ["\n".join(lines[: starts[1]]), lines[-1]]


def test_lines_of_other_sources_are_never_joined() -> None:
    """A continuation belongs to the line before only within one group."""
    lines = pa.array(["start", "  more", "  of another"])
    assert find_continuations(lines, pa.array(["a", "a", "b"])).to_pylist() == [False, True, False]


def test_lines_without_continuations_are_returned_as_they_are() -> None:
    """Nothing is joined where nothing continues."""
    lines = pa.array(["one", "two", "Error reading three"])
    joined, firsts = join_lines(lines)
    assert joined.to_pylist() == lines.to_pylist()
    assert firsts.tolist() == [0, 1, 2]
    assert join_lines(pa.array([], pa.string()))[0].to_pylist() == []


def test_template_is_that_of_the_first_line() -> None:
    """The trace is in the message, not in the template."""
    joined, _ = join_lines(pa.array([*JAVA, *(line.replace("17", "18") for line in JAVA)]))
    rows = learn(joined).parse(joined)
    assert set(rows.column("template").to_pylist()) == {"request failed", "going on"}
    assert rows.column("message")[0].as_py().endswith("Disk.java:4)")
    assert rows.column("level").to_pylist() == ["ERROR", "INFO"] * 2


def test_invalid_bytes_are_not_joined_wrongly() -> None:
    """Bytes that are not valid UTF-8 are looked at as they are."""
    assert find_continuations(pa.array([b"\xff start", b"\t\xff more"])).to_pylist() == [False, True]
