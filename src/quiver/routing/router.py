"""Sends requests to the right node and retries them: any node, a node by id, or the leader of a partition.

It owns the metadata cache and the retries. Every call has one deadline for all its attempts. `ask` and `ask_leader`
retry; `try_leader` makes one attempt, for callers that must keep an order between attempts (`client.sender`). A request
that is not repeatable is never sent again after an attempt of unknown outcome. Each request carries the metadata index
that this router has seen (`known_index`), so that a node that lags behind catches up before it answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from copy import copy
from typing import Any, Final, TypeVar

import msgspec

from quiver.clock import Clock, Rng
from quiver.errors import (
    DiskFullError,
    NotFoundError,
    NotLeaderError,
    OverloadedError,
    QuiverError,
    RequestError,
    TrimmedError,
    UnavailableError,
)
from quiver.model import Buffer, NodeId, PartitionId
from quiver.routing.metadata_cache import MetadataCache
from quiver.routing.retry import Deadline, Retry, RetryBudget
from quiver.routing.transport import Transport
from quiver.tasks import timeout
from quiver.wire.messages import GetMetadata, TopicInfo
from quiver.wire.requests import R, Request

T = TypeVar("T")

LONG_POLL_SPARE_MS: Final = 1_000
"""Time that the response to a long poll may take beyond its wait."""
STALE_REFUSALS: Final = frozenset(
    {"unknown_producer", "unknown_epoch", "unknown_consumer", "not_registered", "group_active"}
)
"""Refusals that a leader may make because it lags behind."""


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The timeouts of a router; the SDK's `ClusterOptions` has bounds and defaults for users."""

    timeout_ms: int = 30_000
    """Timeout of a call, all its attempts included."""
    attempt_timeout_ms: int = 5_000
    """Timeout of one attempt: after it, another node is asked."""
    metadata_age_ms_max: int = 30_000
    """Age at which cached metadata is refreshed although nothing contradicts it."""


class Router:
    """Send requests to the nodes that can answer them, and retry."""

    def __init__(
        self, transport: Transport, cache: MetadataCache, *, clock: Clock, rng: Rng, options: RouterOptions
    ) -> None:
        self.cache = cache
        self.options = options
        self.clock, self.rng = clock, rng
        self._transport = transport
        self._on_behalf_of = ""
        self._budget = RetryBudget(clock, count_partitions=cache.count_partitions)
        self._refreshing = asyncio.Lock()

    def with_options(self, options: RouterOptions) -> Router:
        """Return a router with other options that shares connections, cache and retry budget."""
        other = copy(self)
        other.options = options
        return other

    def acting_for(self, on_behalf_of: str) -> Router:
        """Return a router of a node whose requests are those of a principal, by which their receivers decide.

        Metadata is asked for as the node itself: the cache is shared by all principals. Empty: everything is.
        """
        other = copy(self)
        other._on_behalf_of = on_behalf_of
        return other

    def deadline(self, timeout_ms: int | None = None) -> Deadline:
        """Return the end of a call that begins now."""
        return Deadline(self.clock, self.options.timeout_ms if timeout_ms is None else timeout_ms)

    def retry(self, deadline: Deadline, *, is_read: bool = False, is_repeatable: bool = True) -> Retry:
        """Return the retries of one call."""
        return Retry(deadline=deadline, rng=self.rng, budget=self._budget, is_read=is_read, is_repeatable=is_repeatable)

    # -- any node --------------------------------------------------------------------------------

    async def ask(
        self, request: Request[R], payload: Sequence[Buffer] = (), *, deadline: Deadline
    ) -> tuple[R, memoryview]:
        """Return the answer of any node; a node forwards what only the primary can do."""
        retry = self.retry(deadline, is_read=request.is_read, is_repeatable=request.is_repeatable)
        while True:
            error: QuiverError = UnavailableError("not sent: no address of the cluster is known")
            for address in self.cache.addresses():
                try:
                    answer = await self._call(address, request, payload, deadline=deadline)
                except UnavailableError as failure:
                    error = failure
                    self.cache.prefer("")
                    if isinstance(failure, OverloadedError) or deadline.is_over:
                        break
                except QuiverError as failure:
                    error = failure
                    self.cache.prefer("")
                    break
                else:
                    self.cache.prefer(address)
                    return answer
            await retry.wait_turn(error)

    async def ask_at(self, address: str, request: Request[R], *, deadline: Deadline) -> R:
        """Return the answer of the node at an address, in one attempt."""
        return (await self._call(address, request, (), deadline=deadline))[0]

    async def ask_node(self, node: NodeId, request: Request[R], *, deadline: Deadline) -> tuple[R, memoryview]:
        """Return the answer and payload of a node by its id, in one attempt."""
        if node not in self.cache.nodes:
            await self.refresh_all(deadline=deadline)
        if node not in self.cache.nodes:
            raise NotFoundError(f"not done: the cluster has no node {node}", code="unknown_broker")
        return await self._call(self.cache.nodes[node].wire_address, request, (), deadline=deadline)

    # -- topics ----------------------------------------------------------------------------------

    async def find_topic(self, name: str, *, deadline: Deadline, age_ms_max: int | None = None) -> TopicInfo:
        """Return a topic, from the cache if it is fresh enough.

        Raises:
            NotFoundError: the primary says that there is no such topic.
        """
        age_ms_max = self.options.metadata_age_ms_max if age_ms_max is None else age_ms_max
        known = self.cache.topic(name, age_ms_max=age_ms_max)
        if known is not None:
            return known
        asked_ms = self.clock.monotonic_ms()
        async with self._own_refresh(deadline):
            # A caller that waited for another refresh uses its result instead of asking again.
            waited_ms = self.clock.monotonic_ms() - asked_ms
            known = self.cache.topic(name, age_ms_max=waited_ms) if waited_ms else None
            for is_linearizable in (False, True):
                if known is not None:
                    return known
                await self._refresh(name, deadline=deadline, is_linearizable=is_linearizable)
                known = self.cache.topic(name, age_ms_max=self.options.timeout_ms)
        if known is None:
            raise NotFoundError(f"not done: unknown topic {name!r}", code="unknown_topic")
        return known

    @asynccontextmanager
    async def _own_refresh(self, deadline: Deadline) -> AsyncIterator[None]:
        """Serialize refreshes; a caller waits for those of others, whose deadlines may be later, until its own."""
        try:
            async with timeout(deadline.remaining_ms / 1000):
                await self._refreshing.acquire()
        except TimeoutError:
            message = "not done: the deadline passed while metadata was fetched"
            raise UnavailableError(message, code="deadline") from None
        try:
            yield
        finally:
            self._refreshing.release()

    async def refresh_all(self, *, deadline: Deadline) -> tuple[TopicInfo, ...]:
        """Refresh all cached metadata; return all topics."""
        found, _ = await self.ask(GetMetadata(), deadline=deadline)
        self.cache.update(found, topic=None)
        return found.topics

    async def _refresh(self, name: str, *, deadline: Deadline, is_linearizable: bool) -> None:
        found, _ = await self.ask(GetMetadata(topics=(name,), is_linearizable=is_linearizable), deadline=deadline)
        self.cache.update(found, topic=name)

    # -- leaders ---------------------------------------------------------------------------------

    async def ask_leader(
        self,
        topic: str,
        partition_id: PartitionId,
        build: Callable[[TopicInfo], Request[R]],
        payload: Sequence[Buffer] = (),
        *,
        deadline: Deadline,
        wait_ms: int = 0,
        on_unknown: Callable[[], object] = lambda: None,
    ) -> tuple[R, memoryview]:
        """Return the answer of a partition's leader to the request that `build` makes for its topic.

        `on_unknown` is called for each attempt that may have been done although it failed.

        A leader that does not know a client, or its epoch, may lag behind the node that registered it: such a refusal
        is final only if it is repeated by a leader that has all metadata that the primary had after the first one.
        """
        retry: Retry | None = None
        is_confirmed = False
        while True:
            try:
                info = await self.find_topic(topic, deadline=deadline)
                request = build(info)
            except QuiverError as error:
                if retry is None:
                    raise
                raise retry.final_error(error) from error
            try:
                return await self.try_leader(info, partition_id, request, payload, deadline=deadline, wait_ms=wait_ms)
            except QuiverError as error:
                if error.outcome == "unknown":
                    on_unknown()
                if retry is None:
                    retry = self.retry(deadline, is_read=request.is_read, is_repeatable=request.is_repeatable)
                try:
                    if error.code in STALE_REFUSALS and not is_confirmed:
                        is_confirmed = True
                        meant = await self._doubt_refusal(error, deadline=deadline)
                    else:
                        meant = await self.explain(error, info, partition_id, deadline=deadline)
                except QuiverError as failure:
                    raise retry.final_error(failure) from error
                await retry.wait_turn(meant)

    async def try_leader(
        self,
        topic: TopicInfo,
        partition_id: PartitionId,
        request: Request[R],
        payload: Sequence[Buffer] = (),
        *,
        deadline: Deadline,
        wait_ms: int = 0,
    ) -> tuple[R, memoryview]:
        """Ask the presumed leader of a partition once, and update the cache by the outcome."""
        cache = self.cache
        node = cache.choose(topic, partition_id)
        if node is None:
            cache.forget_topic(topic.topic)
            raise UnavailableError(
                f"not done: no leader is known for topic {topic.topic!r} partition {partition_id}", code="no_leader"
            )
        address = cache.nodes[node].wire_address
        try:
            answer = await self._call(address, request, payload, deadline=deadline, wait_ms=wait_ms)
        except NotLeaderError as error:
            self._learn(topic, partition_id, node, error.leader)
            raise
        except (RequestError, OverloadedError, DiskFullError, TrimmedError):
            raise  # answered by the leader itself
        except QuiverError:
            cache.doubt(topic.topic_id, partition_id, node)
            raise
        cache.confirm(topic.topic_id, partition_id, node)
        return answer

    async def explain(
        self, error: QuiverError, topic: TopicInfo, partition_id: PartitionId, *, deadline: Deadline
    ) -> QuiverError:
        """Return what an error means for the caller: a leader that does not know the topic may lag behind."""
        if not isinstance(error, NotFoundError) or error.code not in ("unknown_topic", "unknown_partition"):
            return error
        self.cache.forget_topic(topic.topic)
        current = await self.find_topic(topic.topic, deadline=deadline)
        if current.topic_id != topic.topic_id or partition_id >= len(current.partitions):
            return error
        return UnavailableError(f"the leader does not know topic {topic.topic!r} yet: {error}", code=error.code)

    async def _doubt_refusal(self, error: QuiverError, *, deadline: Deadline) -> QuiverError:
        """Learn the primary's metadata index, which the next attempt names; return an error that is retried."""
        found, _ = await self.ask(GetMetadata(topics=(), is_linearizable=True), deadline=deadline)
        self.cache.record_index(found.index)
        return UnavailableError(f"the leader may not know the client yet: {error}", code=error.code)

    def _learn(self, topic: TopicInfo, partition_id: PartitionId, node: NodeId, hint: NodeId | None) -> None:
        self.cache.doubt(topic.topic_id, partition_id, node, hint=hint)
        if hint is None or hint not in self.cache.nodes:
            self.cache.forget_topic(topic.topic)

    async def _call(
        self, address: str, request: Request[R], payload: Sequence[Buffer], *, deadline: Deadline, wait_ms: int = 0
    ) -> tuple[R, memoryview]:
        timeout_ms = min(
            deadline.remaining_ms, self.options.attempt_timeout_ms + wait_ms + (LONG_POLL_SPARE_MS if wait_ms else 0)
        )
        if not timeout_ms:
            raise UnavailableError("not sent: the deadline has passed", code="deadline")
        if request.known_index < self.cache.known_index:
            request = msgspec.structs.replace(request, known_index=self.cache.known_index)
        if self._on_behalf_of and not isinstance(request, GetMetadata):
            request = msgspec.structs.replace(request, on_behalf_of=self._on_behalf_of)
        return await self._transport.call(address, request, payload, timeout_ms=timeout_ms)


async def gather_or_raise(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls concurrently and return their results in order; once all have ended, raise the first error, if any."""
    results: list[T] = []
    for outcome in await gather_outcomes(calls):
        if isinstance(outcome, QuiverError):
            raise outcome
        results.append(outcome)
    return results


async def gather_outcomes(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T | QuiverError]:
    """Run calls concurrently; return in order the result of each, or its error of `quiver.errors`."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_catch_error(call)) for call in calls]
    return [task.result() for task in tasks]


async def _catch_error(call: Coroutine[Any, Any, T]) -> T | QuiverError:
    try:
        return await call
    except QuiverError as error:
        return error
