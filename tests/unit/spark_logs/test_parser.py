"""Cutting columns from lines: places that hold for one line of a form are never taken outside another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quiver.spark.logs import learn
from quiver.spark.logs.columns import pa, slices


def _rows(lines: list[str | bytes]) -> Any:
    column = pa.array([line.encode() if isinstance(line, str) else line for line in lines], pa.binary())
    rows = learn(column).parse(column)
    rows.validate(full=True)
    return rows


def test_parameters_of_words_that_were_drawn_together() -> None:
    """A list that follows a word with several numbers is one parameter, from its first number to its last."""
    rows = _rows(['2024-05-01 10:00:00 INFO app.Main: call (1)é"k":"v"2 3 done'])
    assert rows.column("template").to_pylist() == ['call (<*>)é"k":"v"<*> done']
    assert rows.column("parameters").to_pylist() == [['1)é"k":"v"2 3']]


def test_stamps_that_look_like_two_for_some() -> None:
    """A second stamp that the first one's pattern does not lead to is left in the message."""
    rows = _rows(
        ["99Nov 9 12:01:01 |\rx1131566461 \t 1131566461", "}Nov 9 12:01:01 1131566461", "Nov 9 12:01:01 [1131566461"]
    )
    assert rows.num_rows == 3


def test_stamp_behind_the_first_line_is_not_the_records() -> None:
    """Lines whose first lines are equal have nothing else in common: each is cut by its own first line."""
    headed = [f"2024-05-01 10:00:0{n} INFO opened\n2024-05-02 b" for n in range(9)]
    odd = ["once upon 2024-05-01 10:00:00 there", "\r\n2024-05-01 10:00:00 INFO opened", "\r\né"]
    rows = _rows([*headed, *odd])
    assert rows.column("message").to_pylist() == ["opened\n2024-05-02 b"] * 9 + ["there", *odd[1:]]
    assert rows.column("time").is_valid().to_pylist() == [True] * 10 + [False] * 2


def test_places_in_runs_of_other_lengths() -> None:
    """A header that ends within a run of one line does not reach behind the shorter run of another."""
    lines = [f"2024-05-01T10:00:0{n}abc{n} {text} ok" for n, text in enumerate(("started", "stopped", "is"))]
    short = ["7 started ok", "é8 stopped ok", "9 is ok"]
    rows = _rows([*lines, *short])
    assert rows.column("message").to_pylist() == [
        "abc0 started ok",
        "abc1 stopped ok",
        "abc2 is ok",
        " started ok",
        " stopped ok",
        " is ok",
    ]


@pytest.mark.parametrize(("starts", "ends"), [([-1], [2]), ([0], [9]), ([0, 7], [2, 9])])
def test_slices_outside_the_text_are_an_error(starts: list[int], ends: list[int]) -> None:
    """Memory that is not the text's is never read."""
    with pytest.raises(ValueError, match="are not in a text of 8 bytes"):
        slices(np.zeros(8, np.uint8), np.array(starts), np.array(ends), pa.string())
