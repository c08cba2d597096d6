"""Brokers come and go under load: nothing is lost, and no request of a client that retries fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from chaos_clients import CursorConsumer, EndWatcher, OffsetReader, SequencedProducer
from chaos_cluster import Cluster, running_cluster
from chaos_http import Answer, HttpClient, wait_for
from chaos_sdk import SdkConsumer, SdkProducer
from run_chaos import TOPIC, Run

CLIENTS = (
    (SequencedProducer, 2),
    (SdkProducer, 1),
    (OffsetReader, 1),
    (CursorConsumer, 1),
    (SdkConsumer, 1),
    (EndWatcher, 1),
)
MOVE_TIMEOUT_S = 120


def _get(cluster: Cluster, path: str, **parameters: object) -> Answer:
    client = HttpClient([cluster.node(1).http])
    try:
        return client.get(path, **parameters)
    finally:
        client.close()


def _replicas(cluster: Cluster) -> set[int]:
    """Return the brokers that hold any replica of the topic."""
    answer = _get(cluster, "/partitions", topic=TOPIC)
    return {node for partition in answer.body.get("partitions", ()) for node in partition["replicas"]}


def _state(cluster: Cluster, broker: int) -> str:
    brokers = _get(cluster, "/brokers").body.get("brokers", ())
    return next((one["state"] for one in brokers if one["broker_id"] == broker), "")


def _drain(cluster: Cluster, broker: int) -> None:
    """Have everything moved off a broker, and wait until it has been."""
    client = HttpClient([cluster.node(1).http])
    assert client.post(f"/brokers/{broker}/drain").is_ok
    client.close()
    wait_for(f"broker {broker} is drained", lambda: _state(cluster, broker) == "drained", MOVE_TIMEOUT_S)
    assert broker not in _replicas(cluster)


@pytest.mark.timeout(900)
def test_broker_is_drained_and_removed_and_another_added_under_load(tmp_path: Path) -> None:
    with running_cluster(tmp_path, nodes=4) as cluster:
        run = Run(cluster, seed=2, clients=CLIENTS)
        run.begin()
        wait_for("a replica on broker 4", lambda: 4 in _replicas(cluster), 60)
        time.sleep(2)

        _drain(cluster, 4)
        client = HttpClient([cluster.node(1).http])
        assert client.delete("/brokers/4").is_ok
        client.close()
        assert cluster.node(4).stop() == 0
        cluster.nodes.pop()

        added = cluster.add_broker(number=5)
        added.start()
        added.wait_ready()
        _drain(cluster, 3)
        assert 5 in _replicas(cluster)
        time.sleep(2)

        report = run.finish()
    assert report.is_clean, str(report)
    assert report.failed_requests == []
    assert report.verdict.facts["records_acknowledged"] > 0
