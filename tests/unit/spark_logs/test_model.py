"""The model: it learns, merges, is stored, and parses every line."""

from __future__ import annotations

import pyarrow as pa

from quiver.spark.logs import SCHEMA, Model, learn

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
