"""Counters, histograms and Prometheus' text format, read back by the official parser."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from quiver.metrics import (
    CODES_MAX,
    OTHER,
    CodeCounter,
    Histogram,
    MetricFamily,
    MetricReader,
    counter,
    flatten,
    gauge,
    histogram,
    labelled,
    render,
)

SECONDS = st.floats(min_value=0, max_value=100, allow_nan=False)


@given(st.lists(SECONDS))
def test_buckets_are_cumulative_and_complete(values: list[float]) -> None:
    one = Histogram((0.1, 1.0, 10.0))
    for value in values:
        one.observe(value)
    samples = {dict(sample.labels).get("le", sample.suffix): sample.value for sample in one.samples()}
    for bound in (0.1, 1.0, 10.0):
        assert samples[str(bound)] == sum(value <= bound for value in values)
    assert samples["+Inf"] == samples["_count"] == len(values)
    assert math.isclose(samples["_sum"], sum(values), abs_tol=1e-9)


@given(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False), max_size=4))
def test_official_parser_reads_what_was_written(values: dict[str, float]) -> None:
    family = labelled(
        "quiver_x_bytes", "gauge", 'A "line"\nand \\ more.', [((("topic", t),), v) for t, v in values.items()]
    )
    (parsed,) = text_string_to_metric_families(render([family]))
    assert parsed.type == "gauge"
    assert {one.labels["topic"]: one.value for one in parsed.samples} == values


def test_histogram_is_one_family_to_the_official_parser() -> None:
    one = Histogram((0.1, 1.0))
    one.observe(0.5)
    page = render(
        [histogram("quiver_x_seconds", "X.", {(("stage", "fsync"),): one}), counter("quiver_y_total", "Y.", 3)]
    )
    first, second = text_string_to_metric_families(page)
    assert (first.name, first.type, second.name, second.type) == (
        "quiver_x_seconds",
        "histogram",
        "quiver_y",
        "counter",
    )
    found = [one.value for one in first.samples if one.name == "quiver_x_seconds_bucket"]
    assert found == [0.0, 1.0, 1.0]


def test_codes_beyond_the_bound_are_counted_together() -> None:
    codes = CodeCounter()
    for number in range(CODES_MAX + 10):
        codes.add(f"code_{number}")
    codes.add("code_0")
    assert codes.counts[OTHER] == 10
    assert codes.counts["code_0"] == 2
    assert len(codes.counts) == CODES_MAX + 1


def families() -> list[MetricFamily]:
    one = Histogram((0.1, 1.0))
    for value in (0.05, 0.05, 0.5, 5.0):
        one.observe(value)
    return [
        gauge("a", "A.", 7),
        labelled("b", "gauge", "B.", [((("peer", "1"),), 2), ((("peer", "2"),), 3)]),
        histogram("c", "C.", {(("stage", "x"),): one, (("stage", "empty"),): Histogram((0.1, 1.0))}),
    ]


def test_reader_sums_labels_and_bounds_quantiles() -> None:
    reader = MetricReader(families())
    assert reader.total("a") == 7
    assert (reader.total("b"), reader.total("b", peer="2"), reader.total("b", peer="9")) == (5, 3, None)
    assert "a" in reader
    assert reader.total("none") is None
    assert reader.quantile("c", 0.5, stage="x") == 0.1
    assert reader.quantile("c", 0.75, stage="x") == 1.0
    assert reader.quantile("c", 0.99, stage="x") == math.inf
    assert reader.quantile("c", 0.99, stage="empty") is None
    assert reader.quantile("none", 0.5) is None


def test_flat_values_have_names_and_labels_and_a_bound_of_the_p99() -> None:
    found = flatten(families())
    assert found["a"] == 7
    assert found['b{peer="2"}'] == 3
    assert found['c_count{stage="x"}'] == 4
    assert 'c_p99{stage="x"}' not in found
    one = Histogram((0.1, 1.0))
    one.observe(0.5)
    assert flatten([histogram("d", "D.", {(): one})])["d_p99"] == 1.0
