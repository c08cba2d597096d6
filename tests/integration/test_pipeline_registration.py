"""Runs of pipelines that describe themselves, and the list of them over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from gateway_nodes import ask

import quiver
from quiver.errors import RequestError
from quiver.spark.pipelines.registration import RUNS_TOPIC, RunDescription, RunRegistration
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


def test_run_goes_on_without_a_cluster() -> None:
    def refuse() -> quiver.Cluster:
        raise RequestError("no permission")

    with RunRegistration(refuse, "audit", topics=("logs",)) as registration:
        registration.note(records=1)


def test_both_sides_know_the_same_fields() -> None:
    from quiver.gateway.console.contract import PipelineRunItem
    from quiver.gateway.console.pipelines import RUNS_TOPIC as SHOWN_TOPIC

    assert set(RunDescription.__struct_fields__) == set(PipelineRunItem.__struct_fields__)
    assert RUNS_TOPIC == SHOWN_TOPIC
