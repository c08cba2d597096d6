"""The model: it learns, merges, is stored, and parses every line."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import zstandard

from quiver.errors import RequestError
from quiver.spark.logs import SCHEMA, Model, learn
from quiver.spark.logs import model as model_module
from quiver.spark.logs.columns import pa

LINES = [
    f"2024-05-0{day} 10:00:0{second},123 {level} [main] com.example.Store: {text}"
    for day in range(1, 4)
    for second, (level, text) in enumerate(
        (
            ("INFO", f"opened segment {day} in {day}3 ms"),
            ("WARN", f"disk at {day}9 percent"),
            ("ERROR", f"lost connection to 10.0.0.{day}:900{day}"),
        )
    )
]


def test_parse_reads_header_template_and_parameters() -> None:
    """A line becomes a row with its own columns."""
    rows = learn(pa.array(LINES)).parse(pa.array(LINES))
    assert rows.schema == SCHEMA
    row = rows.slice(2, 1).to_pylist()[0]
    assert row["time"].isoformat() == "2024-05-01T10:00:02.123000+00:00"
    assert (row["level"], row["source"], row["thread_or_pid"]) == ("ERROR", "com.example.Store", "main")
    assert (row["template"], row["parameters"]) == ("lost connection to <*>", ["10.0.0.1:9001"])
    assert row["line"] == LINES[2]
    assert row["raw"] is None


def test_stored_model_parses_alike() -> None:
    """A model that was stored and read gives the same rows."""
    model = learn(pa.array(LINES))
    read = Model.from_bytes(model.to_bytes())
    assert read == model
    assert read.parse(pa.array(LINES)).equals(model.parse(pa.array(LINES)))


def test_bytes_that_are_no_model_are_an_error() -> None:
    """A stored model that is broken or of a later version is told apart."""
    with pytest.raises(RequestError, match="not a stored model"):
        Model.from_bytes(b"something else")
    later = zstandard.compress(msgspec.msgpack.encode([99]))
    with pytest.raises(RequestError, match="version 99"):
        Model.from_bytes(later)


def test_new_lines_are_told() -> None:
    """A parser says which lines have a form that was not learned from, and parses them all the same."""
    parser = learn(pa.array(LINES)).parser()
    lines = pa.array([LINES[0], LINES[0].replace("opened", "deleted")])
    parsed = parser.parse(lines)
    assert parsed.is_new.to_pylist() == [False, True]
    assert parsed.rows.column("template").to_pylist() == ["opened segment <*> in <*>", "deleted segment <*> in <*>"]


def test_merged_template_has_a_successor() -> None:
    """When more lines show that a word varies, the model says what became of the templates before."""
    text = "2024-05-01 10:00:00,123 INFO [main] com.example.Store: member {} logged in"
    few = learn(pa.array([text.format(name) for name in ("anna", "berta")]))
    more = learn(pa.array([text.format(name) for name in ("carl", "dora", "emil")]))
    assert len(few.templates) == 2
    assert len(more.templates) == 3
    merged = few.merge(more)
    (now,) = merged.templates
    assert merged.templates[now] == "member <*> logged in"
    for old in (*few.templates, *more.templates):
        assert merged.resolve(old) == (now,)
    assert merged.resolve(now) == (now,)
    assert Model.from_bytes(merged.to_bytes()).resolve(next(iter(few.templates))) == (now,)


def test_model_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the bound each template keeps some of its forms, and all templates stay."""
    monkeypatch.setattr(model_module, "FORMS_MAX", 100)
    monkeypatch.setattr(model_module, "FORMS_OF_TEMPLATE", 20)
    names = ["".join(own) for own in itertools.product("abcdef", repeat=3)]
    text = "2024-05-01 10:00:00,123 INFO [main] com.example.Store: "
    lines = [f"{text}user {name} logged in" for name in names]
    lines += [text + "disk is full", text + "disk is fine", text + "shutting down"]
    model = learn(pa.array(lines))
    assert model.form_count < 30
    assert set(model.templates.values()) == {"user <*> logged in", "disk is full", "disk is fine", "shutting down"}
    assert set(model.parse(pa.array(lines)).column("template").to_pylist()) == set(model.templates.values())


def test_undecodable_line_keeps_its_bytes() -> None:
    """A line that is not valid UTF-8 has its bytes in `raw` and a readable text beside it."""
    lines = pa.array([LINES[0].encode(), b"\xff\xfe broken 7", None], pa.binary())
    rows = learn(lines).parse(lines)
    assert rows.column("raw").to_pylist() == [None, b"\xff\xfe broken 7", None]
    assert rows.column("line").to_pylist() == [LINES[0], "\ufffd\ufffd broken 7", ""]
    assert rows.column("template")[1].as_py() == "\ufffd\ufffd broken <*>"
