"""The next steps of a group: taken before given, one owner at most, and an end to it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quiver.groups.assignment import AssignablePartition, PartitionKey, Subscription
from quiver.groups.machine import GroupSteps, PartitionOwner, epoch_at, is_free, plan_steps
from quiver.model import SESSION_BITS, Index, PartitionId, TopicId

TOPICS = 3


class Group:
    """A group whose steps are carried out at once, and whose members release when they are told to."""

    def __init__(self) -> None:
        self.members: dict[str, Subscription] = {}
        self.counts = [4, 3, 0]
        self.owners: dict[PartitionKey, PartitionOwner] = {}

    def partitions(self) -> list[AssignablePartition]:
        return [
            AssignablePartition((TopicId(topic), PartitionId(number)))
            for topic, count in enumerate(self.counts)
            for number in range(count)
        ]

    def plan(self) -> GroupSteps:
        return plan_steps(self.members, self.partitions(), self.owners)

    def step(self) -> GroupSteps:
        steps = self.plan()
        for key in steps.drops:
            del self.owners[key]
        for key in steps.revokes:
            self.owners[key] = PartitionOwner(self.owners[key].member, is_revoking=True)
        for key, name in steps.grants:
            assert is_free(self.owners.get(key)), "taken before given"
            self.owners[key] = PartitionOwner(name)
        return steps

    def release(self, key: PartitionKey) -> None:
        assert self.owners.pop(key).is_revoking

    def leave(self, name: str) -> None:
        del self.members[name]
        self.owners = {key: owner for key, owner in self.owners.items() if owner.member != name}

    def settle(self) -> int:
        """Let everybody do what they should until nothing is left; return in how many rounds."""
        for rounds in range(10):
            steps = self.step()
            revoking = [key for key, owner in self.owners.items() if owner.is_revoking]
            for key in revoking:
                self.release(key)
            if steps.is_empty and not revoking:
                return rounds
        raise AssertionError("the group does not settle")


def subscribe(*topics: int) -> Subscription:
    return Subscription(frozenset(map(TopicId, topics)))


class GroupLife(RuleBasedStateMachine):
    """Members come, go, change their minds; topics grow and vanish; steps and releases come in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.group = Group()

    @rule(name=st.sampled_from("abcde"), topics=st.sets(st.integers(0, TOPICS - 1)))
    def join(self, name: str, topics: set[int]) -> None:
        self.group.members[name] = subscribe(*topics)

    @rule(name=st.sampled_from("abcde"))
    def leave(self, name: str) -> None:
        if name in self.group.members:
            self.group.leave(name)

    @rule(topic=st.integers(0, TOPICS - 1), count=st.integers(0, 5))
    def change_topic(self, topic: int, count: int) -> None:
        self.group.counts[topic] = 0 if count == 0 else max(count, self.group.counts[topic])

    @rule()
    def step(self) -> None:
        self.group.step()

    @rule(number=st.integers(0, 20))
    def release(self, number: int) -> None:
        revoking = sorted(key for key, owner in self.group.owners.items() if owner.is_revoking)
        if revoking:
            self.group.release(revoking[number % len(revoking)])

    @invariant()
    def owners_are_members(self) -> None:
        assert all(owner.member in self.group.members for owner in self.group.owners.values())

    def teardown(self) -> None:
        group = self.group
        assert group.settle() <= 4
        owned = {key: owner.member for key, owner in group.owners.items()}
        wanted = {topic for member in group.members.values() for topic in member.topics}
        assert set(owned) == {one.key for one in group.partitions() if one.key[0] in wanted}
        counts = Counter(owned.values())
        for (topic, _), owner in owned.items():
            for name, member in group.members.items():
                assert topic not in member.topics or counts[name] >= counts[owner] - 1


TestGroupLife = GroupLife.TestCase
TestGroupLife.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_member_that_joins_gets_partitions_only_when_they_are_released() -> None:
    group = Group()
    group.members["a"] = subscribe(0)
    group.step()
    group.members["b"] = subscribe(0)
    steps = group.step()
    assert steps.grants == ()
    assert len(steps.revokes) == 2
    assert group.step().is_empty, "b waits for a"
    group.release(steps.revokes[0])
    assert group.step().grants == ((steps.revokes[0], "b"),)


def test_member_that_leaves_while_others_release_for_it_moves_nothing_else() -> None:
    group = Group()
    group.members["a"] = subscribe(0)
    group.step()
    group.members["b"] = subscribe(0)
    revoked = group.step().revokes
    group.leave("b")
    assert group.step().is_empty
    for key in revoked:
        group.release(key)
    assert {name for _, name in group.step().grants} == {"a"}
    assert group.settle() == 0


def test_topic_that_vanishes_is_dropped_and_one_that_is_no_longer_wanted_is_revoked() -> None:
    group = Group()
    group.members["a"] = subscribe(0, 1)
    group.settle()
    group.counts[0] = 0
    group.members["a"] = subscribe(0)
    steps = group.step()
    assert {key[0] for key in steps.drops} == {0}
    assert {key[0] for key in steps.revokes} == {1}


@given(st.integers(0, 1 << 40), st.integers(0, (1 << SESSION_BITS) - 1))
def test_epochs_are_higher_than_all_sessions_of_earlier_indexes(index: int, low_bits: int) -> None:
    assert epoch_at(Index(index + 1)) > index << SESSION_BITS | low_bits
