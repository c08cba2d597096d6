"""A test per rule of "In Search of an Understandable Consensus Algorithm", in the paper's order."""

from __future__ import annotations

import pytest
from raft_harness import Cluster, append, core, entries, sole

from quiver.errors import InvariantBroken, UnavailableError
from quiver.model import Index, NodeId, Term
from quiver.raft import (
    Append,
    AppendResponse,
    Entry,
    EntryKind,
    HardState,
    Heartbeat,
    HeartbeatResponse,
    Raft,
    RaftMessage,
    Role,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)

N1, N2, N3 = NodeId(1), NodeId(2), NodeId(3)
LATE_MS = 10_000


def vote_request(
    term: int, last: tuple[int, int] = (0, 0), *, pre: bool = False, transfer: bool = False
) -> VoteRequest:
    return VoteRequest(Term(term), Index(last[0]), Term(last[1]), pre, transfer)


def heartbeat(term: int, commit: int = 0, round_: int = 1) -> Heartbeat:
    return Heartbeat(Term(term), Index(commit), round_)


def accepted(term: int, match: int, round_: int = 0) -> AppendResponse:
    index = Index(match)
    return AppendResponse(Term(term), True, index, index, index, round_)


def make_leader(raft: Raft, now_ms: int = LATE_MS) -> None:
    raft.receive(N2, TimeoutNow(raft.term), now_ms)
    raft.receive(N2, VoteResponse(raft.term, True), now_ms)
    raft.receive(N3, VoteResponse(raft.term, True), now_ms)
    assert raft.is_leader


def make_candidate(raft: Raft) -> None:
    raft.receive(N2, TimeoutNow(raft.term), LATE_MS)
    assert raft.role is Role.CANDIDATE


# §5.1 Raft basics


@pytest.mark.parametrize("prepare", [None, make_candidate, make_leader])
@pytest.mark.parametrize(
    "message",
    [append(9, (0, 0)), heartbeat(9), accepted(9, 0), HeartbeatResponse(Term(9), Index(0), Index(0), Index(0), 1)],
)
def test_5_1_anybody_who_hears_of_a_later_term_follows_in_it(prepare: object, message: RaftMessage) -> None:
    raft = core()
    if callable(prepare):
        prepare(raft)
    output = raft.receive(N2, message, LATE_MS)
    assert (raft.role, raft.term) == (Role.FOLLOWER, 9)
    assert output.hard_state == HardState(Term(9), None)


def test_5_1_leader_of_an_earlier_term_is_told_of_the_later_one() -> None:
    raft = core(term=5)
    for message in (append(4, (0, 0)), heartbeat(4)):
        response = sole(raft.receive(N2, message, 0))
        assert response.term == 5
        assert not response.accepted
    assert raft.leader is None


def test_5_1_vote_request_of_an_earlier_term_is_refused() -> None:
    raft = core(term=5)
    assert sole(raft.receive(N2, vote_request(4), 0)) == VoteResponse(Term(5), False)
    assert sole(raft.receive(N2, vote_request(5, pre=True), 0)).granted
    assert not sole(raft.receive(N2, vote_request(4, pre=True), 0)).granted


def test_5_1_answers_and_orders_of_an_earlier_term_are_ignored() -> None:
    """R7: late replies of old terms count for nothing."""
    raft = core(log=[1, 1], term=1)
    make_leader(raft)
    assert raft.term == 2
    for message in (accepted(1, 3), HeartbeatResponse(Term(1), Index(3), Index(3), Index(3), 9), TimeoutNow(Term(1))):
        output = raft.receive(N2, message, LATE_MS)
        assert (output.messages, output.committed, raft.commit_index) == ([], range(0), 0)


# §5.2 Leader election


def test_5_2_members_start_as_followers() -> None:
    raft = core()
    assert (raft.id, raft.role) == (N1, Role.FOLLOWER)


def test_5_2_follower_stays_one_while_it_hears_a_leader() -> None:
    raft = core(term=1)
    for now_ms in range(0, 5_000, 100):
        raft.receive(N2, heartbeat(1), now_ms)
        raft.tick(now_ms)
        assert (raft.role, raft.leader) == (Role.FOLLOWER, N2)


def test_5_2_leader_sends_heartbeats_periodically() -> None:
    raft = core(heartbeat_interval_ms=100)
    make_leader(raft)
    assert raft.tick(LATE_MS + 99).messages == []
    output = raft.tick(LATE_MS + 100)
    beats = [m for m in output.messages if isinstance(m.message, Heartbeat)]
    assert [beat.to for beat in beats] == [2, 3]
    assert output.next_deadline_ms == LATE_MS + 200


def test_5_2_silence_starts_an_election() -> None:
    raft = core(term=3)
    output = raft.tick(LATE_MS)
    assert output.became is not None
    assert (output.became.role, raft.term) == (Role.PRE_CANDIDATE, 3)  # the term is raised once a pre-vote is won
    output = raft.receive(N2, VoteResponse(Term(4), True, True), LATE_MS)
    assert (raft.role, raft.term) == (Role.CANDIDATE, 4)
    assert output.hard_state == HardState(Term(4), N1)  # it votes for itself, durably
    assert [m.to for m in output.messages_after_save] == [2, 3]
    assert output.messages == []


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_5_2_majority_of_votes_wins(size: int) -> None:
    raft = core(voters=range(1, size + 1))
    raft.tick(LATE_MS)
    for node in range(2, size + 1):
        raft.receive(NodeId(node), VoteResponse(Term(1), True, True), LATE_MS)
    granted = 1
    for node in range(2, size + 1):
        assert raft.is_leader == (2 * granted > size)
        raft.receive(NodeId(node), VoteResponse(Term(1), True), LATE_MS)
        granted += 1
    assert raft.is_leader


def test_5_2_refusals_of_a_majority_end_a_campaign() -> None:
    raft = core(voters=range(1, 6))
    make_candidate(raft)
    raft.receive(N2, VoteResponse(Term(1), False), LATE_MS)
    assert raft.receive(N3, VoteResponse(Term(1), False), LATE_MS).became is None
    became = raft.receive(NodeId(4), VoteResponse(Term(1), False), LATE_MS).became
    assert became is not None
    assert became.role is Role.FOLLOWER


def test_5_2_one_vote_per_term_first_come_first_served() -> None:
    raft = core()
    output = raft.receive(N2, vote_request(1), LATE_MS)
    assert sole(output) == VoteResponse(Term(1), True)
    assert output.hard_state == HardState(Term(1), N2)
    assert output.messages == []  # R2: the vote leaves only after it is durable
    assert not sole(raft.receive(N3, vote_request(1), LATE_MS)).granted
    again = raft.receive(N2, vote_request(1), LATE_MS)
    assert sole(again).granted  # a repeated request gets the same answer
    assert again.hard_state is None


def test_5_2_vote_survives_a_restart() -> None:
    """R2."""
    raft = core(term=1, vote=2)
    assert not sole(raft.receive(N3, vote_request(1), LATE_MS)).granted
    assert sole(raft.receive(N2, vote_request(1), LATE_MS)).granted


def test_5_2_candidate_follows_a_leader_of_its_own_term() -> None:
    raft = core()
    make_candidate(raft)
    raft.receive(N3, append(1, (0, 0)), LATE_MS)
    assert (raft.role, raft.leader) == (Role.FOLLOWER, N3)


def test_5_2_candidate_without_a_result_tries_again() -> None:
    raft = core()
    make_candidate(raft)
    assert raft.term == 1
    output = raft.tick(raft.next_deadline_ms or 0)
    assert raft.role is Role.PRE_CANDIDATE
    assert [m.message.term for m in output.messages] == [2, 2]


def test_5_2_election_timeouts_are_spread() -> None:
    cluster = Cluster(20, election_timeout_ms=500)
    deadlines = {m.raft.next_deadline_ms for m in cluster.members.values()}
    assert len(deadlines) > 10
    assert all(d is not None and 1_500 <= d < 2_000 for d in deadlines)


def test_5_2_second_leader_in_a_term_ends_the_process() -> None:
    """I1."""
    raft = core(term=1)
    raft.receive(N2, heartbeat(1), 0)
    with pytest.raises(InvariantBroken, match="one leader per term"):
        raft.receive(N3, heartbeat(1), 0)


# §5.3 Log replication


def test_5_3_leader_appends_and_sends_in_parallel() -> None:
    cluster = Cluster()
    leader = cluster.elect(1)
    leader.auto_sync = False
    output = leader.propose(b"a")
    assert [entry.data for entry in output.append] == [b"a"]
    assert [permission.to for permission in output.send] == [2, 3]
    first = output.send[0]
    assert (first.prev_index, first.prev_term, first.first_index, first.end_index) == (1, 1, 2, 3)


def test_5_3_entry_is_committed_once_a_majority_holds_it() -> None:
    cluster = Cluster(5)
    leader = cluster.elect(1)
    leader.propose(b"a")
    sent = [e for e in cluster.network if isinstance(e.message, Append)]
    cluster.network.clear()
    cluster.deliver(sent[0])
    cluster.settle()
    assert leader.raft.commit_index == 1
    cluster.deliver(sent[1])
    cluster.settle()
    assert leader.raft.commit_index == 2


def test_5_3_followers_learn_the_commit_index() -> None:
    raft = core(term=1)
    output = raft.receive(N2, append(1, (0, 0), *entries(1, 1, 1), commit=1), 0)
    assert output.committed == range(1, 2)
    output = raft.receive(N2, heartbeat(1, commit=2), 0)
    assert output.committed == range(2, 3)


def test_5_3_follower_commits_only_what_it_knows_to_be_the_leaders() -> None:
    """Figure 2: min(leaderCommit, index of last new entry), not the end of its own log."""
    raft = core(log=[1, 1, 1], term=2)
    raft.receive(N2, heartbeat(2, commit=3), 0)
    assert raft.commit_index == 0
    raft.receive(N2, append(2, (1, 1), *entries(2, 1), commit=3), 0)
    assert raft.commit_index == 2


@pytest.mark.parametrize(
    ("prev", "fits"),
    [((0, 0), True), ((1, 1), True), ((3, 2), True), ((3, 1), False), ((4, 2), False), ((2, 3), False)],
)
def test_5_3_consistency_check(prev: tuple[int, int], fits: bool) -> None:
    raft = core(log=[1, 1, 2], term=3)
    response = sole(raft.receive(N2, append(3, prev), 0))
    assert response.accepted == fits
    if fits:
        assert response.match_index == prev[0]
    else:
        assert response.rejected_index == prev[0]


FIGURE_7 = {
    "a": [1, 1, 1, 4, 4, 5, 5, 6, 6],
    "b": [1, 1, 1, 4],
    "c": [1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 6],
    "d": [1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 7, 7],
    "e": [1, 1, 1, 4, 4, 4, 4],
    "f": [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3],
}
FIGURE_7_LEADER = [1, 1, 1, 4, 4, 5, 5, 6, 6, 6]


@pytest.mark.parametrize("case", sorted(FIGURE_7))
def test_5_3_figure_7_every_follower_becomes_equal_to_the_leader(case: str) -> None:
    cluster = Cluster()
    logs = {1: FIGURE_7_LEADER, 2: FIGURE_7[case], 3: FIGURE_7_LEADER[:3]}
    for node, terms in logs.items():
        member = cluster[node]
        member.disk.append(Entry(Index(i + 1), Term(t), data=b"%d-%d" % (i + 1, t)) for i, t in enumerate(terms))
        member.disk.synced = member.disk.last_index
        member.disk.hard_state = HardState(Term(7), None)
        member.start()
    cluster.elect(1)
    cluster.settle()
    assert cluster[2].disk.entries == cluster[1].disk.entries == cluster[3].disk.entries
    assert cluster[1].raft.term == 8


def test_5_3_conflict_is_found_by_skipping_terms() -> None:
    """Two rounds, not one per entry, for a follower with hundreds of entries of a lost term."""
    raft = core(log=[1] * 10 + [4] * 200)
    make_leader(raft)
    rejected = AppendResponse(raft.term, False, Index(0), Index(0), Index(310), 0, Index(210), Index(210), Term(3))
    assert raft.receive(N2, rejected, LATE_MS).send[0].prev_index == 10
    follower = core(node=2, log=[1] * 10 + [3] * 300, term=4)
    response = sole(follower.receive(N1, append(5, (210, 4)), 0))
    assert (response.hint_index, response.hint_term) == (210, 3)
    response = sole(follower.receive(N1, append(5, (200, 2)), 0))
    assert (response.hint_index, response.hint_term) == (10, 1)


def test_5_3_only_conflicting_entries_are_cut() -> None:
    """R6: a duplicate or short append leaves what follows alone."""
    raft = core(log=[1, 1, 1, 2], term=3)
    output = raft.receive(N2, append(3, (1, 1), *entries(2, 1)), 0)
    assert (output.truncate_from, tuple(output.append), raft.last_index) == (None, (), 4)
    output = raft.receive(N2, append(3, (2, 1), *entries(3, 1, 3)), 0)
    assert output.truncate_from == 4
    assert [entry.index for entry in output.append] == [4]
    assert raft.last_index == 4


def test_5_3_leader_never_overwrites_its_own_log() -> None:
    """Leader Append-Only: an append of its own term is another leader's, which cannot be."""
    raft = core()
    make_leader(raft)
    with pytest.raises(InvariantBroken):
        raft.receive(N2, append(1, (0, 0), *entries(1, 1)), LATE_MS)


# §5.4 Safety


@pytest.mark.parametrize(
    ("last", "granted"),
    [((2, 2), False), ((3, 2), True), ((4, 2), True), ((1, 3), True), ((9, 1), False)],
)
@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("transfer", [False, True])
def test_5_4_1_voter_refuses_a_log_less_up_to_date(
    last: tuple[int, int], granted: bool, pre: bool, transfer: bool
) -> None:
    """R8: on votes, on pre-votes, and on elections that a leader asked for."""
    raft = core(log=[1, 2, 2])
    response = sole(raft.receive(N2, vote_request(4, last, pre=pre, transfer=transfer), LATE_MS))
    assert response.granted == granted


def test_5_4_2_only_entries_of_the_own_term_are_committed_by_counting() -> None:
    """R1."""
    raft = core(log=[1, 2])
    make_leader(raft)
    raft.durable(Index(3), raft.term)
    raft.receive(N2, accepted(3, 2), LATE_MS)
    assert raft.commit_index == 0
    output = raft.receive(N2, accepted(3, 3), LATE_MS)
    assert output.committed == range(1, 4)


# §5.5 Follower and candidate crashes


def test_5_5_repeated_append_changes_nothing() -> None:
    raft = core(term=1)
    message = append(1, (0, 0), *entries(1, 1, 1))
    raft.receive(N2, message, 0)
    raft.durable(Index(2), Term(1))
    output = raft.receive(N2, message, 0)
    assert (output.truncate_from, tuple(output.append)) == (None, ())
    assert sole(output).match_index == 2


def test_5_5_crashed_follower_is_brought_up_to_date() -> None:
    cluster = Cluster()
    leader = cluster.elect(1)
    cluster[3].crash()
    leader.propose(b"a", b"b")
    cluster.settle()
    cluster[3].restart()
    cluster.elapse(1_000)
    assert cluster[3].data == leader.data


# §6 Cluster membership changes: see test_raft_membership. §7 Log compaction: see test_raft_snapshots.
# §8 Client interaction


def test_8_new_leader_commits_an_entry_of_its_term() -> None:
    cluster = Cluster()
    leader = cluster.elect(2)
    assert [entry.kind for entry in leader.disk.entries] == [EntryKind.CONFIG], "the first one writes down the members"
    assert leader.raft.commit_index == 1
    assert leader.raft.is_ready
    leader = cluster.elect(3)
    assert [entry.kind for entry in leader.disk.entries] == [EntryKind.CONFIG, EntryKind.NOOP]
    assert leader.raft.commit_index == 2
    assert leader.raft.is_ready


def test_8_leader_is_not_ready_before_it_commits_in_its_term() -> None:
    """R10."""
    raft = core(log=[1], commit=1)
    assert not raft.is_ready
    make_leader(raft)
    assert not raft.is_ready
    raft.durable(Index(2), raft.term)
    raft.receive(N2, accepted(2, 2), LATE_MS)
    assert raft.is_ready


def test_8_non_leaders_refuse_with_a_hint() -> None:
    raft = core(term=1)
    raft.receive(N3, heartbeat(1), 0)
    for refused in (raft.next_slot, lambda: raft.read(1, 0), lambda: raft.propose(entries(1, 1), 0)):
        with pytest.raises(UnavailableError):
            refused()
    assert raft.leader == N3
