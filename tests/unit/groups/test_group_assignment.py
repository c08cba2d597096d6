"""Who should own which partition: balanced, sticky, close, and cheap to compute."""

from __future__ import annotations

import random
from collections import Counter
from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.groups.assignment import AssignablePartition, Assignor, PartitionKey, Subscription, assign
from quiver.model import PartitionId, TopicId

RACKS = ("", "a", "b")
Owners = dict[PartitionKey, str]


def make_partitions(*counts: int) -> list[AssignablePartition]:
    """Return the partitions of topics 0, 1, … with so many partitions each."""
    return [
        AssignablePartition((TopicId(topic), PartitionId(number)))
        for topic, count in enumerate(counts)
        for number in range(count)
    ]


def subscribe(names: str | list[str], *topics: int, rack: str = "") -> dict[str, Subscription]:
    return {name: Subscription(frozenset(map(TopicId, topics)), rack) for name in names}


def moved(before: Owners, after: Owners) -> set[PartitionKey]:
    return {key for key in before if after.get(key) != before[key]}


@st.composite
def situations(draw: st.DrawFn) -> tuple[dict[str, Subscription], list[AssignablePartition], Owners]:
    counts = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    names = draw(st.lists(st.sampled_from("abcdefgh"), max_size=8, unique=True))
    topics = st.frozensets(st.sampled_from(range(len(counts))).map(TopicId))
    members = {name: Subscription(draw(topics), draw(st.sampled_from(RACKS))) for name in names}
    partitions = [
        AssignablePartition(one.key, draw(st.sampled_from(RACKS)), tuple(draw(st.sets(st.sampled_from(RACKS[1:])))))
        for one in make_partitions(*counts)
    ]
    owners = {one.key: draw(st.sampled_from("abcdefghxyz")) for one in partitions if draw(st.booleans())}
    return members, partitions, owners


@given(situations())
@settings(max_examples=150)
def test_assignment_is_complete_valid_balanced_stable_and_deterministic(
    situation: tuple[dict[str, Subscription], list[AssignablePartition], Owners],
) -> None:
    members, partitions, owners = situation
    target = assign(members, partitions, owners)
    subscribed = {topic for one in members.values() for topic in one.topics}
    assert set(target) == {one.key for one in partitions if one.key[0] in subscribed}
    assert all(key[0] in members[name].topics for key, name in target.items())
    counts = Counter(dict.fromkeys(members, 0))
    counts.update(target.values())
    for key, owner in target.items():
        for name, member in members.items():
            if key[0] in member.topics:
                assert counts[name] >= counts[owner] - 1, f"{name} could take {key} from {owner}"
    assert assign(members, partitions, target) == target, "the second time, nothing moves"
    shuffled = list(members)
    random.Random(len(target)).shuffle(shuffled)
    assert (
        assign({name: members[name] for name in shuffled}, partitions[::-1], dict(reversed(owners.items()))) == target
    )


@given(st.integers(1, 12), st.integers(0, 60), st.data())
@settings(max_examples=200)
def test_join_moves_only_the_share_of_the_new_member(size: int, count: int, data: st.DataObject) -> None:
    racks = st.sampled_from(RACKS)
    partitions = [AssignablePartition(one.key, data.draw(racks)) for one in make_partitions(count)]
    members = {f"m{number}": Subscription(frozenset((TopicId(0),)), data.draw(racks)) for number in range(size)}
    before = assign(members, partitions, {})
    counts = Counter(dict.fromkeys(members, 0))
    counts.update(before.values())
    assert max(counts.values()) - min(counts.values()) <= 1
    members["new"] = Subscription(frozenset((TopicId(0),)), data.draw(racks))
    after = assign(members, partitions, before)
    assert {after[key] for key in moved(before, after)} <= {"new"}
    assert len(moved(before, after)) <= ceil(count / (size + 1))


@given(st.integers(2, 12), st.integers(0, 60), st.data())
@settings(max_examples=200)
def test_leave_moves_only_what_the_leaver_had(size: int, count: int, data: st.DataObject) -> None:
    partitions = make_partitions(count)
    members = subscribe([f"m{number}" for number in range(size)], 0)
    before = assign(members, partitions, {})
    leaver = data.draw(st.sampled_from(sorted(members)))
    del members[leaver]
    after = assign(members, partitions, before)
    assert moved(before, after) == {key for key, name in before.items() if name == leaver}
    counts = Counter(after.values())
    if count >= size:
        assert max(counts.values()) - min(counts.values()) <= 1


def test_chain_of_subscriptions_is_balanced_across_several_members() -> None:
    members = subscribe("a", 0) | subscribe("b", 0, 1) | subscribe("c", 1)
    partitions = make_partitions(2, 4)
    target = assign(members, partitions, {one.key: "b" for one in partitions})
    assert Counter(target.values()) == {"a": 2, "b": 2, "c": 2}


def test_members_get_partitions_of_their_rack_as_far_as_balance_allows() -> None:
    members = {
        name: Subscription(frozenset((TopicId(0),)), rack) for name, rack in (("1", "a"), ("2", "b"), ("3", "b"))
    }
    partitions = [
        AssignablePartition((TopicId(0), PartitionId(number)), "a" if number < 4 else "b", ("a", "b"))
        for number in range(9)
    ]
    target = assign(members, partitions, {})
    assert Counter(target.values()) == {"1": 3, "2": 3, "3": 3}
    near = sum(members[target[one.key]].rack == one.leader_rack for one in partitions)
    assert near == 8, "rack a leads four, and its only member has room for three"


def test_partition_that_moves_anyway_goes_near_and_no_other_moves_for_the_rack() -> None:
    members = subscribe("1", 0, rack="a")
    racks = ["a", "b", "a", "b"]
    partitions = [AssignablePartition((TopicId(0), PartitionId(n)), rack) for n, rack in enumerate(racks)]
    before = assign(members, partitions, {})
    after = assign(members | subscribe("2", 0, rack="b"), partitions, before)
    assert {key[1] for key in moved(before, after)} == {1, 3}
    swapped = [AssignablePartition(one.key, "b" if one.leader_rack == "a" else "a") for one in partitions]
    assert assign(members | subscribe("2", 0, rack="b"), swapped, after) == after


def test_second_choice_is_the_rack_of_another_replica() -> None:
    members = subscribe("1", 0, rack="x") | subscribe("2", 0, rack="b")
    partitions = [
        AssignablePartition((TopicId(0), PartitionId(0)), "a"),
        AssignablePartition((TopicId(0), PartitionId(1)), "a", ("b",)),
    ]
    assert assign(members, partitions, {}) == {partitions[0].key: "1", partitions[1].key: "2"}


@pytest.mark.parametrize("topics", [1, 30])
@pytest.mark.parametrize("racks", [("",), ("a", "b", "c")])
def test_cost_grows_with_members_and_partitions_not_with_their_product(topics: int, racks: tuple[str, ...]) -> None:
    size, count = 1_000, 3_000
    partitions = [
        AssignablePartition((TopicId(n % topics), PartitionId(n // topics)), racks[n % len(racks)])
        for n in range(count)
    ]
    members = {
        f"m{n}": Subscription(frozenset(map(TopicId, range(topics))), racks[n % len(racks)]) for n in range(size)
    }
    bound = 10 * (size * topics + count) * ceil(log2(size))
    everything = Assignor(members, partitions, {})
    target = everything.run()
    assert everything.steps < bound
    joined = Assignor(members | {"new": members["m0"]}, partitions, target)
    assert len(moved(target, joined.run())) == 2
    assert joined.steps < bound
    del members["m7"]
    left = Assignor(members, partitions, target)
    assert len(moved(target, left.run())) == 3
    assert left.steps < bound
    crowd = Assignor(members, partitions, {one.key: "m0" for one in partitions})
    assert max(Counter(crowd.run().values()).values()) == 4
    assert crowd.steps < 2 * bound, "999 members take their shares from one"


def test_many_different_subscriptions_are_affordable() -> None:
    rng = random.Random(1)
    topics = 60
    members = {f"m{n}": Subscription(frozenset(map(TopicId, rng.sample(range(topics), 5)))) for n in range(300)}
    partitions = make_partitions(*(10 for _ in range(topics)))
    made = Assignor(members, partitions, {})
    made.run()
    assert made.steps < 20 * (300 * 5 + 600) * 30
