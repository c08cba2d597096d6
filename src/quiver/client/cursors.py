"""Consumer cursors stored in the cluster: registration, reading and moving them, lag.

A named consumer registers with its name as the request's id, so that the same name always finds the same consumer. Its
cursors are stored in the partitions' logs. A consumer without a name has positions but no cursors, and leaves no state
in the cluster.

`find_lag` and `reset_cursors` are for operators: they register nothing and read no records. A consumer that runs while
its cursors are reset keeps its positions and overwrites the cursors with its next commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from quiver.client.prefetch import find_offset
from quiver.errors import NotAllowedError, NotFoundError, OutcomeUnknownError, OutOfRangeError, RequestError
from quiver.model import SESSION_BITS, ConsumerId, Offset, PartitionId
from quiver.routing.retry import Deadline
from quiver.routing.router import Router, gather_outcomes
from quiver.tasks import gather_first_error
from quiver.wire.messages import (
    CursorsFound,
    GetCursors,
    MoveCursor,
    RegisterConsumerRequest,
    Selection,
    TopicInfo,
)


async def register_consumer(
    router: Router,
    topics: Sequence[str],
    *,
    name: str,
    consumer_id: int | None,
    partitions: Sequence[PartitionId] = (),
    start: Literal["earliest", "latest"] = "earliest",
    deadline: Deadline,
) -> tuple[ConsumerId, int]:
    """Register a consumer for topics, or find its earlier registration; return its id, and a session.

    A later registration of the same consumer has a higher session, wherever it is made.
    """
    request = RegisterConsumerRequest(
        topics=tuple(Selection(topic=topic, partitions=tuple(partitions)) for topic in topics),
        consumer_id=None if consumer_id is None else ConsumerId(consumer_id),
        start=start,
        request_id=name,
    )
    registered, _ = await router.ask(request, deadline=deadline)
    router.cache.record_index(registered.index)
    session = (registered.session_index or registered.index) << SESSION_BITS | router.rng.randrange(1 << SESSION_BITS)
    return registered.consumer_id, session


class ConsumerCursors:
    """The cursors of one consumer in one topic.

    With a `session`, `find_start` takes over a partition's cursor from sessions before it, whose moves and fetches are
    then refused with `FencedError`. Without one, cursors move whoever reads, except for members of a group: for
    operators, and for programs that store their own offsets.
    """

    def __init__(self, router: Router, topic: str, consumer_id: ConsumerId | None = None, *, session: int = 0) -> None:
        self.consumer_id = consumer_id
        """None: a consumer without a name, which is not registered."""
        self._router = router
        self._topic = topic
        self._session = session

    @property
    def reader_id(self) -> tuple[ConsumerId, int] | None:
        """The consumer and session in whose name records are fetched; None without a session."""
        return (self.consumer_id, self._session) if self.consumer_id is not None and self._session else None

    async def find_start(
        self, partition_id: PartitionId, start: Literal["earliest", "latest"], *, deadline: Deadline
    ) -> tuple[Offset, bool]:
        """Return the offset to start at in a partition, and whether it is the stored cursor."""
        if self.consumer_id is not None:
            await self._move(
                partition_id, "latest" if start == "latest" else Offset(0), only_new=True, deadline=deadline
            )
        found = await self.find(partition_id, deadline=deadline)
        if found.cursors:
            return found.cursors[0], True
        return (found.end_offset if start == "latest" else found.first_offset), False

    async def find(self, partition_id: PartitionId, *, deadline: Deadline) -> CursorsFound:
        """Return the consumer's cursor in a partition, if it has one, and the partition's current bounds."""
        consumer_ids = () if self.consumer_id is None else (self.consumer_id,)

        def build(topic: TopicInfo) -> GetCursors:
            return GetCursors(
                topic_id=topic.topic_id,
                partition_id=partition_id,
                consumer_ids=consumer_ids,
            )

        return (await self._router.ask_leader(self._topic, partition_id, build, deadline=deadline))[0]

    async def begin(self, partition_id: PartitionId, offset: Offset, *, deadline: Deadline) -> None:
        """Set the consumer's cursor in a partition, unless it has one there."""
        await self._move(partition_id, offset, only_new=True, deadline=deadline)

    async def move(self, partition_id: PartitionId, offset: Offset, *, deadline: Deadline) -> None:
        """Set the consumer's cursor in a partition."""
        await self._move(partition_id, offset, only_new=False, deadline=deadline)

    async def _move(
        self, partition_id: PartitionId, offset: Offset | Literal["latest"], *, only_new: bool, deadline: Deadline
    ) -> None:
        if self.consumer_id is None:
            message = "not done: a consumer without a name has no cursor in the cluster; pass name=..."
            raise RequestError(message, code="no_consumer_name")
        cursor = (self.consumer_id, offset)

        def build(topic: TopicInfo) -> MoveCursor:
            return MoveCursor(
                topic_id=topic.topic_id,
                partition_id=partition_id,
                cursors=(cursor,),
                only_new=only_new,
                session=self._session,
            )

        await self._router.ask_leader(self._topic, partition_id, build, deadline=deadline)


class NamedCursors:
    """The cursors of consumers that read by other means; each is registered when it is first moved."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._known: dict[tuple[str, str], ConsumerCursors] = {}

    async def move(self, topic: str, name: str, offsets: Mapping[int, int]) -> None:
        """Set a consumer's cursors, by partition."""
        deadline = self._router.deadline()
        cursors = self._known.get((topic, name))
        if cursors is None:
            consumer_id, _ = await register_consumer(
                self._router, (topic,), name=name, consumer_id=None, deadline=deadline
            )
            cursors = ConsumerCursors(self._router, topic, consumer_id)
            self._known[topic, name] = cursors
        try:
            await asyncio.gather(
                *(cursors.move(PartitionId(part), Offset(at), deadline=deadline) for part, at in offsets.items())
            )
        except RequestError:
            self._known.pop((topic, name), None)  # the consumer may have been removed, or its topic created again
            raise


class PartitionLag(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer's cursor and lag in a partition."""

    consumer_id: ConsumerId
    topic: str
    partition: PartitionId
    cursor: Offset
    first_offset: Offset
    end_offset: Offset
    lag: int
    """Number of records that it has not consumed yet."""


async def find_lag(router: Router, consumer_id: ConsumerId, topics: Iterable[str]) -> list[PartitionLag]:
    """Return a consumer's lag in every partition that it is registered for, by topic and partition."""
    places = [(topic, partition) for topic in topics for partition in await _partitions_of(router, topic)]
    found = await gather_first_error(_find_one(router, consumer_id, *place) for place in places)
    return [lag for lag in found if lag is not None]


async def plan_reset(
    router: Router,
    consumer_id: ConsumerId,
    topic: str,
    target: int | str,
    *,
    is_timestamp: bool,
    partitions: Sequence[PartitionId],
) -> list[tuple[PartitionLag, Offset]]:
    """Return where a consumer is in some partitions of a topic, or in all of its own, and where a reset would set it.

    Raises:
        NotAllowedError: it is not registered for one of `partitions`; no cursor was moved.
        OutOfRangeError: the offset is beyond a partition's end; no cursor was moved.
    """
    known = await _partitions_of(router, topic)
    if unknown := set(partitions) - set(known):
        raise NotFoundError(f"not done: topic {topic!r} has no partition {min(unknown)}", code="unknown_partition")
    lags = await gather_first_error(_find_one(router, consumer_id, topic, at) for at in partitions or known)
    for partition, lag in zip(partitions or known, lags, strict=True):
        if lag is None and partitions:
            message = f"not done: consumer {consumer_id} is not registered for partition {partition} of topic {topic!r}"
            raise NotAllowedError(message, code="not_registered")
    return [
        (lag, await _resolve_target(router, lag, target, is_timestamp=is_timestamp)) for lag in lags if lag is not None
    ]


async def reset_cursors(
    router: Router,
    consumer_id: ConsumerId,
    topic: str,
    target: int | str,
    *,
    is_timestamp: bool,
    partitions: Sequence[PartitionId],
) -> list[tuple[PartitionLag, Offset]]:
    """Set a consumer's cursors in some partitions of a topic, or in all of its own; return where it was and is.

    Raises as `plan_reset` does, when no cursor was moved, and as `move_planned`.
    """
    plan = await plan_reset(router, consumer_id, topic, target, is_timestamp=is_timestamp, partitions=partitions)
    cursors = ConsumerCursors(router, topic, consumer_id)
    await move_planned(plan, lambda lag, to: cursors.move(lag.partition, to, deadline=router.deadline()))
    return plan


async def move_planned(
    plan: Sequence[tuple[PartitionLag, Offset]], move: Callable[[PartitionLag, Offset], Coroutine[Any, Any, None]]
) -> None:
    """Move cursors with `move`, each in its own partition.

    Raises:
        OutcomeUnknownError: some were moved, or perhaps, and others were not (`partly_done`); the message names them.
        QuiverError: not done; no cursor was moved.
    """
    outcomes = await gather_outcomes(move(lag, to) for lag, to in plan)
    errors = [one for one in outcomes if one is not None]
    if not errors:
        return
    if len(errors) == len(plan) and all(one.outcome == "not_done" for one in errors):
        raise errors[0]
    named: dict[str, list[str]] = {}
    for (lag, _), error in zip(plan, outcomes, strict=True):
        what = "moved" if error is None else "not moved" if error.outcome == "not_done" else "perhaps moved"
        named.setdefault(what, []).append(f"{lag.topic}/{lag.partition}")
    shown = "; ".join(f"{what}: {', '.join(places)}" for what, places in sorted(named.items()))
    advice = "reset those that were not moved by topic and partition"
    message = f"may have been done in part ({shown}): {errors[0]}; {advice}"
    raise OutcomeUnknownError(message, code="partly_done") from errors[0]


async def _partitions_of(router: Router, topic: str) -> list[PartitionId]:
    info = await router.find_topic(topic, deadline=router.deadline(), age_ms_max=0)
    return [partition.partition_id for partition in info.partitions]


async def _find_one(
    router: Router, consumer_id: ConsumerId, topic: str, partition_id: PartitionId
) -> PartitionLag | None:
    """Return a consumer's lag in a partition; None if it is not registered for it."""
    try:
        found = await ConsumerCursors(router, topic, consumer_id).find(partition_id, deadline=router.deadline())
    except NotAllowedError as error:
        if error.code != "not_registered":
            raise
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


async def _resolve_target(router: Router, lag: PartitionLag, target: int | str, *, is_timestamp: bool) -> Offset:
    if isinstance(target, str) or is_timestamp:
        return await find_offset(router, lag.topic, lag.partition, target)
    if not 0 <= target <= lag.end_offset:
        place = f"partition {lag.partition} of topic {lag.topic!r}"
        message = f"not done: offset {target} is out of range: {place} ends at {lag.end_offset}"
        raise OutOfRangeError(message)
    return Offset(target)
