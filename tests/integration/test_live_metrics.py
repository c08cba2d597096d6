"""The metrics of live nodes: readable by the official parser, true to what was done, and named as Prometheus asks."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quiver.cli import main
from quiver.config import Settings
from quiver.testing import LocalCluster

Samples = dict[str, float]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3, settings={"broker.metric_topics_max": "1"}) as running:
        with running.connect() as client:
            for topic in ("logs", "audit"):
                client.create_topic(topic, partitions=1)
                with client.producer(topic) as producer:
                    producer.send_many([b"x" * 100] * 50)
                    producer.flush()
            with client.consumer("logs", name="reader", idle_timeout=20) as consumer:
                for number, _ in enumerate(consumer, start=1):
                    if number == 50:
                        break
                consumer.commit()
        yield running


def read_page(cluster: LocalCluster, node: int) -> str:
    with urllib.request.urlopen(f"{cluster.urls[node - 1]}/metrics", timeout=60) as page:
        text: str = page.read().decode()
    return text


def read_samples(cluster: LocalCluster, node: int) -> Samples:
    return {
        one.name + "".join(f",{name}={value}" for name, value in sorted(one.labels.items()) if name != "le"): one.value
        for family in text_string_to_metric_families(read_page(cluster, node))
        for one in family.samples
        if not one.name.endswith("_bucket")
    }


def test_names_and_units_follow_the_conventions(cluster: LocalCluster) -> None:
    families = list(text_string_to_metric_families(read_page(cluster, 1)))
    assert len(families) > 80
    for family in families:
        assert family.name.startswith(("quiver_", "process_")), family.name
        assert family.documentation.endswith("."), family.name
        assert not family.name.endswith(("_ms", "_milliseconds", "_kb", "_mb")), family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_bytes")), family.name


def test_counters_tell_what_was_done(cluster: LocalCluster) -> None:
    nodes = [read_samples(cluster, node) for node in (1, 2, 3)]

    def total(name: str) -> float:
        return sum(samples.get(name, 0.0) for samples in nodes)

    labels = [name for name in nodes[0] if name.startswith("quiver_topic_received_records_total")]
    assert len(labels) <= 2
    received = sum(v for samples in nodes for n, v in samples.items() if n.startswith("quiver_topic_received_records"))
    assert received == 100
    sent = sum(v for samples in nodes for n, v in samples.items() if n.startswith("quiver_topic_sent_records"))
    assert sent >= 50
    for stage in ("queue", "append", "fsync", "replicate", "commit"):
        assert total(f"quiver_produce_stage_seconds_count,stage={stage}") > 0, stage
    assert total("quiver_consume_stage_seconds_count,stage=read") > 0
    assert total("quiver_elections_total") >= 3
    assert total("quiver_partition_leads") == 2
    assert total("quiver_partition_under_replicated") == 0
    assert total("quiver_metadata_primary") == 1
    assert nodes[0]["process_open_fds"] < nodes[0]["process_max_fds"]
    assert nodes[0]["process_resident_memory_bytes"] > 1e7
    assert nodes[0]["quiver_disk_free_bytes"] > 0
    assert total("quiver_peer_connected,peer=1") == 2


def test_batches_decoded_for_an_http_consumer_count_in_the_memory_for_them(cluster: LocalCluster) -> None:
    register = urllib.request.Request(f"{cluster.urls[0]}/consumer/register", data=b'{"topic": "logs"}', method="POST")
    with urllib.request.urlopen(register, timeout=10) as answer:
        consumer_id = json.loads(answer.read())["consumer_id"]
    before = read_samples(cluster, 1)["quiver_decoded_cached_bytes"]
    query = f"topic=logs&consumer_id={consumer_id}&max=10"
    with urllib.request.urlopen(f"{cluster.urls[0]}/consumer/consume_batch?{query}", timeout=10) as answer:
        assert answer.status == 200
    after = read_samples(cluster, 1)
    assert after["quiver_decoded_cached_bytes"] >= before + 50 * 100
    assert (after["quiver_decoded_reserved_bytes"], after["quiver_decoded_refused_total"]) == (0, 0)


def test_error_is_counted_by_its_code(cluster: LocalCluster) -> None:
    with urllib.request.urlopen(f"{cluster.urls[0]}/topics", timeout=60):
        pass
    before = read_samples(cluster, 1).get("quiver_http_errors_total,code=unknown_path", 0.0)
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{cluster.urls[0]}/nowhere", timeout=60)
    assert read_samples(cluster, 1)["quiver_http_errors_total,code=unknown_path"] == before + 1


def test_metrics_of_a_node_without_a_gateway_are_read_through_another(cluster: LocalCluster) -> None:
    with urllib.request.urlopen(f"{cluster.urls[0]}/metrics?node=2", timeout=60) as page:
        text = page.read().decode()
    assert 'quiver_node_info{version="' in text
    assert 'node="2"} 1' in text
    assert "quiver_http_requests_total" not in text
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{cluster.urls[0]}/metrics?node=9", timeout=60)


def test_status_shows_the_load_of_every_node(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", cluster.urls[0]]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    heading = next(number for number, row in enumerate(rows) if row[:2] == ["node", "memory"])
    assert [row[0] for row in rows[heading + 1 : heading + 4]] == ["1", "2", "3"]
    limits = Settings()
    assert any(cell.endswith(f"/{limits.wire.client_connections_max}") for cell in rows[heading + 1])
    assert any(cell.endswith(f"/{limits.gateway.connections_max}") for cell in rows[heading + 1])
    assert main(["status", "--json", "--url", cluster.urls[0]]) == 0
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    assert sum(node["metrics"]["quiver_partition_leads"] for node in nodes) == 2
    assert all("quiver_elections_total" in node["metrics"] for node in nodes)
