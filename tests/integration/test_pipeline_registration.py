"""Runs of pipelines that describe themselves, and the list of them over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_nodes import ask

import quiver
from quiver.errors import RequestError
from quiver.spark.pipelines import registration
from quiver.spark.pipelines.registration import (
    REPORT_BYTES_MAX,
    REPORTS_TOPIC,
    RUNS_TOPIC,
    RunDescription,
    RunRegistration,
)
from quiver.testing import LocalCluster


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with LocalCluster(nodes=1) as local:
        yield local.urls[0].removeprefix("http://")


def test_runs_are_listed_with_their_last_state(address: str) -> None:
    assert ask(address, "GET", "/pipelines") == (200, {"status": "success", "runs": []})
    with quiver.connect(f"http://{address}") as cluster:
        with RunRegistration(lambda: cluster, "audit", topics=("logs",), report="audit.md") as passing:
            while not (runs := ask(address, "GET", "/pipelines")[1]["runs"]):
                time.sleep(0.05)  # a run does not wait for its first description
            (run,) = runs
            assert (run["state"], run["topics"], run["report"]) == ("running", ["logs"], "audit.md")
            passing.note(state="passed", verdict="all sources agree", records=42)
        failing = RunRegistration(lambda: cluster, "archive", topics=("logs",))
        with pytest.raises(RequestError), failing:
            raise RequestError("the lake is full")
        again = RunRegistration(lambda: cluster, "audit", topics=("logs",), report="audit.md")
        with again:
            again.note(state="failed", verdict="3 records differ")
    listed = {one["run"].rpartition(" ")[0]: one for one in ask(address, "GET", "/pipelines")[1]["runs"]}
    assert {name: (one["state"], one["verdict"]) for name, one in listed.items()} == {
        "archive logs": ("failed", "the lake is full"),
        "audit logs": ("failed", "3 records differ"),
    }, "the same job again continues its line"


def test_report_is_copied_to_the_cluster(address: str, tmp_path: Path) -> None:
    page = tmp_path / "logs.html"
    page.write_bytes("<p>ünchanged".encode())
    large = tmp_path / "large.md"
    large.write_bytes(bytes(REPORT_BYTES_MAX + 1))
    missing = tmp_path / "missing.md"
    with quiver.connect(f"http://{address}") as cluster:
        for path in (page, large, missing):
            with RunRegistration(lambda: cluster, path.stem, topics=("t",), report=str(path)) as run:
                run.note(state="done", lag=7)
        with pytest.raises(RequestError), RunRegistration(lambda: cluster, "bad", topics=("t",), report=str(page)):
            raise RequestError("it failed before it wrote one: what is there is an older one")
    runs = {one["pipeline"]: one for one in ask(address, "GET", "/pipelines")[1]["runs"]}
    assert [runs[name].get("report_offset") for name in ("logs", "large", "missing", "bad")] == [0, None, None, None]
    assert [runs[name]["state"] for name in ("logs", "large", "missing")] == ["done"] * 3
    assert runs["logs"]["lag"] == 7
    (record,) = ask(address, "GET", f"/topics/{REPORTS_TOPIC}/records")[1]["records"]
    assert (record["message"], record["headers"]) == ("<p>ünchanged", {"name": "logs.html"})


def test_run_that_waits_says_so_now_and_then(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with quiver.connect(f"http://{address}") as cluster, RunRegistration(lambda: cluster, "idle", topics=()) as run:
        run.note_idle()
        described = run._last.updated_ms
        monkeypatch.setattr(registration, "IDLE_EVERY_S", 0.0)
        time.sleep(0.002)
        run.note_idle()
        assert run._last.updated_ms > described


def test_run_goes_on_without_a_cluster() -> None:
    def refuse() -> quiver.Cluster:
        raise RequestError("no permission")

    with RunRegistration(refuse, "audit", topics=("logs",)) as run:
        run.note(records=1)


def test_both_sides_know_the_same_fields() -> None:
    from quiver.gateway.console.contract import PipelineRunItem
    from quiver.gateway.console.pipelines import RUNS_TOPIC as SHOWN_TOPIC

    assert set(RunDescription.__struct_fields__) == set(PipelineRunItem.__struct_fields__)
    assert RUNS_TOPIC == SHOWN_TOPIC
