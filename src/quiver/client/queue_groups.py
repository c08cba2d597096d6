"""The group behind a work queue: created with its settings, checked against them, changed by an explicit call."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import msgspec

from quiver.client.options import to_ms
from quiver.errors import ConflictError, NotAllowedError, NotFoundError, OutOfRangeError, RequestError
from quiver.groups.settings import QueueSettings
from quiver.model import ConsumerId, PartitionId
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.tasks import gather_first_error
from quiver.wire.group_messages import ConfigureGroup, DescribeGroups, GroupInfo, JoinGroup, QueueSettingsChange
from quiver.wire.messages import GetMetadata, MoveCursor, TopicInfo
from quiver.wire.queue_messages import GetQueue, QueueFound


class QueuePartition(msgspec.Struct, frozen=True, kw_only=True):
    """The records of a queue in one partition, by what happens to them next."""

    topic: str
    partition: PartitionId
    ready: int
    """Deliverable now."""
    leased: int
    """With workers."""
    waiting: int
    """Delayed, to be retried later, or after another record of their key."""
    dying: int
    """On their way to the dead letters."""
    cursor: int
    """Every record before it is acknowledged or dead."""
    next_offset: int
    """No record from here on was delivered yet."""
    end_offset: int
    in_flight_max: int
    stall: str
    """Why nothing can be received now: empty, in_flight_max, waiting or key_order; or it is empty."""


class QueueDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A work queue: its group, settings and partitions."""

    group: str
    group_id: ConsumerId
    topics: tuple[str, ...]
    settings: QueueSettings
    partitions: tuple[QueuePartition, ...] = ()


def make_change(
    *,
    lease: float | None = None,
    max_attempts: int | None = None,
    backoff: float | None = None,
    backoff_max: float | None = None,
    backoff_multiplier: float | None = None,
    in_flight_max: int | None = None,
    order: Literal["offset", "key"] | None = None,
    dead_letter_topic: str | None = None,
) -> QueueSettingsChange:
    """Return the settings that a caller gave, in seconds; raise `OutOfRangeError` for those out of bounds."""
    change = QueueSettingsChange(
        lease_ms=None if lease is None else to_ms(lease, "lease"),
        max_attempts=max_attempts,
        backoff_ms=None if backoff is None else to_ms(backoff, "backoff"),
        backoff_max_ms=None if backoff_max is None else to_ms(backoff_max, "backoff_max"),
        backoff_multiplier=None if backoff_multiplier is None else float(backoff_multiplier),
        in_flight_max=in_flight_max,
        order=order,
        dead_letter_topic=dead_letter_topic,
    )
    try:
        msgspec.convert(given_settings(change), QueueSettings)
    except msgspec.ValidationError as error:
        raise OutOfRangeError(f"not done: a setting of the queue is out of range: {error}") from None
    return change


def given_settings(change: QueueSettingsChange) -> dict[str, object]:
    """Return the settings that a change names."""
    return {name: value for name, value in msgspec.structs.asdict(change).items() if value is not None}


async def open_group(
    router: Router,
    topic: str,
    group: str,
    change: QueueSettingsChange,
    *,
    start: Literal["earliest", "latest"],
    deadline: Deadline,
) -> tuple[ConsumerId, QueueSettings]:
    """Return a queue's group and its settings; a new group is created with those that are given.

    Raises:
        ConflictError: the group exists and has other settings (`queue_settings`), or reads streams (`group_kind`).
        NotFoundError: unknown topic.
    """
    if not group:
        raise RequestError("not done: a queue needs the name of its group: pass group=...", code="no_group_name")
    await router.find_topic(topic, deadline=deadline)
    await _catch_up(router, deadline=deadline)
    known = await find_group(router, group, deadline=deadline)
    is_queue = known is not None and known.kind == "queue"
    if known is not None:
        _check_settings(known, change)
    if known is None or not is_queue or topic not in known.topics:
        group_id = await _register(
            router,
            ConfigureGroup(group=group, kind="queue", topics=(topic,), start=start, settings=change),
            is_configuring=not is_queue and bool(given_settings(change)),
            deadline=deadline,
        )
        if start == "latest":
            await _start_at_end(router, topic, group_id, deadline=deadline)
        known = await find_queue(router, group, deadline=deadline)
    return known.group_id, known.settings or QueueSettings()


async def _register(router: Router, request: ConfigureGroup, *, is_configuring: bool, deadline: Deadline) -> ConsumerId:
    """Create a queue with its settings, or register a further topic of one that exists; return its group.

    Joining needs the right to read the topic only, and makes who joins the owner of a new group, who may configure it.
    """
    joining = JoinGroup(group=request.group, topics=request.topics, kind="queue", start=request.start)
    if is_configuring:
        with suppress(NotAllowedError):
            return await _configure(router, request, deadline=deadline)
    joined, _ = await router.ask(joining, deadline=deadline)
    router.cache.record_index(joined.index)  # whoever is asked next knows the owner
    return await _configure(router, request, deadline=deadline) if is_configuring else joined.group_id


async def _configure(router: Router, request: ConfigureGroup, *, deadline: Deadline) -> ConsumerId:
    configured, _ = await router.ask(request, deadline=deadline)
    router.cache.record_index(configured.index)
    return configured.group_id


def _check_settings(known: GroupInfo, change: QueueSettingsChange) -> None:
    if differing := _find_differing(known, change):
        raise ConflictError(
            f"not done: group {known.group!r} has other settings: {'; '.join(differing)}; leave them out to use the "
            "group as it is, or change it for everybody with configure_queue() or `quiver queue configure`",
            code="queue_settings",
        )


def _find_differing(known: GroupInfo, change: QueueSettingsChange) -> list[str]:
    """Return in which settings a queue differs from those that are asked for; a group of streams does in none."""
    if known.kind != "queue" or known.settings is None:
        return []
    return [
        f"{name} is {getattr(known.settings, name)!r}, not {value!r}"
        for name, value in given_settings(change).items()
        if getattr(known.settings, name) != value
    ]


async def _catch_up(router: Router, *, deadline: Deadline) -> None:
    """Let what is asked next be no older than now: nodes that lag behind the primary catch up before they answer."""
    found, _ = await router.ask(GetMetadata(topics=(), is_linearizable=True), deadline=deadline)
    router.cache.record_index(found.index)


async def _start_at_end(router: Router, topic: str, group_id: ConsumerId, *, deadline: Deadline) -> None:
    """Put the cursors of a new queue at the end of every partition."""
    info = await router.find_topic(topic, deadline=deadline)

    async def move(partition_id: PartitionId) -> None:
        def build(found: TopicInfo) -> MoveCursor:
            return MoveCursor(
                topic_id=found.topic_id, partition_id=partition_id, cursors=((group_id, "latest"),), only_new=True
            )

        await router.ask_leader(topic, partition_id, build, deadline=deadline)

    await gather_first_error(move(one.partition_id) for one in info.partitions)


async def find_group(router: Router, group: str, *, deadline: Deadline) -> GroupInfo | None:
    """Return a group by its name; None if there is none."""
    groups = await _ask_groups(router, DescribeGroups(groups=(group,), with_members=False), deadline=deadline)
    return groups[0] if groups else None


async def _ask_groups(router: Router, request: DescribeGroups, *, deadline: Deadline) -> tuple[GroupInfo, ...]:
    """Return groups; leaders that have not applied them yet catch up before they answer what is asked next."""
    found, _ = await router.ask(request, deadline=deadline)
    router.cache.record_index(found.index)
    return found.groups


async def find_queue(router: Router, group: str, *, deadline: Deadline) -> GroupInfo:
    """Return the group of a queue.

    Raises:
        NotFoundError: there is no such group (`unknown_group`).
        ConflictError: it reads streams (`not_a_queue`).
    """
    await _catch_up(router, deadline=deadline)
    known = await find_group(router, group, deadline=deadline)
    if known is None:
        raise NotFoundError(f"not done: unknown group {group!r}", code="unknown_group")
    if known.kind != "queue":
        raise ConflictError(f"not done: group {group!r} reads streams, it is not a queue", code="not_a_queue")
    return known


async def list_queues(router: Router, *, deadline: Deadline) -> list[QueueDescription]:
    """Return all queues, sorted by name, without their partitions."""
    await _catch_up(router, deadline=deadline)
    groups = await _ask_groups(router, DescribeGroups(with_members=False), deadline=deadline)
    return [_describe(one) for one in groups if one.kind == "queue"]


async def describe_queue(router: Router, group: str, *, deadline: Deadline) -> QueueDescription:
    """Return a queue with the state of every partition, as reported by its leader."""
    known = await find_queue(router, group, deadline=deadline)
    places: list[tuple[str, PartitionId]] = []
    for topic in known.topics:
        info = await router.find_topic(topic, deadline=deadline)
        places += [(topic, one.partition_id) for one in info.partitions]
    found = await gather_first_error(
        find_state(router, topic, partition, known.group_id, deadline=deadline) for topic, partition in places
    )
    partitions = tuple(
        QueuePartition(
            topic=topic,
            partition=partition,
            ready=one.ready,
            leased=one.leased,
            waiting=one.waiting,
            dying=one.dying,
            cursor=one.first_unsettled,
            next_offset=one.next_offset,
            end_offset=one.end_offset,
            in_flight_max=one.in_flight_max,
            stall=one.stall,
        )
        for (topic, partition), one in zip(places, found, strict=True)
    )
    return msgspec.structs.replace(_describe(known), partitions=partitions)


async def find_state(
    router: Router, topic: str, partition_id: PartitionId, group_id: ConsumerId, *, deadline: Deadline
) -> QueueFound:
    """Return the state of a queue in a partition."""

    def build(info: TopicInfo) -> GetQueue:
        return GetQueue(topic_id=info.topic_id, partition_id=partition_id, group_id=group_id)

    return (await router.ask_leader(topic, partition_id, build, deadline=deadline))[0]


async def configure_queue(router: Router, group: str, change: QueueSettingsChange, *, deadline: Deadline) -> None:
    """Change settings of a queue for all its workers; what is leased keeps its lease."""
    await find_queue(router, group, deadline=deadline)
    await _configure(router, ConfigureGroup(group=group, kind="queue", settings=change), deadline=deadline)


def _describe(known: GroupInfo) -> QueueDescription:
    settings = known.settings or QueueSettings()
    return QueueDescription(group=known.group, group_id=known.group_id, topics=known.topics, settings=settings)
