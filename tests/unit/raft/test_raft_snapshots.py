"""R16: snapshots, and logs whose start has moved."""

from __future__ import annotations

import random
from typing import Any

import pytest
from raft_harness import Cluster, Member, append, core, entries, sole

from quiver.errors import InvariantBroken
from quiver.model import Index, NodeId, Term
from quiver.raft import (
    AppendResponse,
    Configuration,
    Heartbeat,
    InitialState,
    InstallSnapshot,
    ProgressState,
    Raft,
    RaftConfig,
    RaftPeerStatus,
    SnapshotMetadata,
)

N1, N2, N3 = NodeId(1), NodeId(2), NodeId(3)
MEMBERS = Configuration(voters=(N1, N2, N3))


def install(term: int, last: tuple[int, int], members: Configuration = MEMBERS) -> InstallSnapshot:
    return InstallSnapshot(Term(term), SnapshotMetadata(Index(last[0]), Term(last[1]), members), 1)


def peer(leader: Member, node: int) -> RaftPeerStatus:
    return next(p for p in leader.raft.status().peers if p.node == node)


def behind(**settings: Any) -> tuple[Cluster, Member]:
    """A leader whose log no longer holds what n3 needs next."""
    cluster = Cluster(**settings)
    leader = cluster.elect(1)
    cluster.elapse(100)
    cluster.cut(3)
    leader.propose(*(b"%d" % i for i in range(5)))
    cluster.settle()
    leader.compact(5)
    cluster.heal()
    return cluster, leader


def test_follower_behind_the_logs_start_gets_a_snapshot() -> None:
    cluster, leader = behind()
    cluster.elapse(2_000)
    assert cluster[3].disk.base == (4, 1)
    assert cluster[3].data == leader.data
    assert cluster[3].raft.commit_index == leader.raft.commit_index
    assert peer(leader, 3).state is ProgressState.REPLICATE


def test_nothing_else_is_sent_while_a_snapshot_is_under_way() -> None:
    cluster, leader = behind()
    leader.auto_send = False
    cluster.elapse(1_000)
    permission = leader.snapshot_permissions[0]
    assert (permission.to, permission.needed_index) == (3, 4)
    assert peer(leader, 3).state is ProgressState.SNAPSHOT
    leader.propose(b"x")
    assert [p.to for p in leader.permissions] == [2]
    assert leader.raft.sent(N3, ticket=permission.ticket, end_index=Index(2), size_bytes=0).send == []


def test_lost_snapshot_is_sent_again() -> None:
    cluster, leader = behind()
    leader.auto_send = False
    cluster.elapse(1_000)
    leader.send_snapshot(leader.snapshot_permissions.pop())
    assert cluster.drop(InstallSnapshot) == 1
    leader.auto_send = True
    cluster.elapse(1_500)
    assert cluster[3].data == leader.data


def test_failed_snapshot_is_tried_again_once_the_member_answers() -> None:
    cluster, leader = behind()
    leader.auto_send = False
    cluster.elapse(1_000)
    permission = leader.snapshot_permissions.pop()
    leader.raft.snapshot_failed(N3, ticket=permission.ticket + 1)
    assert peer(leader, 3).state is ProgressState.SNAPSHOT
    leader.raft.snapshot_failed(N3, ticket=permission.ticket)
    assert peer(leader, 3).state is ProgressState.PROBE
    leader.raft.snapshot_sent(N3, ticket=permission.ticket)
    cluster.elapse(100)
    assert [p.to for p in leader.snapshot_permissions] == [3]


def test_broken_connection_voids_a_snapshot() -> None:
    cluster, leader = behind()
    leader.auto_send = False
    cluster.elapse(1_000)
    leader.raft.peer_unreachable(N3)
    assert peer(leader, 3).state is ProgressState.PROBE


def test_rejection_while_a_snapshot_is_under_way_is_ignored() -> None:
    cluster, leader = behind()
    leader.auto_send = False
    cluster.elapse(1_000)
    index = Index(1)
    leader.receive(3, AppendResponse(Term(1), False, index, index, index, 1, Index(9), index, Term(1)))
    assert peer(leader, 3).state is ProgressState.SNAPSHOT


def test_snapshot_replaces_the_log_and_is_answered_once_durable() -> None:
    raft = core(log=[1, 1], term=2)
    output = raft.receive(N2, install(2, (9, 2)), 0)
    assert output.restore == install(2, (9, 2)).snapshot
    assert output.messages == []
    assert (raft.first_index, raft.last_index, raft.commit_index) == (10, 9, 9)
    response = sole(raft.receive(N2, Heartbeat(Term(2), Index(9), 3), 0))
    assert (response.match_index, response.received_index) == (0, 9)  # R3: received, not durable yet
    response = sole(raft.snapshot_restored(Index(9)))
    assert (response.accepted, response.match_index) == (True, 9)
    assert raft.snapshot_restored(Index(9)).messages == []


def test_snapshot_brings_its_configuration() -> None:
    raft = core(term=1)
    members = Configuration(voters=(N1, N2))
    raft.receive(N2, install(1, (5, 1), members), 0)
    assert raft.configuration == members


def test_older_snapshot_is_only_answered() -> None:
    raft = core(log=[1, 1, 1], commit=2)
    output = raft.receive(N2, install(1, (2, 1)), 0)
    assert output.restore is None
    assert sole(output).match_index == 2
    assert raft.last_index == 3


def test_snapshot_of_a_known_entry_keeps_the_suffix() -> None:
    raft = core(log=[1, 1, 1, 1])
    output = raft.receive(N2, install(1, (3, 1)), 0)
    assert (output.restore, output.committed, raft.last_index) == (None, range(1, 4), 4)
    assert sole(output).match_index == 3


def test_snapshot_that_conflicts_drops_the_whole_log() -> None:
    raft = core(log=[1, 1, 1, 1], term=2)
    output = raft.receive(N2, install(2, (3, 2)), 0)
    assert output.restore is not None
    assert (raft.first_index, raft.last_index, raft.durable_index) == (4, 3, 0)


def test_second_snapshot_overtakes_the_first() -> None:
    """R16: as etcd #18055."""
    raft = core(term=1)
    raft.receive(N2, install(1, (5, 1)), 0)
    raft.receive(N2, install(1, (8, 1)), 0)
    assert raft.snapshot_restored(Index(5)).messages == []
    assert sole(raft.snapshot_restored(Index(8))).match_index == 8


def test_entries_may_follow_before_the_restore_is_durable() -> None:
    raft = core(term=1)
    raft.receive(N2, install(1, (5, 1)), 0)
    output = raft.receive(N2, append(1, (5, 1), *entries(6, 1)), 0)
    assert [entry.index for entry in output.append] == [6]
    assert sole(raft.snapshot_restored(Index(5))).match_index == 5
    assert sole(raft.durable(Index(6), Term(1))).match_index == 6


def test_restore_that_ends_after_an_election_counts_for_the_new_leader() -> None:
    raft = core(voters=[1, 2], term=1)
    raft.receive(N2, install(1, (5, 1), Configuration(voters=(N1,))), 0)
    raft.tick(10_000)
    assert raft.is_leader
    raft.snapshot_restored(Index(5))
    assert raft.durable(Index(6), Term(2)).committed == range(6, 7)


def test_compaction_keeps_to_what_is_committed() -> None:
    raft = core(log=[1, 1, 1], commit=2)
    raft.compacted(Index(3))
    assert raft.first_index == 3
    raft.compacted(Index(2))
    assert raft.first_index == 3
    with pytest.raises(InvariantBroken, match="only committed"):
        raft.compacted(Index(4))


def test_member_starts_from_a_snapshot() -> None:
    snapshot = SnapshotMetadata(Index(7), Term(3), MEMBERS)
    initial = InitialState(
        term=Term(3),
        first_index=Index(8),
        last_index=Index(9),
        base_term=Term(3),
        terms=((Index(8), Term(3)),),
        snapshot=snapshot,
    )
    raft = Raft(RaftConfig(id=N1), initial, rng=random.Random(1), now_ms=0)
    assert (raft.commit_index, raft.last_index, raft.configuration) == (7, 9, MEMBERS)
    assert raft.term_at(Index(7)) == 3


def test_slow_follower_is_served_again_when_compaction_passes_it_during_a_snapshot() -> None:
    cluster, leader = behind()
    leader.auto_send = False
    cluster.elapse(1_000)
    leader.propose(b"x", b"y")
    for permission in list(leader.permissions):
        leader.permissions.remove(permission)
        leader.send(permission)
    cluster.settle()
    leader.send_snapshot(leader.snapshot_permissions.pop())
    leader.compact(8)
    leader.auto_send = True
    cluster.elapse(2_000)
    assert cluster[3].data == leader.data
