"""`quiver sim` runs seeds and prints a finding with its replay command; `quiver history check` reports anomalies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quiver.cli import main
from quiver.testing.history import Recorder
from quiver.testing.simulator.report import violated
from quiver.testing.simulator.runner import Nemesis

Output = pytest.CaptureFixture[str]


def break_at_the_first_fault(_: Nemesis[Any], *__: object) -> None:
    violated("I1", "two leaders in one term", term=7)


def test_one_seed_is_run_and_described(capsys: Output) -> None:
    assert main(["sim", "--seed", "15"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("seed=15 simulated_ms=")
    assert last == "nothing found"


def test_several_seeds_are_summed_up(capsys: Output) -> None:
    assert main(["sim", "--seeds", "2", "--first", "15", "--jobs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["fault", "count"]
    assert any(line.startswith("seeds=2 cluster_hours=") for line in lines)
    assert lines[-1] == "findings=0"


def test_summary_is_machine_readable(capsys: Output) -> None:
    assert main(["sim", "--seeds", "1", "--first", "15", "--jobs", "1", "--json"]) == 0
    summary = msgspec.json.decode(capsys.readouterr().out)
    assert summary["seeds"] == 1
    assert summary["findings"] == []
    assert summary["sends"]["ok"] > 0


def test_finding_is_printed_with_its_replay_command(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr(Nemesis, "begin", break_at_the_first_fault)
    assert main(["sim", "--seed", "15"]) == 1
    output = capsys.readouterr().out
    assert "finding: I1: two leaders in one term term=7" in output
    assert "last events:" in output
    assert "shortest failing schedule found (0 of" in output
    assert output.endswith("replay: quiver sim --seed 15\n")


def spin_at_the_first_fault(_: Nemesis[Any], *__: object) -> None:
    while True:  # as a coroutine does whose wait returns without waiting
        pass


def test_seed_that_never_yields_is_a_finding_with_its_stack(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr(Nemesis, "begin", spin_at_the_first_fault)
    assert main(["sim", "--seed", "15", "--seed-seconds", "1"]) == 1
    output = capsys.readouterr().out
    assert "finding: F3: the seed did not end within 1 s of processor time" in output
    assert "spin_at_the_first_fault" in output


def test_campaign_goes_on_after_a_seed_that_did_not_end(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr(Nemesis, "begin", spin_at_the_first_fault)
    arguments = ["sim", "--seeds", "2", "--first", "15", "--jobs", "1", "--seed-seconds", "0.5"]
    assert main(arguments) == 1
    output = capsys.readouterr().out
    assert output.count("replay: quiver sim --seed") == 2
    assert output.endswith("findings=2\n")


def test_campaign_with_a_finding_fails(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr(Nemesis, "begin", break_at_the_first_fault)
    assert main(["sim", "--seeds", "2", "--first", "15", "--jobs", "1"]) == 1
    printed = capsys.readouterr()
    assert printed.out.count("replay: quiver sim --seed 1") == 2
    assert "seed 16: I1: two leaders in one term" in printed.err


def test_time_limit_ends_a_campaign(capsys: Output) -> None:
    assert main(["sim", "--seeds", "1000", "--jobs", "1", "--minutes", "0.00001"]) == 0
    assert re.search(r"^seeds=[01] ", capsys.readouterr().out, flags=re.MULTILINE)


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
