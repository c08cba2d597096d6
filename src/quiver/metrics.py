"""Metrics: counters and histograms that hot paths update, and families in the form in which they are exposed.

A part of a node owns its counters and histograms as plain attributes; nothing is registered anywhere. When metrics are
read, each part returns `MetricFamily` values, which travel in `NodeDescribed` and are rendered in Prometheus' text
format. Updating allocates nothing that stays. Everything belongs to one event loop: work in threads returns its
durations, and the loop records them.

Durations come from `now_s` and decide nothing, which is why this module may read the machine's clock.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

now_s = time.perf_counter
"""Return seconds from an arbitrary start, to measure durations."""

LATENCY_BOUNDS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Upper bounds of the buckets of latencies; a last bucket counts the rest."""

OTHER = "other"
"""The label of everything beyond a bound on the number of labels."""
CODES_MAX = 64
"""Most distinct codes that a `CodeCounter` keeps apart."""

Labels = tuple[tuple[str, str], ...]
MetricKind = Literal["counter", "gauge", "histogram"]


class Histogram:
    """Count durations or sizes by fixed buckets."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def samples(self, labels: Labels = ()) -> Iterator[MetricSample]:
        """Yield the cumulative buckets, the sum and the count."""
        count = 0
        for bound, own in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            count += own
            yield MetricSample("_bucket", (*labels, ("le", bound)), float(count))
        yield MetricSample("_sum", labels, self.total)
        yield MetricSample("_count", labels, float(count))


class CodeCounter:
    """Count events by a code, such as an error's; codes beyond `CODES_MAX` are counted as `OTHER`."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, code: str) -> None:
        """Count one event."""
        counts = self.counts
        if code not in counts and len(counts) >= CODES_MAX:
            code = OTHER
        counts[code] = counts.get(code, 0) + 1


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    """One value of a metric; `suffix` is `_bucket`, `_sum` or `_count` for a histogram, else empty."""

    suffix: str
    labels: Labels
    value: float


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """One metric with all its label sets."""

    name: str
    kind: MetricKind
    sentence: str
    samples: tuple[MetricSample, ...]

    def lines(self) -> Iterator[str]:
        """Yield the lines of Prometheus' text format."""
        yield f"# HELP {self.name} {_escape_help(self.sentence)}\n# TYPE {self.name} {self.kind}\n"
        for sample in self.samples:
            yield f"{self.name}{sample.suffix}{_join(sample.labels)} {_number(sample.value)}\n"


def gauge(name: str, sentence: str, value: float) -> MetricFamily:
    """Return a gauge without labels."""
    return MetricFamily(name, "gauge", sentence, (MetricSample("", (), float(value)),))


def counter(name: str, sentence: str, value: float) -> MetricFamily:
    """Return a counter without labels."""
    return MetricFamily(name, "counter", sentence, (MetricSample("", (), float(value)),))


def labelled(
    name: str, kind: Literal["counter", "gauge"], sentence: str, values: Iterable[tuple[Labels, float]]
) -> MetricFamily:
    """Return a counter or gauge with a value per label set."""
    return MetricFamily(name, kind, sentence, tuple(MetricSample("", labels, float(value)) for labels, value in values))


def histogram(name: str, sentence: str, by_label: Mapping[Labels, Histogram]) -> MetricFamily:
    """Return a histogram per label set."""
    samples = (sample for labels, one in by_label.items() for sample in one.samples(labels))
    return MetricFamily(name, "histogram", sentence, tuple(samples))


def render(families: Iterable[MetricFamily]) -> str:
    """Return a page in Prometheus' text format."""
    return "".join(line for family in families for line in family.lines())


def flatten(families: Iterable[MetricFamily]) -> dict[str, float]:
    """Return every value under its name and labels; of a histogram the count, the sum and a bound of the p99."""
    known = tuple(families)
    reader, values = MetricReader(known), dict[str, float]()
    for family in known:
        for sample in family.samples:
            if sample.suffix == "_bucket":
                continue
            labels = _join(sample.labels)
            values[f"{family.name}{sample.suffix}{labels}"] = sample.value
            p99 = reader.find_quantile(family.name, 0.99, dict(sample.labels)) if sample.suffix == "_count" else None
            if p99 is not None and math.isfinite(p99):
                values[f"{family.name}_p99{labels}"] = p99
    return values


class MetricReader:
    """Read values out of families, as `quiver doctor` and `quiver status` do."""

    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = {family.name: family for family in families}

    def __contains__(self, name: str) -> bool:
        return name in self._families

    def __bool__(self) -> bool:
        return bool(self._families)

    def values(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return all label sets and values of a counter or gauge; none if it is not exposed."""
        family = self._families.get(name)
        return [] if family is None else [(dict(one.labels), one.value) for one in family.samples if not one.suffix]

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum over the label sets that have these labels; None if there is none."""
        wanted = labels.items()
        found = [value for own, value in self.values(name) if wanted <= own.items()]
        return sum(found) if found else None

    def quantile(self, name: str, share: float, *, count_min: int = 1, **labels: str) -> float | None:
        """Return an upper bound of a quantile of a histogram; None if it has fewer than `count_min` values."""
        return self.find_quantile(name, share, labels, count_min=count_min)

    def find_quantile(self, name: str, share: float, labels: Mapping[str, str], *, count_min: int = 1) -> float | None:
        """Return what `quantile` does, for labels that are not known by name."""
        family = self._families.get(name)
        if family is None:
            return None
        wanted = labels.items()
        buckets: dict[float, float] = {}
        for one in family.samples:
            own = dict(one.labels)
            if one.suffix == "_bucket" and wanted <= own.items():
                bound = float(own["le"])
                buckets[bound] = buckets.get(bound, 0.0) + one.value
        if not buckets or buckets[float("inf")] < count_min:
            return None
        return next(bound for bound, count in sorted(buckets.items()) if count >= share * buckets[float("inf")])


def _join(labels: Labels) -> str:
    shown = ",".join(f'{name}="{_escape(text)}"' for name, text in labels)
    return f"{{{shown}}}" if shown else ""


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
