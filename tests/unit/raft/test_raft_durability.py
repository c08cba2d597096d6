"""R2, R3, R4, R7: what is said must be on disk before it is said."""

from __future__ import annotations

import pytest
from raft_harness import Cluster, append, core, entries, sole

from quiver.errors import InvariantBroken
from quiver.model import Index, NodeId, Term
from quiver.raft import AppendResponse, HardState, Heartbeat, SnapshotMetadata, TimeoutNow, VoteRequest

N1, N2, N3 = NodeId(1), NodeId(2), NodeId(3)


def test_follower_acknowledges_only_after_the_write_is_durable() -> None:
    """R3."""
    raft = core(term=1)
    output = raft.receive(N2, append(1, (0, 0), *entries(1, 1, 1)), 0)
    assert output.messages == []
    response = sole(raft.durable(Index(1), Term(1)))
    assert (response.match_index, response.received_index, response.durable_index) == (1, 2, 1)
    assert sole(raft.durable(Index(2), Term(1))).match_index == 2
    assert raft.durable(Index(2), Term(1)).messages == []


def test_duplicate_append_does_not_acknowledge_an_unsynced_entry() -> None:
    """R3: also on empty and on repeated appends."""
    raft = core(term=1)
    raft.receive(N2, append(1, (0, 0), *entries(1, 1, 1)), 0)
    assert sole(raft.receive(N2, append(1, (0, 0), *entries(1, 1, 1)), 0)).match_index == 0
    assert sole(raft.receive(N2, append(1, (2, 1)), 0)).match_index == 0


def test_heartbeat_answer_does_not_acknowledge_an_unsynced_entry() -> None:
    """R3: as YugabyteDB did."""
    raft = core(term=1)
    raft.receive(N2, append(1, (0, 0), *entries(1, 1, 1)), 0)
    raft.durable(Index(1), Term(1))
    response = sole(raft.receive(N2, Heartbeat(Term(1), Index(0), 5), 0))
    assert (response.match_index, response.received_index, response.round) == (1, 2, 5)


def test_durable_tail_of_an_earlier_leader_is_not_acknowledged() -> None:
    """R7: the match comes from the request, not from the log's end."""
    raft = core(log=[1, 1, 1], term=2)
    assert sole(raft.receive(N2, append(2, (1, 1)), 0)).match_index == 1


def test_leader_counts_its_own_copy_only_when_durable() -> None:
    """R3: parallel local append."""
    cluster = Cluster()
    leader = cluster.elect(1)
    leader.auto_sync = False
    cluster.cut(3)
    leader.propose(b"a")
    cluster.settle()
    assert cluster[2].disk.synced == 2
    assert leader.raft.commit_index == 1
    leader.sync()
    assert leader.raft.commit_index == 2


def test_entry_may_be_committed_by_others_before_the_leaders_disk_has_it() -> None:
    cluster = Cluster()
    leader = cluster.elect(1)
    leader.auto_sync = False
    leader.propose(b"a")
    cluster.settle()
    assert (leader.raft.commit_index, leader.raft.durable_index) == (2, 1)
    assert leader.raft.applicable_index == 1  # R4: a durable state machine must wait for its own log
    leader.sync()
    assert leader.raft.applicable_index == 2


def test_group_of_one_commits_only_when_durable() -> None:
    """R3: as etcd #14370 did not."""
    raft = core(voters=[1])
    output = raft.tick(10_000)
    assert raft.is_leader
    assert output.hard_state == HardState(Term(1), N1)
    assert not output.committed
    output = raft.durable(Index(1), Term(1))
    assert output.committed == range(1, 2)
    assert not raft.propose(entries(2, 1), 10_000).committed
    assert raft.durable(Index(2), Term(1)).committed == range(2, 3)


def test_no_message_leaves_before_the_hard_state_it_depends_on() -> None:
    """R2."""
    raft = core()
    for output in (
        raft.receive(N2, VoteRequest(Term(1), Index(0), Term(0)), 10_000),
        raft.receive(N3, append(2, (0, 0)), 10_000),
        raft.receive(N3, TimeoutNow(Term(2)), 10_000),
    ):
        assert output.hard_state is not None
        assert output.messages == []
        assert output.messages_after_save


def test_late_report_of_an_overwritten_write_is_dropped() -> None:
    """R7, ABA: A is overwritten by B, B by A again; the first A's report says nothing about the second."""
    raft = core(term=1)
    raft.receive(N2, append(1, (0, 0), *entries(1, 1)), 0)
    raft.receive(N3, append(2, (0, 0), *entries(1, 2)), 0)
    raft.receive(N2, append(3, (0, 0), *entries(1, 1)), 0)
    assert raft.durable(Index(1), Term(1)).messages == []
    assert raft.durable(Index(1), Term(2)).messages == []
    assert raft.durable_index == 0
    assert sole(raft.durable(Index(1), Term(3))).match_index == 1


def test_report_from_an_earlier_term_counts_when_nothing_was_cut() -> None:
    raft = core(term=1)
    raft.receive(N2, append(1, (0, 0), *entries(1, 1, 1)), 0)
    raft.receive(N3, append(2, (2, 1)), 0)
    assert sole(raft.durable(Index(2), Term(1))).match_index == 2


def test_truncation_lowers_durability() -> None:
    raft = core(log=[1, 1, 1], term=2)
    raft.receive(N2, append(2, (1, 1), *entries(2, 2)), 0)
    assert raft.durable_index == 1


def test_report_without_a_leader_is_kept_for_later() -> None:
    raft = core(term=1)
    raft.receive(N2, append(1, (0, 0), *entries(1, 1)), 0)
    raft.tick(10_000)
    assert raft.durable(Index(1), Term(1)).messages == []
    assert sole(raft.receive(N2, Heartbeat(Term(1), Index(0), 2), 10_000)).match_index == 1


def test_term_of_the_log_outranks_an_unsaved_term() -> None:
    """R4: the crash fell between the entries and the hard state; a vote of that term was never sent."""
    raft = core(log=[1, 3], term=2, vote=2)
    assert raft.term == 3
    assert raft.status().vote is None


def test_committed_entries_are_never_cut() -> None:
    """R6."""
    raft = core(log=[1, 1], commit=2)
    output = raft.receive(N2, append(2, (0, 0), *entries(1, 2, 2)), 0)
    assert output.truncate_from is None
    assert raft.last_index == 2
    with pytest.raises(InvariantBroken, match="never truncated"):
        raft._state.truncate(Index(2))


def test_commit_hint_is_held_within_the_log() -> None:
    """R4: as Curvine's commit index beyond the log."""
    assert core(log=[1, 1], commit=9).commit_index == 2


def test_answers_survive_every_crash_between_write_and_sync() -> None:
    """R3: whatever a follower acknowledged is still there after a power failure at any moment."""
    cluster = Cluster()
    leader = cluster.elect(1)
    follower = cluster[2]
    follower.auto_sync = False
    for value in (b"a", b"b", b"c"):
        leader.propose(value)
        cluster.settle()
    follower.sync(2)
    acknowledged = max(m.match_index for m in cluster.pending(AppendResponse))
    follower.crash()
    assert follower.disk.last_index >= acknowledged == 3


def test_applied_follows_commit() -> None:
    raft = core(log=[1, 1, 1], commit=2)
    raft.applied(Index(2))
    assert raft.status().applied_index == 2
    with pytest.raises(InvariantBroken, match="only committed"):
        raft.applied(Index(3))


def test_durability_never_exceeds_a_log_that_was_restored_meanwhile() -> None:
    raft = core(term=1)
    raft.receive(N2, append(1, (0, 0), *entries(1, 1)), 0)
    snapshot = SnapshotMetadata(Index(5), Term(1), raft.configuration)
    raft._state.log.restore(snapshot, term=Term(1), matched=Index(0))
    raft.durable(Index(9), Term(1))
    assert raft.durable_index == 5
