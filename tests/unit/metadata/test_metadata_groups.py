"""What commands do to consumer groups: members, partitions, epochs, and everything that is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata_commands import commands
from metadata_world import (
    NOW_MS,
    create_topic,
    entry,
    formed_state,
    init_cluster,
    log,
    refused,
    register_broker,
    register_consumer,
    select,
)

from quiver.broker.client_checks import check_consumer
from quiver.features import LEVEL_MAX
from quiver.groups import limits, machine
from quiver.groups.settings import QueueSettings
from quiver.manager.describe_groups import describe_assignment
from quiver.metadata import groups, open_database
from quiver.metadata.apply import apply
from quiver.metadata.commands import (
    AddPartitionsCommand,
    AnyCommand,
    CommandDone,
    CommandResult,
    DeleteTopicCommand,
    ExpireClients,
    ForgetClientCommand,
    PurgeTopic,
    RecoverCluster,
    RegisterConsumerResult,
    RestartGroupResult,
    SilentClient,
    encode_command,
)
from quiver.metadata.database import Transaction
from quiver.metadata.group_commands import (
    AssignPartitions,
    ConfigureGroupCommand,
    DeleteGroupCommand,
    GroupCommand,
    GroupMember,
    GroupPartition,
    JoinGroupCommand,
    PartitionGrant,
    PartitionRelease,
    ReleasePartitions,
    RemoveMembers,
    RestartGroupCommand,
)
from quiver.metadata.rows import ALL_PARTITIONS, EntityKind, GroupKind, GroupMemberRow, GroupRow, StartFrom
from quiver.metadata.state import LogPosition, MetadataState
from quiver.metadata.state_machine import MetadataStateMachine
from quiver.model import SESSION_BITS, ConsumerId, Index, NodeId, PartitionId, Term, TopicId

GROUP = ConsumerId(1)
LOGS = TopicId(1)


class World:
    """The metadata of a cluster with one topic of two partitions; every command has its own index."""

    def __init__(self) -> None:
        self.state = MetadataState()
        self.do(init_cluster(feature_level=LEVEL_MAX))
        for number in (1, 2, 3):
            self.do(register_broker(number))
        self.do(create_topic())

    def do(self, command: AnyCommand) -> CommandResult:
        outcome = apply(self.state, command)
        assert outcome.refusal is None, outcome.refusal
        assert outcome.result is not None
        self.state.advance_to(LogPosition(Index(self.state.position.index + 1), Term(1)))
        return outcome.result

    def join(self, member_id: str, **fields: Any) -> CommandResult:
        return self.do(join(member_id, **fields))

    def assign(self, *grants: tuple[str, int], revokes: tuple[int, ...] = (), **fields: Any) -> CommandResult:
        return self.do(assign(self.group.version, *grants, revokes=revokes, **fields))

    @property
    def group(self) -> GroupRow:
        return self.state.view().consumer_groups[GROUP]

    def member(self, member_id: str) -> GroupMemberRow:
        return self.state.view().group_members[GROUP, member_id]

    def owned(self) -> dict[str, list[int]]:
        members = self.state.view().members_of(GROUP)
        return {row.member_id: [int(one.partition_id) for one in row.owned] for row in members}

    def release(self, member_id: str, partition: int, epoch: int) -> CommandResult:
        one = PartitionRelease(GROUP, member_id, LOGS, PartitionId(partition), epoch)
        return self.do(ReleasePartitions(now_ms=NOW_MS, releases=(one,)))


def join(member_id: str = "m1", **fields: Any) -> JoinGroupCommand:
    given: dict[str, Any] = {"now_ms": NOW_MS, "group": "billing", "topics": (select("logs"),)} | fields
    return JoinGroupCommand(member_id=member_id, **given)


def assign(version: int, *grants: tuple[str, int], revokes: tuple[int, ...] = (), **fields: Any) -> AssignPartitions:
    given: dict[str, Any] = {"now_ms": NOW_MS, "group_id": GROUP} | fields
    return AssignPartitions(
        version=version,
        grants=tuple(PartitionGrant(member, LOGS, PartitionId(number)) for member, number in grants),
        revokes=tuple(GroupPartition(LOGS, PartitionId(number)) for number in revokes),
        **given,
    )


def remove(*names: str, reason: str = "left") -> RemoveMembers:
    return RemoveMembers(now_ms=NOW_MS, members=tuple(GroupMember(GROUP, name) for name in names), reason=reason)


@pytest.fixture
def world() -> World:
    return World()


# -- members -----------------------------------------------------------------------------------------


def test_first_member_creates_the_group_and_its_consumer(world: World) -> None:
    assert world.join("m1") == RegisterConsumerResult(GROUP)
    assert world.join("m2") == RegisterConsumerResult(GROUP)
    consumer = world.state.view().consumer("billing")
    assert consumer is not None
    assert [one.topic_id for one in consumer.registrations] == [LOGS]
    assert world.owned() == {"m1": [], "m2": []}
    assert world.group.kind is GroupKind.STREAM


def test_groups_need_the_feature_level_that_knows_them() -> None:
    assert refused(formed_state(), join()) == "feature_level"


def test_named_consumer_becomes_a_group_with_the_same_id(world: World) -> None:
    world.do(register_consumer(request_id="billing"))
    assert world.join("m1") == RegisterConsumerResult(GROUP)


def test_join_is_idempotent_and_changes_the_subscription(world: World) -> None:
    world.do(create_topic("audit"))
    world.join("m1")
    world.assign(("m1", 0))
    before = world.member("m1")
    world.join("m1", now_ms=NOW_MS + 5)
    assert world.member("m1") == before
    world.join("m1", topics=(select("audit"), select("logs")))
    after = world.member("m1")
    assert after.topics == ("audit", "logs")
    assert (after.owned, after.joined_ms, after.version) == (before.owned, before.joined_ms, before.version)


def test_pattern_needs_no_topic_and_topics_are_registered_when_they_are_assigned(world: World) -> None:
    world.join("m1", topics=(), pattern="l*", start=StartFrom.LATEST, now_ms=NOW_MS + 1)
    consumer = world.state.view().consumer("billing")
    assert consumer is not None
    assert consumer.registrations == ()
    world.do(create_topic("later", now_ms=NOW_MS + 1))
    world.assign(("m1", 0))
    later = PartitionGrant("m1", TopicId(2), PartitionId(0))
    world.do(AssignPartitions(now_ms=NOW_MS, group_id=GROUP, version=world.group.version, grants=(later,)))
    consumer = world.state.view().consumer("billing")
    assert consumer is not None
    starts = [(one.topic_id, one.start) for one in consumer.registrations]
    assert starts == [(LOGS, StartFrom.LATEST), (TopicId(2), StartFrom.EARLIEST)], "a later topic from its beginning"


def test_member_that_leaves_or_expires_frees_its_partitions(world: World) -> None:
    world.join("m1")
    world.join("m2", client="host:7")
    world.assign(("m1", 0), ("m2", 1))
    version = world.group.version
    assert world.do(remove("m2", "ghost", reason="expired")) == CommandDone(2)
    assert world.owned() == {"m1": [0]}
    assert world.group.version == version + 1
    assert world.group.reason == "member host:7 expired"
    assert world.do(remove("m2")) == CommandDone(0)
    world.assign(("m1", 1))
    assert world.owned() == {"m1": [0, 1]}


def test_instance_that_comes_back_gets_its_partitions_under_a_new_epoch_and_nobody_else_moves(world: World) -> None:
    world.join("a1", instance="a")
    world.join("b1", instance="b")
    world.assign(("a1", 0), ("b1", 1))
    other, old = world.member("b1"), world.member("a1")
    version = world.group.version
    world.join("a2", instance="a")
    new = world.member("a2")
    assert world.owned() == {"a2": [0], "b1": [1]}
    assert new.owned[0].epoch > old.owned[0].epoch
    assert new.owned[0].epoch == world.state.position.index << SESSION_BITS
    assert new.replaces == "a1"
    assert world.member("b1") == other
    assert world.group.version == version + 1
    world.join("a2", instance="a")
    assert world.member("a2") == new


def test_what_a_replaced_instance_was_asked_to_release_is_free(world: World) -> None:
    world.join("a1", instance="a")
    world.assign(("a1", 0), ("a1", 1))
    world.assign(revokes=(1,))
    world.join("a2", instance="a")
    assert world.owned() == {"a2": [0]}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"group": ""}, "bad_group"),
        ({"member_id": ""}, "bad_group"),
        ({"topics": (select("logs", 0),)}, "bad_group"),
        ({"topics": ()}, "no_topics"),
        ({"topics": (select("nothing"),)}, "unknown_topic"),
        ({"session_timeout_ms": 999}, "bad_group"),
        ({"session_timeout_ms": 3_600_001}, "bad_group"),
        ({"group_kind": GroupKind.QUEUE}, "group_kind"),
        ({"topics": (select("logs"),) * 1_001}, "bad_group"),
        ({"principal": "user:bob"}, "not_owner"),
    ],
)
def test_bad_join_is_refused(world: World, fields: dict[str, Any], code: str) -> None:
    world.join("m1", principal="user:alice")
    given = {"principal": "user:alice"} | fields
    member_id = given.pop("member_id", "m2")
    assert refused(world.state, join(member_id, **given)) == code


def test_numbers_of_groups_members_and_assignments_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.join("m1")
    monkeypatch.setattr(groups, "MEMBERS_MAX", 1)
    assert refused(world.state, join("m2")) == "too_many_members"
    monkeypatch.setattr(groups, "MEMBERS_MAX", 10)
    monkeypatch.setattr(groups, "MEMBERS_TOTAL_MAX", 1)
    assert refused(world.state, join("m2")) == "too_many_members"
    monkeypatch.setattr(groups, "GROUPS_MAX", 1)
    assert refused(world.state, join("m2", group="other")) == "too_many_groups"
    monkeypatch.setattr(groups, "ASSIGNED_MAX", 1)
    assert refused(world.state, assign(0, ("m1", 0), ("m1", 1))) == "too_many_assignments"
    monkeypatch.setattr(groups, "STEPS_MAX", 1)
    assert refused(world.state, assign(0, ("m1", 0), ("m1", 1))) == "bad_assignment"
    assert limits.MEMBERS_MAX >= 1_000


# -- partitions --------------------------------------------------------------------------------------


def test_grant_has_the_epoch_of_its_index_and_a_second_one_a_higher(world: World) -> None:
    world.join("m1")
    world.assign(("m1", 0), reason="because")
    index = world.state.position.index
    assert world.member("m1").owned[0].epoch == machine.epoch_at(index)
    assert world.member("m1").version == index
    assert (world.group.rebalances, world.group.last_rebalance_ms, world.group.reason) == (1, NOW_MS, "because")
    world.release("m1", 0, machine.epoch_at(index))
    assert world.owned() == {"m1": []}
    world.assign(("m1", 0))
    assert world.member("m1").owned[0].epoch > machine.epoch_at(index)


def test_partition_is_taken_before_it_is_given(world: World) -> None:
    world.join("m1")
    world.join("m2")
    world.assign(("m1", 0), ("m1", 1))
    epoch = world.member("m1").owned[1].epoch
    world.assign(revokes=(1,))
    assert [one.is_revoking for one in world.member("m1").owned] == [False, True]
    assert refused(world.state, assign(world.group.version, ("m2", 1))) == "bad_assignment"
    version = world.group.version
    assert world.release("m1", 1, epoch - 1) == CommandDone(0)
    assert world.release("m2", 1, epoch) == CommandDone(0)
    assert world.release("m1", 1, epoch) == CommandDone(1)
    assert world.group.version == version, "what is released does not make other plans stale"
    world.assign(("m2", 1))
    assert world.owned() == {"m1": [0], "m2": [1]}
    assert world.member("m2").owned[0].epoch > epoch


def test_stale_and_impossible_assignments_are_refused_as_a_whole(world: World) -> None:
    world.join("m1")
    stale = world.group.version
    world.assign(("m1", 0))
    assert refused(world.state, assign(stale, ("m1", 1))) == "group_changed"
    version = world.group.version
    for wrong in (
        assign(version, ("m1", 1), ("ghost", 1)),
        assign(version, ("m1", 1), ("m1", 1)),
        assign(version, ("m1", 1), ("m1", 2)),
        assign(version, ("m1", 1), ("m1", 0)),
        assign(version, ("m1", 1), revokes=(5,)),
        assign(version, ("m1", 1), drops=(GroupPartition(LOGS, PartitionId(0)),)),
        assign(version, ("m1", 1), drops=(GroupPartition(LOGS, PartitionId(7)),)),
    ):
        assert refused(world.state, wrong) == "bad_assignment"
    assert refused(world.state, assign(version, group_id=ConsumerId(9))) == "unknown_group"


def test_join_does_not_make_a_plan_stale_and_a_leave_does(world: World) -> None:
    world.join("m1")
    version = world.group.version
    world.join("m2")
    world.do(assign(version, ("m1", 0)))
    version = world.group.version
    world.do(remove("m2"))
    assert refused(world.state, assign(version, ("m1", 1))) == "group_changed"


def test_topic_that_vanishes_is_dropped_and_one_that_grows_is_given(world: World) -> None:
    world.join("m1")
    world.assign(("m1", 0), ("m1", 1))
    world.do(AddPartitionsCommand(now_ms=NOW_MS, topic="logs", partitions=3, assignments=((NodeId(1),),)))
    world.assign(("m1", 2))
    world.do(DeleteTopicCommand(now_ms=NOW_MS, topic="logs", purge_ms=NOW_MS))
    gone = tuple(GroupPartition(LOGS, PartitionId(number)) for number in (0, 1))
    world.assign(drops=gone)
    assert world.owned() == {"m1": [2]}
    world.do(PurgeTopic(now_ms=NOW_MS, topic_id=LOGS))
    assert world.owned() == {"m1": []}
    assert world.state.assigned == 0


def test_group_that_starts_at_the_end_reads_partitions_that_are_added_from_the_beginning(world: World) -> None:
    world.join("m1", start=StartFrom.LATEST)
    world.do(register_consumer(request_id="plain", start=StartFrom.LATEST))
    world.do(AddPartitionsCommand(now_ms=NOW_MS, topic="logs", partitions=3, assignments=((NodeId(1),),)))
    view = world.state.view()
    consumer, plain = view.consumer("billing"), view.consumer("plain")
    assert consumer is not None
    assert plain is not None
    starts = [(one.partition_id, one.start) for one in consumer.registrations]
    assert starts == [(ALL_PARTITIONS, StartFrom.LATEST), (PartitionId(2), StartFrom.EARLIEST)]
    assert len(plain.registrations) == 1
    world.assign(("m1", 0), ("m1", 2))
    found = describe_assignment(world.state.view(), world.member("m1"))
    assert [(one.partition_id, one.start) for one in found.owned] == [(0, "latest"), (2, "earliest")]
    assert check_consumer(view, GROUP, key=(LOGS, PartitionId(2))).start is StartFrom.EARLIEST
    assert check_consumer(view, GROUP, key=(LOGS, PartitionId(1))).start is StartFrom.LATEST


# -- groups ------------------------------------------------------------------------------------------


def test_plain_consumer_of_a_group_with_members_is_refused_and_later_allowed(world: World) -> None:
    world.join("m1")
    assert refused(world.state, register_consumer(request_id="billing")) == "group_active"
    assert refused(world.state, register_consumer(consumer_id=GROUP)) == "group_active"
    assert refused(world.state, ForgetClientCommand(now_ms=NOW_MS, kind=EntityKind.CONSUMER, id=1)) == "group_active"
    world.do(remove("m1"))
    assert world.do(register_consumer(request_id="billing")) == RegisterConsumerResult(GROUP)


def test_group_expires_with_its_consumer_but_not_while_it_has_members(world: World) -> None:
    world.join("m1")
    expire = ExpireClients(now_ms=NOW_MS, clients=(SilentClient(EntityKind.CONSUMER, 1, NOW_MS),))
    assert world.do(expire) == CommandDone(0)
    world.do(remove("m1"))
    world.do(expire)
    assert world.state.view().consumer_groups == {}
    assert world.state.view().consumer("billing") is None


def test_group_with_members_is_deleted_only_by_force(world: World) -> None:
    world.join("m1")
    world.assign(("m1", 0))
    delete = DeleteGroupCommand(now_ms=NOW_MS, group="billing")
    assert refused(world.state, delete) == "group_active"
    world.do(msgspec.structs.replace(delete, is_forced=True))
    view = world.state.view()
    assert (view.consumer("billing"), view.consumer_groups, view.group_members) == (None, {}, {})
    assert world.state.assigned == 0
    assert refused(world.state, delete) == "unknown_group"
    assert world.join("m1") == RegisterConsumerResult(ConsumerId(2)), "an id is never reused"


def test_restart_takes_everything_and_returns_a_session_above_all_epochs(world: World) -> None:
    world.join("m1")
    world.assign(("m1", 0))
    epoch = world.member("m1").owned[0].epoch
    found = world.do(RestartGroupCommand(now_ms=NOW_MS, group="billing", pause_ms=5_000))
    assert isinstance(found, RestartGroupResult)
    assert found.session > epoch
    assert world.owned() == {"m1": []}
    assert (world.group.pause_ms, world.group.reason) == (5_000, "restarted")
    world.do(RestartGroupCommand(now_ms=NOW_MS, group="billing"))
    assert world.group.pause_ms == 0
    world.assign(("m1", 0))
    assert world.member("m1").owned[0].epoch > found.session
    too_long = RestartGroupCommand(now_ms=NOW_MS, group="billing", pause_ms=600_001)
    assert refused(world.state, too_long) == "bad_group"
    assert refused(world.state, RestartGroupCommand(now_ms=NOW_MS, group="nobody")) == "unknown_group"


def test_recovery_gives_all_partitions_anew_above_the_epochs_of_lost_commands(world: World) -> None:
    world.join("m1")
    world.assign(("m1", 0))
    epoch, version = world.member("m1").owned[0].epoch, world.group.version
    world.do(RecoverCluster(now_ms=NOW_MS, lost=(NodeId(3),)))
    assert world.owned() == {"m1": []}
    assert world.group.version == version + 1
    world.assign(("m1", 0))
    assert world.member("m1").owned[0].epoch - epoch > 10**6 << SESSION_BITS
    assert MetadataState.decode(world.state.view().encode()).counters == world.state.counters


def test_restart_of_a_plain_consumer_only_returns_a_session(world: World) -> None:
    world.do(register_consumer(request_id="plain"))
    found = world.do(RestartGroupCommand(now_ms=NOW_MS, group="plain"))
    assert found == RestartGroupResult(GROUP, world.state.position.index << SESSION_BITS)
    assert world.state.view().consumer_groups == {}


def test_queue_has_settings_and_no_members(world: World) -> None:
    queue: dict[str, Any] = {"group": "workers", "group_kind": GroupKind.QUEUE}
    assert world.join("", **queue) == RegisterConsumerResult(GROUP)
    assert world.state.view().group_members == {}
    lease = QueueSettings(lease_ms=5, backoff_multiplier=1.5)
    world.do(ConfigureGroupCommand(now_ms=NOW_MS, group="workers", settings=lease))
    assert world.group.settings == lease
    assert refused(world.state, join("m1", group="workers")) == "group_kind"
    assert refused(world.state, register_consumer(request_id="workers")) == "group_kind"
    assert refused(world.state, assign(0, group_id=GROUP)) == "unknown_group"


def test_configure_creates_a_group_with_topics_and_refuses_settings_of_a_stream(world: World) -> None:
    settings_ = QueueSettings(max_attempts=2)
    unknown = ConfigureGroupCommand(now_ms=NOW_MS, group="workers", settings=settings_)
    assert refused(world.state, unknown) == "unknown_group"
    created = msgspec.structs.replace(unknown, topics=(select("logs"),), group_kind=GroupKind.QUEUE)
    assert world.do(created) == RegisterConsumerResult(GROUP)
    assert world.group.settings == settings_
    world.join("m1", group="stream")
    assert refused(world.state, msgspec.structs.replace(unknown, group="stream")) == "group_kind"


def test_groups_are_in_snapshots_and_in_sql(world: World) -> None:
    world.join("m1", instance="a", rack="r", pattern="x,*", client="host", principal="user:alice")
    world.join("m2", principal="user:alice")
    world.join("", group="jobs", group_kind=GroupKind.QUEUE)
    settings_ = QueueSettings(order="key", backoff_multiplier=1.1)
    world.do(ConfigureGroupCommand(now_ms=NOW_MS, group="jobs", settings=settings_))
    world.assign(("m1", 0), ("m2", 1))
    world.assign(revokes=(1,))
    view = world.state.view()
    restored = MetadataState.decode(view.encode())
    assert restored.view().digest() == view.digest()
    assert (restored.members, restored.assigned) == (world.state.members, 2)
    database = open_database("sqlite://")
    database.prepare()
    changes: dict[Any, Any] = {(row.table, row.key): row for row in view.rows()}
    written = Transaction(before=LogPosition(), after=view.position, counters=view.counters, changes=changes, base=None)
    database.write(written)
    assert database.load().view().digest() == view.digest()
    database.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(commands(GroupCommand), max_size=25))
def test_whatever_the_commands_a_partition_has_one_owner_and_rising_epochs(found: list[AnyCommand]) -> None:
    formed: list[AnyCommand] = [init_cluster(feature_level=LEVEL_MAX), *map(register_broker, (1, 2, 3)), create_topic()]
    formed += [join("m1", group="r1"), join("m2", group="r1"), assign(0, ("m1", 0), ("m2", 1))]
    state_machine = MetadataStateMachine(MetadataState(), on_failure=lambda _: None)
    state_machine.apply(log(*formed))
    highest: dict[tuple[int, int, int], int] = {}
    for number, command in enumerate(found, start=len(formed) + 1):
        state_machine.apply([entry(encode_command(command), number)])
        assert state_machine.defects == 0
        view = state_machine.state.view()
        owned = [(row.group_id, *one.key) for row in view.group_members.values() for one in row.owned]
        assert len(set(owned)) == len(owned) == state_machine.state.assigned
        for row in view.group_members.values():
            assert row.group_id in view.consumer_groups
            assert row.group_id in view.consumers
            for one in row.owned:
                key = (row.group_id, *one.key)
                assert one.epoch >= highest.get(key, 0)
                highest[key] = one.epoch
