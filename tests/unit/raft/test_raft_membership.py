"""R13, R14: changing members by joint consensus."""

from __future__ import annotations

import pytest
from raft_harness import Cluster, Member, append, core, entries

from quiver.errors import RequestError, UnavailableError
from quiver.model import Index, NodeId, Term
from quiver.raft import Append, Configuration, Entry, EntryKind, HeartbeatResponse, Role, TimeoutNow, VoteResponse

N2 = NodeId(2)


def configuration(
    voters: list[int], outgoing: list[int] | None = None, learners: list[int] | None = None
) -> Configuration:
    return Configuration(
        voters=tuple(map(NodeId, voters)),
        voters_outgoing=tuple(map(NodeId, outgoing or [])),
        learners=tuple(map(NodeId, learners or [])),
    )


def changes(member: Member) -> list[Configuration]:
    """Return the configurations in a member's log after the first, which the first leader has written down."""
    return [e.configuration for e in member.disk.entries if e.configuration is not None][1:]


def grown() -> tuple[Cluster, Member]:
    """Three voters, and a fourth node as a caught-up learner."""
    cluster = Cluster(4, voters=[1, 2, 3], blank=[4])
    leader = cluster.elect(1)
    leader.change([1, 2, 3], [4])
    cluster.elapse(200)
    assert cluster[4].data == leader.data
    return cluster, leader


def test_learner_is_added_without_a_joint_phase() -> None:
    _, leader = grown()
    assert changes(leader) == [configuration([1, 2, 3], learners=[4])]


def test_learner_gets_entries_but_does_not_count() -> None:
    cluster, leader = grown()
    leader.propose(b"a")
    cluster.drop(to=2)
    cluster.drop(to=3)
    cluster.settle()
    assert cluster[4].data[-1] == b"a"
    assert leader.raft.commit_index == 2


def test_change_of_voters_goes_through_a_joint_configuration() -> None:
    cluster, leader = grown()
    leader.change([1, 2, 4])
    assert leader.raft.configuration == configuration([1, 2, 4], [1, 2, 3])
    cluster.elapse(200)
    assert changes(leader)[1:] == [configuration([1, 2, 4], [1, 2, 3]), configuration([1, 2, 4])]
    assert leader.raft.configuration == configuration([1, 2, 4])
    assert [p.node for p in leader.raft.status().peers] == [2, 4]


def test_joint_decision_needs_both_majorities() -> None:
    cluster = Cluster(6, voters=[1, 2, 3], learners=[4, 5, 6])
    leader = cluster.elect(1)
    cluster.elapse(100)
    cluster.cut(2)
    cluster.cut(3)
    leader.change([4, 5, 6])
    cluster.settle()
    assert leader.raft.commit_index == 1  # every new voter has it, but one of three old ones
    cluster.heal()
    cluster.elapse(1_000)
    assert cluster.leader().raft.configuration == configuration([4, 5, 6])


def test_joint_election_needs_both_majorities() -> None:
    cluster = Cluster(5, voters=[1, 2, 3], learners=[4, 5])
    leader = cluster.elect(1)
    cluster.elapse(100)
    leader.change([1, 4, 5])
    cluster.settle()
    for member in cluster.members.values():
        assert member.raft.configuration.is_voter(NodeId(1))
    joint = configuration([1, 4, 5], [1, 2, 3])
    raft = core(voters=joint.voters, node=4)
    entry = Entry(Index(1), Term(1), EntryKind.CONFIG, b"", joint)
    raft.receive(NodeId(1), append(1, (0, 0), entry), 0)
    raft.receive(NodeId(1), TimeoutNow(Term(1)), 0)
    raft.receive(NodeId(5), VoteResponse(Term(2), True), 0)
    assert raft.role is Role.CANDIDATE  # a majority of the new voters alone is none
    raft.receive(NodeId(2), VoteResponse(Term(2), True), 0)
    assert raft.role is Role.CANDIDATE
    raft.receive(NodeId(3), VoteResponse(Term(2), True), 0)
    assert raft.is_leader


def test_joint_election_is_lost_when_one_side_refuses() -> None:
    raft = core(voters=[4, 5, 6], node=4)
    entry = Entry(Index(1), Term(1), EntryKind.CONFIG, b"", configuration([4, 5, 6], [1, 2, 3]))
    raft.receive(NodeId(1), append(1, (0, 0), entry), 0)
    raft.receive(NodeId(1), TimeoutNow(Term(1)), 0)
    raft.receive(NodeId(1), VoteResponse(Term(2), False), 0)
    raft.receive(NodeId(2), VoteResponse(Term(2), False), 0)
    assert raft.role is Role.FOLLOWER


def test_configuration_is_in_force_on_append_and_not_after_truncation() -> None:
    raft = core(term=1)
    before = raft.configuration
    entry = Entry(Index(1), Term(1), EntryKind.CONFIG, b"", configuration([1, 2]))
    raft.receive(N2, append(1, (0, 0), entry), 0)
    assert raft.configuration == configuration([1, 2])
    raft.receive(NodeId(3), append(2, (0, 0), *entries(1, 2)), 0)
    assert raft.configuration == before


def test_new_leader_finishes_a_change_it_inherits() -> None:
    cluster, leader = grown()
    leader.change([1, 2, 4])
    while not all(cluster[node].raft.configuration.is_joint for node in (2, 4)):
        cluster.deliver(cluster.network[0])
    cluster.network.clear()
    leader.crash()
    cluster.elapse(3_000)
    assert cluster.leader().id in (2, 4)
    assert cluster.leader().raft.configuration == configuration([1, 2, 4])


def test_one_change_at_a_time() -> None:
    cluster, leader = grown()
    leader.change([1, 2, 4])
    with pytest.raises(UnavailableError, match="pending"):
        leader.change([1, 2, 3])
    cluster.elapse(300)
    leader.change([1, 2])


def test_change_to_what_already_is_does_nothing() -> None:
    _, leader = grown()
    assert not leader.change([3, 2, 1], [4]).append
    assert leader.raft.status().configuration == configuration([1, 2, 3], learners=[4])


def test_configuration_of_the_first_members_is_written_down_by_the_first_leader() -> None:
    cluster = Cluster(3, voters=[1, 2, 3], blank=[3])
    assert not cluster[3].raft.configuration.includes(NodeId(3))
    leader = cluster.elect(1)
    leader.change([1, 2, 3])  # which is the case: nothing is written
    cluster.elapse(200)
    assert [entry.configuration for entry in leader.disk.entries] == [configuration([1, 2, 3])]
    assert cluster[3].raft.configuration == configuration([1, 2, 3])


def test_no_change_before_the_leader_committed_in_its_term() -> None:
    """R13: the rule that single-server changes missed."""
    raft = core()
    raft.receive(N2, TimeoutNow(Term(0)), 0)
    raft.receive(N2, VoteResponse(Term(1), True), 0)
    with pytest.raises(UnavailableError, match="own term"):
        raft.change_membership(voters=(NodeId(1), N2), now_ms=0)


@pytest.mark.parametrize(("voters", "learners"), [([], []), ([1, 1], []), ([1, 2], [2]), ([1, 2, 9], [])])
def test_impossible_targets_are_refused(voters: list[int], learners: list[int]) -> None:
    _, leader = grown()
    before = leader.raft.status()
    with pytest.raises(RequestError):
        leader.change(voters, learners)
    assert leader.raft.status() == before


def test_learner_must_be_caught_up_to_become_a_voter() -> None:
    cluster = Cluster(4, voters=[1, 2, 3], blank=[4], promotion_lag_max=2)
    leader = cluster.elect(1)
    cluster.cut(4)
    leader.change([1, 2, 3], [4])
    cluster.elapse(100)
    with pytest.raises(UnavailableError, match="not caught up"):
        leader.change([1, 2, 3, 4])
    cluster.heal()
    cluster.elapse(300)
    cluster.cut(4)
    leader.propose(b"a", b"b", b"c")
    cluster.settle()
    with pytest.raises(UnavailableError, match="misses 3"):
        leader.change([1, 2, 3, 4])
    cluster.heal()
    cluster.elapse(1_000)
    leader.change([1, 2, 3, 4])


def test_learner_that_has_no_vote_yet_is_not_promoted() -> None:
    """R24: if the leader failed just then, it would be needed to elect the next one, and could not vote."""
    _, leader = grown()
    match, round_ = leader.raft.last_index, 99
    leader.receive(4, HeartbeatResponse(Term(1), match, match, match, round_, joining=True))
    assert not leader.raft.is_caught_up(NodeId(4))
    with pytest.raises(UnavailableError, match="no vote yet"):
        leader.change([1, 2, 3, 4])
    leader.receive(4, HeartbeatResponse(Term(1), match, match, match, round_ + 1))
    leader.change([1, 2, 3, 4])


def test_lost_learner_is_not_promoted() -> None:
    _, leader = grown()
    nothing = Index(0)
    leader.receive(4, HeartbeatResponse(Term(1), nothing, nothing, nothing, 99))
    with pytest.raises(UnavailableError):
        leader.change([1, 2, 3, 4])


def test_voter_can_become_a_learner() -> None:
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.elapse(100)
    leader.change([1, 2], [3])
    assert leader.raft.configuration == configuration([1, 2], [1, 2, 3], [3])
    cluster.elapse(300)
    assert leader.raft.configuration == configuration([1, 2], learners=[3])
    leader.propose(b"a")
    cluster.elapse(200)
    assert cluster[3].data == leader.data


def test_removed_leader_leads_until_its_removal_is_committed() -> None:
    """R14."""
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.elapse(100)
    leader.change([2, 3])
    while changes(leader)[-1:] != [configuration([2, 3])]:
        cluster.deliver(cluster.network[0])
    assert leader.raft.is_leader
    cluster.settle()
    assert not leader.raft.is_leader
    assert leader.raft.next_deadline_ms is None
    assert cluster.leader().id == 2  # it was told to take over at once
    assert cluster.leader().raft.term == 2


def test_removed_leader_does_not_count_itself() -> None:
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.elapse(100)
    leader.change([2, 3])
    while changes(leader)[-1:] != [configuration([2, 3])]:
        cluster.deliver(cluster.network[0])
    final = leader.raft.last_index
    cluster.cut(3)
    cluster.settle()
    assert leader.raft.last_index == final
    assert leader.raft.commit_index == final - 1  # itself and one of the two new voters are not enough


def test_removed_member_does_not_disturb() -> None:
    """R14: it may never learn of its removal; pre-vote and the fresh leader hold it off."""
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.elapse(100)
    cluster.cut(3)
    leader.change([1, 2])
    cluster.elapse(300)
    cluster.heal()
    cluster.elapse(5_000)
    assert leader.raft.is_leader
    assert leader.raft.term == 1
    assert cluster[3].raft.term == 1


def test_only_holder_of_the_longest_log_campaigns_although_its_log_removes_it() -> None:
    """Dissertation §4.2.2; found by a random walk.

    The leader n1 leaves n2 out, sends the final configuration, and loses power before its own disk has it. Now
    n1 needs n2's vote (its log is still joint) but its log is shorter; n2 must be the one to campaign.
    """
    cluster = Cluster(2)
    leader = cluster.elect(1)
    cluster.elapse(100)
    leader.change([1], [2])
    leader.auto_sync = True
    while not cluster.pending(Append, to=2):
        cluster.deliver(cluster.network[0])
    leader.auto_sync = False
    cluster.settle()
    assert changes(cluster[2])[-1] == configuration([1], learners=[2])
    leader.crash()
    assert changes(leader)[-1].is_joint
    leader.auto_sync = True
    leader.restart()
    cluster.elapse(5_000)
    assert cluster.leader().id == 1
    assert cluster.leader().raft.configuration == configuration([1], learners=[2])
    assert cluster.leader().raft.commit_index == cluster.leader().raft.last_index


def test_sole_voter_can_be_replaced_by_another_node() -> None:
    cluster = Cluster(2, voters=[1], learners=[2])
    leader = cluster.elect(1)
    cluster.elapse(100)
    leader.change([2])
    cluster.elapse(1_500)
    assert cluster.leader().id == 2
    assert cluster.leader().raft.configuration == configuration([2])


def test_lost_member_is_no_successor() -> None:
    cluster = Cluster(3)
    leader = cluster.elect(1)
    cluster.elapse(100)
    nothing = Index(0)
    leader.receive(2, HeartbeatResponse(Term(1), nothing, nothing, nothing, 99))
    leadership = leader.raft._state.leadership
    assert leadership is not None
    assert leadership.successor((N2, NodeId(3))) == 3


def test_only_a_leader_changes_members() -> None:
    with pytest.raises(UnavailableError):
        core().change_membership(voters=(N2,), now_ms=0)
