"""Publish audit events as records of an internal topic, which only administrators read."""

from __future__ import annotations

from collections.abc import Sequence

from quiver.clock import Clock
from quiver.errors import ConflictError, NotFoundError
from quiver.model import PartitionId
from quiver.record import build_batch
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.security.permissions import INTERNAL_PREFIX
from quiver.wire.messages import CreateTopicRequest, Produce, RetentionInfo, TopicInfo

AUDIT_TOPIC = INTERNAL_PREFIX + "audit"
RETENTION = RetentionInfo(ms=90 * 24 * 3_600_000, bytes=1024**3)
TIMEOUT_MS = 5_000
"""Time for a number of events; while the topic cannot be written, events stay in the file alone."""
_PARTITION = PartitionId(0)


class AuditTopic:
    """Append events to the topic, which is created with the first ones. An event may be there twice."""

    def __init__(self, router: Router, clock: Clock) -> None:
        self._router = router
        self._clock = clock

    async def publish(self, lines: Sequence[bytes]) -> None:
        """Append events; raises as `Router.ask_leader` does."""
        deadline = self._router.deadline(TIMEOUT_MS)
        batch = build_batch(lines, timestamp=self._clock.wall_ms())
        try:
            await self._append(batch, deadline)
        except NotFoundError:
            await self._create(deadline)
            await self._append(batch, deadline)

    async def _append(self, batch: bytes, deadline: Deadline) -> None:
        def build(info: TopicInfo) -> Produce:
            return Produce(topic_id=info.topic_id, partition_id=_PARTITION)

        await self._router.ask_leader(AUDIT_TOPIC, _PARTITION, build, [batch], deadline=deadline)

    async def _create(self, deadline: Deadline) -> None:
        # A new id each time: with the same one, a topic that was deleted would never be created again.
        request_id = f"audit-{self._router.rng.randrange(1 << 62):016x}"
        request = CreateTopicRequest(topic=AUDIT_TOPIC, partitions=1, retention=RETENTION, request_id=request_id)
        try:
            created, _ = await self._router.ask(request, deadline=deadline)
        except ConflictError as error:
            if error.code != "topic_exists":  # another node was first
                raise
        else:
            self._router.cache.record_index(created.index)
