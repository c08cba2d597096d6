"""A consumer's place as the cluster keeps it: registration, cursors, bounds.

A named consumer registers with its name as the request's id, so that the same name finds the same consumer again; its
cursors live in the partitions' logs. One without a name leaves nothing behind: it has positions, but no cursors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from quiver.errors import RequestError
from quiver.model import ConsumerId, Offset, PartitionId
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.wire.messages import (
    CursorsFound,
    GetCursors,
    MoveCursor,
    RegisterConsumerRequest,
    Selection,
    TopicInfo,
)


class Cursors:
    """Where one consumer of one topic is, by the cluster's account."""

    def __init__(self, router: Router, topic: str, consumer_id: ConsumerId | None = None) -> None:
        self.consumer_id = consumer_id
        """None: a consumer that the cluster does not know."""
        self._router = router
        self._topic = topic

    async def register(
        self,
        *,
        name: str,
        consumer_id: int | None,
        partitions: Sequence[PartitionId],
        start: Literal["earliest", "latest"],
        deadline: Deadline,
    ) -> None:
        """Make the consumer known to the cluster, or find it."""
        request = RegisterConsumerRequest(
            topics=(Selection(topic=self._topic, partitions=tuple(partitions)),),
            consumer_id=None if consumer_id is None else ConsumerId(consumer_id),
            start=start,
            request_id=name,
        )
        registered, _ = await self._router.ask(request, deadline=deadline)
        self._router.cache.see(registered.index)
        self.consumer_id = registered.consumer_id

    async def find_start(
        self, partition_id: PartitionId, start: Literal["earliest", "latest"], *, deadline: Deadline
    ) -> tuple[Offset, bool]:
        """Return where to begin in a partition, and whether that is where the cluster has the cursor."""
        if self.consumer_id is not None:
            await self._move(
                partition_id, "latest" if start == "latest" else Offset(0), only_new=True, deadline=deadline
            )
        found = await self.find(partition_id, deadline=deadline)
        if found.cursors:
            return found.cursors[0], True
        return (found.end_offset if start == "latest" else found.first_offset), False

    async def find(self, partition_id: PartitionId, *, deadline: Deadline) -> CursorsFound:
        """Return the consumer's cursor in a partition, if it has one, and the partition's bounds as they are now."""
        consumer_ids = () if self.consumer_id is None else (self.consumer_id,)

        def build(topic: TopicInfo) -> GetCursors:
            return GetCursors(
                topic_id=topic.topic_id,
                partition_id=partition_id,
                consumer_ids=consumer_ids,
            )

        return (await self._router.ask_leader(self._topic, partition_id, build, deadline=deadline))[0]

    async def move(self, partition_id: PartitionId, offset: Offset, *, deadline: Deadline) -> None:
        """Set the consumer's cursor in a partition."""
        await self._move(partition_id, offset, only_new=False, deadline=deadline)

    async def _move(
        self, partition_id: PartitionId, offset: Offset | Literal["latest"], *, only_new: bool, deadline: Deadline
    ) -> None:
        if self.consumer_id is None:
            message = "not done: a consumer without a name has no cursor in the cluster; give it one"
            raise RequestError(message, code="no_consumer_name")
        cursor = (self.consumer_id, offset)

        def build(topic: TopicInfo) -> MoveCursor:
            return MoveCursor(
                topic_id=topic.topic_id,
                partition_id=partition_id,
                cursors=(cursor,),
                only_new=only_new,
            )

        await self._router.ask_leader(self._topic, partition_id, build, deadline=deadline)
