"""R8, R9, R18, R22, R24: who may ask, who may answer, and who is left alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from raft_harness import Cluster, append, core, entries, sole

from quiver.errors import ConfigError, UnavailableError
from quiver.model import Index, NodeId, Term
from quiver.raft import (
    Configuration,
    Entry,
    EntryKind,
    Heartbeat,
    InitialState,
    Raft,
    RaftConfig,
    Role,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)

N1, N2, N3 = NodeId(1), NodeId(2), NodeId(3)


def request(term: int, last_index: int = 0, *, pre: bool = False, transfer: bool = False) -> VoteRequest:
    return VoteRequest(Term(term), Index(last_index), Term(1 if last_index else 0), pre, transfer)


def test_pre_vote_changes_neither_term_nor_vote() -> None:
    raft = core(term=3)
    output = raft.receive(N2, request(4, pre=True), 10_000)
    assert sole(output) == VoteResponse(Term(4), True, True)
    assert output.hard_state is None
    assert (raft.term, raft.status().vote) == (3, None)
    assert sole(raft.receive(N3, request(4, pre=True), 10_000)).granted


@pytest.mark.parametrize("pre", [True, False])
def test_votes_are_refused_while_a_leader_is_fresh(pre: bool) -> None:
    """R9."""
    raft = core(term=1, election_timeout_ms=500)
    raft.receive(N2, Heartbeat(Term(1), Index(0), 1), 1_000)
    output = raft.receive(N3, request(5, pre=pre), 1_499)
    assert raft.term == 1
    assert [m.message for m in output.messages] == ([VoteResponse(Term(1), False, True)] if pre else [])
    assert sole(raft.receive(N3, request(5, pre=pre), 1_500)).granted


def test_transfer_overrides_a_fresh_leader() -> None:
    """R15."""
    raft = core(term=1)
    raft.receive(N2, Heartbeat(Term(1), Index(0), 1), 1_000)
    assert sole(raft.receive(N3, request(2, transfer=True), 1_001)).granted


def test_leader_is_not_unseated_by_a_vote_request() -> None:
    cluster = Cluster()
    leader = cluster.elect(1)
    leader.receive(3, request(9))
    assert leader.raft.is_leader


def test_pre_candidate_does_not_count_its_own_leader_as_fresh() -> None:
    """R9: both followers time out at once; each grants the other's pre-vote."""
    cluster = Cluster()
    cluster.elect(1)
    cluster.cut(1)
    cluster.campaign(2)
    deadline = cluster[3].raft.next_deadline_ms
    assert deadline is not None
    cluster.now_ms = max(cluster.now_ms, deadline)
    cluster[3].tick()
    cluster.settle()
    assert {cluster[2].raft.role, cluster[3].raft.role} & {Role.CANDIDATE, Role.LEADER}


def test_pre_candidate_hears_its_leader_again_and_follows_it() -> None:
    cluster = Cluster()
    leader = cluster.elect(1)
    cluster.campaign(3)
    cluster.network.clear()
    assert cluster[3].raft.role is Role.PRE_CANDIDATE
    leader.propose(b"a")
    cluster.settle()
    assert (cluster[3].raft.role, cluster[3].raft.leader) == (Role.FOLLOWER, 1)
    assert cluster[3].data == leader.data


def test_refused_pre_vote_ends_in_following() -> None:
    raft = core(term=1)
    raft.tick(10_000)
    raft.receive(N2, VoteResponse(Term(1), False, True), 10_000)
    raft.receive(N3, VoteResponse(Term(1), False, True), 10_000)
    assert (raft.role, raft.term) == (Role.FOLLOWER, 1)


def test_first_election_needs_no_pre_votes() -> None:
    raft = core()
    output = raft.tick(10_000)
    assert (raft.role, raft.term) == (Role.CANDIDATE, 1)
    assert output.hard_state is not None
    assert [outgoing.message for outgoing in output.messages_after_save] == 2 * [
        VoteRequest(Term(1), Index(0), Term(0), False, False)
    ]


def test_refusal_of_a_later_term_is_learned_from() -> None:
    raft = core()
    raft.tick(10_000)
    raft.receive(N2, VoteResponse(Term(7), False, True), 10_000)
    assert (raft.role, raft.term) == (Role.FOLLOWER, 7)


def test_answers_to_other_campaigns_do_not_count() -> None:
    raft = core(term=3)
    raft.receive(N2, VoteResponse(Term(3), True), 0)  # no campaign at all
    raft.tick(10_000)
    raft.receive(N2, VoteResponse(Term(3), True), 10_000)  # a vote is not a pre-vote
    raft.receive(N2, VoteResponse(Term(9), True, True), 10_000)  # a pre-vote for another term
    assert (raft.role, raft.term) == (Role.PRE_CANDIDATE, 3)


def test_member_that_stands_again_asks_those_too_who_could_not_hear_it_before() -> None:
    raft = core(term=3)
    for _ in range(2):
        asked = [(item.to, item.message) for item in raft.campaign(10).messages]
        assert asked == [(N2, request(4, pre=True)), (N3, request(4, pre=True))]
    raft.receive(N2, VoteResponse(Term(4), True, True), 10)
    assert (raft.role, raft.term) == (Role.CANDIDATE, 4)
    assert not raft.campaign(10).messages, "votes are being counted"


def test_cut_off_member_does_not_disturb_when_it_returns() -> None:
    """R9: the term does not grow while a member cannot win."""
    cluster = Cluster()
    leader = cluster.elect(1)
    cluster.cut(3)
    cluster.elapse(5_000)
    assert cluster[3].raft.term == 1
    cluster.heal()
    cluster.elapse(2_000)
    assert leader.raft.is_leader
    assert leader.raft.term == 1


def test_leader_without_a_quorum_steps_down() -> None:
    """R9: check-quorum."""
    cluster = Cluster()
    leader = cluster.elect(1)
    leader.propose(b"a")
    leader.read(4)
    cluster.cut(1)
    cluster.elapse(450)
    assert leader.raft.is_leader
    cluster.elapse(250)
    assert not leader.raft.is_leader
    lost = [o for o in leader.outputs if o.proposals_lost is not None]
    assert lost[-1].proposals_lost == 2
    assert leader.reads_failed == [4]


def test_paused_leader_steps_down_at_its_first_tick() -> None:
    cluster = Cluster()
    leader = cluster.elect(1)
    cluster.now_ms += 5_000
    leader.tick()
    assert not leader.raft.is_leader


def test_group_of_one_never_loses_its_quorum() -> None:
    cluster = Cluster(1)
    leader = cluster.elect(1)
    cluster.elapse(5_000)
    assert leader.raft.is_leader
    assert leader.raft.term == 1


def test_blank_member_neither_votes_nor_campaigns() -> None:
    """R22: it may have lost everything that it acknowledged under its name."""
    cluster = Cluster(3, voters=[1, 2, 3], blank=[3])
    blank = cluster[3]
    assert blank.raft.next_deadline_ms is None
    for pre in (True, False):
        assert not sole(blank.receive(1, request(1, pre=pre))).granted
    blank.receive(1, TimeoutNow(blank.raft.term))
    assert blank.raft.role is Role.FOLLOWER


def test_blank_member_may_vote_once_its_log_names_it() -> None:
    cluster = Cluster(3, voters=[1, 2], blank=[3])
    leader = cluster.elect(1)
    leader.change([1, 2], [3])
    cluster.settle()
    assert sole(cluster[3].receive(2, request(9, 9, transfer=True))).granted


def test_damaged_member_neither_votes_nor_campaigns_until_repaired() -> None:
    """R18, I10."""
    raft = core(log=[1], recover_until=3)
    assert raft.status().recovering
    assert raft.next_deadline_ms is None
    assert not sole(raft.receive(N2, request(2, 9), 10_000)).granted
    raft.receive(N2, append(3, (1, 1), *entries(2, 3, 3)), 10_000)
    assert not raft.durable(Index(2), Term(3)).recovered
    output = raft.durable(Index(3), Term(3))
    assert output.recovered
    assert not sole(output).recovering
    assert sole(raft.receive(N3, request(4, 9, transfer=True), 20_000)).granted is False  # an older log, no more
    assert raft.next_deadline_ms is not None


def test_damage_is_not_repaired_by_ones_own_word() -> None:
    """R18: entries on disk count only once the current leader has vouched for them."""
    raft = core(log=[1, 1, 1], term=1, recover_until=3)
    raft.receive(N2, Heartbeat(Term(2), Index(0), 1), 0)
    assert raft.status().recovering
    assert raft.receive(N2, append(2, (3, 1)), 0).recovered


def joining(*log: Entry) -> Raft:
    """Return a node that is added again: its log so far is of the time when it was the only voter."""
    raft = Raft(RaftConfig(id=N1), InitialState(is_joining=True), rng=random.Random(1), now_ms=0)
    alone = Entry(Index(1), Term(1), EntryKind.CONFIG, configuration=Configuration(voters=(N1,)))
    raft.receive(N2, append(3, (0, 0), alone, *log, commit=3), 0)
    return raft


def test_joining_member_has_no_say_until_it_has_what_is_committed() -> None:
    """R24."""
    raft = joining()
    raft.durable(Index(1), Term(3))
    assert raft.next_deadline_ms is None
    raft.tick(10_000)
    assert raft.role is Role.FOLLOWER
    assert not sole(raft.receive(N3, request(4, 9, transfer=True), 10_000)).granted
    raft.receive(N2, append(4, (1, 1), *entries(2, 3, 4), commit=3), 10_000)
    assert not raft.durable(Index(2), Term(4)).joined
    output = raft.durable(Index(3), Term(4))
    assert output.joined
    assert output.hard_state is not None, "it is saved before what makes it a voter is acknowledged"
    assert not output.messages
    assert raft.next_deadline_ms is not None


def test_joining_member_does_not_trust_a_leader_that_has_committed_nothing_itself() -> None:
    """R24: a new leader may not know yet that this node was removed."""
    raft = joining(*entries(2, 1, 1))
    assert not raft.durable(Index(3), Term(3)).joined
    raft.receive(N2, append(3, (3, 1), *entries(4, 3), commit=3), 0)
    assert not raft.durable(Index(4), Term(3)).joined
    assert raft.receive(N2, Heartbeat(Term(3), Index(4), 1), 0).joined


def test_joining_member_catches_up_with_what_was_committed_first() -> None:
    """R24: under load it never has all that is committed at the moment."""
    raft = joining(*entries(2, 1))
    raft.receive(N2, append(3, (2, 1), *entries(3, 3), commit=9), 0)
    assert raft.durable(Index(3), Term(3)).joined


def test_timeout_now_of_the_leader_itself_is_ignored() -> None:
    cluster = Cluster()
    leader = cluster.elect(1)
    leader.receive(2, TimeoutNow(leader.raft.term))
    assert leader.raft.is_leader


def test_learner_never_campaigns() -> None:
    raft = core(node=3, voters=[1, 2], learners=[3])
    assert raft.next_deadline_ms is None
    raft.tick(10_000)
    assert raft.role is Role.FOLLOWER


def test_tick_before_the_deadline_does_nothing() -> None:
    raft = core()
    output = raft.tick(1)
    assert (output.messages, raft.role) == ([], Role.FOLLOWER)
    with pytest.raises(UnavailableError):
        raft.next_slot()


@pytest.mark.parametrize(
    "settings",
    [
        {"heartbeat_interval_ms": 500, "election_timeout_ms": 500},
        {"heartbeat_interval_ms": 0},
        {"inflight_messages_max": 0},
        {"uncommitted_bytes_max": 0},
    ],
)
def test_useless_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RaftConfig(id=N1, **settings)


def test_suspected_leader_is_replaced_before_its_timeout() -> None:
    raft = core(term=1, election_timeout_ms=500)
    raft.receive(N2, Heartbeat(Term(1), Index(0), 1), 1_000)
    deadline_ms = raft.suspect(N2, 1_001).next_deadline_ms
    assert deadline_ms is not None
    assert 1_001 <= deadline_ms < 1_251
    assert sole(raft.receive(N3, request(5, pre=True), 1_002)).granted, "a suspected leader is not fresh"
    raft.tick(deadline_ms)
    assert raft.role is Role.PRE_CANDIDATE


def test_suspicion_of_another_member_or_by_the_leader_itself_changes_nothing() -> None:
    raft = core(term=1, election_timeout_ms=500)
    before = raft.receive(N2, Heartbeat(Term(1), Index(0), 1), 1_000).next_deadline_ms
    assert raft.suspect(N3, 1_001).next_deadline_ms == before
    leader = Cluster().elect(1)
    assert leader.raft.suspect(N1, leader.cluster.now_ms).became is None
    assert leader.raft.is_leader


def test_leader_that_was_suspected_wrongly_goes_on() -> None:
    """R9: the others still hear it, so they refuse; the doubter follows again."""
    cluster = Cluster()
    leader = cluster.elect(1)
    cluster[3].run(cluster[3].raft.suspect(N1, cluster.now_ms))
    cluster.elapse(2_000)
    assert leader.raft.is_leader
    assert leader.raft.term == cluster[3].raft.term == 1
