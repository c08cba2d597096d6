"""Lines that name their fields: JSON and logfmt."""

from __future__ import annotations

from datetime import UTC, datetime

from quiver.spark.logs import learn
from quiver.spark.logs.columns import pa


def test_json_is_read_by_its_fields() -> None:
    """The names that loggers use for time, level, source and message are known."""
    lines = pa.array(
        [
            '{"ts": 1714557600.5, "level": "info", "logger": "web", "msg": "served /a/1 in 7 ms", "pid": 12}',
            '{"@timestamp": "2024-05-01T10:00:00Z", "severity": "ERROR", "message": "lost \\"node 3\\"", "host": "h1"}',
            '{"ctx": {"message": "inner"}, "message": "served /b/2 in 9 ms", "level": "warn"}',
            '{"not": "a log line"}',
            '{"broken": ',
        ]
    )
    rows = learn(lines).parse(lines).to_pylist()
    assert [row["message"] for row in rows] == [
        "served /a/1 in 7 ms",
        'lost "node 3"',
        "served /b/2 in 9 ms",
        '{"not": "a log line"}',
        '{"broken": ',
    ]
    assert [row["level"] for row in rows] == ["INFO", "ERROR", "WARN", None, None]
    assert rows[0]["time"] == datetime(2024, 5, 1, 10, 0, 0, 500_000, tzinfo=UTC)
    assert rows[1]["time"] == datetime(2024, 5, 1, 10, tzinfo=UTC)
    assert (rows[0]["source"], rows[0]["thread_or_pid"], rows[1]["host"]) == ("web", "12", "h1")
    assert rows[0]["template"] == rows[2]["template"] == "served <*> in <*>"
    assert rows[0]["parameters"] == ["/a/1", "7 ms"]
    assert rows[1]["template"] == 'lost "node <*>"'


def test_logfmt_is_read_by_its_fields() -> None:
    """Values may be quoted."""
    lines = pa.array(
        [
            'time="2024-05-01T10:00:00Z" level=info msg="opened 3 files" component=store',
            "ts=1714557600 lvl=warn msg=slow duration=17ms",
        ]
    )
    rows = learn(lines).parse(lines).to_pylist()
    assert [row["message"] for row in rows] == ["opened 3 files", "slow"]
    assert [row["level"] for row in rows] == ["INFO", "WARN"]
    assert {row["time"] for row in rows} == {datetime(2024, 5, 1, 10, tzinfo=UTC)}
    assert rows[0]["source"] == "store"


def test_key_values_in_a_message_are_no_logfmt() -> None:
    """A line with a header and some pairs is not taken for logfmt."""
    lines = pa.array([f"May  1 10:00:0{n} web sshd[{n}]: failure; logname= uid=0 euid=0 tty=ssh" for n in range(5)])
    rows = learn(lines).parse(lines)
    assert set(rows.column("source").to_pylist()) == {"sshd"}


def test_json_and_text_in_one_batch_keep_their_order() -> None:
    """Rows are in the order of the lines."""
    lines = [f'{{"msg": "tick {n}"}}' if n % 2 else f"2024-05-01 10:00:0{n} INFO a.b: tock {n}" for n in range(10)]
    rows = learn(pa.array(lines)).parse(pa.array(lines))
    assert rows.column("line").to_pylist() == lines
    assert rows.column("message").to_pylist() == [f"{'tick' if n % 2 else 'tock'} {n}" for n in range(10)]
