"""What one replica stores of a partition: read from the node that is named, whether it leads or not.

For who compares replicas (`quiver pipeline audit`). Unlike everything else that reads records here, it takes what the
replica has as it is: a gap is left a gap, since it is the finding that is looked for. Committed records only, as far
as that node knows; one that lags behind is waited for, for a moment.
"""

from __future__ import annotations

import asyncio
from typing import Final

from quiver.client.ranges import RangeReader, check_incarnation, check_partition
from quiver.errors import DamageError, OutOfRangeError, UnavailableError
from quiver.model import NodeId
from quiver.record import Batch, decode_batches
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.wire.messages import ReadReplica, ReplicaRead

BEHIND_S: Final = 0.1
"""Time between two looks at a replica that has not heard yet of all that is committed."""
BEHIND_MS_MAX: Final = 5_000
"""How long such a replica is waited for: several times as long as it takes to hear of it."""


class ReplicaReader(RangeReader):
    """Read the batches that one node stores of a range of offsets; use on one loop."""

    def __init__(
        self,
        router: Router,
        topic: str,
        partition: int,
        *,
        node: int,
        first_offset: int,
        end_offset: int,
        topic_id: int | None,
        fetch_bytes: int,
    ) -> None:
        super().__init__(
            router,
            topic,
            partition,
            first_offset=first_offset,
            end_offset=end_offset,
            topic_id=topic_id,
            fetch_bytes=fetch_bytes,
        )
        self._node = NodeId(node)

    async def _fetch(self) -> list[Batch]:
        deadline, patience = self._router.deadline(), self._router.deadline(BEHIND_MS_MAX)
        retry = self._router.retry(deadline, is_read=True)
        while True:
            try:
                read, payload = await self._ask(deadline)
            except UnavailableError as error:
                await retry.wait_turn(error)
                continue
            if batches := self._accept(payload):
                return batches
            place = f"node {self._node}: {self._topic!r} partition {self._partition}"
            if read.end_offset > self._position:
                raise DamageError(f"{place} has nothing from {self._position} on, of {read.end_offset}", code="gap")
            if patience.is_over or deadline.remaining_ms <= 1000 * BEHIND_S:
                message = f"{place} ends at {read.end_offset}, before {self._end_offset}"
                raise OutOfRangeError(message, code="past_end")
            await asyncio.sleep(BEHIND_S)

    async def _ask(self, deadline: Deadline) -> tuple[ReplicaRead, memoryview]:
        info = await self._router.find_topic(self._topic, deadline=deadline)
        if self._topic_id is None:
            self._topic_id = info.topic_id
        check_incarnation(info, self._topic_id)
        check_partition(info, self._partition)
        request = ReadReplica(
            topic_id=self._topic_id,
            partition_id=self._partition,
            offset=self._position,
            bytes_max=self._bytes_wanted(),
        )
        return await self._router.ask_node(self._node, request, deadline=deadline)

    def _accept(self, payload: memoryview) -> list[Batch]:
        batches: list[Batch] = []
        for batch in decode_batches(payload):
            header = batch.header
            if header.is_control or header.end_offset <= self._position or header.base_offset >= self._end_offset:
                continue
            batches.append(batch)
        if batches:
            self._note_size(batches)
            self._position = batches[-1].header.end_offset
        return batches
