"""R23: while a leader is alive, strangers bring no term; nobody ever brings one that uses up the terms."""

from __future__ import annotations

import random

import pytest
from raft_harness import core, entries

from quiver.model import TERM_MAX, Index, NodeId, Term
from quiver.raft import (
    TERM_FREE_MAX,
    Append,
    AppendResponse,
    Configuration,
    Heartbeat,
    InitialState,
    InstallSnapshot,
    Raft,
    RaftConfig,
    RaftMessage,
    Role,
    SnapshotMetadata,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)
from quiver.raft.core import TERM_STEP_MAX

N1, N2, N3, STRANGER = NodeId(1), NodeId(2), NodeId(3), NodeId(4242)
NOTHING = Index(0)
MEMBERS = Configuration(voters=(N1, N2, N3))
MESSAGES: list[RaftMessage] = [
    Heartbeat(Term(9), NOTHING, 1),
    Append(Term(9), NOTHING, Term(0), entries(1, 9), NOTHING, 1),
    InstallSnapshot(Term(9), SnapshotMetadata(Index(5), Term(9), Configuration(voters=(STRANGER,))), 1),
    AppendResponse(Term(9), True, NOTHING, NOTHING, NOTHING, 1),
    VoteRequest(Term(9), Index(99), Term(9)),
    VoteRequest(Term(9), Index(99), Term(9), False, True),
    VoteResponse(Term(9), True),
    TimeoutNow(Term(9)),
]


def make(*, known: tuple[NodeId, ...] = (), configuration: Configuration | None = MEMBERS, term: int = 3) -> Raft:
    initial = InitialState(term=Term(term), configurations=((NOTHING, configuration),) if configuration else ())
    return Raft(RaftConfig(id=N1), initial, rng=random.Random(1), now_ms=0, knows=known.__contains__)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_stranger_changes_nothing_while_a_leader_is_alive(message: RaftMessage) -> None:
    raft = make()
    raft.receive(N2, Heartbeat(Term(3), NOTHING, 1), 10_000)
    output = raft.receive(STRANGER, message, 10_001)
    assert output.is_refused
    assert (output.hard_state, output.append, output.restore, output.messages) == (None, (), None, [])
    assert (raft.term, raft.role, raft.leader, raft.last_index) == (3, Role.FOLLOWER, N2, 0)


def test_member_that_lags_behind_follows_a_known_leader_that_it_does_not_know_as_a_member() -> None:
    raft = make(known=(NodeId(4),))
    raft.receive(N2, Heartbeat(Term(3), NOTHING, 1), 9_999)
    raft.receive(NodeId(4), Heartbeat(Term(9), NOTHING, 1), 10_000)
    assert (raft.term, raft.leader) == (9, 4)


def test_member_without_a_leader_hears_nodes_that_are_newer_than_all_it_knows() -> None:
    """The members may all have changed while this one was away (§6): else the group could never use its vote."""
    raft = make()
    raft.receive(NodeId(4), Heartbeat(Term(9), NOTHING, 1), 10_000)
    assert (raft.term, raft.leader) == (9, 4)
    raft = make()
    granted = raft.receive(NodeId(4), VoteRequest(Term(9), Index(99), Term(9)), 10_000)
    assert [outgoing.message for outgoing in granted.messages_after_save] == [VoteResponse(Term(9), True)]


def test_blank_member_follows_whoever_leads() -> None:
    raft = make(configuration=None, term=0)
    raft.receive(N2, Append(Term(2), NOTHING, Term(0), entries(1, 2), NOTHING, 1), 10_000)
    assert (raft.term, raft.leader, raft.last_index) == (2, N2, 1)
    assert not raft.receive(N2, Append(Term(2), Index(1), Term(2), entries(2, 2), NOTHING, 2), 10_001).is_refused


@pytest.mark.parametrize("term", [TERM_FREE_MAX + 1, TERM_MAX, (1 << 64) - 1])
def test_term_that_no_election_can_have_reached_is_not_adopted(term: int) -> None:
    raft = core(term=3)
    assert raft.receive(N2, Heartbeat(Term(term), NOTHING, 1), 10_000).is_refused
    assert raft.receive(N2, VoteRequest(Term(term), Index(9), Term(9)), 10_000).is_refused
    assert raft.term == 3


def test_high_terms_still_grow_one_by_one() -> None:
    raft = core(term=TERM_FREE_MAX + 7)
    raft.receive(N2, Heartbeat(Term(TERM_FREE_MAX + 8), NOTHING, 1), 10_000)
    assert raft.term == TERM_FREE_MAX + 8
    assert raft.receive(N2, Heartbeat(Term(raft.term + TERM_STEP_MAX + 1), NOTHING, 1), 10_000).is_refused


def test_blank_member_joins_a_group_of_high_terms_through_a_known_node() -> None:
    known, unknown = make(known=(N2,), configuration=None, term=0), make(configuration=None, term=0)
    message = Heartbeat(Term(TERM_FREE_MAX + 5), NOTHING, 1)
    assert unknown.receive(N2, message, 10_000).is_refused
    known.receive(N2, message, 10_000)
    assert known.term == TERM_FREE_MAX + 5


def test_nobody_campaigns_beyond_the_last_term() -> None:
    raft = core(term=TERM_MAX)
    output = raft.tick(100_000)
    assert (raft.term, raft.role, output.messages, output.hard_state) == (TERM_MAX, Role.FOLLOWER, [], None)
    raft.receive(N2, TimeoutNow(Term(TERM_MAX)), 100_001)
    assert raft.term == TERM_MAX
