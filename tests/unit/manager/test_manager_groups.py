"""Groups on the primary: members come, go, crash, pause; topics change; the primary fails; each moves the least."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import msgspec
import pytest
from group_world import GroupWorld, work
from manager_world import WorkingManager, World, run

from quiver.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    OutcomeUnknownError,
    OutOfRangeError,
    QuiverError,
    RequestError,
    UnavailableError,
)
from quiver.groups.machine import GroupSteps
from quiver.manager import group_coordinator
from quiver.manager.group_coordinator import BATCH_MAX, CommandBatcher
from quiver.manager.group_plan import is_group_planned, is_member_planned, plan_commands, plan_group
from quiver.metadata import (
    AddPartitionsCommand,
    AssignPartitions,
    ConfigureGroupCommand,
    DeleteTopicCommand,
    GroupKind,
    GroupMember,
    GroupMemberRow,
    GroupRow,
    MetadataStore,
    NotPrimaryError,
    OwnedPartition,
    RemoveMembers,
    RestoreTopicCommand,
    TopicSelection,
)
from quiver.model import ConsumerId, NodeId, PartitionId, TopicId
from quiver.security.identity import ConnectionIdentity
from quiver.security.permissions import Grant, Permissions, ResourceKind, Verb
from quiver.security.principal import user_principal
from quiver.wire.group_messages import (
    ConfigureGroup,
    DeleteGroup,
    DescribeGroups,
    GroupHeartbeat,
    JoinGroup,
    QueueSettingsChange,
    RestartGroup,
)
from quiver.wire.messages import CreateTopicRequest, RegisterConsumerRequest, Selection
from quiver.wire.requests import Request


def test_members_share_the_partitions_and_a_join_moves_only_its_share() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=6)
        one = world.enter("one")
        await world.wait_settled(6, one)
        two = world.enter("two")
        await world.wait_settled(6, one, two)
        assert len(world.moves) == 6 + 3
        three = world.enter("three")
        await world.wait_settled(6, one, two, three)
        assert len(world.moves) == 6 + 3 + 2
        assert world.row().reason == "member three joined"
        await asyncio.sleep(10)
        assert len(world.moves) == 11, "a settled group rests"

    work(test)


def test_clean_leave_gives_the_partitions_to_others_at_once_and_pauses_no_other() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=6)
        members = [world.enter(name) for name in ("one", "two", "three")]
        await world.wait_settled(6, *members)
        before = [dict(member.owned) for member in members]
        left_s = world.loop.time()
        await members[0].leave()
        await world.wait_settled(6, *members[1:])
        assert world.loop.time() - left_s < 1
        for member, owned in zip(members[1:], before[1:], strict=True):
            assert owned.items() <= member.owned.items(), "what stays keeps its epoch"
        assert world.row().reason == "member one left"

    work(test)


def test_crashed_member_loses_its_partitions_after_its_session_timeout_and_not_before() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=4)
        one, two = world.enter("one"), world.enter("two", session_timeout_ms=1_000)
        await world.wait_settled(4, one, two)
        epochs = dict(two.owned)
        two.crash()
        crashed_s = world.loop.time()
        await world.wait_settled(4, one)
        assert 0.3 < world.loop.time() - crashed_s < 2
        assert all(one.owned[key] > epoch for key, epoch in epochs.items()), "its epochs are fenced"
        with pytest.raises(NotFoundError) as raised:
            await two.beat()
        assert raised.value.code == "unknown_member"
        assert world.row().reason == "member two expired"

    work(test)


def test_member_that_is_slow_to_release_keeps_its_partitions_while_it_lives() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=4)
        one = world.enter("one", release_s=1.5)
        await world.wait_settled(4, one)
        two = world.enter("two")
        await asyncio.sleep(1)
        assert two.owned == {}
        await world.wait_settled(4, one, two)
        assert one.joins == 1

    work(test)


def test_static_member_that_comes_back_gets_its_partitions_and_nobody_else_moves() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=6)
        members = [world.enter(f"{name}-1", instance=name) for name in ("a", "b", "c")]
        await world.wait_settled(6, *members)
        before = dict(members[0].owned)
        others = [member.changes for member in members[1:]]
        members[0].crash()
        again = world.enter("a-2", instance="a")
        await world.wait_settled(6, again, *members[1:])
        assert again.owned.keys() == before.keys()
        assert all(again.owned[key] > epoch for key, epoch in before.items())
        assert [member.changes for member in members[1:]] == others
        with pytest.raises(FencedError) as raised:
            await members[0].beat()
        assert raised.value.code == "member_replaced"

    work(test)


def test_failover_of_the_primary_moves_nothing_and_expires_nobody() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=6)
        members = [world.enter(name) for name in ("one", "two", "three")]
        await world.wait_settled(6, *members)
        changes = [member.changes for member in members]
        rebalances = world.row().rebalances
        for _ in range(2):
            primary = await world.primary()
            primary.kill()
            await world.wait(lambda: world._find_primary())
            await asyncio.sleep(3)
            primary.start()
            await asyncio.sleep(3)
        assert [member.changes for member in members] == changes
        assert [member.joins for member in members] == [1, 1, 1]
        assert world.row().rebalances == rebalances

    work(test)


def test_primary_that_was_stalled_itself_expires_nobody() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=2)
        one = world.enter("one")
        await world.wait_settled(2, one)
        coordinator = world.working(int((await world.primary()).id)).manager.groups
        one.crash()
        coordinator._liveness.ignore_stall(5_000)
        await asyncio.sleep(1)
        assert (ConsumerId(1), "one") in world.view.group_members
        await world.wait(lambda: not world.view.group_members or None)

    work(test)


def test_topics_that_grow_appear_and_vanish() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=2)
        fields = {"topics": (), "pattern": "logs*"}
        members = [world.enter(name, **fields) for name in ("one", "two")]
        await world.wait_settled(2, *members)
        more = AddPartitionsCommand(now_ms=1, topic="logs", partitions=4, assignments=((NodeId(1),), (NodeId(2),)))
        await world.submit(more)
        await world.wait_settled(4, *members)
        assert world.row().reason == "topics changed"
        await world.create("logs.web", 2)
        await world.create("other", 2)
        await world.wait_settled(6, *members)
        assert len(world.moves) == 6, "what is there does not move"
        await world.submit(DeleteTopicCommand(now_ms=1, topic="logs", purge_ms=10**15))
        await world.wait_settled(2, *members)
        await world.submit(RestoreTopicCommand(now_ms=1, topic_id=TopicId(1)))
        await world.wait_settled(6, *members)
        consumer = world.view.consumer("g")
        assert consumer is not None
        assert {one.topic_id for one in consumer.registrations} == {TopicId(1), TopicId(2)}

    work(test)


def test_pattern_matches_only_topics_that_the_member_may_read() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=2)
        await world.create("quiver.audit", 1)
        one = world.enter("one", topics=(), pattern="*")
        await world.wait_settled(2, one)
        await world.create("secret", 2)
        await world.wait_settled(4, one)
        coordinator = world.working(int((await world.primary()).id)).manager.groups
        row = world.view.group_members[ConsumerId(1), "one"]
        user = ConnectionIdentity(user_principal("bob"))
        grant = Grant(subject="user:bob", verb=Verb.READ, kind=ResourceKind.TOPIC, name="logs")
        user.permissions = Permissions(user.principal, [grant])
        one.crash()
        coordinator.handle_joined(row.key, user)
        assert [coordinator._may_read(world.view, row, id_) for id_ in sorted(world.view.topics)] == [
            True,
            False,
            False,
        ]
        await world.create("logs.more", 1)  # plans again

        def revoking() -> set[TopicId]:
            return {part.topic_id for part in world.view.members_of(ConsumerId(1))[0].owned if part.is_revoking}

        await world.wait(lambda: revoking() == {TopicId(3)} or None)

    work(test)


def test_subscriptions_that_differ_and_change() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=2, audit=4)
        one = world.enter("one", topics=("logs",))
        two = world.enter("two", topics=("logs", "audit"))
        await world.wait(lambda: (len(one.owned), len(two.owned)) == (2, 4) or None)
        again = world.enter("one-b", topics=("audit",))
        await world.wait(lambda: (len(one.owned), len(two.owned), len(again.owned)) == (2, 2, 2) or None)

    work(test)


def test_many_join_and_leave_at_once_and_it_settles() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=30)
        members = [world.enter(f"m{number:02}") for number in range(20)]
        await world.wait_settled(30, *members)
        assert world.row().rebalances < 20, "joins are gathered"
        for member in members[::2]:
            if len(member.name) % 2:
                member.crash()
            else:
                await member.leave()
        await world.wait_settled(30, *members[1::2])
        owners = Counter(key for member in members[1::2] for key in member.owned)
        assert max(owners.values()) == 1

    work(test)


def test_group_is_restarted_with_a_pause_and_members_get_higher_epochs() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=4)
        one, two = world.enter("one"), world.enter("two")
        await world.wait_settled(4, one, two)
        restarted = await world.ask(RestartGroup(group="g", pause_ms=60_000))
        await asyncio.sleep(2)
        assert (one.owned, two.owned) == ({}, {})
        assert (await world.describe()).state == "paused"
        await world.ask(RestartGroup(group="g"))
        await world.wait_settled(4, one, two)
        assert min((*one.owned.values(), *two.owned.values())) > restarted.session
        await world.ask(RestartGroup(group="g", pause_ms=1_000))
        await asyncio.sleep(0.5)
        assert one.owned == {}
        await world.wait_settled(4, one, two)  # a pause ends by itself, too
        assert [one.joins, two.joins] == [1, 1]
        with pytest.raises(NotFoundError):
            await world.ask(RestartGroup(group="nobody"))

    work(test)


def test_group_in_use_is_neither_deleted_nor_taken_by_a_plain_consumer() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=2)
        one = world.enter("one")
        await world.wait_settled(2, one)
        plain = RegisterConsumerRequest(topics=(Selection(topic="logs"),), request_id="g")
        requests: tuple[Request[Any], ...] = (plain, DeleteGroup(group="g"))
        for request in requests:
            with pytest.raises(ConflictError) as raised:
                await world.ask(request)
            assert raised.value.code == "group_active"
            assert "not done" in raised.value.message
        await world.ask(DeleteGroup(group="g", is_forced=True))
        await world.wait(lambda: one.joins == 2 or None)
        await world.wait_settled(2, one)

    work(test)


def test_groups_are_described() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=3)
        await world.ask(RegisterConsumerRequest(topics=(Selection(topic="logs"),), request_id="plain"))
        one = world.enter("one", rack="r", client="host:1", instance="i", group="g")
        await world.wait_settled(3, one)
        index = world.view.index
        described = await world.ask(DescribeGroups(known_index=index))
        assert described.index >= index  # whoever asks a leader next names it
        found = described.groups
        assert [(info.group, info.state, info.member_count) for info in found] == [
            ("g", "stable", 1),
            ("plain", "empty", 0),
        ]
        info = found[0]
        assert (info.partitions, info.unassigned, info.rebalances > 0, info.topics) == (3, 0, True, ("logs",))
        member = info.members[0]
        assert (member.rack, member.client, member.instance) == ("r", "host:1", "i")
        assert {(part.topic, part.partition_id): part.epoch for part in member.owned} == {
            ("logs", key[1]): epoch for key, epoch in one.owned.items()
        }
        assert (await world.ask(DescribeGroups(groups=("g", "none"), with_members=False))).groups[0].members == ()
        status = world.working(int((await world.primary()).id)).manager.status().groups
        assert status is not None
        assert (status.groups, status.members, status.assigned, status.unassigned) == (1, 1, 3, 0)
        assert dict(status.rebalances)["joined"] >= 1
        (largest,) = status.largest
        assert (largest.group, largest.members, largest.unassigned) == ("g", 1, 0)
        assert (largest.version, largest.rebalances) == (info.version, info.rebalances)
        assert largest.last_rebalance_ms == info.last_rebalance_ms > 0

    work(test)


def test_queues_have_settings_and_no_members() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=2)
        joined = await world.ask(JoinGroup(group="q", topics=("logs",), kind="queue"))
        assert joined.heartbeat_ms == 0
        settings = QueueSettingsChange(lease_ms=5_000, order="key")
        configured = await world.ask(ConfigureGroup(group="q", settings=settings))
        assert configured.group_id == joined.group_id
        configured = await world.ask(ConfigureGroup(group="q", settings=QueueSettingsChange(max_attempts=2)))
        info = (await world.ask(DescribeGroups(groups=("q",), known_index=configured.index))).groups[0]
        assert info.settings is not None
        assert (info.settings.lease_ms, info.settings.order, info.settings.max_attempts) == (5_000, "key", 2)
        with pytest.raises(OutOfRangeError) as raised:
            await world.ask(ConfigureGroup(group="q", settings=QueueSettingsChange(in_flight_max=0)))
        assert raised.value.code == "bad_group"
        with pytest.raises(ConflictError):
            await world.ask(JoinGroup(group="q", topics=("logs",), member_id="m"))

    work(test)


def test_queue_does_not_write_dead_letters_into_what_is_anothers() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=2, **{"logs.a_b.dead": 1})
        primary = world.working(int((await world.primary()).id))
        assert await ask_as("bob", primary, "a/b") == "not_allowed"
        assert await ask_as("bob", primary, "a/b", Verb.WRITE) == ""
        assert await ask_as("bob", primary, "other") == ""
        await world.submit(ConfigureGroupCommand(now_ms=1, group="stream", topics=(TopicSelection("logs"),)))
        await world.create("logs.stream.dead", 1)
        stream = ConfigureGroup(group="stream", kind="stream", topics=("logs",))
        assert await ask_as("bob", primary, "stream", request=stream) == ""  # it has no dead letters

    work(test)


def test_queue_keeps_the_topic_that_was_made_for_its_dead_letters() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=2, more=2)
        primary = world.working(int((await world.primary()).id))
        assert await ask_as("bob", primary, "a_b") == ""
        group = world.view.consumer("a_b")
        assert group is not None
        assert group.owner == "user:bob"
        made = CreateTopicRequest(
            topic="logs.a_b.dead", request_id=f"quiver-dead/{group.consumer_id}/1/1", owner="user:bob"
        )
        await world.ask(made)
        row = await world.wait(lambda: world.view.topic("logs.a_b.dead"))
        assert row.owner == "user:bob"
        more = JoinGroup(group="a_b", topics=("logs", "more"), kind="queue")
        assert await ask_as("bob", primary, "a_b", request=more) == ""
        assert await ask_as("bob", primary, "a/b") == "", "another queue of the same owner"
        assert await ask_as("eve", primary, "a b") == "not_allowed"
        graves = ConfigureGroup(group="a_b", settings=QueueSettingsChange(dead_letter_topic="graves"))
        assert await ask_as("bob", primary, "a_b", request=graves) == ""
        await world.create("more.a_b.dead", 1)
        default = ConfigureGroup(group="a_b", settings=QueueSettingsChange(dead_letter_topic=""))
        assert await ask_as("bob", primary, "a_b", request=default) == "not_allowed"

    work(test)


async def ask_as(
    user: str, primary: WorkingManager, group: str, *verbs: Verb, request: JoinGroup | ConfigureGroup | None = None
) -> str:
    """Open a queue of `logs`, or send another request, for a user with verbs on logs; return why it was refused."""
    identity = ConnectionIdentity(user_principal(user))
    grants = [
        Grant(subject=f"user:{user}", verb=verb, kind=ResourceKind.TOPIC, name="logs", is_prefix=True) for verb in verbs
    ]
    identity.permissions = Permissions(identity.principal, grants)
    asked = request or JoinGroup(group=group, topics=("logs",), kind="queue")
    try:
        await primary.admin._groups.carry_out(asked, identity, primary.manager.groups)
    except QuiverError as error:
        return error.code
    return ""


def test_dead_letters_have_a_topic_that_the_queue_does_not_read() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=2, other=2)
        for name in ("logs", "a b"):
            settings = QueueSettingsChange(dead_letter_topic=name)
            with pytest.raises(OutOfRangeError, match="dead_letter_topic"):
                await world.ask(ConfigureGroup(group="q", kind="queue", topics=("logs",), settings=settings))
        assert world.view.consumer("q") is None
        settings = QueueSettingsChange(dead_letter_topic="other")
        await world.ask(ConfigureGroup(group="q", kind="queue", topics=("logs",), settings=settings))
        requests: tuple[Request[Any], ...] = (
            JoinGroup(group="q", topics=("other",), kind="queue"),
            ConfigureGroup(group="q", topics=("other",)),
            ConfigureGroup(group="q", settings=QueueSettingsChange(dead_letter_topic="logs")),
        )
        for request in requests:
            with pytest.raises(OutOfRangeError, match="dead_letter_topic"):
                await world.ask(request)

    work(test)


def test_deleted_topic_is_not_among_those_of_a_group_and_another_may_have_its_name() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=2, other=2)
        await world.ask(JoinGroup(group="g", topics=("logs", "other"), kind="queue"))
        await world.submit(DeleteTopicCommand(now_ms=1, topic="logs", purge_ms=10**15))
        assert (await world.describe()).topics == ("other",)
        await world.create("logs", 1)
        assert (await world.describe()).topics == ("other",), "the new topic has no registration yet"
        await world.ask(JoinGroup(group="g", topics=("logs",), kind="queue"))
        assert (await world.describe()).topics == ("logs", "other")

    work(test)


def test_bad_joins_are_refused() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=2)
        for request in (
            JoinGroup(group="", topics=("logs",), member_id="m"),
            JoinGroup(group="g", topics=("logs",)),
            JoinGroup(group="g", member_id="m"),
            JoinGroup(group="g", topics=("none",), member_id="m"),
            JoinGroup(group="g", topics=("logs",), member_id="m", session_timeout_ms=5),
            JoinGroup(group="g\x00", topics=("logs",), member_id="m"),
        ):
            with pytest.raises(RequestError):
                await world.ask(request)
        with pytest.raises(OutOfRangeError, match="control characters"):
            await world.ask(ConfigureGroup(group="g\n", kind="queue", topics=("logs",)))
        assert world.view.consumer_groups == {}

    work(test)


def test_heartbeat_waits_until_the_assignment_changes() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=2)
        one = world.enter("one")
        await world.wait_settled(2, one)
        one.crash()
        begun_s = world.loop.time()
        found = await one.beat(seen=one.seen, wait_ms=700)
        assert found.version == one.seen
        assert 0.6 < world.loop.time() - begun_s < 1.5
        two = world.enter("two")
        found = await one.beat(seen=one.seen, wait_ms=2_000)
        assert len(found.revoking) == 1
        assert len(found.owned) == 1
        two.crash()

    work(test)


def test_heartbeats_that_wait_survive_a_change_of_the_primary_and_leave_nothing_behind() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=2)
        one = world.enter("one", session_timeout_ms=10_000)
        await world.wait_settled(2, one)
        primary = await world.primary()
        coordinator = world.working(int(primary.id)).manager.groups
        one.crash()
        node = await world.replica()
        request = GroupHeartbeat(group_id=one.group_id, member_id="one", seen=one.seen, wait_ms=5_000)
        waiting = world.loop.create_task(world.ask(request, of=int(node.id), timeout_ms=8_000))
        await asyncio.sleep(0.5)
        await world.run_on(primary, primary.store.transfer_primary(timeout_ms=2_000))
        await world.wait(lambda: world._find_primary() not in (None, primary) or None)
        with pytest.raises(NotPrimaryError):
            coordinator._find((ConsumerId(1), "one"))
        world.enter("two")
        found = await waiting
        assert found.version > one.seen
        assert len(found.revoking) == 1
        await asyncio.sleep(2)
        for manager in world.managers.values():
            assert isinstance(manager, WorkingManager)
            assert manager.admin._waiters._waiting.keys() <= {(one.group_id, "two")}

    work(test)


def test_waiting_heartbeats_take_no_room_on_the_way_to_the_primary() -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=2)
        one = world.enter("one", session_timeout_ms=10_000)
        await world.wait_settled(2, one)
        one.crash()
        node = await world.replica()
        request = GroupHeartbeat(group_id=one.group_id, member_id="one", seen=one.seen, wait_ms=2_000)
        waiting = world.loop.create_task(world.ask(request, of=int(node.id), timeout_ms=8_000))
        await asyncio.sleep(0.5)
        assert isinstance(node, WorkingManager)
        assert len(node.admin._waiters) == 1
        sent = [entry for entry in world.wire.asked if entry[1] == "group_heartbeat"]
        (await world.primary()).kill()  # it is not needed any more
        assert (await waiting).version == one.seen
        assert sent[-1][0] != node.address
        assert len(node.admin._waiters) == 0

    work(test)


def test_commands_of_many_requests_are_gathered_and_errors_say_whether_they_were_done() -> None:
    class Store:
        """Takes commands one by one, when it is told to."""

        def __init__(self) -> None:
            self.commands: list[RemoveMembers] = []
            self.turn = asyncio.Event()
            self.error: QuiverError | None = None

        async def submit(self, command: RemoveMembers) -> None:
            self.commands.append(command)
            await self.turn.wait()
            if self.error is not None and len(self.commands) > 1:
                raise self.error

    def build(members: tuple[GroupMember, ...]) -> RemoveMembers:
        return RemoveMembers(now_ms=1, members=members)

    async def test(_: World) -> None:
        store, one = Store(), GroupMember(ConsumerId(1), "m")
        batcher = CommandBatcher[GroupMember](cast("MetadataStore", store), build)
        running = asyncio.get_running_loop().create_task(batcher.run())
        first = asyncio.get_running_loop().create_task(batcher.submit([one]))
        await asyncio.sleep(0.01)
        rest = [asyncio.get_running_loop().create_task(batcher.submit([one])) for _ in range(50)]
        await asyncio.sleep(0.01)
        assert [len(command.members) for command in store.commands] == [1]
        store.turn.set()
        await first
        await asyncio.gather(*rest)
        assert [len(command.members) for command in store.commands] == [1, 50]
        store.commands, store.error = [], UnavailableError("not done")
        with pytest.raises(OutcomeUnknownError, match="in part"):
            await batcher.submit([one] * (BATCH_MAX + 1))
        store.turn.clear()
        lost = asyncio.get_running_loop().create_task(batcher.submit([one]))
        await asyncio.sleep(0.01)
        late = asyncio.get_running_loop().create_task(batcher.submit([one]))
        await asyncio.sleep(0.01)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        batcher.close()
        with pytest.raises(OutcomeUnknownError):
            await lost
        with pytest.raises(NotPrimaryError):
            await late

    run(test)


def test_plan_of_a_stale_version_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[AssignPartitions] = []

    def stale(group: GroupRow, steps: GroupSteps, *, now_ms: int, reason: str) -> Iterator[AssignPartitions]:
        for command in plan_commands(group, steps, now_ms=now_ms, reason=reason):
            times.append(command)
            yield msgspec.structs.replace(command, version=command.version + (len(times) == 1))

    monkeypatch.setattr(group_coordinator, "plan_commands", stale)

    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=2)
        await world.wait_settled(2, world.enter("one"))
        assert len(times) >= 2

    work(test)


def test_own_commands_lead_to_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[GroupSteps] = []

    def counted(*arguments: Any) -> Any:
        steps, topics = plan_group(*arguments)
        plans.append(steps)
        return steps, topics

    monkeypatch.setattr(group_coordinator, "plan_group", counted)

    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=4)
        one = world.enter("one")
        await world.wait_settled(4, one)
        await asyncio.sleep(2)
        assert [len(steps.grants) for steps in plans] == [4], "the grants are not planned again"
        two = world.enter("two")
        await world.wait_settled(4, one, two)
        await asyncio.sleep(2)
        assert [(len(steps.grants), len(steps.revokes)) for steps in plans[1:]] == [(0, 2), (2, 0)]
        await two.leave()
        await world.wait_settled(4, one)
        await asyncio.sleep(2)
        assert [len(steps.grants) for steps in plans[3:]] == [2]

    work(test)


def test_changes_that_lead_to_a_plan() -> None:
    owned = OwnedPartition(topic_id=TopicId(1), partition_id=PartitionId(0), epoch=1)
    other = msgspec.structs.replace(owned, partition_id=PartitionId(1))
    row = GroupMemberRow(
        group_id=ConsumerId(1), member_id="a", joined_ms=1, session_timeout_ms=1, topics=("logs",), owned=(owned,)
    )

    def changed(**fields: Any) -> bool:
        return is_member_planned(row, msgspec.structs.replace(row, **fields))

    assert is_member_planned(None, row)
    assert is_member_planned(row, None)
    assert changed(topics=("audit",))
    assert changed(pattern="*")
    assert changed(rack="a")
    assert changed(owned=())
    assert changed(owned=(other,))
    assert not changed(owned=(owned, other), version=2)
    assert not changed(owned=(msgspec.structs.replace(owned, is_revoking=True),), version=2)
    group = GroupRow(group_id=ConsumerId(1), kind=GroupKind.STREAM, created_ms=1)
    assert is_group_planned(None, group)
    assert is_group_planned(group, None)
    assert is_group_planned(group, msgspec.structs.replace(group, pause_ms=5))
    assert not is_group_planned(group, msgspec.structs.replace(group, version=2, rebalances=1, reason="joined"))
