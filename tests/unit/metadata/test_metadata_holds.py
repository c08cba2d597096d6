"""What commands do to holds: placed, renewed, released, ended when they are over and not before."""

from __future__ import annotations

from typing import Any

import pytest
from metadata_world import NOW_MS, create_topic, do, formed_state, refused

from quiver.errors import ConflictError, OutOfRangeError
from quiver.features import LEVEL_MIN
from quiver.metadata import (
    CommandDone,
    DeleteTopicCommand,
    ExpireHold,
    HoldPosition,
    PlaceHoldCommand,
    PurgeTopic,
    ReleaseHoldCommand,
)
from quiver.metadata.decision import CommandRefusal
from quiver.metadata.state import MetadataState
from quiver.metadata.topics import HOLDS_MAX, LASTING_MS_MAX
from quiver.model import PartitionId, TopicId

LOGS, AUDIT = TopicId(1), TopicId(2)
P0, P1 = PartitionId(0), PartitionId(1)


def place(name: str = "q", *offsets: int, topic_id: TopicId = LOGS, **fields: Any) -> PlaceHoldCommand:
    """Return a hold from these offsets on, the first in partition 0."""
    positions = tuple(held(number, offset) for number, offset in enumerate(offsets or (5,)))
    given: dict[str, Any] = {"now_ms": NOW_MS, "positions": positions, "lasting_ms": 60_000} | fields
    return PlaceHoldCommand(topic_id=topic_id, name=name, **given)


def held(partition: int, offset: int = 1) -> HoldPosition:
    return HoldPosition(partition_id=PartitionId(partition), first_offset=offset)


def expire(now_ms: int, name: str = "q") -> ExpireHold:
    return ExpireHold(now_ms=now_ms, topic_id=LOGS, name=name)


def two_topics(*, feature_level: int = LEVEL_MIN) -> MetadataState:
    state = formed_state(feature_level=feature_level)
    do(state, create_topic("audit"))
    return state


def test_lowest_of_all_holds_on_a_partition_counts() -> None:
    state = two_topics()
    do(state, place("q", 7, 3))
    do(state, place("r", 5))
    do(state, place("q", 1, topic_id=AUDIT))
    view = state.view()
    assert [view.held_offset(LOGS, part) for part in (P0, P1)] == [5, 3]
    assert [view.held_offset(AUDIT, part) for part in (P0, P1)] == [1, None]


def test_renewed_hold_moves_and_lasts_longer_and_keeps_when_it_was_placed() -> None:
    state = two_topics()
    do(state, place("q", 1, owner="me"))
    do(state, place("q", 9, now_ms=NOW_MS + 50, owner="me"))
    hold = state.view().holds[LOGS, "q"]
    assert (hold.placed_ms, hold.expires_ms, hold.owner) == (NOW_MS, NOW_MS + 60_050, "me")
    assert state.view().held_offset(LOGS, P0) == 9
    assert do(state, place("q", 9, now_ms=NOW_MS + 50, owner="me")) == CommandDone(0)


def test_released_hold_is_gone_on_one_topic_or_on_all() -> None:
    state = two_topics()
    for command in (place("q"), place("r"), place("q", topic_id=AUDIT)):
        do(state, command)
    assert do(state, ReleaseHoldCommand(now_ms=NOW_MS, name="q", topic_id=AUDIT)) == CommandDone(1)
    assert sorted(state.view().holds) == [(LOGS, "q"), (LOGS, "r")]
    do(state, place("q", topic_id=AUDIT))
    assert do(state, ReleaseHoldCommand(now_ms=NOW_MS, name="q")) == CommandDone(2)
    assert sorted(state.view().holds) == [(LOGS, "r")]
    assert do(state, ReleaseHoldCommand(now_ms=NOW_MS, name="q")) == CommandDone(0), (
        "one that is gone already is no error"
    )


def test_hold_ends_when_it_is_over_and_not_before() -> None:
    state = two_topics()
    do(state, place("q"))
    assert refused(state, expire(NOW_MS + 59_999)) == "too_early"
    do(state, place("q", now_ms=NOW_MS + 1))
    assert refused(state, expire(NOW_MS + 60_000)) == "too_early", "it was renewed meanwhile"
    assert do(state, expire(NOW_MS + 60_001)) == CommandDone(1)
    assert do(state, expire(NOW_MS + 60_001)) == CommandDone(0)
    assert state.view().held_offset(LOGS, P0) is None


def test_hold_goes_with_its_topic_and_not_when_that_can_be_had_back() -> None:
    state = two_topics()
    do(state, place("q"))
    do(state, DeleteTopicCommand(now_ms=NOW_MS, topic="logs", purge_ms=NOW_MS))
    assert state.view().held_offset(LOGS, P0) == 5
    do(state, place("q", 6))
    do(state, PurgeTopic(now_ms=NOW_MS, topic_id=LOGS))
    assert dict(state.view().holds) == {}
    assert refused(state, place("q")) == "unknown_topic"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (place(""), "bad_hold"),
        (place(lasting_ms=999), "bad_hold"),
        (place(lasting_ms=LASTING_MS_MAX + 1), "bad_hold"),
        (place(positions=()), "bad_hold"),
        (place(positions=(held(1), held(0))), "bad_hold"),
        (place(positions=(held(0), held(0))), "bad_hold"),
        (place("q", 1, 2, 3), "unknown_partition"),
        (place(topic_id=TopicId(9)), "unknown_topic"),
    ],
)
def test_what_cannot_be_held_is_refused(command: PlaceHoldCommand, code: str) -> None:
    assert refused(two_topics(), command) == code


def test_there_is_a_bound_on_holds_but_known_ones_can_be_renewed() -> None:
    state = two_topics()
    for number in range(HOLDS_MAX):
        do(state, place(f"q{number}"))
    assert refused(state, place("one-more")) == "too_many_holds"
    do(state, place("q7", 9))


def test_one_user_leaves_holds_to_others() -> None:
    state = two_topics(feature_level=2)
    for number in range(HOLDS_MAX // 2):
        do(state, place(f"q{number}", principal="user:eve"))
    assert refused(state, place("one-more", principal="user:eve")) == "too_many_holds"
    do(state, place("q7", 9, principal="user:eve"))
    for number in range(HOLDS_MAX // 8):
        do(state, place(f"a{number}", principal="user:alice"))
    assert refused(state, place("one-more", principal="user:alice")) == "too_many_holds"
    do(state, place("nobody's"))


def test_hold_belongs_to_who_placed_it() -> None:
    state = two_topics(feature_level=2)
    do(state, place("q", principal="user:alice"))
    assert refused(state, place("q", 9, principal="user:eve")) == "not_owner"
    for topic_id in (LOGS, None):
        release = ReleaseHoldCommand(now_ms=NOW_MS, name="q", topic_id=topic_id, principal="user:eve")
        assert refused(state, release) == "not_owner"
    do(state, place("q", 9, principal="user:root", takes_over=True))
    assert state.view().holds[LOGS, "q"].principal == "user:alice"
    do(state, place("q", topic_id=AUDIT, principal="user:eve"))
    do(state, ReleaseHoldCommand(now_ms=NOW_MS, name="q", principal="user:eve"))
    assert sorted(state.view().holds) == [(LOGS, "q")]
    do(state, ReleaseHoldCommand(now_ms=NOW_MS, name="q", principal="user:root", takes_over=True))
    assert not state.view().holds


def test_hold_of_nobody_belongs_to_the_first_who_renews_it() -> None:
    state = two_topics(feature_level=2)
    do(state, place("q"))
    do(state, place("q", principal="user:alice"))
    assert refused(state, place("q", principal="user:eve")) == "not_owner"


def test_owner_of_a_hold_needs_the_feature_level() -> None:
    state = two_topics()
    assert refused(state, place("q", takes_over=True)) == "feature_level"
    assert refused(state, place("q", principal="user:alice")) == "feature_level"


def test_refusals_say_what_to_do() -> None:
    assert type(CommandRefusal("too_many_holds", "not done: ?").error()) is ConflictError
    assert type(CommandRefusal("bad_hold", "not done: ?").error()) is OutOfRangeError


def test_what_is_held_is_gathered_once_as_long_as_holds_stay() -> None:
    state = two_topics()
    do(state, place("q"))
    assert state.view().held_offset(LOGS, P0) == 5
    gathered = state.view()._held_offsets
    do(state, create_topic("more"))
    assert state.view()._held_offsets is gathered
