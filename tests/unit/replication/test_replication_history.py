"""A member's last events and latencies: bounded, and without repeats."""

from __future__ import annotations

from quiver.model import Index, NodeId, Term
from quiver.raft import Configuration, Role, RoleChange
from quiver.replication.history import APPENDS_MAX, EVENTS_MAX, MemberHistory, ReplicationCounters
from quiver.testing import SimulatedClock


class Time:
    """Time that moves by hand."""

    now_ns = 0

    def advance(self, ms: int) -> None:
        self.now_ns += ms * 1_000_000


def make() -> tuple[MemberHistory, ReplicationCounters, Time]:
    counters, time = ReplicationCounters(), Time()
    return MemberHistory(counters, SimulatedClock(time), saved_index=Index(0)), counters, time


def change(role: Role, term: int, leader: int | None = None) -> RoleChange:
    return RoleChange(role, Term(term), None if leader is None else NodeId(leader))


def test_events_are_bounded() -> None:
    history, _, _ = make()
    for term in range(1, 100):
        history.note_role(change(Role.FOLLOWER, term, 2))
    assert len(history.events) == EVENTS_MAX
    assert history.events[-1].epoch == 99


def test_repeated_attempt_is_one_event_and_keeps_its_time() -> None:
    history, _, time = make()
    history.note_role(change(Role.PRE_CANDIDATE, 1))
    since_ms = history.since_ms
    for _ in range(30):
        time.advance(100)
        history.note_role(change(Role.PRE_CANDIDATE, 1))
    assert [event.kind for event in history.events] == ["pre_candidate"]
    assert history.since_ms == since_ms


def test_elections_and_lost_leaderships_are_counted_once() -> None:
    history, counters, _ = make()
    for one in (change(Role.CANDIDATE, 1), change(Role.LEADER, 1, 1), change(Role.LEADER, 1, 1)):
        history.note_role(one)
    history.note_role(change(Role.FOLLOWER, 2, 3))
    history.note_role(change(Role.FOLLOWER, 3, 3))
    history.note_transfer(NodeId(3), Term(3))
    history.note_members(Configuration(voters=(NodeId(1), NodeId(3))), Term(3))
    assert (counters.campaigns, counters.elections_won, counters.leaderships_lost, counters.transfers) == (1, 1, 1, 1)
    assert history.events[-1].members == (1, 3)


def test_commits_are_measured_once_per_group_of_proposals() -> None:
    history, counters, _ = make()
    for end_index in (3, 5, 9):
        history.note_appended(Index(end_index))
    history.note_committed(Index(1))
    assert sum(counters.replicate.counts) == 0
    history.note_committed(Index(4))
    assert sum(counters.replicate.counts) == 1
    history.note_committed(Index(8))
    assert sum(counters.replicate.counts) == 2


def test_leader_without_a_majority_does_not_grow() -> None:
    history, counters, _ = make()
    for end_index in range(2 * APPENDS_MAX):
        history.note_appended(Index(end_index))
    history.note_role(change(Role.FOLLOWER, 2))
    history.note_committed(Index(10**6))
    assert sum(counters.replicate.counts) == 0
