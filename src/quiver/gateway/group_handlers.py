"""Handlers of the routes of consumer groups.

Answers are shared by callers, so reads are the node's own, and `HttpAccess` decides about them and filters them.
Changes are sent in the caller's name, also to the partitions' leaders, who decide as on the wire.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from quiver.client.group_admin import (
    ResetTarget,
    delete_group,
    find_group,
    find_groups,
    find_lags,
    reset_group,
)
from quiver.client.queue_groups import QueuePartition, configure_queue, describe_queue, given_settings
from quiver.errors import RequestError
from quiver.gateway import contract, group_contract
from quiver.gateway.application import RouteHandler
from quiver.gateway.changes import with_one_attempt
from quiver.groups.settings import dead_letter_topic_of
from quiver.model import PartitionId
from quiver.routing.router import Router
from quiver.wire.group_messages import AssignedPartition, GroupInfo, GroupMemberInfo, QueueSettingsChange


class GroupHandlers:
    """Handle the calls on consumer groups."""

    def __init__(self, router: Router, *, timeout_ms: int) -> None:
        self._router = router.with_options(msgspec.structs.replace(router.options, timeout_ms=timeout_ms))

    def handlers(self) -> dict[str, RouteHandler]:
        """Return the handlers by the names of their routes."""
        return {
            "list_groups": self.list_groups,
            "describe_group": self.describe_group,
            "get_group_lag": self.get_group_lag,
            "describe_queue": self.describe_queue,
            "configure_queue": self.configure_queue,
            "reset_group": self.reset_group,
            "delete_group": self.delete_group,
        }

    async def list_groups(self, _: contract.Parameters) -> group_contract.GroupsAnswer:
        """List all groups."""
        found = await find_groups(self._router)
        return group_contract.GroupsAnswer(groups=[_group_item(one) for one in found])

    async def describe_group(self, given: group_contract.GroupQuery) -> group_contract.GroupAnswer:
        """Describe a group and its members."""
        found = await find_group(self._router, given.group)
        return group_contract.GroupAnswer(
            group=_group_item(found), members=[_member_item(one) for one in found.members]
        )

    async def get_group_lag(self, given: group_contract.GroupLagQuery) -> group_contract.GroupLagAnswer:
        """Return a group's lag in each partition, as its leader reports it now."""
        info = await find_group(self._router, given.group)
        owners = {
            (one.topic, one.partition_id): member.member_id
            for member in info.members
            for one in (*member.owned, *member.revoking)
        }
        items = [
            group_contract.GroupLagItem(
                topic=one.topic,
                partition_id=one.partition,
                cursor=one.cursor,
                first_offset=one.first_offset,
                end_offset=one.end_offset,
                lag=one.lag,
                member_id=owners.get((one.topic, one.partition)),
            )
            for one in await find_lags(self._router, info, given.topic)
        ]
        return group_contract.GroupLagAnswer(lag=sum(one.lag for one in items), partitions=items)

    async def describe_queue(self, given: group_contract.GroupQuery) -> group_contract.QueueAnswer:
        """Describe a work queue, as the leaders of its partitions report it now."""
        found = await describe_queue(self._router, given.group, deadline=self._router.deadline())
        settings = found.settings
        return group_contract.QueueAnswer(
            settings=group_contract.QueueSettingsItem(
                lease_ms=settings.lease_ms,
                max_attempts=settings.max_attempts,
                backoff_ms=settings.backoff_ms,
                backoff_multiplier=settings.backoff_multiplier,
                backoff_max_ms=settings.backoff_max_ms,
                in_flight_max=settings.in_flight_max,
                order=settings.order,
            ),
            partitions=[_queue_item(one) for one in found.partitions],
        )

    async def configure_queue(self, given: group_contract.QueueSettingsBody, on_behalf_of: str) -> contract.Answer:
        """Change settings of a work queue."""
        change = msgspec.convert(given, QueueSettingsChange, from_attributes=True)
        if not given_settings(change):
            raise RequestError("not done: name a setting to change, such as lease_ms")
        router = self._router.acting_for(on_behalf_of)
        await configure_queue(router, given.group, change, deadline=router.deadline())
        return contract.Answer()

    async def reset_group(
        self, given: group_contract.GroupResetBody, on_behalf_of: str
    ) -> group_contract.GroupResetAnswer:
        """Move a group's cursors, or say what would be moved."""
        if given.to is not None and given.offset is not None:
            raise RequestError("not done: give one of to, offset, timestamp and shift")
        if given.partition_id is not None and given.topic is None:
            raise RequestError("not done: a partition is one of a topic; give topic as well")
        found = await reset_group(
            self._router.acting_for(on_behalf_of),
            given.group,
            ResetTarget(
                offset=given.offset if given.to is None else given.to, timestamp_ms=given.timestamp, shift=given.shift
            ),
            topic=given.topic,
            partitions=() if given.partition_id is None else (PartitionId(given.partition_id),),
            is_dry_run=given.dry_run,
            is_forced=given.force,
        )
        cursors = [
            group_contract.CursorItem(
                topic=one.topic,
                partition_id=one.partition,
                before=one.cursor,
                after=one.target,
                end_offset=one.end_offset,
                lag=one.lag,
            )
            for one in found
        ]
        return group_contract.GroupResetAnswer(cursors=cursors)

    async def delete_group(self, given: group_contract.GroupDeleteQuery, on_behalf_of: str) -> contract.Answer:
        """Delete a group with its cursors."""
        router = with_one_attempt(self._router).acting_for(on_behalf_of)
        await delete_group(router, given.group, is_forced=given.force)
        return contract.Answer()


def _queue_item(one: QueuePartition) -> group_contract.QueuePartitionItem:
    return group_contract.QueuePartitionItem(
        topic=one.topic,
        partition_id=one.partition,
        ready=one.ready,
        leased=one.leased,
        waiting=one.waiting,
        dying=one.dying,
        cursor=one.cursor,
        next_offset=one.next_offset,
        end_offset=one.end_offset,
        stall=one.stall,
    )


def _group_item(found: GroupInfo) -> group_contract.GroupItem:
    return group_contract.GroupItem(
        group=found.group,
        group_id=found.group_id,
        kind=found.kind,
        state=found.state,
        topics=list(found.topics),
        members=len(found.members),
        partitions=found.partitions,
        unassigned=found.unassigned,
        rebalances=found.rebalances,
        last_rebalance_ms=found.last_rebalance_ms or None,
        last_rebalance_reason=found.last_rebalance_reason,
        dead_letter_topics=_dead_letter_topics(found),
    )


def _dead_letter_topics(found: GroupInfo) -> dict[str, str]:
    settings = found.settings
    if settings is None:
        return {}
    return {topic: dead_letter_topic_of(settings, topic=topic, group=found.group) for topic in found.topics}


def _member_item(member: GroupMemberInfo) -> group_contract.MemberItem:
    return group_contract.MemberItem(
        member_id=member.member_id,
        instance=member.instance or None,
        rack=member.rack or None,
        client=member.client,
        principal=member.principal or None,
        topics=list(member.topics),
        pattern=member.pattern or None,
        session_timeout_ms=member.session_timeout_ms,
        joined_ms=member.joined_ms,
        partitions=[
            *(_partition_item(one, "owned") for one in member.owned),
            *(_partition_item(one, "revoking") for one in member.revoking),
        ],
    )


def _partition_item(one: AssignedPartition, state: Literal["owned", "revoking"]) -> group_contract.OwnedPartitionItem:
    return group_contract.OwnedPartitionItem(
        topic=one.topic, partition_id=one.partition_id, epoch=str(one.epoch), state=state
    )
