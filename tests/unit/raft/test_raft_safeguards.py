"""Each safeguard matters: with it a demonstration passes, without it the same demonstration fails.

A demonstration is a short script or a number of random walks. One that could not tell the difference
would be no test of the rule.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from raft_harness import Cluster, Member, append, core, entries, sole
from raft_walk import SEEDS, Walk

from quiver.errors import InvariantBroken, UnavailableError
from quiver.model import Index, NodeId, Term
from quiver.raft import (
    AppendResponse,
    Configuration,
    Entry,
    EntryKind,
    HardState,
    Heartbeat,
    HeartbeatResponse,
    InitialState,
    InstallSnapshot,
    Raft,
    RaftConfig,
    Role,
    SnapshotMetadata,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)
from quiver.testing.raft_ablations import REPLACEMENTS, Safeguard, disabled

Demonstration = Callable[[], None]

N1, N2, N3 = NodeId(1), NodeId(2), NodeId(3)


def walks() -> None:
    """Walk over the seeds of `test_raft_random_walk`, which shows that nothing fails with every safeguard on."""
    for seed in SEEDS:
        Walk(seed).run()


def elected(count: int = 3) -> tuple[Cluster, Member]:
    cluster = Cluster(count)
    leader = cluster.elect(1)
    cluster.elapse(100)
    return cluster, leader


def restarted_voter_remembers() -> None:
    cluster = Cluster(3)
    voter = cluster[3]
    voter.receive(1, VoteRequest(Term(1), Index(0), Term(0)))
    voter.crash()
    voter.restart()
    assert not sole(voter.receive(2, VoteRequest(Term(1), Index(0), Term(0)))).granted


def figure_8() -> None:
    raft = core(log=[1, 2], term=3)
    raft.receive(N2, TimeoutNow(Term(3)), 0)
    raft.receive(N2, VoteResponse(Term(4), True), 0)
    raft.receive(N2, AppendResponse(Term(4), True, Index(2), Index(2), Index(2), 0), 0)
    assert raft.commit_index == 0


def inherited_entries_commit_by_themselves() -> None:
    cluster, leader = elected()
    leader.propose(b"a")
    cluster.drop()
    leader.crash()
    cluster[2].crash()
    leader.restart()
    cluster[2].restart()
    cluster.elapse(3_000)
    assert all(cluster.leader().raft.commit_index == m.raft.last_index for m in cluster.members.values())


def returning_member_does_not_raise_the_term() -> None:
    cluster, leader = elected()
    cluster.cut(3)
    cluster.elapse(3_000)
    cluster.heal()
    cluster.elapse(1_000)
    assert leader.raft.term == 1


def lonely_leader_steps_down() -> None:
    cluster, leader = elected()
    cluster.cut(1)
    cluster.elapse(2_000)
    assert not leader.raft.is_leader


def half_connected_member_does_not_unseat_the_leader() -> None:
    cluster, leader = elected()
    cluster.cut(1, 3)  # n3 hears n2 alone
    cluster.elapse(2_000)
    assert leader.raft.is_leader
    assert leader.raft.term == 1


def short_append_cuts_nothing() -> None:
    raft = core(log=[1, 1, 1])
    raft.receive(N2, append(1, (0, 0), *entries(1, 1)), 0)
    assert raft.last_index == 3


def foreign_tail_is_not_vouched_for() -> None:
    raft = core(log=[1, 1, 1], term=2)
    assert sole(raft.receive(N2, append(2, (1, 1)), 0)).match_index == 1


def late_answer_of_an_earlier_term_counts_for_nothing() -> None:
    raft = core(log=[1, 1])
    raft.receive(N2, TimeoutNow(Term(1)), 0)
    raft.receive(N2, VoteResponse(Term(2), True), 0)
    raft.durable(Index(3), Term(2))
    raft.receive(N3, AppendResponse(Term(1), True, Index(3), Index(3), Index(3), 0), 0)
    assert raft.commit_index == 0


def replaced_leader_answers_no_read() -> None:
    cluster, old = elected()
    cluster.cut(1)
    cluster.now_ms += 600
    cluster.elect(2).propose(b"new")
    cluster.settle()
    old.read(7)
    assert old.reads == {}


def new_leader_reads_all_that_its_predecessor_committed() -> None:
    cluster, old = elected()
    old.propose(b"a")
    cluster.settle()
    cluster.now_ms += 1_000
    cluster.campaign(2)
    while not cluster[2].raft.is_leader:
        cluster.deliver(cluster.network[0])
    cluster[2].read(7)
    cluster.settle()
    assert cluster[2].reads[7] >= 2


def second_change_waits() -> None:
    _, leader = elected()
    leader.change([1, 2])
    with pytest.raises(UnavailableError):
        leader.change([1])


def joint_commit_needs_the_old_voters() -> None:
    cluster = Cluster(6, voters=[1, 2, 3], learners=[4, 5, 6])
    leader = cluster.elect(1)
    cluster.elapse(100)
    cluster.cut(2)
    cluster.cut(3)
    leader.change([4, 5, 6])
    cluster.settle()
    assert leader.raft.commit_index == 1


def joint_election_needs_the_old_voters() -> None:
    joint = Configuration(voters=(N1,), voters_outgoing=(N2, N3))
    raft = core(voters=joint.voters)
    snapshot = SnapshotMetadata(Index(1), Term(1), joint)
    raft.receive(N2, InstallSnapshot(Term(1), snapshot, 1), 0)
    raft.tick(10_000)
    assert not raft.is_leader


def configuration_is_in_force_on_append() -> None:
    raft = core(term=1)
    target = Configuration(voters=(N1, N2))
    raft.receive(N2, append(1, (0, 0), Entry(Index(1), Term(1), EntryKind.CONFIG, b"", target)), 0)
    on_append = raft.configuration
    raft.receive(N2, Heartbeat(Term(1), Index(1), 1), 0)
    assert raft.configuration == target  # at the latest when committed
    assert on_append == target


def learners_commit_nothing() -> None:
    cluster = Cluster(5, voters=[1, 2, 3], learners=[4, 5])
    leader = cluster.elect(1)
    leader.propose(b"a")
    cluster.drop(to=2)
    cluster.drop(to=3)
    cluster.settle()
    assert leader.raft.commit_index == 1


def overwritten_write_vouches_for_nothing() -> None:
    raft = core(term=1)
    raft.receive(N2, append(1, (0, 0), *entries(1, 1)), 0)
    raft.receive(N3, append(2, (0, 0), *entries(1, 2)), 0)
    assert raft.durable(Index(1), Term(1)).messages == []


def gap_is_rejected() -> None:
    raft = core(log=[1, 1], term=2)
    assert not sole(raft.receive(N2, append(2, (2, 2)), 0)).accepted


def replaced_leader_follows() -> None:
    cluster, leader = elected()
    nothing = Index(0)
    leader.receive(2, HeartbeatResponse(Term(9), nothing, nothing, nothing, 0))
    assert not leader.raft.is_leader
    cluster.settle()


def late_snapshot_rolls_nothing_back() -> None:
    raft = core(log=[1, 1, 1], commit=3)
    raft.receive(N2, InstallSnapshot(Term(1), SnapshotMetadata(Index(2), Term(1), raft.configuration), 1), 0)
    assert (raft.commit_index, raft.last_index) == (3, 3)


def snapshot_drops_a_diverged_tail() -> None:
    raft = core(log=[1, 1, 1], term=2)
    raft.receive(N2, InstallSnapshot(Term(2), SnapshotMetadata(Index(2), Term(2), raft.configuration), 1), 0)
    assert raft.last_index == 2


def damaged_member_does_not_vote() -> None:
    raft = core(log=[1], recover_until=3)
    assert not sole(raft.receive(N2, VoteRequest(Term(2), Index(9), Term(1)), 10_000)).granted


def blank_member_does_not_vote() -> None:
    raft = core(voters=[2, 3])
    assert not sole(raft.receive(N2, VoteRequest(Term(2), Index(9), Term(1)), 10_000)).granted


def node_that_is_added_again_does_not_elect_itself() -> None:
    raft = Raft(RaftConfig(id=N1), InitialState(is_joining=True), rng=random.Random(1), now_ms=0)
    alone = Entry(Index(1), Term(1), EntryKind.CONFIG, configuration=Configuration(voters=(N1,)))
    raft.receive(N2, append(3, (0, 0), alone, *entries(2, 1, 1), commit=9), 0)  # ended by an entry that is not here yet
    raft.durable(Index(3), Term(3))
    raft.tick(10_000)
    assert (raft.role, raft.term) == (Role.FOLLOWER, 3)


def unmatched_tail_is_not_committed() -> None:
    raft = core(log=[1, 1], term=2)
    raft.receive(N2, Heartbeat(Term(2), Index(2), 1), 0)
    assert raft.commit_index == 0


def second_candidate_gets_no_vote() -> None:
    raft = core()
    raft.receive(N2, VoteRequest(Term(1), Index(0), Term(0)), 10_000)
    assert not sole(raft.receive(N3, VoteRequest(Term(1), Index(0), Term(0)), 10_000)).granted


def transfer_refuses_proposals() -> None:
    _, leader = elected()
    leader.transfer(2)
    with pytest.raises(UnavailableError):
        leader.propose(b"a")


def stranger_does_not_unseat_the_leader() -> None:
    initial = InitialState(term=Term(3), configurations=((Index(0), Configuration(voters=(N1, N2, N3))),))
    raft = Raft(RaftConfig(id=N1), initial, rng=random.Random(1), now_ms=0, knows=lambda _: False)
    raft.receive(N2, Heartbeat(Term(3), Index(0), 1), 10)
    raft.receive(NodeId(4242), Heartbeat(Term(4), Index(0), 1), 11)
    assert (raft.term, raft.leader) == (3, N2)


DEMONSTRATIONS: dict[Safeguard, tuple[Demonstration, ...]] = {
    Safeguard.VOTE_PERSISTENCE: (restarted_voter_remembers,),
    Safeguard.COMMIT_OWN_TERM_ONLY: (figure_8, walks),
    Safeguard.NOOP_ON_ELECTION: (inherited_entries_commit_by_themselves,),
    Safeguard.PRE_VOTE: (returning_member_does_not_raise_the_term,),
    Safeguard.CHECK_QUORUM: (lonely_leader_steps_down,),
    Safeguard.LEADER_STICKINESS: (half_connected_member_does_not_unseat_the_leader,),
    Safeguard.LOG_FRESHNESS_ON_VOTE: (walks,),
    Safeguard.ACK_ONLY_DURABLE: (walks,),
    Safeguard.LEADER_COUNTS_ONLY_DURABLE: (walks,),
    Safeguard.TRUNCATE_ONLY_ON_CONFLICT: (short_append_cuts_nothing, walks),
    Safeguard.MATCH_FROM_REQUEST: (foreign_tail_is_not_vouched_for,),
    Safeguard.IGNORE_OLD_TERM_RESPONSES: (late_answer_of_an_earlier_term_counts_for_nothing,),
    Safeguard.READ_INDEX_ROUND: (replaced_leader_answers_no_read,),
    Safeguard.READ_AFTER_OWN_TERM_COMMIT: (new_leader_reads_all_that_its_predecessor_committed, walks),
    Safeguard.JOINT_QUORUM: (joint_commit_needs_the_old_voters, joint_election_needs_the_old_voters),
    Safeguard.CONFIG_ON_APPEND: (configuration_is_in_force_on_append,),
    Safeguard.ONE_PENDING_CHANGE: (second_change_waits,),
    Safeguard.LEARNER_NOT_COUNTED: (learners_commit_nothing,),
    Safeguard.DURABLE_TERM_CHECK: (overwritten_write_vouches_for_nothing,),
    Safeguard.APPEND_CONSISTENCY_CHECK: (gap_is_rejected, walks),
    Safeguard.TERM_STEP_DOWN: (replaced_leader_follows,),
    Safeguard.SINGLE_VOTE_PER_TERM: (second_candidate_gets_no_vote, walks),
    Safeguard.SNAPSHOT_IGNORES_OLDER: (late_snapshot_rolls_nothing_back,),
    Safeguard.SNAPSHOT_CONFLICT_DROPS_LOG: (snapshot_drops_a_diverged_tail,),
    Safeguard.RECOVER_UNTIL_NO_VOTE: (damaged_member_does_not_vote,),
    Safeguard.BLANK_MEMBER_NO_VOTE: (blank_member_does_not_vote,),
    Safeguard.JOINING_MEMBER_NO_VOTE: (node_that_is_added_again_does_not_elect_itself,),
    Safeguard.COMMIT_NEVER_BEYOND_MATCHED: (unmatched_tail_is_not_committed,),
    Safeguard.TRANSFER_STOPS_PROPOSALS: (transfer_refuses_proposals,),
    Safeguard.STRANGERS_UNHEEDED: (stranger_does_not_unseat_the_leader,),
}

CASES = [
    pytest.param(safeguard, demonstration, id=f"{safeguard}-{position}")
    for safeguard, demonstrations in DEMONSTRATIONS.items()
    for position, demonstration in enumerate(demonstrations)
]


def test_every_safeguard_is_demonstrated() -> None:
    assert set(DEMONSTRATIONS) == set(Safeguard)


@pytest.mark.parametrize(("safeguard", "demonstration"), CASES)
def test_without_the_safeguard_its_demonstration_fails(safeguard: Safeguard, demonstration: Demonstration) -> None:
    if demonstration is not walks:  # `test_raft_random_walk` covers those
        demonstration()
    with disabled(safeguard), pytest.raises((AssertionError, InvariantBroken, pytest.fail.Exception)):
        demonstration()


@pytest.mark.parametrize("safeguard", Safeguard)
def test_safeguard_is_back_after_its_ablation(safeguard: Safeguard) -> None:
    def in_place() -> list[object]:
        return [getattr(owner, name) for owner, name, _ in REPLACEMENTS[safeguard]]

    before = in_place()
    with disabled(safeguard):
        assert in_place() == [replacement for _, _, replacement in REPLACEMENTS[safeguard]]
    assert in_place() == before


def test_nothing_is_disabled_by_default() -> None:
    raft = core()
    assert raft.receive(N2, VoteRequest(Term(1), Index(0), Term(0)), 10_000).hard_state == HardState(Term(1), N2)
