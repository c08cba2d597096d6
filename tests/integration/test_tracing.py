"""Traces through a real cluster: from the SDK and HTTP to the commit, and links from consumers back to producers.

The process has one tracer provider with an exporter in memory; nodes run on threads of this process and use it. One
test runs `quiver node` as a process, which sends its spans to a collector.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from reading import read_to_end
from waiting import wait_until

import quiver
from quiver.errors import RequestError
from quiver.record import Batch, build_batch
from quiver.testing import LocalCluster
from quiver.tracing import TRACEPARENT, open_tracing

EXPORTER = InMemorySpanExporter()
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C


@pytest.fixture(scope="module", autouse=True)
def provider() -> None:
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(EXPORTER))
    trace.set_tracer_provider(made)


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3, settings={"tracing.is_enabled": "true"}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(local: LocalCluster) -> Iterator[quiver.Cluster]:
    with quiver.connect(local.urls[0], tracing=True) as client:
        yield client


@pytest.fixture
def topic(cluster: quiver.Cluster, request: pytest.FixtureRequest) -> str:
    name = request.node.name.replace("[", ".").replace("]", "")
    cluster.create_topic(name, partitions=1)
    EXPORTER.clear()
    return str(name)


def spans(name: str, count: int) -> list[ReadableSpan]:
    """Wait for spans: those of a leader end on its own thread."""
    found: list[ReadableSpan] = []

    def are_there() -> bool:
        found[:] = [span for span in EXPORTER.get_finished_spans() if span.name == name]
        if name == "append":  # a node that does not lead yet refuses, and the next attempt is a span of its own
            found[:] = [span for span in found if "error.type" not in attributes(span)]
        return len(found) >= count

    wait_until(are_there)
    assert len(found) == count
    return found


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def context_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def call(url: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_record_is_traced_from_send_to_commit_and_linked_by_its_consumer(cluster: quiver.Cluster, topic: str) -> None:
    with cluster.producer(topic) as producer, trace.get_tracer("test").start_as_current_span("order") as order:
        position = producer.send("hello", headers={"kind": "greeting"}).result()
    (sent,), (appended,) = spans(f"send {topic}", 1), spans("append", 1)
    assert sent.parent is not None
    assert sent.parent.span_id == order.get_span_context().span_id
    assert appended.parent is not None
    assert appended.parent.span_id == context_id(sent)
    assert attributes(sent)["quiver.offset"] == position.offset
    assert attributes(appended)["quiver.base_offset"] == position.offset
    assert sent.start_time is not None
    assert sent.end_time is not None
    assert appended.start_time is not None
    assert appended.end_time is not None
    assert sent.start_time <= appended.start_time <= appended.end_time

    with cluster.consumer(topic) as consumer:
        (record,) = consumer.poll(timeout=60)
    assert [name for name, _ in record.headers] == ["kind", TRACEPARENT]
    (received,) = spans(f"receive {topic}", 1)
    assert [link.context.span_id for link in received.links] == [context_id(sent)]
    assert received.context is not None
    assert sent.context is not None
    assert received.context.trace_id != sent.context.trace_id, "a consumer's work is a trace of its own"


def test_values_that_are_sent_together_share_a_span(cluster: quiver.Cluster, topic: str) -> None:
    with cluster.producer(topic) as producer:
        producer.send_many(f"line {number}" for number in range(100)).result()
    (sent,), (appended,) = spans(f"send {topic}", 1), spans("append", 1)
    assert attributes(sent)["messaging.batch.message_count"] == 100
    assert appended.parent is not None
    assert appended.parent.span_id == context_id(sent)
    with cluster.consumer(topic) as consumer:
        assert len(read_to_end(consumer)) == 100
    (received,) = spans(f"receive {topic}", 1)
    assert len(received.links) == 1


@pytest.mark.parametrize("sequence", [None, 0], ids=["plain", "sequenced"])
@pytest.mark.parametrize("way", ["one", "batch", "records"])
def test_http_call_continues_the_trace_of_its_caller(
    local: LocalCluster, cluster: quiver.Cluster, topic: str, way: str, sequence: int | None
) -> None:
    url = local.urls[0]
    producer_id = call(f"{url}/producer/register", {"topic": topic})["producer_id"]
    body: dict[str, Any] = {"topic": topic, "producer_id": producer_id, "partition_id": 0, "sequence": sequence}
    path = "/producer/produce"
    if way == "one":
        body["message"] = "hello"
    else:
        path = "/producer/produce_batch"
        body |= {"messages": ["a", "b"]} if way == "batch" else {"records": [{"message": "a", "headers": {"x": "y"}}]}
    call(f"{url}{path}", body, traceparent=PARENT)
    (called,), (appended,) = spans(f"POST {path}", 1), spans("append", 1)
    assert called.context is not None
    assert called.context.trace_id == TRACE_ID
    assert called.parent is not None
    assert attributes(called)["http.response.status_code"] == 200
    assert appended.parent is not None
    assert appended.parent.span_id == context_id(called)
    with cluster.consumer(topic) as consumer:
        for record in consumer.poll(timeout=60):
            carried = dict(record.headers)[TRACEPARENT]
            assert carried is not None
            assert carried.startswith(f"00-{TRACE_ID:032x}-{context_id(called):016x}-".encode())


@pytest.mark.parametrize("path", ["/consumer/consume", "/consumer/consume_batch"], ids=["one", "batch"])
def test_http_consumer_is_linked_to_the_senders(
    local: LocalCluster, cluster: quiver.Cluster, topic: str, path: str
) -> None:
    with cluster.producer(topic) as producer:
        # What looks like a context in a message is none.
        producer.send(json.dumps({"headers": {TRACEPARENT: PARENT}})).result()
    (sent,) = spans(f"send {topic}", 1)
    url = local.urls[0]
    consumer_id = call(f"{url}/consumer/register", {"topic": topic})["consumer_id"]
    query = f"{url}{path}?topic={topic}&consumer_id={consumer_id}"
    with urllib.request.urlopen(urllib.request.Request(query, headers={TRACEPARENT: PARENT}), timeout=30) as answer:
        assert TRACEPARENT in answer.read().decode()
    (called,) = spans(f"GET {path}", 1)
    assert called.context is not None
    assert called.context.trace_id == TRACE_ID
    assert [link.context.span_id for link in called.links] == [context_id(sent)]


def test_unsampled_call_leaves_nothing_behind(local: LocalCluster, cluster: quiver.Cluster, topic: str) -> None:
    url = local.urls[0]
    producer_id = call(f"{url}/producer/register", {"topic": topic})["producer_id"]
    call(f"{url}/producer/produce", {"topic": topic, "producer_id": producer_id, "message": "x"}, traceparent=UNSAMPLED)
    with cluster.consumer(topic) as consumer:
        (record,) = consumer.poll(timeout=60)
    assert record.headers == ()
    assert EXPORTER.get_finished_spans() == ()


def test_failures_are_in_the_spans(local: LocalCluster, cluster: quiver.Cluster, topic: str) -> None:
    with cluster.producer(topic) as producer, pytest.raises(RequestError):
        producer.send("x", partition=7)
    (sent,) = spans(f"send {topic}", 1)
    assert not sent.status.is_ok
    assert attributes(sent)["error.type"] == "unknown_partition"
    assert attributes(sent)["quiver.outcome"] == "not_done"
    with pytest.raises(urllib.error.HTTPError):
        call(
            f"{local.urls[0]}/producer/produce",
            {"topic": topic, "producer_id": 4711, "message": "x"},
            traceparent=PARENT,
        )
    (called,) = spans("POST /producer/produce", 1)
    assert attributes(called)["error.type"] == "unknown_producer"
    assert attributes(called)["http.response.status_code"] == 404


@pytest.mark.parametrize("value", [b"", b"00-zz", b"00-" + b"0" * 52, b"\xff" * 55, None], ids=range(5))
def test_header_that_is_no_context_is_only_a_header(cluster: quiver.Cluster, topic: str, value: bytes | None) -> None:
    batch = build_batch([b"x"], headers=[[(TRACEPARENT, value)]], timestamp=1)
    with cluster.producer(topic) as producer:
        producer.send_many(Batch.decode(batch)).result()
    with cluster.consumer(topic) as consumer:
        (record,) = consumer.poll(timeout=60)
    assert record.headers == ((TRACEPARENT, value),)
    assert [span.name for span in EXPORTER.get_finished_spans() if span.name.startswith("receive")] == []


def test_damaged_batch_is_refused_as_ever() -> None:
    async def refuse(*_: object) -> None:
        raise RequestError("not done: it is damaged", code="damaged")

    handle = open_tracing().trace_append(refuse)
    for payload in (b"", b"x" * 200, build_batch([b"x"], timestamp=1)[:-1]):
        with pytest.raises(RequestError, match="damaged"):
            asyncio.run(handle(None, None, memoryview(payload)))


class Collector(http.server.BaseHTTPRequestHandler):
    """Keep the spans that are posted, as a collector would."""

    received: list[Any]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        self.received.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_node_sends_its_spans_to_a_collector(tmp_path: Path) -> None:
    received: list[Any] = []
    handler = type("OneCollector", (Collector,), {"received": received})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    command = [sys.executable, "-m", "quiver", "node", "--id", "1", "--data", str(tmp_path / "data")]
    command += ["--wire", "127.0.0.1:0", "--http", "127.0.0.1:0", "--tracing-is-enabled", "true"]
    command += ["--tracing-endpoint", endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as node:
        assert node.stdout is not None
        ready = dict(part.split("=") for part in node.stdout.readline().split()[1:])
        url = f"http://{ready['http']}"
        producer_id = call(f"{url}/producer/register", {"topic": "logs"})["producer_id"]
        call(
            f"{url}/producer/produce", {"topic": "logs", "producer_id": producer_id, "message": "x"}, traceparent=PARENT
        )
        os.kill(node.pid, signal.SIGTERM)
        assert node.wait(60) == 0
    server.shutdown()
    server.server_close()
    assert {path for path, _ in received} == {"/v1/traces"}
    resources = [one for _, request in received for one in request.resource_spans]
    names = {item.key: item.value.string_value for one in resources for item in one.resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("quiver", "1")
    found = {span.name for one in resources for scope in one.scope_spans for span in scope.spans}
    assert found == {"POST /producer/produce", "append"}


def test_nothing_of_it_runs_while_it_is_off(local: LocalCluster, topic: str) -> None:
    with quiver.connect(local.urls[0]) as cluster, cluster.producer(topic) as producer:
        core = producer._producer.core
        assert "add" not in vars(core), "the class's own method, not a wrapper"
        assert core.extend == core.accumulator.extend
        producer.send("x").result()
        with cluster.consumer(topic) as consumer:
            (record,) = consumer.poll(timeout=60)
            assert "consume" not in vars(consumer._consumer.core)
    assert record.headers == ()
    assert EXPORTER.get_finished_spans() == ()


def test_library_is_imported_only_on_demand() -> None:
    program = "import sys, quiver.node, quiver.cli.node; quiver.connect; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
