"""What tracing costs: one awaited request with tracing off, on but not sampled, and sampled.

    python bench_tracing.py [--requests 200]

As `bench_calls`: three nodes in this process, three replicas, fsync on; calls of Python functions and processor time of
the leader's thread for each request. Spans go to OpenTelemetry's own batch processor, which drops them in its thread.
The client's cost is measured by itself: accepting records, without the wait for them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Sequence
from typing import Any

from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import quiver
from bench_calls import TOPIC, VALUE, Calls, leader_of, measure
from quiver.testing import LocalCluster
from table import Row, best_seconds, show

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = SAMPLED[:-1] + "0"
SENDS = 50


class Nowhere(SpanExporter):
    """Drop spans."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:  # noqa: ARG002 - OpenTelemetry's signature
        return SpanExportResult.SUCCESS


def measure_mode(mode: str, requests: int) -> list[Row]:
    """Return the rows of one mode: off, unsampled or sampled."""
    settings = {"tracing.is_enabled": "false" if mode == "off" else "true"}
    parent = TraceContextTextMapPropagator().extract({"traceparent": SAMPLED if mode == "sampled" else UNSAMPLED})
    rows = []
    with (
        LocalCluster(nodes=3, settings=settings) as local,
        quiver.connect(local.urls[0], tracing=mode != "off") as cluster,
    ):
        cluster.create_topic(TOPIC, partitions=1)
        producer = cluster.producer(TOPIC)
        producer.send(VALUE).result()
        leader = leader_of(cluster)
        calls = Calls(local, leader)
        host, port = local.urls[leader - 1].removeprefix("http://").split(":")
        client = http.client.HTTPConnection(host, int(port))

        def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
            client.request("POST", path, json.dumps(body), {"traceparent": SAMPLED if mode == "sampled" else UNSAMPLED})
            found: dict[str, Any] = json.load(client.getresponse())
            return found

        number = post("/producer/register", {"topic": TOPIC})["producer_id"]
        body = {"topic": TOPIC, "producer_id": number, "message": VALUE.decode()}
        token = context.attach(parent)
        for what, request in (
            ("SDK send", lambda: producer.send(VALUE).result()),
            ("HTTP produce", lambda: post("/producer/produce", body)),
        ):
            python, _, spent_us = measure(calls, request, requests)
            rows.append(Row(f"{mode}: {what}, calls on the leader", python, "calls"))
            rows.append(Row(f"{mode}: {what}, leader's thread", spent_us, "µs"))

        def accept() -> None:
            for _ in range(SENDS):
                producer.send(VALUE)

        rows.append(
            Row(f"{mode}: accept a record in the SDK", best_seconds(accept, loops=1, repeats=40) / SENDS * 1e6, "µs")
        )
        producer.flush()
        context.detach(token)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    requests = parser.parse_args().requests
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    trace.set_tracer_provider(provider)
    rows = [row for mode in ("off", "unsampled", "sampled") for row in measure_mode(mode, requests)]
    return show(rows, title="one request with and without tracing, three replicas, fsync on")


if __name__ == "__main__":
    sys.exit(main())
