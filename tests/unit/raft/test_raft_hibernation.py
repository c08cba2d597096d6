"""Idle groups cost nothing, and nothing is lost by it."""

from __future__ import annotations

from raft_harness import Cluster, Member, core, sole

from quiver.model import Index, NodeId, Term
from quiver.raft import Heartbeat, HeartbeatResponse, VoteRequest, VoteResponse

N2, N3 = NodeId(2), NodeId(3)


def asleep(count: int = 3) -> tuple[Cluster, Member]:
    cluster = Cluster(count, hibernation=True, idle_ticks_before_hibernation=3)
    leader = cluster.elect(1)
    leader.propose(b"a")
    cluster.elapse(1_000)
    assert leader.raft.status().hibernating
    return cluster, leader


def test_idle_group_sleeps_and_no_timer_runs() -> None:
    cluster, _ = asleep()
    assert [m.raft.next_deadline_ms for m in cluster.members.values()] == [None, None, None]
    assert all(m.raft.status().hibernating for m in cluster.members.values())
    cluster.elapse(100_000, step_ms=1_000)
    assert cluster.leader().raft.term == 1
    assert cluster.network == []


def test_groups_stay_awake_unless_told() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.elapse(5_000)
    assert not any(m.raft.status().hibernating for m in cluster.members.values())


def test_group_stays_awake_while_a_member_is_behind() -> None:
    cluster = Cluster(3, hibernation=True, idle_ticks_before_hibernation=3)
    leader = cluster.elect(1)
    cluster[3].auto_sync = False
    leader.propose(b"a")
    cluster.elapse(3_000)
    assert not leader.raft.status().hibernating
    cluster[3].sync()
    cluster.elapse(1_000)
    assert leader.raft.status().hibernating


def test_group_stays_awake_while_a_member_is_silent() -> None:
    cluster = Cluster(3, hibernation=True, idle_ticks_before_hibernation=3)
    leader = cluster.elect(1)
    cluster.elapse(100)
    cluster.cut(3)
    cluster.elapse(2_000)
    assert leader.raft.is_leader
    assert not leader.raft.status().hibernating


def test_proposal_wakes_the_group() -> None:
    cluster, leader = asleep()
    leader.propose(b"b")
    assert leader.raft.next_deadline_ms == cluster.now_ms
    cluster.settle()
    assert not any(m.raft.status().hibernating for m in cluster.members.values())
    assert leader.raft.commit_index == 3


def test_read_wakes_the_group_and_still_takes_a_round() -> None:
    cluster, leader = asleep()
    leader.read(7)
    assert leader.reads == {}
    cluster.settle()
    assert leader.reads == {7: 2}


def test_transfer_and_change_wake_the_leader() -> None:
    cluster, leader = asleep()
    leader.change([1, 2, 3], [9])
    assert not leader.raft.status().hibernating
    cluster, leader = asleep()
    leader.transfer(2)
    cluster.settle()
    assert cluster[2].raft.is_leader


def test_sleeping_follower_holds_its_leader_for_fresh_but_wakes() -> None:
    cluster, _ = asleep()
    cluster.now_ms += 1_000_000
    follower = cluster[2]
    output = follower.receive(3, VoteRequest(Term(2), Index(9), Term(1), True))
    told = {outgoing.to: outgoing.message for outgoing in output.messages}
    assert told[N3] == VoteResponse(Term(1), False, True)
    assert isinstance(told[NodeId(1)], HeartbeatResponse)
    assert follower.raft.next_deadline_ms is not None


def test_stranger_that_wakes_the_followers_unseats_no_leader() -> None:
    """A removed member asks those that it knows for votes; the leader is not among them, and sleeps."""
    cluster, leader = asleep()
    for _ in range(20):
        for node in (2, 3):
            cluster[node].receive(4, VoteRequest(Term(2), Index(1), Term(1), True))
        cluster.elapse(700)
    assert leader.raft.is_leader
    assert leader.raft.term == 1


def test_woken_followers_elect_a_new_leader_when_the_old_is_gone() -> None:
    cluster, leader = asleep()
    leader.crash()
    cluster.now_ms += 60_000
    for node in (2, 3):
        cluster[node].run(cluster[node].raft.wake(cluster.now_ms))
    cluster.elapse(2_000)
    assert cluster.leader().id in (2, 3)


def test_follower_woken_for_nothing_wakes_the_leader_and_all_sleep_again() -> None:
    cluster, leader = asleep()
    cluster[3].run(cluster[3].raft.wake(cluster.now_ms))
    cluster.elapse(3_000)
    assert leader.raft.is_leader
    assert leader.raft.term == 1
    assert all(m.raft.status().hibernating for m in cluster.members.values())


def test_leader_woken_because_a_follower_is_gone_keeps_watch() -> None:
    cluster, leader = asleep()
    cluster[3].crash()
    leader.run(leader.raft.wake(cluster.now_ms))
    cluster.elapse(3_000)
    assert leader.raft.is_leader
    assert not leader.raft.status().hibernating


def test_follower_that_does_not_agree_answers_and_wakes_the_leader() -> None:
    raft = core(log=[1, 1], term=1)
    response = sole(raft.receive(N2, Heartbeat(Term(1), Index(1), 4, True), 0))
    assert response.round == 4
    assert not raft.status().hibernating
    _, leader = asleep()
    latest = leader.raft._state.round
    index = Index(1)
    leader.receive(3, HeartbeatResponse(Term(1), index, index, index, latest - 1))
    assert leader.raft.status().hibernating  # merely a slow answer
    leader.receive(3, HeartbeatResponse(Term(1), index, index, index, latest))
    assert not leader.raft.status().hibernating


def test_repeated_hibernate_does_not_wake() -> None:
    cluster, leader = asleep()
    beat = Heartbeat(Term(1), Index(2), leader.raft._state.round, True)
    cluster[2].receive(1, beat)
    assert cluster[2].raft.status().hibernating
    cluster[2].receive(1, Heartbeat(Term(1), Index(2), leader.raft._state.round + 1))
    assert not cluster[2].raft.status().hibernating


def test_group_of_one_sleeps_too() -> None:
    cluster, leader = asleep(1)
    assert leader.tick().messages == []
    leader.propose(b"b")
    assert leader.raft.commit_index == 3
    cluster.elapse(1_000)
    assert leader.raft.status().hibernating


def test_waking_the_awake_changes_nothing() -> None:
    raft = core()
    before = raft.next_deadline_ms
    raft.wake(5)
    assert raft.next_deadline_ms == before


def test_restarted_member_wakes_the_group() -> None:
    cluster, leader = asleep()
    cluster[3].crash()
    cluster[3].restart()
    cluster.elapse(3_000)
    assert leader.raft.is_leader
    assert leader.raft.term == 1
    assert cluster[3].raft.status().hibernating
