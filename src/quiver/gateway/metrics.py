"""This node's metrics in Prometheus' text format: counters of requests and records, and gauges from status snapshots.

Label sets are bounded: a route is one of the table or empty, a status is one of HTTP's, and only a bounded number of
consumers with the greatest lag is exported. A path that a client invents never becomes a label, so requests for unknown
paths do not grow memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from quiver.gateway.http import HttpStatus
from quiver.wire.admin_messages import NodeDescribed

LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histogram's buckets; a last bucket counts the rest."""

Labels = tuple[tuple[str, str], ...]


class _Histogram:
    """Latencies of the requests of one route."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.sum_s = 0.0


class Metrics:
    """Count requests and records of the gateway."""

    def __init__(self) -> None:
        self.produced_records = 0
        self.produced_bytes = 0
        self.consumed_records = 0
        self.consumed_bytes = 0
        self._requests: dict[tuple[str, str, int], int] = {}
        self._latencies: dict[str, _Histogram] = {}

    def count_request(self, route: str, *, method: str, status: int, seconds: float) -> None:
        """Count an answered request; status 0: the client had disconnected."""
        key = (route, method, status)
        self._requests[key] = self._requests.get(key, 0) + 1
        latency = self._latencies.get(route)
        if latency is None:
            latency = self._latencies[route] = _Histogram()
        latency.counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        latency.sum_s += seconds

    def count_produced(self, *, records: int, size_bytes: int) -> None:
        """Count acknowledged records."""
        self.produced_records += records
        self.produced_bytes += size_bytes

    def count_consumed(self, *, records: int, size_bytes: int) -> None:
        """Count consumed records."""
        self.consumed_records += records
        self.consumed_bytes += size_bytes

    def render(self, http: HttpStatus, node: NodeDescribed, *, now_ms: int) -> str:
        """Return the metrics page."""
        families = (*self._own(), *_http(http), *_node(node, now_ms))
        return "".join(line for family in families for line in family.lines())

    def _own(self) -> Iterator[MetricFamily]:
        requests: dict[Labels, float] = {
            (("route", route), ("method", method), ("status", str(status))): float(count)
            for (route, method, status), count in sorted(self._requests.items())
        }
        yield MetricFamily("quiver_http_requests_total", "counter", "Requests answered.", requests)
        yield MetricFamily(
            "quiver_http_request_seconds", "histogram", "Time to answer a request.", dict(self._buckets())
        )
        for name, value, sentence in (
            ("produced_records", self.produced_records, "Records acknowledged to HTTP producers."),
            ("produced_bytes", self.produced_bytes, "Bytes of values acknowledged to HTTP producers."),
            ("consumed_records", self.consumed_records, "Records consumed by HTTP consumers."),
            ("consumed_bytes", self.consumed_bytes, "Bytes of values consumed by HTTP consumers."),
        ):
            yield MetricFamily(f"quiver_http_{name}_total", "counter", sentence, {(): float(value)})

    def _buckets(self) -> Iterator[tuple[Labels, float]]:
        for route, latency in sorted(self._latencies.items()):
            total = 0
            for bound, count in zip((*map(str, LATENCY_BOUNDS_S), "+Inf"), latency.counts, strict=True):
                total += count
                yield (("", "_bucket"), ("route", route), ("le", bound)), float(total)
            yield (("", "_sum"), ("route", route)), latency.sum_s
            yield (("", "_count"), ("route", route)), float(total)


class MetricFamily(msgspec.Struct, frozen=True):
    """One metric with all its label sets; a label without a name is a suffix of the metric's name."""

    name: str
    kind: str
    sentence: str
    values: Mapping[Labels, float]

    def lines(self) -> Iterator[str]:
        """Yield the lines of Prometheus' text format."""
        yield f"# HELP {self.name} {self.sentence}\n# TYPE {self.name} {self.kind}\n"
        for labels, value in self.values.items():
            suffix = "".join(text for name, text in labels if not name)
            shown = ",".join(f'{name}="{_escape(text)}"' for name, text in labels if name)
            yield (
                f"{self.name}{suffix}{{{shown}}} {_number(value)}\n"
                if shown
                else f"{self.name}{suffix} {_number(value)}\n"
            )


def _http(http: HttpStatus) -> Iterable[MetricFamily]:
    return (
        _gauge("quiver_http_connections", "HTTP connections.", http.connections),
        _gauge("quiver_http_idle_connections", "HTTP connections without a pending request.", http.idle),
        _gauge("quiver_http_requests", "HTTP requests being answered.", http.requests),
        _gauge("quiver_http_body_bytes", "Bytes of request bodies in memory.", http.body_bytes),
        _counter("quiver_http_connections_total", "HTTP connections accepted.", http.accepted),
        _counter("quiver_http_refused_total", "HTTP connections and requests refused at a limit.", http.refused),
        _counter("quiver_http_timed_out_total", "HTTP connections closed on a timeout.", http.timed_out),
    )


def _node(node: NodeDescribed, now_ms: int) -> Iterable[MetricFamily]:
    led = [replica for replica in node.replicas if replica.leader == node.node]
    labels: Labels = (("version", node.version), ("node", str(node.node)))
    return (
        MetricFamily("quiver_node_info", "gauge", "This node.", {labels: 1.0}),
        _gauge("quiver_node_uptime_seconds", "Time since the node started.", max(0, now_ms - node.started_ms) / 1000),
        _gauge("quiver_node_ready", "Whether the node serves.", int(node.is_ready)),
        _gauge("quiver_metadata_applied_index", "Applied index of the metadata log.", node.applied_index),
        _gauge("quiver_metadata_commit_index", "Known commit index of the metadata log.", node.commit_index),
        _gauge("quiver_metadata_primary", "Whether this node is the primary.", int(node.primary == node.node)),
        _gauge("quiver_partition_replicas", "Replicas of partitions on this node.", len(node.replicas)),
        _gauge("quiver_partition_leads", "Partitions whose leader is this node.", len(led)),
        _gauge("quiver_partition_not_ready", "Replicas that do not serve.", sum(not r.is_ready for r in node.replicas)),
        _gauge("quiver_partition_log_bytes", "Bytes of all replicas' logs.", sum(r.bytes for r in node.replicas)),
        _gauge("quiver_holds", "Retention holds in the cluster.", node.holds),
        MetricFamily(
            "quiver_consumer_lag_records",
            "gauge",
            "Records not yet consumed, in partitions led by this node; the greatest lags only.",
            {(("consumer", lag.consumer), ("topic", lag.topic)): float(lag.records) for lag in node.lags},
        ),
        _gauge(
            "quiver_partition_out_of_sync",
            "Follower replicas that are behind leaders on this node.",
            sum(len(set(replica.voters) - set(replica.in_sync)) for replica in led if replica.in_sync),
        ),
    )


def _gauge(name: str, sentence: str, value: float) -> MetricFamily:
    return MetricFamily(name, "gauge", sentence, {(): float(value)})


def _counter(name: str, sentence: str, value: float) -> MetricFamily:
    return MetricFamily(name, "counter", sentence, {(): float(value)})


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
