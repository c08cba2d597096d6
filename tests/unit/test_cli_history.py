"""`quiver history check` reports the anomalies of a recorded history."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quiver.cli import main
from quiver.testing.history import Recorder

Output = pytest.CaptureFixture[str]


def _record(path: Path, read: str) -> str:
    with path.open("w") as stream:
        recorder = Recorder(stream)
        recorder.invoke("p", "send", "t-0", ["a"]).ok(0)
        recorder.invoke("r", "poll", "t-0").ok([[0, read]])
    return str(path)


def test_clean_history_is_reported_clean(tmp_path: Path, capsys: Output) -> None:
    assert main(["history", "check", _record(tmp_path / "h.jsonl", "a")]) == 0
    assert capsys.readouterr().out.startswith("nothing found in operations=2 ")


def test_anomalies_are_shown_and_fail_the_command(tmp_path: Path, capsys: Output) -> None:
    assert main(["history", "check", _record(tmp_path / "h.jsonl", "b")]) == 1
    assert "inconsistent-offsets key=t-0 offset=0 values=['a', 'b']" in capsys.readouterr().out


def test_verdict_is_machine_readable(tmp_path: Path, capsys: Output) -> None:
    assert main(["history", "check", "--json", _record(tmp_path / "h.jsonl", "b")]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert not verdict["is_clean"]
    assert verdict["counts"]["unexpected"] == 1


def test_file_that_is_not_a_history_is_refused(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text("what\n")
    assert main(["history", "check", str(path)]) == 2
    assert "line 1 is no event" in capsys.readouterr().err
