"""R15: handing leadership over."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from raft_harness import Cluster, Member

from quiver.errors import RequestError, UnavailableError
from quiver.model import Index, NodeId, Term
from quiver.raft import Append, HeartbeatResponse, TimeoutNow, VoteRequest


def elected(count: int = 3, **settings: Any) -> tuple[Cluster, Member]:
    cluster = Cluster(count, **settings)
    leader = cluster.elect(1)
    cluster.elapse(100)
    return cluster, leader


def test_transfer_to_a_caught_up_voter_is_immediate() -> None:
    cluster, leader = elected()
    leader.transfer(3)
    assert leader.raft.status().transfer_to == 3
    assert len(cluster.pending(TimeoutNow, to=3)) == 1
    cluster.settle()
    assert cluster[3].raft.is_leader
    assert cluster[3].raft.term == 2
    assert not leader.raft.is_leader


def test_transfer_skips_the_pre_vote_and_says_why() -> None:
    cluster, leader = elected()
    leader.transfer(3)
    cluster.deliver(cluster.network[0])
    requests = cluster.pending(VoteRequest)
    assert [(r.pre, r.transfer) for r in requests] == [(False, True)] * 2


def test_proposals_and_changes_stop_meanwhile() -> None:
    cluster, leader = elected()
    leader.transfer(3)
    with pytest.raises(UnavailableError):
        leader.propose(b"a")
    with pytest.raises(UnavailableError):
        leader.change([1, 2])
    cluster.settle()


def test_target_is_caught_up_first() -> None:
    cluster, leader = elected()
    leader.propose(b"a")
    lost = cluster.drop(Append, to=3)
    assert lost == 1
    leader.raft.peer_unreachable(NodeId(3))
    leader.transfer(3)
    assert cluster.pending(TimeoutNow) == []
    cluster.elapse(200)
    assert cluster[3].raft.is_leader
    assert cluster[3].data[:2] == [b".", b"a"]


def test_transfer_that_takes_too_long_is_aborted() -> None:
    cluster, leader = elected()
    cluster.cut(3)
    leader.transfer(3)
    cluster.elapse(700)
    assert leader.raft.status().transfer_to is None
    leader.propose(b"a")
    cluster.elapse(100)
    assert leader.raft.commit_index == 2


def test_reads_do_not_put_off_the_end_of_a_transfer() -> None:
    """Each read begins a round of heartbeats; what is done at a heartbeat's time is done all the same."""
    cluster, leader = elected()
    leader.transfer(3)
    cluster.drop(TimeoutNow)
    for context in range(70):
        leader.read(context)
        cluster.elapse(10)
    assert len(leader.reads) == 70
    assert leader.raft.status().transfer_to is None


def test_target_is_told_once() -> None:
    cluster, leader = elected()
    leader.transfer(3)
    cluster.drop(TimeoutNow)
    index = Index(1)
    leader.receive(3, HeartbeatResponse(Term(1), index, index, index, 2))
    leader.receive(2, HeartbeatResponse(Term(1), index, index, index, 2))
    assert cluster.pending(TimeoutNow) == []


def test_asking_again_for_the_same_target_is_fine_for_another_is_not() -> None:
    cluster, leader = elected()
    leader.transfer(3)
    leader.transfer(3)
    with pytest.raises(UnavailableError):
        leader.transfer(2)
    assert len(cluster.pending(TimeoutNow)) == 1


@pytest.mark.parametrize("target", [1, 4, 9])
def test_only_another_voter_can_be_the_target(target: int) -> None:
    cluster = Cluster(4, voters=[1, 2, 3], learners=[4])
    leader = cluster.elect(1)
    with pytest.raises(RequestError):
        leader.transfer(target)


def test_lost_member_cannot_be_the_target() -> None:
    _, leader = elected()
    nothing = Index(0)
    leader.receive(3, HeartbeatResponse(Term(1), nothing, nothing, nothing, 99))
    with pytest.raises(UnavailableError):
        leader.transfer(3)


def test_only_a_leader_transfers() -> None:
    cluster, _ = elected()
    with pytest.raises(UnavailableError):
        cluster[2].transfer(3)


def test_voter_that_did_not_take_over_is_not_asked_again_for_a_while() -> None:
    """Whoever retries at once would otherwise let the group accept hardly any proposals."""
    cluster, leader = elected()
    accepted = 0
    for _ in range(100):
        with contextlib.suppress(UnavailableError):
            leader.transfer(3)
        with contextlib.suppress(UnavailableError):
            leader.propose(b"a")
            accepted += 1
        cluster.drop(TimeoutNow)
        cluster.elapse(50)
    assert accepted > 80
    cluster.elapse(10_000)
    leader.transfer(3)
    cluster.elapse(100)
    assert cluster[3].raft.is_leader


def test_another_voter_takes_over_after_one_did_not() -> None:
    cluster, leader = elected()
    leader.transfer(3)
    cluster.drop(TimeoutNow)
    cluster.elapse(700)
    with pytest.raises(UnavailableError, match="node 3 did not take over"):
        leader.transfer(3)
    leader.transfer(2)
    cluster.settle()
    assert cluster[2].raft.is_leader
