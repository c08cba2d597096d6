"""Signs of life of members: who is silent for too long, and what does not count as silence."""

from __future__ import annotations

import pytest

from quiver.manager.group_liveness import RETRY_MS, GroupLiveness, MemberKey
from quiver.metadata import GroupMemberRow
from quiver.model import ConsumerId

ONE: MemberKey = (ConsumerId(1), "one")
TWO: MemberKey = (ConsumerId(1), "two")


class FakeClock:
    now_ms = 1_000_000

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms


def member(key: MemberKey, timeout_ms: int = 2_000) -> GroupMemberRow:
    return GroupMemberRow(group_id=key[0], member_id=key[1], joined_ms=0, session_timeout_ms=timeout_ms)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def liveness(clock: FakeClock) -> GroupLiveness:
    found = GroupLiveness(clock)
    found.keep_all({key: member(key) for key in (ONE, TWO)})
    return found


def test_member_is_silent_after_its_timeout_and_reported_again_until_it_is_gone(
    clock: FakeClock, liveness: GroupLiveness
) -> None:
    clock.now_ms += 1_999
    assert liveness.find_silent() == []
    liveness.hear(TWO)
    clock.now_ms += 1
    assert liveness.find_silent() == [ONE]
    assert liveness.find_silent() == []
    clock.now_ms += RETRY_MS
    assert liveness.find_silent() == [ONE]
    liveness.keep(ONE, None)
    clock.now_ms += RETRY_MS
    assert liveness.find_silent() == []
    clock.now_ms += 2_000
    assert liveness.find_silent() == [TWO]


def test_member_that_is_heard_after_it_was_reported_lives(clock: FakeClock, liveness: GroupLiveness) -> None:
    clock.now_ms += 2_000
    assert liveness.find_silent() == [ONE, TWO]
    liveness.hear(ONE)
    clock.now_ms += RETRY_MS
    assert liveness.find_silent() == [TWO]


def test_own_stall_is_not_silence_of_the_members(clock: FakeClock, liveness: GroupLiveness) -> None:
    clock.now_ms += 30_000
    liveness.ignore_stall(29_000)
    assert liveness.find_silent() == []
    clock.now_ms += 1_000
    assert liveness.find_silent() == [ONE, TWO]


def test_new_timeout_counts_from_the_last_sign_of_life(clock: FakeClock, liveness: GroupLiveness) -> None:
    clock.now_ms += 500
    liveness.keep(ONE, member(ONE, 1_000))
    liveness.keep(TWO, member(TWO, 60_000))
    clock.now_ms += 500
    assert liveness.find_silent() == [ONE]
    clock.now_ms += 58_999
    assert TWO not in liveness.find_silent()
    clock.now_ms += 1
    assert TWO in liveness.find_silent()


def test_members_that_are_not_in_the_metadata_are_forgotten(clock: FakeClock, liveness: GroupLiveness) -> None:
    liveness.keep_all({TWO: member(TWO)})
    clock.now_ms += 10_000
    assert liveness.find_silent() == [TWO]


def test_member_that_comes_and_goes_leaves_nothing_behind(clock: FakeClock, liveness: GroupLiveness) -> None:
    for _ in range(100):
        liveness.keep(ONE, member(ONE))
        liveness.hear(ONE)
        clock.now_ms += 100
        liveness.keep(ONE, None)
    clock.now_ms += 10_000
    assert liveness.find_silent() == [TWO]
    assert (len(liveness._heard_ms), len(liveness._checks_ms), len(liveness._deadlines)) == (1, 1, 1)
