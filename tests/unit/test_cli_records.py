"""The parts of the command line that read and write records: quantities, JSON lines, templates, rates, plots."""

from __future__ import annotations

import time
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.cli.bench import percentiles, plot_distribution
from quiver.cli.consume import json_line, make_template
from quiver.cli.json_lines import parse_record
from quiver.cli.produce import pace
from quiver.cli.quantities import UNLIMITED, DurationType, SizeType, format_duration, format_size
from quiver.cli.top import summarize, watch
from quiver.client.overview import ClusterOverview, PartitionOverview, TopicOverview
from quiver.errors import RequestError, UnavailableError
from quiver.model import Index, NodeId, Offset, PartitionId, TopicId
from quiver.record.batch import Record
from quiver.wire.messages import RetentionInfo

texts = st.binary(max_size=20) | st.none()
records = st.builds(
    Record,
    offset=st.integers(0, 1 << 40).map(Offset),
    timestamp=st.integers(0, 1 << 40),
    key=texts,
    value=texts,
    headers=st.dictionaries(st.text(max_size=5), texts, max_size=3).map(lambda one: tuple(one.items())),
    partition=st.integers(0, 5).map(PartitionId),
)


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("7d", 604_800_000),
        ("1.5h", 5_400_000),
        ("15m", 900_000),
        ("2 s", 2_000),
        ("500ms", 500),
        ("42", 42),
        ("1w", 604_800_000),
    ],
)
def test_durations(text: str, milliseconds: int) -> None:
    assert DurationType().convert(text, None, None) == milliseconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("10GiB", 10 << 30), ("500MB", 500_000_000), ("64kib", 65_536), ("1.5KiB", 1536), ("7", 7), ("1 tb", 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert SizeType().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "d", "7y", "-1d", "1e3s", "0", "0.1ms", "7d3h", "unlimited"])
def test_words_that_are_no_duration_are_refused_with_examples(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"7d, 36h|less than 1"):
        DurationType().convert(text, None, None)


@pytest.mark.parametrize("text", ["9" * 400, "999999999999w"])
def test_quantity_that_no_number_holds_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="too much"):
        DurationType().convert(text, None, None)


def test_unlimited_is_taken_only_where_it_means_something() -> None:
    assert SizeType(or_unlimited=True).convert("unlimited", None, None) == UNLIMITED
    with pytest.raises(click.BadParameter, match="no size"):
        SizeType().convert("unlimited", None, None)


@given(st.integers(1, 10**13))
def test_printed_quantities_are_read_back(number: int) -> None:
    assert DurationType().convert(format_duration(number), None, None) == number
    assert SizeType().convert(format_size(number), None, None) == number


@given(records)
def test_consumed_json_is_read_back(record: Record) -> None:
    found = parse_record(json_line(record), "line 1")
    headers = tuple(found.headers.items())
    assert (found.value, found.key, headers) == (record.value, record.key, record.headers)
    assert (found.timestamp, found.partition) == (record.timestamp, record.partition)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b'{"value": {"a": [1]}}', b'{"a":[1]}'),
        (b'{"value": 5}', b"5"),
        (b'{"value": "x"}', b"x"),
        (b'{"value": null}', None),
    ],
)
def test_any_json_is_a_value(line: bytes, value: bytes | None) -> None:
    assert parse_record(line, "line 1").value == value


@pytest.mark.parametrize(
    "line",
    [b"", b"text", b"[]", b"{}", b'{"vlaue": 1}', b'{"value": {"base64": "?"}}', b'{"value": 1, "timestamp": "x"}'],
)
def test_bad_line_is_named_and_not_sent(line: bytes) -> None:
    with pytest.raises(RequestError, match="not sent: line 7") as raised:
        parse_record(line, "line 7")
    assert raised.value.outcome == "not_done"


def test_template_renders_fields_and_escapes() -> None:
    record = Record(Offset(7), 0, b"k", b"v\x1b", (("h", b"1"),), PartitionId(2))
    render = make_template(r"{time}\t{partition}:{offset} {key}={value} {headers} {{}}")
    assert render(record) == b"1970-01-01T00:00:00.000Z\t2:7 k=v\\x1b h=1 {}\n"


@pytest.mark.parametrize("template", ["{nope}", "{value", "{value.__class__}", "{0}", "{value:d}", "{offset!x}"])
def test_template_with_anything_else_is_refused(template: str) -> None:
    with pytest.raises(click.UsageError, match="--template"):
        make_template(template)


def test_pace_keeps_lines_in_order_and_below_the_rate() -> None:
    start_s = time.monotonic()
    blocks = [[b"%d" % n for n in range(30)], [], [b"x"]]
    parts = list(pace(iter(blocks), 200))
    assert [line for part in parts for line in part] == [line for block in blocks for line in block]
    assert max(map(len, parts)) <= 10
    assert time.monotonic() - start_s >= 30 / 200 - 0.05
    assert list(pace(iter(blocks), None)) == blocks


def test_percentiles_are_those_of_the_ranked_values() -> None:
    assert percentiles([]) == {}
    found = percentiles([float(n) for n in range(1, 1001)])
    assert found == {"p50": 500.0, "p90": 900.0, "p99": 990.0, "p99.9": 999.0, "max": 1000.0}


@given(st.lists(st.floats(0, 1e5), max_size=50))
def test_plot_counts_every_value(values: list[float]) -> None:
    lines = list(plot_distribution(values))
    assert sum(int(line.rsplit(" ", 1)[1].replace(",", "")) for line in lines) == len(values)


def overview(*end_offsets: int | None) -> ClusterOverview:
    part: dict[str, Any] = {"group": 1, "leader": NodeId(1), "epoch": 1, "learners": (), "first_offset": 0, "bytes": 5}
    partitions = tuple(
        PartitionOverview(
            partition=PartitionId(number),
            replicas=(NodeId(1), NodeId(2)),
            in_sync=(NodeId(1),),
            end_offset=end_offset,
            **part,
        )
        for number, end_offset in enumerate(end_offsets)
    )
    topics = tuple(
        TopicOverview(topic=name, topic_id=TopicId(1), replicas=2, retention=RetentionInfo(), partitions=partitions)
        for name in ("logs", "_internal", "quiver.digests")
    )
    return ClusterOverview(cluster_id="c", primary=NodeId(1), index=Index(1), nodes=(), topics=topics, moves=())


def test_view_has_rates_since_the_one_before() -> None:
    first = summarize(overview(10), {}, before={}, passed_s=None, with_internal=False)
    assert [(one.topic, one.records_per_second) for one in first.topics] == [("logs", None)]
    before = {("", "logs"): {0: 10}, ("report", "logs"): {0: 3}}
    view = summarize(overview(30), {("report", "logs"): {0: (23, 7)}}, before=before, passed_s=2, with_internal=True)
    assert [(one.topic, one.records_per_second) for one in view.topics] == [
        ("logs", 10.0),
        ("_internal", None),
        ("quiver.digests", None),
    ]
    assert [(one.lag, one.records_per_second) for one in view.consumers] == [(7, 10.0)]
    assert [one.under_replicated for one in view.topics] == [1, 1, 1]


def test_rates_count_partitions_that_reported_both_times_only() -> None:
    before = {("", "logs"): {0: 10}, ("report", "logs"): {1: 5}}
    consumed = {("report", "logs"): {0: (900, 0), 1: (9, 1)}}
    view = summarize(overview(30, 1_000_000), consumed, before=before, passed_s=2, with_internal=False)
    assert [one.records_per_second for one in view.topics] == [10.0], "the leader of partition 1 is back: no rate of it"
    assert [(one.lag, one.records_per_second) for one in view.consumers] == [(1, 2.0)]
    leaderless = summarize(overview(None, None), {}, before=before, passed_s=2, with_internal=False)
    assert [one.records_per_second for one in leaderless.topics] == [None]


def test_view_of_a_cluster_that_stopped_answering_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        count = 0

        def status(self) -> ClusterOverview:
            self.count += 1
            if self.count == 2:
                raise UnavailableError("no node answered")
            return overview(10)

        def clients(self, kind: str) -> list[Any]:
            assert kind == "consumer"
            return []

    monkeypatch.setattr(time, "sleep", lambda _: None)
    views = watch(Failing(), 1.0, with_internal=False)  # type: ignore[arg-type] # what the view asks for
    assert [next(views).error for _ in range(3)] == ["", "no node answered", ""]
