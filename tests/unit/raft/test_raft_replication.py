"""Permissions, windows, back-off, lost messages and lost members, as a leader sees them."""

from __future__ import annotations

from typing import Any

import pytest
from raft_harness import Cluster, Member, core, entries

from quiver.errors import InvariantBroken, OverloadedError
from quiver.model import Index, NodeId, Term
from quiver.raft import Append, AppendResponse, Entry, Heartbeat, HeartbeatResponse, ProgressState, RaftPeerStatus

N2, N3 = NodeId(2), NodeId(3)


def peer(leader: Member, node: int) -> RaftPeerStatus:
    return next(p for p in leader.raft.status().peers if p.node == node)


def elected(**settings: Any) -> tuple[Cluster, Member]:
    cluster = Cluster(**settings)
    leader = cluster.elect(1)
    cluster.elapse(100)
    assert [p.state for p in leader.raft.status().peers] == [ProgressState.REPLICATE] * 2
    return cluster, leader


# Permissions


def test_no_second_permission_before_the_first_is_reported() -> None:
    _, leader = elected()
    leader.auto_send = False
    assert [p.to for p in leader.propose(b"a").send] == [2, 3]
    assert leader.propose(b"b").send == []
    first = leader.permissions[0]
    output = leader.raft.sent(N2, ticket=first.ticket, end_index=Index(3), size_bytes=1)
    assert [(p.to, p.first_index, p.end_index) for p in output.send] == [(2, 3, 4)]


def test_permission_carries_what_an_append_needs() -> None:
    _, leader = elected(append_bytes_max=100)
    leader.auto_send = False
    permission = leader.propose(b"a").send[0]
    assert (permission.term, permission.prev_index, permission.prev_term) == (1, 1, 1)
    assert (permission.commit, permission.bytes_max) == (1, 100)


def test_report_that_nothing_could_be_read_waits_for_the_next_heartbeat() -> None:
    cluster, leader = elected()
    leader.auto_send = False
    permission = leader.propose(b"a").send[0]
    output = leader.raft.sent(N2, ticket=permission.ticket, end_index=permission.first_index, size_bytes=0)
    assert output.send == []
    assert peer(leader, 2).inflight_messages == 0
    leader.permissions.clear()
    cluster.now_ms += 100
    assert [p.to for p in leader.tick().send] == [2]


def test_answer_may_overtake_the_report_of_sending() -> None:
    cluster, leader = elected()
    cluster.quorum_checked = False  # the answer is made up
    leader.auto_send = False
    permission = leader.propose(b"a").send[0]
    index = Index(2)
    leader.receive(2, AppendResponse(Term(1), True, index, index, index, 1))
    leader.propose(b"b")
    output = leader.raft.sent(N2, ticket=permission.ticket, end_index=Index(3), size_bytes=1)
    assert [(p.to, p.first_index) for p in output.send] == [(2, 3)]
    assert peer(leader, 2).inflight_messages == 0


def test_stale_ticket_is_ignored() -> None:
    _, leader = elected()
    leader.auto_send = False
    permission = leader.propose(b"a").send[0]
    leader.raft.peer_unreachable(N2)
    leader.raft.sent(N2, ticket=permission.ticket, end_index=Index(3), size_bytes=1)
    assert peer(leader, 2).inflight_messages == 0
    assert peer(leader, 2).next_index == 2


def test_reports_to_a_member_that_does_not_lead_are_ignored() -> None:
    raft = core()
    assert raft.sent(N2, ticket=1, end_index=Index(1), size_bytes=0).send == []
    assert raft.peer_unreachable(N2).messages == []
    assert raft.snapshot_sent(N2, ticket=1).messages == []
    assert raft.snapshot_failed(N2, ticket=1).messages == []


def test_reports_about_strangers_are_ignored() -> None:
    _, leader = elected()
    stranger = NodeId(9)
    leader.raft.sent(stranger, ticket=1, end_index=Index(2), size_bytes=0)
    leader.raft.peer_unreachable(stranger)
    nothing = Index(0)
    leader.receive(9, AppendResponse(Term(1), True, nothing, nothing, nothing, 1))
    leader.receive(9, HeartbeatResponse(Term(1), nothing, nothing, nothing, 1))
    assert len(leader.raft.status().peers) == 2


def test_sending_beyond_the_log_is_a_broken_driver() -> None:
    _, leader = elected()
    leader.auto_send = False
    permission = leader.propose(b"a").send[0]
    with pytest.raises(InvariantBroken):
        leader.raft.sent(N2, ticket=permission.ticket, end_index=Index(9), size_bytes=1)


# Windows


def test_window_of_messages_is_a_bound() -> None:
    cluster, leader = elected(inflight_messages_max=3)
    for value in (b"a", b"b", b"c", b"d", b"e"):
        leader.propose(value)
    assert len(cluster.pending(Append, to=2)) == 3
    assert peer(leader, 2).inflight_messages == 3
    cluster.settle()
    assert peer(leader, 2).match_index == 6
    assert cluster[2].data == leader.data


def test_window_of_bytes_is_a_bound() -> None:
    cluster, leader = elected(inflight_bytes_max=10, append_bytes_max=6)
    for _ in range(5):
        leader.propose(b"1234")
    assert [len(m.entries) for m in cluster.pending(Append, to=2)] == [1, 1, 1]
    assert peer(leader, 2).inflight_bytes == 12  # the last one may exceed: at least one entry always goes
    cluster.settle()
    assert (peer(leader, 2).match_index, peer(leader, 2).inflight_bytes) == (6, 0)


def test_append_is_filled_up_to_its_bound() -> None:
    cluster, leader = elected(append_bytes_max=8)
    leader.propose(*[b"1234"] * 5)
    assert [len(m.entries) for m in cluster.pending(Append, to=2)] == [2, 2, 1]


def test_late_answers_free_the_window_only_once() -> None:
    cluster, leader = elected(inflight_messages_max=4)
    for value in (b"a", b"b", b"c"):
        leader.propose(value)
    cluster.network.clear()
    cluster.quorum_checked = False  # the answers are made up
    for match in (3, 2, 3, 1):
        index = Index(match)
        leader.receive(2, AppendResponse(Term(1), True, index, index, index, 1))
    assert peer(leader, 2).inflight_messages == 1
    assert peer(leader, 2).match_index == 3


def test_probing_sends_one_append_per_answer() -> None:
    cluster = Cluster()
    leader = cluster.elect(1)
    leader.raft.peer_unreachable(N2)
    assert peer(leader, 2).state is ProgressState.PROBE
    leader.propose(b"a")
    leader.propose(b"b")
    assert cluster.pending(Append, to=2) == []  # it has not been heard from since
    cluster.drop()
    leader.receive(2, HeartbeatResponse(Term(1), Index(1), Index(1), Index(1), 1))
    assert [len(m.entries) for m in cluster.pending(Append, to=2)] == [2]
    leader.propose(b"c")
    assert len(cluster.pending(Append, to=2)) == 1
    cluster.settle()
    assert peer(leader, 2).state is ProgressState.REPLICATE
    assert cluster[2].data == leader.data


# Overload


def test_uncommitted_bytes_are_bounded() -> None:
    cluster, leader = elected(uncommitted_bytes_max=10)
    leader.propose(b"12345678")
    with pytest.raises(OverloadedError):
        leader.propose(b"123")
    leader.propose(b"12")
    with pytest.raises(OverloadedError):
        leader.raft.next_slot()
    assert leader.raft.status().uncommitted_bytes == 10
    cluster.settle()
    assert leader.raft.status().uncommitted_bytes == 0
    leader.propose(b"a single one may exceed the bound")


def test_refused_proposal_leaves_no_trace() -> None:
    _, leader = elected(uncommitted_bytes_max=10)
    leader.propose(b"12345678")
    before = leader.raft.status()
    with pytest.raises(OverloadedError):
        leader.propose(b"123")
    assert leader.raft.status() == before


@pytest.mark.parametrize("wrong", [entries(2, 2), entries(3, 1), entries(1, 1)])
def test_proposals_with_wrong_slots_are_a_broken_driver(wrong: tuple[Entry, ...]) -> None:
    _, leader = elected()
    with pytest.raises(InvariantBroken):
        leader.raft.propose(wrong, leader.cluster.now_ms)


# Losses


def test_lost_append_is_sent_again_after_an_election_timeout() -> None:
    cluster, leader = elected()
    leader.propose(b"a")
    assert cluster.drop(Append, to=2) == 1
    cluster.elapse(400)
    assert cluster[2].data == [b"."]
    cluster.elapse(500)
    assert cluster[2].data == leader.data


def test_slow_disk_is_not_sent_the_same_again() -> None:
    cluster, leader = elected()
    cluster[2].auto_sync = False
    leader.propose(b"a")
    cluster.elapse(2_000)
    assert peer(leader, 2).state is ProgressState.REPLICATE
    assert peer(leader, 2).inflight_messages == 1
    cluster[2].sync()
    cluster.settle()
    assert peer(leader, 2).match_index == 2


def test_lost_acknowledgement_is_replaced_by_the_next_heartbeats() -> None:
    cluster, leader = elected()
    leader.propose(b"a")
    cluster.drop(Append, to=3)
    while cluster.network:
        cluster.deliver(cluster.network[0])
        cluster.drop(AppendResponse)
    assert leader.raft.commit_index == 1
    cluster.elapse(100)
    assert leader.raft.commit_index == 2


def test_overtaken_append_is_rejected_and_repaired() -> None:
    cluster, leader = elected()
    leader.propose(b"a")
    leader.propose(b"b")
    first, second = [e for e in cluster.network if e.to == 2]
    cluster.deliver(second)
    assert cluster.pending(AppendResponse)[0].rejected_index == 2
    cluster.deliver(first)
    cluster.settle()
    assert cluster[2].data == leader.data
    assert peer(leader, 2).state is ProgressState.REPLICATE


def test_stale_rejection_is_ignored() -> None:
    _, leader = elected()
    before = peer(leader, 2)
    index = Index(1)
    leader.receive(2, AppendResponse(Term(1), False, index, index, index, 1, rejected_index=Index(1)))
    assert peer(leader, 2) == before
    leader.raft.peer_unreachable(N2)
    leader.receive(2, AppendResponse(Term(1), False, index, index, index, 1, rejected_index=Index(7)))
    assert peer(leader, 2).next_index == 2


def test_restarted_follower_that_lost_unsynced_entries_gets_them_again() -> None:
    cluster, leader = elected(inflight_messages_max=1)
    follower = cluster[2]
    follower.auto_sync = False
    leader.propose(b"a")
    cluster.elapse(100)
    assert follower.data == [b".", b"a"]
    follower.crash()
    follower.auto_sync = True
    follower.restart()
    cluster.elapse(1_500)
    assert follower.data == leader.data
    assert peer(leader, 2).match_index == leader.raft.last_index


def test_member_that_lost_what_it_acknowledged_is_not_counted() -> None:
    """R22: an empty disk under an old name."""
    cluster, leader = elected()
    leader.propose(b"a")
    cluster.elapse(200)
    wiped = cluster[2]
    wiped.crash()
    wiped.disk.truncate(Index(1))
    wiped.disk.configurations = []
    wiped.restart()
    cluster.elapse(200)
    assert peer(leader, 2).state is ProgressState.LOST
    assert peer(leader, 2).match_index == 0
    leader.propose(b"b")
    cluster.elapse(2_000)
    assert wiped.data == []
    assert leader.raft.commit_index == 3
    assert leader.raft.is_leader
    cluster.cut(3)
    leader.propose(b"c")
    cluster.elapse(2_000)
    assert leader.raft.commit_index == 3
    assert not leader.raft.is_leader  # a lost member is no quorum
    assert leader.raft.peer_unreachable(N2).messages == []


def test_lost_member_is_left_alone_when_unreachable_or_asked_for() -> None:
    cluster, leader = elected()
    nothing = Index(0)
    leader.receive(2, HeartbeatResponse(Term(1), nothing, nothing, nothing, 99))
    assert peer(leader, 2).state is ProgressState.LOST
    leader.raft.peer_unreachable(N2)
    leader.receive(2, AppendResponse(Term(1), True, Index(1), Index(1), Index(1), 100))
    assert peer(leader, 2).state is ProgressState.LOST
    cluster.now_ms += 100
    assert [m.to for m in leader.tick().messages if isinstance(m.message, Heartbeat)] == [3]


def test_member_that_restores_a_snapshot_after_a_restart_is_not_lost() -> None:
    """R22: while a snapshot replaces its log it vouches for less than before it was restarted (seed 1613)."""
    cluster, leader = elected()
    leader.propose(b"a", b"b")
    cluster.elapse(200)
    assert peer(leader, 2).match_index == 3
    leader.receive(2, HeartbeatResponse(Term(1), Index(1), Index(3), Index(1), 99))
    assert peer(leader, 2).state is not ProgressState.LOST
    assert peer(leader, 2).match_index == 1
    cluster.elapse(200)
    assert peer(leader, 2).match_index == 3


def test_recovering_member_is_repaired_by_the_current_leader() -> None:
    """R18: it says so itself, counts for what it has, and is sent the rest."""
    cluster, leader = elected()
    leader.propose(b"a", b"b")
    cluster.elapse(200)
    damaged = cluster[2]
    damaged.crash()
    damaged.disk.truncate(Index(2))
    damaged.disk.recover_until = Index(3)
    damaged.restart()
    cluster.elapse(100)
    cluster.elapse(500)
    assert damaged.data == leader.data
    assert not damaged.raft.status().recovering
    assert peer(leader, 2).match_index == 3


def test_answer_beyond_the_leaders_log_is_cut_to_it() -> None:
    _, leader = elected()
    index = Index(50)
    leader.receive(2, AppendResponse(Term(1), True, index, index, index, 1))
    assert peer(leader, 2).match_index == 1
    assert leader.raft.commit_index == 1


# Telling the commit


def test_followers_learn_of_a_commit_with_the_next_heartbeat() -> None:
    cluster, leader = elected()
    leader.propose(b"a")
    cluster.settle()
    assert [m.raft.commit_index for m in cluster.members.values()] == [2, 1, 1]
    cluster.elapse(100)
    assert [m.raft.commit_index for m in cluster.members.values()] == [2, 2, 2]


def test_append_of_several_terms_is_taken_whole() -> None:
    raft = core(term=3)
    message = Append(Term(3), Index(0), Term(0), entries(1, 1, 2, 2, 3), Index(0), 1)
    raft.receive(N2, message, 0)
    assert [raft.term_at(Index(i)) for i in range(6)] == [0, 1, 2, 2, 3, None]
    assert raft.first_index == 1


def test_append_below_the_logs_start_is_taken_from_the_commit_on() -> None:
    raft = core(log=[1, 1, 1], commit=3)
    raft.compacted(Index(3))
    assert raft.first_index == 3
    output = raft.receive(N2, Append(Term(1), Index(0), Term(0), entries(1, 1, 1, 1, 1), Index(0), 1), 0)
    assert [entry.index for entry in output.append] == [4]
