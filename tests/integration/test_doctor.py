"""`quiver explain` and `quiver doctor` on live nodes with faults made on purpose."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from waiting import wait_until

from quiver.cli import main
from quiver.testing import LocalCluster

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(arguments)
        return code, capsys.readouterr().out

    return run_command


def codes(report: Any) -> set[str]:
    return {finding["code"] for finding in report["findings"]}


def test_faults_are_found_and_explained(run: Run) -> None:
    with LocalCluster(nodes=3) as cluster, cluster.connect() as client:
        url = ("--url", ",".join(cluster.addresses))
        client.create_topic("logs", partitions=1)
        with client.producer("logs") as producer:
            producer.send_many([b"x"] * 10)
            producer.flush()

        wait_until(lambda: run("doctor", "--at-least", "critical", *url)[0] == 0)
        text = run("doctor", "--at-least", "critical", *url)[1]
        assert ("3 of 3 nodes answered" in text, text.endswith("healthy\n")) == (True, True), text
        ours = {"descriptors_short", "fsync_slow", "loop_lags"}  # of the machine that runs this test
        wait_until(lambda: codes(json.loads(run("doctor", "--json", *url)[1])) <= ours)

        def explain() -> Any:
            return json.loads(run("explain", "logs/0@9", "--json", *url)[1])

        wait_until(lambda: len(explain()["in_sync"]) == 3)
        found = explain()
        leader = found["leader"]
        assert found["high_watermark"] == 10
        assert found["since_ms"] > 0
        assert (found["produce_obstacles"], found["consume_obstacles"]) == ([], [])
        assert {one["report"]["log_end_offset"] for one in found["replicas"]} == {10}
        assert any(one["event"]["kind"] == "leader" and one["node"] == leader for one in found["events"])
        text = run("explain", "logs/0@12", *url)[1]
        assert "NO (offset_out_of_range): offset 12 is beyond the high watermark 10" in text
        assert max(map(len, text.splitlines())) <= 80

        client.hold("logs", "report", {0: 4}, lasting=600, owner="a job")
        client.create_topic("single", partitions=1, replicas=1)
        # The command may ask a node that has not applied the change yet.
        wait_until(lambda: codes(json.loads(run("doctor", "--json", *url)[1])) >= {"hold", "replicas_few"})
        assert run("doctor", *url)[0] == 1
        wait_until(lambda: "held from 4 by report" in run("explain", "logs/0", *url)[1])

        follower = next(node for node in (1, 2, 3) if node != leader)
        cluster.kill(follower)
        wait_until(lambda: "partition_under_replicated" in codes(json.loads(run("doctor", "--json", *url)[1])))
        code, text = run("doctor", *url)
        assert code == 1
        assert "CRITICAL node_missing" in text
        assert f"node {follower}: does not answer" in text
        assert f"node {follower} did not answer" in run("explain", "logs/0", *url)[1]

        cluster.kill(next(node for node in (1, 2, 3) if node not in (leader, follower)))
        wait_until(lambda: json.loads(run("explain", "logs/0", "--json", *url)[1])["leader"] is None)
        found = json.loads(run("explain", "logs/0", "--json", *url)[1])
        assert [one["code"] for one in found["produce_obstacles"]] == ["no_majority"]
        assert codes(json.loads(run("doctor", "--json", *url)[1])) >= {"node_missing", "partition_leaderless"}


def test_cluster_that_is_not_reached_is_told_apart_from_findings(run: Run) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    assert run("doctor", "--url", url, "--timeout", "1")[0] == 2


def test_wrong_places_are_refused_with_the_form(run: Run) -> None:
    with LocalCluster(nodes=1) as cluster:
        url = ("--url", cluster.urls[0])
        assert run("explain", "logs", *url)[0] == 2
        assert run("explain", "nothing/0", *url)[0] == 2
        with cluster.connect() as client:
            client.create_topic("logs", partitions=1)
        assert run("explain", "logs/7", *url)[0] == 2
        wait_until(lambda: json.loads(run("explain", "logs/0", "--json", *url)[1])["consume_obstacles"] == [])
        with urllib.request.urlopen(
            f"{cluster.urls[0]}/explain?topic=logs&partition_id=0&offset=0", timeout=60
        ) as page:
            answer = json.load(page)
        assert answer["status"] == "success"
        assert answer["explanation"]["consume_obstacles"][0]["code"] == "not_produced"
