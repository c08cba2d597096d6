"""R10, R11: a read sees everything that was committed before it began."""

from __future__ import annotations

from typing import Any

import pytest
from raft_harness import Cluster, Member, core

from quiver.errors import OverloadedError
from quiver.model import Index, NodeId, Term
from quiver.raft import AppendResponse, Heartbeat, HeartbeatResponse, VoteResponse

N2, N3 = NodeId(2), NodeId(3)


def elected(count: int = 3, **settings: Any) -> tuple[Cluster, Member]:
    cluster = Cluster(count, **settings)
    leader = cluster.elect(1)
    cluster.elapse(100)
    return cluster, leader


def test_read_waits_for_a_quorum_that_answers_after_it_began() -> None:
    cluster, leader = elected()
    leader.propose(b"a")
    cluster.settle()
    leader.read(7)
    assert leader.reads == {}
    beats = cluster.pending(Heartbeat)
    assert len(beats) == 2
    cluster.settle()
    assert leader.reads == {7: 2}


def test_answer_to_an_earlier_round_does_not_release_a_read() -> None:
    """R11: as etcd #20418 did."""
    cluster, leader = elected()
    cluster.now_ms += 100
    leader.tick()
    cluster.deliver(cluster.network[0])  # n2 answers this round...
    answer = next(e for e in cluster.network if isinstance(e.message, HeartbeatResponse))
    cluster.network.clear()
    leader.read(7)  # ...but the read begins later
    cluster.drop()
    cluster.deliver(answer)
    assert leader.reads == {}


def test_reads_that_arrive_during_a_round_share_the_next() -> None:
    cluster, leader = elected()
    leader.read(1)
    leader.read(2)
    leader.read(3)
    assert len(cluster.pending(Heartbeat)) == 2  # one round so far
    leader.propose(b"a")
    cluster.settle()
    assert leader.reads == {1: 1, 2: 1, 3: 1}


def test_lost_round_is_made_good_by_the_next_heartbeat() -> None:
    cluster, leader = elected()
    leader.read(1)
    leader.read(2)
    cluster.drop()
    cluster.elapse(100)
    assert leader.reads == {1: 1, 2: 1}


def test_new_leader_answers_reads_only_after_it_committed_in_its_term() -> None:
    """R10."""
    cluster = Cluster()
    cluster.elect(1).propose(b"a")
    cluster.settle()
    cluster.now_ms += 1_000
    cluster.campaign(2)
    while not cluster[2].raft.is_leader:
        cluster.deliver(cluster.network[0])
    leader = cluster[2]
    leader.read(7)
    assert cluster.pending(Heartbeat) == []
    cluster.settle()
    assert leader.reads == {7: 3}


def test_append_answers_count_for_a_round_too() -> None:
    cluster, leader = elected()
    leader.read(7)
    cluster.drop(Heartbeat)
    leader.propose(b"a")
    cluster.settle()
    assert leader.reads == {7: 1}


def test_group_of_one_answers_at_once_when_ready() -> None:
    raft = core(voters=[1])
    raft.tick(10_000)
    assert not raft.read(1, 10_000).reads
    output = raft.durable(Index(1), Term(1))
    assert [(r.context, r.index) for r in output.reads] == [(1, 1)]
    assert [r.context for r in raft.read(2, 10_000).reads] == [2]


def test_learners_answers_do_not_release_a_read() -> None:
    cluster = Cluster(4, voters=[1, 2, 3], learners=[4])
    leader = cluster.elect(1)
    cluster.elapse(100)
    leader.read(7)
    cluster.drop(to=2)
    cluster.drop(to=3)
    cluster.settle()
    assert leader.reads == {}


def test_reads_fail_when_leadership_is_lost() -> None:
    cluster, leader = elected()
    leader.read(1)
    leader.read(2)
    index = Index(0)
    leader.receive(2, AppendResponse(Term(9), False, index, index, index, 0))
    assert leader.reads_failed == [1, 2]
    assert leader.reads == {}
    cluster.settle()
    assert leader.reads == {}


def test_reads_kept_back_fail_too() -> None:
    raft = core()
    raft.tick(10_000)
    for pre in (True, False):
        raft.receive(N2, VoteResponse(Term(1), True, pre), 10_000)
    assert raft.is_leader
    raft.read(5, 10_000)
    assert raft.status().reads_pending == 1
    index = Index(0)
    assert raft.receive(N3, AppendResponse(Term(9), False, index, index, index, 0), 10_000).reads_failed == [5]


def test_waiting_reads_are_bounded() -> None:
    _, leader = elected(reads_pending_max=2)
    leader.read(1)
    leader.read(2)
    with pytest.raises(OverloadedError):
        leader.read(3)


def test_stale_leader_never_answers() -> None:
    cluster, old = elected()
    cluster.cut(1)
    cluster.now_ms += 600
    cluster.campaign(2)
    cluster.settle()
    cluster[2].propose(b"new")
    cluster.settle()
    assert cluster[2].raft.commit_index == 3
    assert old.raft.is_leader  # nobody told it yet
    old.read(7)
    cluster.heal()
    cluster.elapse(500)
    assert old.reads == {}
    assert old.reads_failed == [7]


def test_round_numbers_are_never_used_again() -> None:
    """R11."""
    cluster, leader = elected()
    seen: list[int] = []
    for context in range(5):
        leader.read(context)
        seen.append(cluster.pending(Heartbeat)[-1].round)
        cluster.elapse(100)
    assert seen == sorted(set(seen))
