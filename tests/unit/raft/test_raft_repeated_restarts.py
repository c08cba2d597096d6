"""A member that restarts twice under one leader: first whole, then without entries that it acknowledged (R18, R22)."""

from __future__ import annotations

from raft_harness import core

from quiver.model import Index, NodeId, Term
from quiver.raft import HeartbeatResponse, ProgressState, Raft, TimeoutNow, VoteResponse

N2 = NodeId(2)


def leading() -> Raft:
    raft = core(log=[1, 1, 1, 1])
    raft.receive(N2, TimeoutNow(Term(1)), 0)
    raft.receive(N2, VoteResponse(Term(2), granted=True), 0)
    raft.receive(N2, answer(match=5, received=5, durable=5, heard_round=1), 1)
    assert raft.status().peers[0].match_index == 5
    return raft


def answer(*, match: int, received: int, durable: int, heard_round: int, recovering: bool = False) -> HeartbeatResponse:
    return HeartbeatResponse(Term(2), Index(match), Index(received), Index(durable), heard_round, recovering)


def test_recovering_member_is_served_again_although_it_knows_more_than_after_its_first_restart() -> None:
    raft = leading()
    raft.receive(N2, answer(match=0, received=0, durable=5, heard_round=2), 2)  # whole, but it forgot what matches
    raft.receive(N2, answer(match=3, received=3, durable=3, heard_round=3, recovering=True), 3)
    assert raft.status().peers[0].match_index == 3
    assert raft.status().peers[0].next_index == 4


def test_member_that_lost_entries_without_saying_so_is_lost_although_it_knows_more_than_after_its_first_restart() -> (
    None
):
    raft = leading()
    raft.receive(N2, answer(match=0, received=0, durable=5, heard_round=2), 2)
    raft.receive(N2, answer(match=3, received=3, durable=3, heard_round=3), 3)
    assert raft.status().peers[0].state is ProgressState.LOST
