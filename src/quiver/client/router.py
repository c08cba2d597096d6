"""How the client asks: any node about the cluster, a partition's leader about its records; again until it is known.

It owns the directory and the retries; every call has one deadline for all its tries. `ask` and `ask_leader` try again;
`try_leader` makes one try, for who must keep an order between tries (`sender`). No request is ever sent twice whose
repetition could do harm: those end with the first try whose outcome is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from quiver.client.metadata_cache import MetadataCache
from quiver.client.options import ClusterOptions
from quiver.client.retry import Deadline, Retry, RetryBudget
from quiver.client.transport import Transport
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
from quiver.wire.consume_many import ConsumeMany
from quiver.wire.exchange import R, Request
from quiver.wire.messages import (
    Consume,
    DeleteTopicRequest,
    ForgetClientRequest,
    GetMetadata,
    RemoveBroker,
    RestoreTopicRequest,
    TopicInfo,
)
from quiver.wire.traits import READS

ONCE: Final[frozenset[type[Request[Any]]]] = frozenset(
    (DeleteTopicRequest, RestoreTopicRequest, RemoveBroker, ForgetClientRequest, ConsumeMany)
)
"""Requests that mean something else the second time: the topic may have been made anew, the cursor has moved."""
SPARE_MS: Final = 1_000
"""How much longer than its wait a long poll's answer may take."""


class Router:
    """Send requests to where they belong, and again while that may help."""

    def __init__(
        self, transport: Transport, directory: MetadataCache, *, clock: Clock, rng: Rng, options: ClusterOptions
    ) -> None:
        self.directory = directory
        self.options = options
        self.clock, self.rng = clock, rng
        self._transport = transport
        self._budget = RetryBudget(clock)
        self._refreshing = asyncio.Lock()

    def deadline(self, timeout_ms: int | None = None) -> Deadline:
        """Return the end of a call that begins now."""
        return Deadline(self.clock, self.options.timeout_ms if timeout_ms is None else timeout_ms)

    def retry(self, request: type[Request[Any]], deadline: Deadline, *, is_repeatable: bool | None = None) -> Retry:
        """Return the memory of a call's tries, by what kind of request it is."""
        return Retry(
            deadline=deadline,
            rng=self.rng,
            budget=self._budget,
            is_read=request in READS,
            is_repeatable=request not in ONCE if is_repeatable is None else is_repeatable,
        )

    # -- any node --------------------------------------------------------------------------------

    async def ask(
        self, request: Request[R], payload: Sequence[Buffer] = (), *, deadline: Deadline
    ) -> tuple[R, memoryview]:
        """Return any node's answer; nodes hand on what they cannot do themselves."""
        retry = self.retry(type(request), deadline)
        while True:
            error: QuiverError = UnavailableError("no address of the cluster is known")
            for address in self.directory.addresses():
                try:
                    answer = await self._call(address, request, payload, deadline=deadline)
                except UnavailableError as failure:
                    error = failure
                    self.directory.prefer("")
                    if isinstance(failure, OverloadedError) or deadline.is_over:
                        break
                except QuiverError as failure:
                    error = failure
                    self.directory.prefer("")
                    break
                else:
                    self.directory.prefer(address)
                    return answer
            await retry.wait_turn(error)

    async def ask_at(self, address: str, request: Request[R], *, deadline: Deadline) -> R:
        """Return what one node answers, asked once."""
        return (await self._call(address, request, (), deadline=deadline))[0]

    async def ask_node(self, node: NodeId, request: Request[R], *, deadline: Deadline) -> tuple[R, memoryview]:
        """Return what the node with an id answers, with its payload, asked once."""
        if node not in self.directory.nodes:
            await self.refresh_all(deadline=deadline)
        if node not in self.directory.nodes:
            raise NotFoundError(f"there is no node {node}", code="unknown_broker")
        return await self._call(self.directory.nodes[node].wire_address, request, (), deadline=deadline)

    # -- topics ----------------------------------------------------------------------------------

    async def find_topic(self, name: str, *, deadline: Deadline, age_ms_max: int | None = None) -> TopicInfo:
        """Return a topic, from memory if it was heard of lately.

        Raises:
            NotFoundError: there is no such topic, by the primary's own word.
        """
        age_ms_max = self.options.metadata_age_ms_max if age_ms_max is None else age_ms_max
        known = self.directory.topic(name, age_ms_max=age_ms_max)
        if known is not None:
            return known
        asked_ms = self.clock.monotonic_ms()
        async with self._refreshing:
            # Who waited here while somebody else asked takes what that one heard.
            waited_ms = self.clock.monotonic_ms() - asked_ms
            known = self.directory.topic(name, age_ms_max=waited_ms) if waited_ms else None
            for is_linearizable in (False, True):
                if known is not None:
                    return known
                await self._refresh(name, deadline=deadline, is_linearizable=is_linearizable)
                known = self.directory.topic(name, age_ms_max=self.options.timeout_ms)
        if known is None:
            raise NotFoundError(f"there is no topic {name!r}", code="unknown_topic")
        return known

    async def refresh_all(self, *, deadline: Deadline) -> tuple[TopicInfo, ...]:
        """Ask for everything there is to know; return all topics."""
        request = GetMetadata(known_index=self.directory.known_index)
        found, _ = await self.ask(request, deadline=deadline)
        self.directory.take(found, asked=None)
        return found.topics

    async def _refresh(self, name: str, *, deadline: Deadline, is_linearizable: bool) -> None:
        known_index = self.directory.known_index
        request = GetMetadata(topics=(name,), known_index=known_index, is_linearizable=is_linearizable)
        found, _ = await self.ask(request, deadline=deadline)
        self.directory.take(found, asked=name)

    # -- leaders ---------------------------------------------------------------------------------

    async def ask_leader(
        self,
        topic: str,
        partition_id: PartitionId,
        build: Callable[[TopicInfo], Request[R]],
        *,
        deadline: Deadline,
        wait_ms: int = 0,
    ) -> tuple[R, memoryview]:
        """Return the answer of a partition's leader to the request that `build` makes for its topic."""
        retry: Retry | None = None
        while True:
            info = await self.find_topic(topic, deadline=deadline)
            request = build(info)
            if retry is None:
                is_repeatable = request.offset is not None if isinstance(request, Consume) else None
                retry = self.retry(type(request), deadline, is_repeatable=is_repeatable)
            try:
                return await self.try_leader(info, partition_id, request, deadline=deadline, wait_ms=wait_ms)
            except QuiverError as error:
                await retry.wait_turn(await self.explain(error, info, partition_id, deadline=deadline))

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
        """Ask the node that seems to lead a partition, once, and learn from how it goes."""
        directory = self.directory
        node = directory.choose(topic, partition_id)
        if node is None:
            directory.forget_topic(topic.topic)
            raise UnavailableError(f"no leader of {topic.topic!r} partition {partition_id} was found", code="no_leader")
        address = directory.nodes[node].wire_address
        try:
            answer = await self._call(address, request, payload, deadline=deadline, wait_ms=wait_ms)
        except NotLeaderError as error:
            self._learn(topic, partition_id, node, error.leader)
            raise
        except (RequestError, OverloadedError, DiskFullError, TrimmedError):
            raise  # the leader's own word
        except QuiverError:
            directory.doubt(topic.topic_id, partition_id, node)
            raise
        directory.confirm(topic.topic_id, partition_id, node)
        return answer

    async def explain(
        self, error: QuiverError, topic: TopicInfo, partition_id: PartitionId, *, deadline: Deadline
    ) -> QuiverError:
        """Return what an error of a partition's request means: a leader that does not know the topic may be behind."""
        if not isinstance(error, NotFoundError) or error.code not in ("unknown_topic", "unknown_partition"):
            return error
        self.directory.forget_topic(topic.topic)
        current = await self.find_topic(topic.topic, deadline=deadline)
        if current.topic_id != topic.topic_id or partition_id >= len(current.partitions):
            return error
        return UnavailableError(f"a node has not heard of {topic.topic!r} yet: {error}", code=error.code)

    def _learn(self, topic: TopicInfo, partition_id: PartitionId, node: NodeId, hint: NodeId | None) -> None:
        self.directory.doubt(topic.topic_id, partition_id, node, hint=hint)
        if hint is None or hint not in self.directory.nodes:
            self.directory.forget_topic(topic.topic)

    async def _call(
        self, address: str, request: Request[R], payload: Sequence[Buffer], *, deadline: Deadline, wait_ms: int = 0
    ) -> tuple[R, memoryview]:
        timeout_ms = min(
            deadline.remaining_ms, self.options.attempt_timeout_ms + wait_ms + (SPARE_MS if wait_ms else 0)
        )
        if not timeout_ms:
            raise UnavailableError("not sent: the time is over", code="deadline")
        return await self._transport.call(address, request, payload, timeout_ms=timeout_ms)
