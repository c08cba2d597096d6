"""Consumers seen from outside: how far each is, and setting where it goes on.

For operators and their tools. Nothing here registers anything or reads a record; a consumer that runs while its
cursors are moved goes on where it is, and stores its own place with its next commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from quiver.client.cursors import Cursors
from quiver.client.prefetch import find_offset
from quiver.client.tasks import together
from quiver.errors import NotAllowedError, NotFoundError, OutOfRangeError
from quiver.model import ConsumerId, Offset, PartitionId
from quiver.routing.router import Router


class PartitionLag(msgspec.Struct, frozen=True, kw_only=True):
    """How far a consumer is in a partition."""

    consumer_id: ConsumerId
    topic: str
    partition: PartitionId
    cursor: Offset
    first_offset: Offset
    end_offset: Offset
    lag: int
    """Records that it has not consumed yet."""


async def find_lag(router: Router, consumer_id: ConsumerId, topics: Iterable[str]) -> list[PartitionLag]:
    """Return how far a consumer is in every partition that it is registered for, by topic and partition."""
    places = [(topic, partition) for topic in topics for partition in await _partitions_of(router, topic)]
    found = await together(_find_one(router, consumer_id, *place) for place in places)
    return [lag for lag in found if lag is not None]


async def reset_cursors(
    router: Router,
    consumer_id: ConsumerId,
    topic: str,
    where: int | str,
    *,
    is_timestamp: bool,
    partitions: Sequence[PartitionId],
) -> None:
    """Set a consumer's cursors in some partitions of a topic, or in all that it is registered for.

    Raises:
        NotAllowedError: it is not registered for a partition that was named.
        OutOfRangeError: an offset is behind a partition's end; nothing was moved.
    """
    known = await _partitions_of(router, topic)
    if unknown := set(partitions) - set(known):
        raise NotFoundError(f"{topic!r} has no partition {min(unknown)}", code="unknown_partition")
    lags = await together(_find_one(router, consumer_id, topic, at) for at in partitions or known)
    for partition, lag in zip(partitions or known, lags, strict=True):
        if lag is None and partitions:
            message = f"consumer {consumer_id} is not registered for partition {partition} of {topic!r}"
            raise NotAllowedError(message, code="not_registered")
    targets = [
        (lag.partition, await _target(router, lag, where, is_timestamp=is_timestamp)) for lag in lags if lag is not None
    ]
    cursors = Cursors(router, topic, consumer_id)
    await together(cursors.move(partition, to, deadline=router.deadline()) for partition, to in targets)


async def _partitions_of(router: Router, topic: str) -> list[PartitionId]:
    info = await router.find_topic(topic, deadline=router.deadline(), age_ms_max=0)
    return [partition.partition_id for partition in info.partitions]


async def _find_one(
    router: Router, consumer_id: ConsumerId, topic: str, partition_id: PartitionId
) -> PartitionLag | None:
    """Return how far a consumer is in a partition; None if it is not registered for it."""
    try:
        found = await Cursors(router, topic, consumer_id).find(partition_id, deadline=router.deadline())
    except NotAllowedError:
        return None
    (cursor,) = found.cursors
    return PartitionLag(
        consumer_id=consumer_id,
        topic=topic,
        partition=partition_id,
        cursor=cursor,
        first_offset=found.first_offset,
        end_offset=found.end_offset,
        lag=max(0, found.end_offset - max(cursor, found.first_offset)),
    )


async def _target(router: Router, lag: PartitionLag, where: int | str, *, is_timestamp: bool) -> Offset:
    if isinstance(where, str) or is_timestamp:
        return await find_offset(router, lag.topic, lag.partition, where)
    if not 0 <= where <= lag.end_offset:
        message = f"not done: partition {lag.partition} of {lag.topic!r} ends at {lag.end_offset}, before {where}"
        raise OutOfRangeError(message)
    return Offset(where)
