"""The numbers of the console's charts, from a node's metrics: rates and quantiles since the measurement before. Pure.

A counter that is lower than before belongs to a node that was restarted; the first measurement after it has no rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

import msgspec

from quiver.metrics import MetricFamily
from quiver.model import NodeId
from quiver.wire.admin_messages import HistorySample

SERIES: Final = (
    "in_records",
    "in_bytes",
    "out_records",
    "out_bytes",
    "produce_p50_ms",
    "produce_p99_ms",
    "cpu",
    "memory_bytes",
    "disk_free_bytes",
    "under_replicated",
    "leaderless",
    "lag_records",
    "elections",
)
"""What a sample has, in this order; the first four and `cpu` are per second."""
SUMMED: Final = frozenset(
    ("in_records", "in_bytes", "out_records", "out_bytes", "under_replicated", "lag_records", "elections")
)
"""Series of the cluster that are the sum of its nodes'; the others are the worst of them."""
LOWEST_IS_WORST: Final = frozenset(("disk_free_bytes",))
LAGS_MAX: Final = 10
"""Consumers in a sample."""
_COUNTERS: Final = {
    "in_records": "quiver_topic_received_records_total",
    "in_bytes": "quiver_topic_received_bytes_total",
    "out_records": "quiver_topic_sent_records_total",
    "out_bytes": "quiver_topic_sent_bytes_total",
    "cpu": "process_cpu_seconds_total",
    "elections": "quiver_elections_total",
}
_GAUGES: Final = {
    "memory_bytes": "process_resident_memory_bytes",
    "disk_free_bytes": "quiver_disk_free_bytes",
    "under_replicated": "quiver_partition_under_replicated",
    "leaderless": "quiver_partition_leaderless",
    "lag_records": "quiver_consumer_lag_records",
}
_LATENCY: Final = "quiver_produce_stage_seconds"
_STAGE: Final = ("stage", "commit")
"""From a proposal until it is applied and answered."""


class NodeMeter:
    """Measure one node again and again."""

    def __init__(self) -> None:
        self._time_ms = 0
        self._counters: dict[str, float] = {}
        self._buckets: dict[float, float] = {}

    def measure(self, families: Iterable[MetricFamily], *, time_ms: int) -> HistorySample:
        """Return what a node did since the last measurement; without one, only what it is."""
        known = {family.name: family for family in families}
        counters = {series: total(known.get(name)) or 0.0 for series, name in _COUNTERS.items()}
        buckets = _read_buckets(known.get(_LATENCY))
        passed_s = (time_ms - self._time_ms) / 1000
        values: dict[str, float | None] = {series: total(known.get(name)) for series, name in _GAUGES.items()}
        is_same_run = bool(self._counters) and passed_s > 0 and counters["cpu"] >= self._counters["cpu"]
        if is_same_run:
            for series, value in counters.items():
                passed = max(0.0, value - self._counters[series])  # a topic that is gone takes its counters along
                values[series] = passed if series == "elections" else passed / passed_s
            new = {bound: count - self._buckets.get(bound, 0.0) for bound, count in buckets.items()}
            values["produce_p50_ms"], values["produce_p99_ms"] = (_quantile(new, share) for share in (0.5, 0.99))
        self._time_ms, self._counters, self._buckets = time_ms, counters, buckets
        rounded = tuple(_round(values.get(series)) for series in SERIES)
        return HistorySample(time_ms, rounded, _greatest_lags(known.get(_GAUGES["lag_records"])))


def combine(samples: Sequence[HistorySample], *, time_ms: int) -> HistorySample:
    """Return the sample of a cluster from those of its nodes: sums, and the worst of what cannot be summed."""
    values: list[float | None] = []
    for at, series in enumerate(SERIES):
        found = [value for sample in samples if (value := sample.values[at]) is not None]
        if not found:
            values.append(None)
        elif series in SUMMED:
            values.append(_round(sum(found)))
        else:
            values.append(min(found) if series in LOWEST_IS_WORST else max(found))
    return HistorySample(time_ms, tuple(values), sum_lags(lag for sample in samples for lag in sample.lags))


def carry(sample: HistorySample) -> HistorySample:
    """Return a sample for a moment at which its node was not measured: what it did, but no event twice."""
    elections = SERIES.index("elections")
    return msgspec.structs.replace(sample, values=(*sample.values[:elections], None, *sample.values[elections + 1 :]))


def merge(histories: Mapping[NodeId, Sequence[HistorySample]], *, interval_ms: int, now_ms: int) -> list[HistorySample]:
    """Return the history of a cluster: the samples of its nodes, whose clocks differ, by intervals that have ended.

    A node that is a little late has two samples in one interval and none in the one before, where its last one counts:
    a sum without it would be a dip that never happened. So would be an interval in which some were not measured yet.
    """
    last = now_ms // interval_ms - 1
    slots: dict[int, dict[NodeId, HistorySample]] = {}
    for node, samples in histories.items():
        own = {slot: sample for sample in samples if (slot := sample.time_ms // interval_ms) <= last}
        late = {slot + 1: carry(sample) for slot, sample in own.items() if slot + 2 in own or slot + 1 == last}
        for slot, sample in (late | own).items():
            slots.setdefault(slot, {})[node] = sample
    return [combine(list(found.values()), time_ms=(slot + 1) * interval_ms) for slot, found in sorted(slots.items())]


def sum_lags(lags: Iterable[tuple[str, str, int]], *, lags_max: int = LAGS_MAX) -> tuple[tuple[str, str, int], ...]:
    """Return the greatest lags by consumer and topic; a topic's partitions may be led by several nodes."""
    sums: dict[tuple[str, str], int] = {}
    for consumer, topic, records in lags:
        sums[consumer, topic] = sums.get((consumer, topic), 0) + records
    greatest = sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:lags_max]
    return tuple((consumer, topic, records) for (consumer, topic), records in greatest)


def total(family: MetricFamily | None) -> float | None:
    """Return the sum of a counter or gauge over its labels; None if it is not exposed."""
    return None if family is None else sum(sample.value for sample in family.samples)


def sum_by_peer(families: Iterable[MetricFamily], name: str) -> dict[NodeId, float]:
    """Return the sum of a gauge that nodes report of each other, by the node that it is about."""
    sums: dict[NodeId, float] = {}
    for family in families:
        for sample in family.samples if family.name == name else ():
            node = NodeId(int(dict(sample.labels)["peer"]))
            sums[node] = sums.get(node, 0.0) + sample.value
    return sums


def _read_buckets(family: MetricFamily | None) -> dict[float, float]:
    """Return the cumulative counts of latencies by the upper bound."""
    if family is None:
        return {}
    return {
        float(sample.labels[-1][1]): sample.value
        for sample in family.samples
        if sample.suffix == "_bucket" and _STAGE in sample.labels
    }


def _quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Return a quantile in milliseconds, interpolated within its bucket; None without values."""
    bounds = sorted(buckets.items())
    if not bounds or bounds[-1][1] <= 0:
        return None
    wanted = share * bounds[-1][1]
    for (low, below), (high, count) in pairwise([(0.0, 0.0), *bounds]):
        if count >= wanted:
            if high == float("inf"):
                return 1000 * low
            return 1000 * (low + (high - low) * (wanted - below) / (count - below))
    return None


def _greatest_lags(family: MetricFamily | None) -> tuple[tuple[str, str, int], ...]:
    if family is None:
        return ()
    labels = ((dict(sample.labels), int(sample.value)) for sample in family.samples)
    return sum_lags((one.get("consumer", ""), one.get("topic", ""), records) for one, records in labels)


def _round(value: float | None) -> float | None:
    """Return a number with as many digits as a chart shows."""
    if value is None:
        return None
    return float(round(value)) if abs(value) >= 1000 else round(value, 4)
