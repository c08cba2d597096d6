from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.model import Index, NodeId
from quiver.raft import Configuration
from quiver.raft.configuration import NO_MEMBERS, ConfigurationHistory, majority_of, majority_value


def nodes(*ids: int) -> tuple[NodeId, ...]:
    return tuple(map(NodeId, ids))


JOINT = Configuration(voters=nodes(1, 2, 4), voters_outgoing=nodes(1, 2, 3), learners=nodes(3, 5))


def test_members_are_everybody_once_and_sorted() -> None:
    assert JOINT.members == (1, 2, 3, 4, 5)


def test_outgoing_voter_still_votes_and_learner_does_not() -> None:
    assert JOINT.is_voter(NodeId(3))
    assert not JOINT.is_voter(NodeId(5))
    assert JOINT.includes(NodeId(5))
    assert not JOINT.includes(NodeId(6))


def test_leaving_a_joint_configuration_drops_the_outgoing_voters() -> None:
    assert JOINT.is_joint
    assert JOINT.left() == Configuration(voters=nodes(1, 2, 4), learners=nodes(3, 5))
    assert not JOINT.left().is_joint


def test_text_names_every_part() -> None:
    assert str(JOINT) == "voters=(n1 n2 n4) outgoing=(n1 n2 n3) learners=(n3 n5)"
    assert str(NO_MEMBERS) == "voters=()"


@pytest.mark.parametrize(("count", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_majority_is_more_than_half(count: int, needed: int) -> None:
    voters = nodes(*range(count))
    assert majority_of(voters, set(voters[:needed]))
    assert not majority_of(voters, set(voters[: needed - 1]))


def test_nobody_is_never_a_majority() -> None:
    assert not majority_of((), {NodeId(1)})
    assert majority_value([]) == 0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7))
def test_majority_value_is_the_highest_reached_by_more_than_half(values: list[int]) -> None:
    expected = max(v for v in values if 2 * sum(other >= v for other in values) > len(values))
    assert majority_value(list(values)) == expected


@given(st.sets(st.integers(1, 6), min_size=1), st.sets(st.integers(1, 6), min_size=1), st.data())
def test_joint_quorums_meet_the_quorums_of_both_sides(old: set[int], new: set[int], data: st.DataObject) -> None:
    """I15: any two configurations that are in force at once have quorums that meet."""
    everybody = sorted(old | new)
    joint = Configuration(voters=nodes(*sorted(new)), voters_outgoing=nodes(*sorted(old)))
    chosen = nodes(*data.draw(st.sets(st.sampled_from(everybody))))
    other = nodes(*data.draw(st.sets(st.sampled_from(everybody))))
    if all(majority_of(voters, chosen) for voters in joint.electorates):
        for side in joint.electorates:
            if majority_of(side, other):
                assert set(chosen) & set(other)


def test_history_goes_by_the_latest_and_reverts() -> None:
    one, two, three = (Configuration(voters=nodes(i)) for i in (1, 2, 3))
    history = ConfigurationHistory([(Index(0), one)])
    history.append(Index(5), two)
    history.append(Index(9), three)
    assert (history.active, history.active_index) == (three, 9)
    assert [history.at(Index(i)) for i in (0, 4, 5, 8, 9)] == [one, one, two, two, three]
    assert list(history.since(Index(6))) == [three, two]
    history.truncate(Index(9))
    assert (history.active, history.active_index) == (two, 5)
    history.truncate(Index(1))
    history.truncate(Index(0))
    assert history.active == one


def test_history_keeps_what_is_in_force_at_the_start() -> None:
    one, two, three = (Configuration(voters=nodes(i)) for i in (1, 2, 3))
    history = ConfigurationHistory([(Index(0), one), (Index(5), two), (Index(9), three)])
    history.compact(Index(8))
    assert history.at(Index(7)) == two
    assert history.at(Index(1)) == two
    assert list(history.since(Index(0))) == [three, two]


def test_blank_history_knows_nobody() -> None:
    assert ConfigurationHistory([]).active is NO_MEMBERS
