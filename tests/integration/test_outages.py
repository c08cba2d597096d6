"""Outages that must not spread: a database server that is away, and a lost majority that must be told."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from contextlib import closing

import pytest
from postgresql_server import running_server
from waiting import wait_until

import quiver
from quiver.cli import main
from quiver.metadata import open_database
from quiver.testing import LocalCluster


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def use(client: quiver.Cluster, topic: str) -> None:
    """Create a topic, produce and consume."""
    client.create_topic(topic, partitions=1)
    with client.producer(topic) as producer:
        producer.send_many([f"{topic} {number}" for number in range(20)])
    with client.consumer(topic, idle_timeout=20) as consumer:
        found = [record.text for _, record in zip(range(20), consumer, strict=False)]
    assert found == [f"{topic} {number}" for number in range(20)]


def outages(client: quiver.Cluster) -> list[int]:
    return [node.node for node in client.status().nodes if node.database_outage]


def status(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["status", *arguments]) == 0
    return capsys.readouterr().out


def test_cluster_serves_while_its_database_server_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    with running_server() as server, LocalCluster(3, settings={"node.metadata_db": server.url}) as cluster:
        with cluster.connect() as client:
            use(client, "before")
            server.stop()
            use(client, "stopped")
            cluster.kill(2)
            cluster.start(2)  # from its log alone
            use(client, "restarted")
            wait_until(lambda: outages(client) == [1, 2, 3])
            assert "node 2 serves from its log, without its database" in status(capsys, "--url", cluster.urls[0])
            server.start()
            wait_until(lambda: not outages(client))
            assert server._process is not None
            os.kill(server._process.pid, signal.SIGSTOP)  # accepts connections, and never answers
            try:
                use(client, "paused")
            finally:
                os.kill(server._process.pid, signal.SIGCONT)
            wait_until(lambda: len({node.stored_index for node in client.status().nodes}) == 1)
            wait_until(lambda: not outages(client))
        for node in cluster.nodes:
            with closing(open_database(server.url, schema=f"quiver_node_{node}")) as database:
                names = {topic.name for topic in database.load().view().active_topics()}
            assert names == {"before", "stopped", "restarted", "paused"}


@pytest.mark.parametrize("url_of", ["urls", "addresses"])
def test_lost_majority_shows_in_readiness_and_status(url_of: str, capsys: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(3, settings={"metadata.staleness_ms_max": "500"}) as cluster:
        with cluster.connect() as client:
            use(client, "logs")
        assert [get(f"{url}/readyz")[0] for url in cluster.urls] == [200, 200, 200]
        cluster.kill(2)
        cluster.kill(3)
        wait_until(lambda: get(f"{cluster.urls[0]}/readyz")[0] == 503)
        assert "no primary" in get(f"{cluster.urls[0]}/readyz")[1]
        assert get(f"{cluster.urls[0]}/livez")[0] == get(f"{cluster.urls[0]}/healthz")[0] == 200
        assert "quiver_node_ready 0" in get(f"{cluster.urls[0]}/metrics")[1]
        url = getattr(cluster, url_of)[0]
        shown = status(capsys, "--url", url)
        assert "there is no primary" in shown
        assert "no answer from nodes 2, 3" in shown
        assert "node 1 is not ready" in shown
        found = json.loads(status(capsys, "--json", "--url", url))
        assert found["is_stale"]
        assert [node["is_alive"] for node in found["nodes"]] == [True, False, False]
        cluster.start(2)
        wait_until(lambda: get(f"{cluster.urls[0]}/readyz")[0] == 200)
