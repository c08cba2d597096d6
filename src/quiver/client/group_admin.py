"""Administration of consumer groups: describe them, show their lag, reset their cursors, delete them.

A reset takes all partitions of the group away first (`RestartGroup`), moves the cursors under a session above all
epochs, and lets the members continue: a member that was reading there is fenced and starts again at the new cursor, so
that its next commit cannot undo the reset.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from quiver.client.cursors import ConsumerCursors, PartitionLag, find_lag, move_planned
from quiver.client.prefetch import find_offset
from quiver.errors import ConflictError, NotFoundError, OutOfRangeError, QuiverError, RequestError
from quiver.model import ConsumerId, Offset, PartitionId
from quiver.routing.router import Router
from quiver.tasks import gather_first_error
from quiver.wire.group_messages import DeleteGroup, DescribeGroups, GroupInfo, RestartGroup
from quiver.wire.messages import GetMetadata

logger = logging.getLogger(__name__)

RESET_PAUSE_MS: Final = 60_000
"""Time after which members get partitions again although a reset was interrupted."""


Shift = int
"""A number of records, also a negative one."""


class CursorReset(msgspec.Struct, frozen=True, kw_only=True):
    """A cursor of a group that was reset, or would be."""

    topic: str
    partition: PartitionId
    cursor: Offset
    """The cursor before."""
    target: Offset
    """The cursor after."""
    end_offset: Offset
    lag: int
    """Number of records from the target to the end."""


class ResetTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where cursors are moved to: exactly one of these."""

    offset: int | str | None = None
    """An offset, "earliest" or "latest"."""
    timestamp_ms: int | None = None
    shift: Shift | None = None
    """Negative to go back; cut off at the partition's bounds."""

    def check(self) -> None:
        """Raise `OutOfRangeError` unless exactly one target is given."""
        if sum(one is not None for one in (self.offset, self.timestamp_ms, self.shift)) != 1:
            raise OutOfRangeError("not done: pass one of offset, timestamp and shift")
        if isinstance(self.offset, str) and self.offset not in ("earliest", "latest"):
            raise OutOfRangeError(f"not done: an offset is a number, 'earliest' or 'latest', not {self.offset!r}")

    async def resolve(self, router: Router, lag: PartitionLag) -> Offset:
        """Return the offset in one partition; raise `OutOfRangeError` if it is beyond the partition's end."""
        if self.shift is not None:
            return Offset(min(max(lag.cursor + self.shift, lag.first_offset), lag.end_offset))
        if isinstance(self.offset, int):
            if not 0 <= self.offset <= lag.end_offset:
                place = f"partition {lag.partition} of topic {lag.topic!r}"
                message = f"not done: offset {self.offset} is out of range: {place} ends at {lag.end_offset}"
                raise OutOfRangeError(message)
            return Offset(self.offset)
        at = self.offset if self.timestamp_ms is None else self.timestamp_ms
        assert at is not None, "one target is given"
        return await find_offset(router, lag.topic, lag.partition, at)


async def find_groups(router: Router) -> list[GroupInfo]:
    """Return all groups, sorted by name."""
    await _catch_up(router)
    found, _ = await router.ask(DescribeGroups(), deadline=router.deadline())
    router.cache.record_index(found.index)
    return list(found.groups)


async def find_group(router: Router, group: str) -> GroupInfo:
    """Return a group; raise `NotFoundError` if there is none of that name."""
    await _catch_up(router)
    found, _ = await router.ask(DescribeGroups(groups=(group,)), deadline=router.deadline())
    router.cache.record_index(found.index)  # leaders that have not applied it yet catch up before they answer
    if not found.groups:
        message = f"not done: unknown group {group!r}; `quiver group list` shows all groups"
        raise NotFoundError(message, code="unknown_group")
    return found.groups[0]


async def find_group_lag(router: Router, group: str, topic: str | None) -> list[PartitionLag]:
    """Return the group's cursor and lag in all its partitions, or in those of one topic."""
    return await find_lags(router, await find_group(router, group), topic)


async def find_lags(router: Router, info: GroupInfo, topic: str | None) -> list[PartitionLag]:
    """Return the lag of a group that was found; raise `NotFoundError` for a topic that it does not read."""
    if topic is not None and topic not in info.topics:
        message = f"not done: group {info.group!r} does not read topic {topic!r}"
        raise NotFoundError(message, code="unknown_topic")
    return await find_lag(router, info.group_id, info.topics if topic is None else (topic,))


async def reset_group(
    router: Router,
    group: str,
    target: ResetTarget,
    *,
    topic: str | None,
    partitions: Sequence[PartitionId],
    is_dry_run: bool,
    is_forced: bool,
) -> list[CursorReset]:
    """Move the cursors of a group; return what was or would be done.

    All targets are found before one cursor moves. Raises `OutcomeUnknownError` (`partly_done`) if some partitions could
    not be reached then; cursors move partition by partition.
    """
    target.check()
    info = await find_group(router, group)
    _require_stream(info)
    if partitions and topic is None and len(info.topics) != 1:
        raise RequestError("not done: partitions are of one topic: name it", code="several_topics")
    lags = await find_lags(router, info, topic)
    if unknown := set(partitions) - {lag.partition for lag in lags}:
        message = f"not done: group {group!r} has no partition {min(unknown)} of topic {topic or info.topics[0]!r}"
        raise NotFoundError(message, code="unknown_partition")
    chosen = [lag for lag in lags if not partitions or lag.partition in partitions]
    offsets = await gather_first_error(target.resolve(router, lag) for lag in chosen)
    if not is_dry_run:
        _require_inactive(info, is_forced=is_forced)
        await _move(router, group, chosen, offsets)
    return [
        CursorReset(
            topic=lag.topic,
            partition=lag.partition,
            cursor=lag.cursor,
            target=offset,
            end_offset=lag.end_offset,
            lag=max(0, lag.end_offset - max(offset, lag.first_offset)),
        )
        for lag, offset in zip(chosen, offsets, strict=True)
    ]


async def require_resettable(router: Router, consumer_id: ConsumerId) -> None:
    """Refuse to reset a consumer by its id if it is a group with members, or a work queue.

    Raises:
        ConflictError: it has members (`group_active`), or is a work queue (`group_kind`).
    """
    await _catch_up(router)
    try:
        found, _ = await router.ask(DescribeGroups(with_members=False), deadline=router.deadline())
    except RequestError as error:
        if error.code != "unknown_request":  # a program from before groups
            raise
        return
    group = next((one.group for one in found.groups if one.group_id == consumer_id), None)
    if group is not None:  # a consumer without a name is no group
        info = await find_group(router, group)
        _require_stream(info)
        _require_inactive(info, is_forced=False)


async def delete_group(router: Router, group: str, *, is_forced: bool) -> None:
    """Delete a group with its cursors."""
    done, _ = await router.ask(DeleteGroup(group=group, is_forced=is_forced), deadline=router.deadline())
    router.cache.record_index(done.index)


async def _catch_up(router: Router) -> None:
    """Let the next answer be as new as the primary's metadata: a member that has just left is not shown."""
    found, _ = await router.ask(GetMetadata(topics=(), is_linearizable=True), deadline=router.deadline())
    router.cache.record_index(found.index)


def _require_stream(info: GroupInfo) -> None:
    if info.kind == "queue":
        message = f"not done: {info.group!r} is a work queue, which has no cursors to reset"
        raise ConflictError(message, code="group_kind")


def _require_inactive(info: GroupInfo, *, is_forced: bool) -> None:
    if info.members and not is_forced:
        count = len(info.members)
        message = (
            f"not done: group {info.group!r} has {count} member{'s' if count > 1 else ''}; stop them, or force the"
            " reset of the group: they then lose their partitions for a moment, and continue at the new cursors"
        )
        raise ConflictError(message, code="group_active")


async def _move(router: Router, group: str, lags: Sequence[PartitionLag], offsets: Sequence[Offset]) -> None:
    request = RestartGroup(group=group, pause_ms=RESET_PAUSE_MS)
    restarted, _ = await router.ask(request, deadline=router.deadline())
    router.cache.record_index(restarted.index)

    async def move(lag: PartitionLag, offset: Offset) -> None:
        cursors = ConsumerCursors(router, lag.topic, ConsumerId(restarted.group_id), session=restarted.session)
        await cursors.move(lag.partition, offset, deadline=router.deadline())

    try:
        await move_planned(list(zip(lags, offsets, strict=True)), move)
    finally:
        await _end_pause(router, msgspec.structs.replace(request, pause_ms=0))


async def _end_pause(router: Router, request: RestartGroup) -> None:
    """Let members have partitions again; a failure changes nothing about the reset, and the pause ends by itself."""
    try:
        ended, _ = await router.ask(request, deadline=router.deadline())
    except QuiverError as error:
        facts = {"group": request.group, "pause_ms": RESET_PAUSE_MS, "error": str(error)}
        logger.warning("members wait until the pause of a reset ends by itself", extra={"facts": facts})
    else:
        router.cache.record_index(ended.index)
