"""A node that is asked to is ready only once its replicas have caught up after its start."""

from __future__ import annotations

import urllib.error
import urllib.request

from waiting import wait_until

from quiver.testing import LocalCluster

WITHIN = "in_sync_within_ms=86400000"


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_node_is_ready_when_its_replicas_are_in_sync() -> None:
    with LocalCluster(nodes=3) as cluster, cluster.connect() as client:
        client.create_topic("logs", partitions=3)
        with client.producer("logs") as producer:
            producer.send_many(["x" * 100] * 1000).result()
        for url in cluster.urls:
            wait_until(lambda url=url: status_of(f"{url}/readyz?{WITHIN}") == 200)  # type: ignore[misc]  # bound early
        assert status_of(f"{cluster.urls[0]}/readyz?in_sync_within_ms=0") == 200
        assert status_of(f"{cluster.urls[0]}/readyz?in_sync_within_ms=-1") == 422
        assert status_of(f"{cluster.urls[0]}/readyz?in_sync_within=1") == 400


def test_node_that_does_not_hear_from_a_leader_is_not_ready() -> None:
    with LocalCluster(nodes=3) as cluster, cluster.connect() as client:
        client.create_topic("logs", partitions=3)
        with client.producer("logs") as producer:
            producer.send_many(["x" * 100] * 1000).result()
        primary = client.managers().primary
        leaders = {one.leader for one in client.describe_topic("logs").partitions}
        leader = next(node for node in (1, 2, 3) if node != primary and node in leaders)
        (follower,) = {1, 2, 3} - {primary, leader}
        cluster.cut(follower, leader)
        url = cluster.urls[follower - 1]
        assert status_of(f"{url}/readyz?{WITHIN}") == 503
        assert status_of(f"{url}/readyz") == 200, "it has a primary"
        cluster.heal()
        wait_until(lambda: status_of(f"{url}/readyz?{WITHIN}") == 200)
