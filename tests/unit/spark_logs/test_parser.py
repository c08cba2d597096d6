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
