"""Filters that speak of places: no less is read than what they let through, and no more if they are answered."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from quiver.spark.filters import is_filter_planner, push_filters
from quiver.spark.offsets import OffsetRange, StreamOffset, TopicOffset

RANGES = [
    OffsetRange(topic=topic, topic_id=topic_id, partition=partition, first_offset=2, end_offset=9)
    for topic_id, topic in enumerate(("logs", "more"))
    for partition in range(3)
]
KINDS: dict[type[Any], Any] = {
    EqualTo: lambda value, to: value == to,
    GreaterThan: lambda value, to: value > to,
    GreaterThanOrEqual: lambda value, to: value >= to,
    LessThan: lambda value, to: value < to,
    LessThanOrEqual: lambda value, to: value <= to,
    In: lambda value, to: value in to,
}
numbers = st.integers(-1, 11)
filters = st.one_of(
    *(st.tuples(st.just(kind), st.sampled_from(["partition", "offset"]), numbers) for kind in KINDS if kind is not In),
    st.tuples(st.just(In), st.sampled_from(["partition", "offset"]), st.lists(numbers, min_size=1).map(tuple)),
    st.tuples(st.just(EqualTo), st.just("topic"), st.sampled_from(["logs", "other"])),
)


def records(ranges: list[OffsetRange]) -> set[tuple[str, int, int]]:
    return {(one.topic, one.partition, offset) for one in ranges for offset in range(one.first_offset, one.end_offset)}


def passes(record: tuple[str, int, int], kind: type[Any], column: str, to: object) -> bool:
    return bool(KINDS[kind](record[("topic", "partition", "offset").index(column)], to))


@given(st.lists(filters, max_size=4))
def test_what_is_read_and_then_filtered_is_what_filters_let_through(chosen: list[tuple[type[Any], str, Any]]) -> None:
    made = [kind((column,), to) for kind, column, to in chosen]
    narrowing, rest = push_filters(made)
    left = [one for one, filter_ in zip(chosen, made, strict=True) if any(filter_ is other for other in rest)]
    found = {one for one in records(narrowing.prune(RANGES)) if all(passes(one, *filter_) for filter_ in left)}
    assert found == {one for one in records(RANGES) if all(passes(one, *filter_) for filter_ in chosen)}
    assert {(kind, column) for kind, column, _ in left} <= {(In, "offset")}


def test_what_says_nothing_about_places_is_left_to_spark() -> None:
    others: list[Filter] = [
        Not(EqualTo(("partition",), 1)),
        EqualTo(("value",), b"x"),
        StringStartsWith(("topic",), "lo"),
        IsNotNull(("key",)),
        EqualTo(("headers", "offset"), 3),
        LessThan(("timestamp",), datetime(2026, 1, 1, tzinfo=UTC)),
    ]
    narrowing, rest = push_filters([IsNotNull(("offset",)), *others])
    assert rest == others
    assert narrowing.prune(RANGES) == RANGES


@pytest.mark.parametrize(("wanted", "offsets"), [((None, 4, 3), {3, 4}), ((None,), set())])
def test_null_among_offsets_lets_nothing_through(wanted: tuple[int | None, ...], offsets: set[int]) -> None:
    narrowing, _ = push_filters([In(("offset",), wanted)])
    assert {offset for _, _, offset in records(narrowing.prune(RANGES))} == offsets


@pytest.mark.parametrize("kind", [EqualTo, GreaterThan, GreaterThanOrEqual])
def test_least_timestamp_is_where_reading_begins(kind: type[Any]) -> None:
    wanted = kind(("timestamp",), datetime.fromtimestamp(7.5009, tz=UTC))
    narrowing, rest = push_filters([GreaterThan(("timestamp",), datetime.fromtimestamp(3, tz=UTC)), wanted])
    assert narrowing.timestamp == 7500
    assert rest[1] is wanted
    of_logs = TopicOffset(id="quiver/0/5", p={0: 4, 1: 9})
    of_another = TopicOffset(id="quiver/3/5", p=dict.fromkeys(range(3), 9))
    found = narrowing.prune(RANGES, StreamOffset(topics={"logs": of_logs, "more": of_another}))
    assert [(one.topic, one.partition, one.first_offset) for one in found] == [
        ("logs", 0, 4),
        ("logs", 2, 2),
        ("more", 0, 2),
        ("more", 1, 2),
        ("more", 2, 2),
    ]


def test_only_the_planner_that_has_filters_is_asked_for_them() -> None:
    assert not is_filter_planner()
