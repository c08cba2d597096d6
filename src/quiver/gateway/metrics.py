"""The gateway's own metrics: requests, their latencies and errors, and the records of HTTP clients.

Label sets are bounded: a route is one of the table or empty, a status is one of HTTP's, and codes are counted by
`CodeCounter`. A path that a client invents never becomes a label, so requests for unknown paths do not grow memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from quiver.gateway.http import HttpStatus
from quiver.metrics import CodeCounter, Histogram, MetricFamily, counter, gauge, histogram, labelled, render

REQUEST_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets of requests; a last bucket counts the rest."""


class Metrics:
    """Count requests and records of the gateway."""

    def __init__(self) -> None:
        self.produced_records = 0
        self.produced_bytes = 0
        self.consumed_records = 0
        self.consumed_bytes = 0
        self.errors = CodeCounter()
        self._requests: dict[tuple[str, str, int], int] = {}
        self._latencies: dict[str, Histogram] = {}

    def count_request(self, route: str, *, method: str, status: int, seconds: float) -> None:
        """Count an answered request; status 0: the client had disconnected."""
        key = (route, method, status)
        self._requests[key] = self._requests.get(key, 0) + 1
        latency = self._latencies.get(route)
        if latency is None:
            latency = self._latencies[route] = Histogram(REQUEST_BOUNDS_S)
        # `Histogram.observe` written out: this is part of every request.
        latency.counts[bisect_left(latency.bounds, seconds)] += 1
        latency.total += seconds

    def count_produced(self, *, records: int, size_bytes: int) -> None:
        """Count acknowledged records."""
        self.produced_records += records
        self.produced_bytes += size_bytes

    def count_consumed(self, *, records: int, size_bytes: int) -> None:
        """Count consumed records."""
        self.consumed_records += records
        self.consumed_bytes += size_bytes

    def render(self, http: HttpStatus, node: Iterable[MetricFamily]) -> str:
        """Return the metrics page: the gateway's own metrics and its node's."""
        return render((*self._own(), *_http(http), *node))

    def _own(self) -> Iterator[MetricFamily]:
        yield labelled(
            "quiver_http_requests_total",
            "counter",
            "Requests answered.",
            [
                ((("route", route), ("method", method), ("status", str(status))), count)
                for (route, method, status), count in sorted(self._requests.items())
            ],
        )
        yield histogram(
            "quiver_http_request_seconds",
            "Time to answer a request.",
            {(("route", route),): latency for route, latency in sorted(self._latencies.items())},
        )
        yield labelled(
            "quiver_http_errors_total",
            "counter",
            "Requests answered with an error, by its code.",
            [((("code", code),), count) for code, count in sorted(self.errors.counts.items())],
        )
        for name, value, sentence in (
            ("produced_records", self.produced_records, "Records acknowledged to HTTP producers."),
            ("produced_bytes", self.produced_bytes, "Bytes of values acknowledged to HTTP producers."),
            ("consumed_records", self.consumed_records, "Records consumed by HTTP consumers."),
            ("consumed_bytes", self.consumed_bytes, "Bytes of values consumed by HTTP consumers."),
        ):
            yield counter(f"quiver_http_{name}_total", sentence, value)


def _http(http: HttpStatus) -> Iterable[MetricFamily]:
    return (
        gauge("quiver_http_connections", "HTTP connections.", http.connections),
        gauge("quiver_http_idle_connections", "HTTP connections without a pending request.", http.idle),
        gauge("quiver_http_requests", "HTTP requests being answered.", http.requests),
        gauge("quiver_http_body_bytes", "Bytes of request bodies in memory.", http.body_bytes),
        counter("quiver_http_connections_total", "HTTP connections accepted.", http.accepted),
        counter("quiver_http_refused_total", "HTTP connections and requests refused at a limit.", http.refused),
        counter("quiver_http_timed_out_total", "HTTP connections closed on a timeout.", http.timed_out),
    )
