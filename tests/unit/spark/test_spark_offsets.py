"""Places in streams, and what lies between them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import RequestError
from quiver.spark.offsets import (
    SPLIT_RECORDS_MIN,
    OffsetRange,
    StreamOffset,
    TopicOffset,
    limit_records,
    plan,
    ranges_between,
    records_between,
    topic_id_of,
    uncounted_loss,
)

ID = "quiver/7/1000"


def at(*offsets: int, incarnation: str = ID, lost: int = 0) -> StreamOffset:
    return StreamOffset(topics={"logs": TopicOffset(id=incarnation, p=dict(enumerate(offsets)), lost=lost)})


def spans(ranges: list[OffsetRange]) -> list[tuple[int, int, int]]:
    return [(one.partition, one.first_offset, one.end_offset) for one in ranges]


def test_place_survives_the_checkpoint() -> None:
    place = at(5, 7, lost=3)
    assert StreamOffset.from_json(json.loads(json.dumps(place.to_json()))) == place
    assert place.to_json() == {"v": 1, "topics": {"logs": {"id": ID, "p": {"0": 5, "1": 7}, "lost": 3}}}
    assert topic_id_of(ID) == 7


@pytest.mark.parametrize("found", [{}, {"v": 2, "topics": {}}, {"v": 1, "topics": {"logs": {"p": 1}}}])
def test_place_that_cannot_be_read_is_an_error(found: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="checkpoint's offset"):
        StreamOffset.from_json(found)


def test_between_two_places_lies_what_is_new() -> None:
    assert spans(ranges_between(at(2, 4), at(5, 4, 3))) == [(0, 2, 5), (2, 0, 3)]
    assert records_between(at(2, 4), at(5, 4, 3)) == 6


def test_topic_that_was_made_anew_is_read_from_its_beginning() -> None:
    assert spans(ranges_between(at(100), at(5, incarnation="quiver/8/2000"))) == [(0, 0, 5)]


def test_target_is_not_passed_and_partitions_unknown_to_it_wait() -> None:
    assert at(9, 9, 9).up_to(at(4, 12), at(1, 1)) == at(4, 9)
    assert at(9).up_to(at(4), at(6)) == at(6)
    assert at(9, incarnation="quiver/8/1").up_to(at(4), at(1)).topics["logs"].p == {}


def test_limit_is_shared_out_by_what_waits() -> None:
    assert limit_records(at(0, 0), at(900, 100), 100) == at(90, 10)
    assert limit_records(at(0, 0), at(30, 10), 100) == at(30, 10)


def test_small_partition_moves_on_beside_a_large_one() -> None:
    limited = limit_records(at(*[0] * 5), at(1_000_000, 1, 1, 1, 1), 10)
    assert all(limited.topics["logs"].p.values())


@given(ends=st.lists(st.integers(0, 10_000), min_size=1, max_size=8), records_max=st.integers(1, 5_000))
def test_limit_is_used_up_and_never_exceeded(ends: list[int], records_max: int) -> None:
    start, end = at(*[0] * len(ends)), at(*ends)
    limited = limit_records(start, end, records_max)
    assert records_between(start, limited) == min(sum(ends), records_max)
    assert all(limited.topics["logs"].p[part] <= own for part, own in enumerate(ends))


@given(ends=st.lists(st.integers(0, 10 * SPLIT_RECORDS_MIN), min_size=1, max_size=5), tasks=st.integers(1, 20))
def test_plan_covers_everything_once_and_in_order(ends: list[int], tasks: int) -> None:
    ranges = ranges_between(at(*[0] * len(ends)), at(*ends))
    planned = plan(ranges, tasks)
    for one in ranges:
        own = [part for part in planned if part.partition == one.partition]
        assert own[0].first_offset == one.first_offset
        assert own[-1].end_offset == one.end_offset
        assert all(before.end_offset == after.first_offset for before, after in pairwise(own))
        assert len(own) == 1 or all(len(part) >= SPLIT_RECORDS_MIN for part in own)


def test_large_partition_is_split_over_all_tasks_and_a_small_one_is_not() -> None:
    planned = plan(ranges_between(at(0, 0), at(100 * SPLIT_RECORDS_MIN, 10)), 4)
    assert [part.partition for part in planned] == [0, 0, 0, 0, 1]
    assert plan([], 4) == []


def test_unread_is_where_reading_goes_on_in_every_partition_there_is() -> None:
    assert at(4, 7).unread(at(9, 9, 3)) == {"logs": {0: 4, 1: 7, 2: 0}}
    assert at(4, 7).unread(at(9, incarnation="quiver/8/2000")) == {"logs": {0: 0}}
    assert at(4).unread(StreamOffset(topics={"logs": TopicOffset(id=ID, p={})})) == {}


def test_what_is_gone_of_a_planned_batch_and_not_counted_is_counted_later() -> None:
    start, end = at(5), at(105)
    (whole,) = ranges_between(start, end)
    (left,) = ranges_between(at(55), end)
    assert uncounted_loss(start, end, [whole], [whole]) == {}
    assert uncounted_loss(start, end, [whole], [left]) == {"logs": 50}
    assert uncounted_loss(start, at(105, lost=50), [whole], [left]) == {}
    assert at(105).with_lost({"logs": 50}) == at(105, lost=50)
    assert at(105).with_lost({}) == at(105)
