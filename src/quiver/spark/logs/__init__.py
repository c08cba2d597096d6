"""Understand log lines: find their headers, join their continuations, learn their templates.

Pure functions on Arrow arrays, without Spark:

    model = learn(pa.array(lines))      # the layouts and templates of the lines
    rows = model.parse(pa.array(lines)) # a batch with the columns of SCHEMA, one row for each line
    model = model.merge(learn(others))  # associative and commutative

`Model.parser()` returns a parser that keeps what it computes for the next batch and tells which lines are new.
"""

from __future__ import annotations

from quiver.spark.logs.joining import find_continuations, join_lines
from quiver.spark.logs.model import Model, learn
from quiver.spark.logs.parser import SCHEMA, Parsed, Parser

__all__ = ["SCHEMA", "Model", "Parsed", "Parser", "find_continuations", "join_lines", "learn"]
