"""Each checker of members finds the broken promise it is for: elections, votes, acknowledgements, configurations."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from quiver.model import GroupId, Index, NodeId, Term
from quiver.raft import (
    AppendResponse,
    Configuration,
    InitialState,
    Raft,
    RaftConfig,
    RaftMessage,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)
from quiver.replication.codec import GroupMessage
from quiver.testing.checkers import CommittedLog, ConfigurationChecker, ElectionChecker, PromiseChecker
from quiver.testing.checkers.durability import check_majority
from quiver.testing.checkers.observer import quorums_meet
from quiver.testing.simulator.report import Violation

GROUP = GroupId(1)
N1, N2, N3, N4 = (NodeId(number) for number in (1, 2, 3, 4))


def finds(invariant: str, act: Callable[[], object]) -> None:
    with pytest.raises(Violation) as caught:
        act()
    assert caught.value.invariant == invariant


def raft(*terms: int, term: int = 5) -> Raft:
    runs = tuple((Index(at + 1), Term(value)) for at, value in enumerate(terms) if at == 0 or value != terms[at - 1])
    initial = InitialState(
        term=Term(term),
        last_index=Index(len(terms)),
        terms=runs,
        configurations=((Index(0), Configuration(voters=(N1, N2, N3))),),
    )
    return Raft(RaftConfig(id=N1), initial, rng=random.Random(1), now_ms=0)


def leading(*terms: int) -> Raft:
    member = raft(*terms, term=5)
    member.receive(N2, TimeoutNow(Term(5)), 0)
    member.receive(N2, VoteResponse(Term(6), granted=True), 0)
    assert member.is_leader
    return member


def committed(*terms: int) -> CommittedLog:
    log = CommittedLog(GROUP)
    log.commit(N2, Index(len(terms)), lambda index: Term((0, *terms)[index]))
    return log


class Durable:
    """A log that is durable below an index; all that the checker looks at."""

    def __init__(self, durable_end_index: int) -> None:
        self.durable_end_index = Index(durable_end_index)


class Holding:
    """A copy that holds some entries by its own word, and perhaps fewer on its platter."""

    def __init__(self, said: bool, real: bool, *, term: int = 0) -> None:
        self.said, self.real, self.term = said, real, Term(term)

    def holds(self, index: Index, term: Term) -> bool:
        return self.said

    def holds_on_platter(self, index: Index, term: Term) -> bool:
        return self.real


def ack(index: int, term: int = 5) -> AppendResponse:
    return AppendResponse(Term(term), True, Index(index), Index(index), Index(index), 0)


def say(judge: PromiseChecker, message: RaftMessage, member: Raft, *, durable_end: int = 100, to: NodeId = N2) -> None:
    judge.say(to, message, member, Durable(durable_end))  # type: ignore[arg-type] # as much of a log as is looked at


def test_second_leader_of_a_term_is_found() -> None:
    checker = ElectionChecker(committed())
    checker.lead(N1, leading(1))
    checker.lead(N1, leading(1))
    finds("I1", lambda: checker.lead(N2, leading(1)))


def test_leader_without_a_committed_entry_is_found() -> None:
    finds("I4", lambda: ElectionChecker(committed(1, 1, 2)).lead(N1, leading(1, 1)))
    finds("I4", lambda: ElectionChecker(committed(1, 1, 3)).lead(N1, leading(1, 1, 2)))
    ElectionChecker(committed(1, 1)).lead(N1, leading(1, 1, 2))


def test_commit_of_an_earlier_term_by_counting_is_found() -> None:
    member = leading(1, 2)
    checker = ElectionChecker(committed())
    checker.count(N1, member, Index(3))
    finds("I4", lambda: checker.count(N1, member, Index(2)))


def test_number_that_goes_back_is_found() -> None:
    checker = ElectionChecker(committed())
    checker.move(N1, "term", 3, 3)
    finds("I2", lambda: checker.move(N1, "term", 3, 2))


def test_second_vote_in_a_term_is_found() -> None:
    judge = PromiseChecker(N1, committed())
    vote = VoteResponse(Term(5), granted=True)
    say(judge, vote, raft(), to=N2)
    say(judge, vote, raft(), to=N2)
    say(judge, VoteResponse(Term(5), granted=False), raft(), to=N3)
    say(judge, VoteResponse(Term(6), granted=True, pre=True), raft(), to=N3)
    finds("I2", lambda: say(judge, vote, raft(), to=N3))


def test_candidate_has_voted_for_itself() -> None:
    judge = PromiseChecker(N1, committed())
    say(judge, VoteRequest(Term(5), Index(0), Term(0)), raft())
    finds("I2", lambda: say(judge, VoteResponse(Term(5), granted=True), raft(), to=N3))


def test_word_of_an_earlier_term_is_found() -> None:
    judge = PromiseChecker(N1, committed())
    judge.say_term(Term(4))
    finds("I2", lambda: say(judge, TimeoutNow(Term(3)), raft()))


def test_acknowledgement_of_what_is_not_durable_is_found() -> None:
    judge = PromiseChecker(N1, committed())
    say(judge, ack(2), raft(1, 1), durable_end=3)
    finds("I6", lambda: say(judge, ack(2), raft(1, 1), durable_end=2))


def test_vote_without_an_acknowledged_committed_entry_is_found() -> None:
    judge = PromiseChecker(N1, committed(1, 1))
    say(judge, ack(2), raft(1, 1))
    finds("I10", lambda: say(judge, VoteResponse(Term(5), granted=True), raft(1)))


def test_vote_without_an_acknowledged_entry_that_was_never_committed_is_fine() -> None:
    judge = PromiseChecker(N1, committed(1, 2))
    for index in range(1, 100):
        say(judge, ack(index), raft(*[1] * 100))
    say(judge, VoteResponse(Term(5), granted=True), raft(1))


def test_member_that_ignores_a_later_term_is_found() -> None:
    judge = PromiseChecker(N1, committed())
    judge.hear(N2, GroupMessage(GROUP, plain=VoteRequest(Term(9), Index(0), Term(0))), raft(term=5), None)
    finds("I2", lambda: judge.hear(N2, GroupMessage(GROUP, plain=ack(1, term=9)), raft(term=5), None))


def test_leader_that_believes_too_much_is_found() -> None:
    judge = PromiseChecker(N1, committed())
    member = leading(1)
    member.receive(N2, AppendResponse(Term(6), True, Index(1), Index(1), Index(1), 0), 0)
    judge.hear(N2, GroupMessage(GROUP, plain=ack(1, term=6)), member, Holding(True, True))
    finds("I6", lambda: judge.hear(N2, GroupMessage(GROUP, plain=ack(1, term=6)), member, Holding(False, False)))
    # Not if a later leader may have overwritten it since: then the answer was slow, and this leader is replaced.
    judge.hear(N2, GroupMessage(GROUP, plain=ack(1, term=6)), member, Holding(False, False, term=7))


def test_leader_that_believes_an_answer_of_an_earlier_term_is_found() -> None:
    judge, member = PromiseChecker(N1, committed()), leading(1)
    late, timely = GroupMessage(GROUP, plain=ack(1, term=5)), GroupMessage(GROUP, plain=ack(1, term=6))
    assert judge.belief(N2, timely, member) is None, "it may move what is believed"
    belief = judge.belief(N2, late, member)
    judge.hear(N2, late, member, Holding(True, True), belief)
    member.receive(N2, AppendResponse(Term(6), True, Index(1), Index(1), Index(1), 0), 0)
    finds("I6", lambda: judge.hear(N2, late, member, Holding(True, True), belief))
    assert judge.belief(N4, late, member) is None, "nothing is believed of a stranger"
    assert judge.belief(N2, late, raft(1)) is None, "a follower believes nothing"


def test_commit_needs_a_majority_of_every_electorate() -> None:
    joint = Configuration(voters=(N1, N2, N4), voters_outgoing=(N1, N2, N3))
    yes, no = Holding(True, True), Holding(False, False)

    def check(*holders: NodeId, on_platter: bool = False, held: Holding = yes) -> None:
        copies = {node: held if node in holders else no for node in (N1, N2, N3, N4)}
        check_majority(joint, copies, group=GROUP, index=Index(1), term=Term(1), on_platter=on_platter)

    check(N1, N2)
    finds("I6", lambda: check(N1, N4))
    finds("I6", lambda: check(N1, N3))
    check(N1, N2, held=Holding(True, False))
    finds("I6", lambda: check(N1, N2, on_platter=True, held=Holding(True, False)))


def test_two_pending_changes_are_found() -> None:
    one, two, three = (Configuration(voters=voters) for voters in ((N1, N2, N3), (N1, N2, N3, N4), (N1, N2)))
    joint = Configuration(voters=two.voters, voters_outgoing=one.voters)
    ConfigurationChecker(GROUP).lead(N1, [joint, one])
    finds("I15", lambda: ConfigurationChecker(GROUP).lead(N1, [three, joint, one]))
    finds("I15", lambda: ConfigurationChecker(GROUP).lead(N1, [Configuration(voters=(N4,)), one]))


def test_quorums_meet_through_a_joint_configuration_only() -> None:
    old, new = Configuration(voters=(N1, N2, N3)), Configuration(voters=(N1, N4))
    joint = Configuration(voters=new.voters, voters_outgoing=old.voters)
    assert quorums_meet(old, joint)
    assert quorums_meet(joint, new)
    assert not quorums_meet(old, new)
