"""The asyncio interface to a cluster: administration of topics, brokers and clients; creates producers and consumers.

Every call has one total deadline for all its attempts (`timeout`). It returns a result or raises an error of
`quiver.errors`, and reports an outcome as *unknown* only if it is. `close` also closes its producers and consumers.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from copy import copy
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

import msgspec

from quiver.client.administration import AsyncClusterAdministration
from quiver.client.arguments import check_arguments
from quiver.client.consumer import AsyncConsumer, parse_seek_target
from quiver.client.consumer_core import ConsumerCore, SeekTarget, parse_subscription
from quiver.client.cursors import NamedCursors, PartitionLag, find_lag, reset_cursors
from quiver.client.diagnosis import Diagnose
from quiver.client.discovery import HttpGet, explain_failure, http_get, locate, parse_seeds
from quiver.client.frames import require_arrow
from quiver.client.holds import find_holds, place_hold, release_hold
from quiver.client.options import (
    ClusterOptions,
    ConsumerOptions,
    ProducerOptions,
    check_options,
    default_delivery_timeout_ms,
    to_compression,
    to_ms,
)
from quiver.client.presentation import describe, html_rows
from quiver.client.producer import AsyncProducer, ProducerCore
from quiver.client.ranges import OffsetSpecs, OnProgress, RangeReader, ReplicaReader, TopicOffsets, find_offsets
from quiver.client.scan import AsyncScan, ScanBound, plan_scan
from quiver.client.topics import TopicDescription, describe_topic
from quiver.clock import Clock, Rng
from quiver.errors import NotFoundError, OverloadedError, RequestError, UnavailableError
from quiver.model import ConsumerId, PartitionId
from quiver.record import Batch
from quiver.routing.created_topic import check_encrypted
from quiver.routing.metadata_cache import MetadataCache
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.routing.transport import Transport
from quiver.wire.admin_messages import (
    ClientInfo,
    HoldInfo,
    ListClients,
)
from quiver.wire.messages import (
    AddPartitionsRequest,
    ConfigureTopicRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    ForgetClientRequest,
    GetMetadata,
    RestoreTopicRequest,
    RetentionInfo,
)
from quiver.wire.requests import Done, Request

if TYPE_CHECKING:
    import pyarrow as pa

    from quiver.client.digest_reporter import DigestReporter

REACH_MS_MAX: Final = 1_300
"""Time after which addresses that do not answer are diagnosed: with it, a wrong address is reported in two seconds."""
CONNECT_MS_MAX: Final = 10_000
"""Longest time for the first contact with nodes that are there and slow."""


@check_arguments
class AsyncCluster(AsyncClusterAdministration):
    """Use a cluster from asyncio; made by `quiver.connect_async`.

    Example:
        async with quiver.connect_async("127.0.0.1:9002") as cluster:
            await cluster.create_topic("logs", partitions=3)
            async with await cluster.producer("logs", name="web-1") as producer:
                await producer.send("hello")
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        transport: Transport,
        clock: Clock,
        rng: Rng,
        options: ClusterOptions | None = None,
        owned: AbstractAsyncContextManager[object] | None = None,
        http_get: HttpGet = http_get,
        diagnose: Diagnose | None = None,
    ) -> None:
        """Accept addresses of some nodes; `owned` is opened before the first request and closed after the last."""
        self.options = options or ClusterOptions()
        check_options(self.options)
        self._seeds = parse_seeds(addresses)
        self._transport, self._owned, self._http_get, self._diagnose = transport, owned, http_get, diagnose
        self._rng = rng
        self._cache = MetadataCache(clock)
        self.router = Router(transport, self._cache, clock=clock, rng=rng, options=self.options)
        self._cursors = NamedCursors(self.router)
        self._made = AsyncExitStack()
        self._clients: dict[ProducerCore | ConsumerCore, None] = {}
        """Producers and consumers that are open, the oldest first."""

    async def open(self) -> Self:
        """Connect to the cluster and fetch its nodes.

        Raises:
            UnavailableError: none of the addresses answered within `timeout`, or `CONNECT_MS_MAX` if that is less; in
                two seconds if no address can be one of a cluster (`not_reached`).
        """
        try:
            if self._owned is not None:
                await self._made.enter_async_context(self._owned)
            self._made.push_async_callback(self._close_clients)
            deadline = self.router.deadline(min(self.options.timeout_ms, CONNECT_MS_MAX))
            await self._find_nodes(deadline)
        except BaseException:
            await self._made.aclose()
            raise
        return self

    async def _find_nodes(self, deadline: Deadline) -> None:
        seeds = await self._locate(deadline)
        self._cache.seeds = tuple(seeds)
        found, _ = await self.router.ask(GetMetadata(topics=(), is_stale_ok=True), deadline=deadline)
        self._cache.update(found, topic="")

    async def _locate(self, deadline: Deadline) -> list[str]:
        """Return wire addresses of nodes; diagnose addresses that do not answer, and wait only for nodes."""
        reach_deadline = self.router.deadline(min(deadline.remaining_ms, REACH_MS_MAX))
        limit = reach_deadline
        while True:
            retry = self.router.retry(limit, is_read=True)
            try:
                while True:
                    timeout_ms = max(1, min(limit.remaining_ms, self.options.attempt_timeout_ms))
                    try:
                        return await locate(self._seeds, self._transport, self._http_get, timeout_ms=timeout_ms)
                    except UnavailableError as error:
                        await retry.wait_turn(error)
            except UnavailableError as error:
                if self._diagnose is not None and not isinstance(error, OverloadedError):
                    await explain_failure(self._seeds, self._diagnose, error, is_final=limit is deadline)
                if limit is deadline:
                    raise
                limit = deadline

    async def close(self) -> None:
        """Close all producers and consumers of this cluster object, then the connections; idempotent."""
        await self._made.aclose()

    async def _close_clients(self) -> None:
        async with AsyncExitStack() as closing:  # closes the newest first, and all of them even if one fails
            for core in self._clients:
                closing.push_async_callback(core.close)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._made.__aexit__(kind, error, trace)

    @property
    def cluster_id(self) -> str:
        """The id of the cluster, empty until a node has answered."""
        return self._cache.cluster_id

    def with_timeout(self, timeout: float) -> Self:
        """Return this cluster with another timeout of its calls: `cluster.with_timeout(2).list_topics()`.

        Both use the same connections; closing one closes the other. Producers and consumers keep the timeout of the
        object that made them.
        """
        other = copy(self)
        other.options = msgspec.structs.replace(self.options, timeout_ms=to_ms(timeout, "timeout"))
        check_options(other.options)
        other.router = self.router.with_options(other.options)
        other._cursors = NamedCursors(other.router)
        return other

    def __repr__(self) -> str:
        addresses = tuple(node.wire_address for node in self._cache.nodes.values())
        return describe(type(self), {"cluster_id": self.cluster_id, "nodes": addresses})

    def _repr_html_(self) -> str:
        nodes = sorted(self._cache.nodes.values(), key=lambda node: node.node)
        rows = [(node.node, node.state, node.wire_address, node.http_address) for node in nodes]
        return html_rows(f"cluster {self.cluster_id}", ("node", "state", "wire", "http"), rows)

    # -- topics ----------------------------------------------------------------------------------

    async def create_topic(
        self,
        topic: str,
        partitions: int = 3,
        *,
        replicas: int | None = None,
        retention: RetentionInfo | None = None,
        encrypted: bool | None = None,
        exist_ok: bool = False,
    ) -> None:
        """Create a topic; its partitions accept records when this returns or soon after.

        `encrypted` says whether its replicas encrypt their files, which cannot be changed later; None: as the cluster
        is set up.

        Raises:
            ConflictError: the topic exists (`topic_exists`) and `exist_ok` is false; the cluster has no key for an
                encrypted one (`no_encryption_key`), or it is there without encryption (`not_encrypted`).
        """
        request = CreateTopicRequest(
            topic=topic,
            partitions=partitions,
            replicas=replicas,
            retention=retention or RetentionInfo(),
            request_id=f"sdk-{self._rng.randrange(1 << 62):016x}",
            is_encrypted=encrypted,
        )
        try:
            created = await self._ask(request)
        except RequestError as error:
            if exist_ok and error.code == "topic_exists":
                if encrypted:
                    found = await self._ask(GetMetadata(topics=(topic,)))
                    check_encrypted(request, is_encrypted=all(info.is_encrypted for info in found.topics))
                return
            raise
        self._cache.record_index(created.index)
        self._cache.forget_topic(topic)
        check_encrypted(request, is_encrypted=created.is_encrypted)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic; `restore_topic` can undo it for a while."""
        await self._change(DeleteTopicRequest(topic=topic), topic)

    async def restore_topic(self, topic: str) -> None:
        """Restore the topic of that name that was deleted last."""
        await self._change(RestoreTopicRequest(topic=topic), topic)

    async def add_partitions(self, topic: str, partitions: int) -> None:
        """Raise the number of a topic's partitions to `partitions`; keys then map to different partitions."""
        await self._change(AddPartitionsRequest(topic=topic, partitions=partitions), topic)

    async def configure_topic(self, topic: str, *, retention: RetentionInfo) -> None:
        """Change the retention of a topic."""
        await self._change(ConfigureTopicRequest(topic=topic, retention=retention), topic)

    async def list_topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        topics = await self.router.refresh_all(deadline=self.router.deadline())
        return sorted(info.topic for info in topics)

    async def describe_topic(self, topic: str) -> TopicDescription:
        """Return a topic with the state of every partition, as reported by its leader."""
        return await describe_topic(self.router, topic)

    # -- clients ---------------------------------------------------------------------------------

    async def clients(
        self, kind: Literal["producer", "consumer", ""] = "", topic: str | None = None
    ) -> list[ClientInfo]:
        """Return the registered producers and consumers, optionally of one kind or topic."""
        request = ListClients(kind=kind, topic=topic)
        return list((await self._ask(request)).clients)

    async def forget(self, kind: Literal["producer", "consumer"], id: int) -> None:  # noqa: A002 - the public name of the argument
        """Remove a producer or consumer; its cursors no longer keep records from retention."""
        self._record_index(await self._ask(ForgetClientRequest(kind=kind, id=id)))

    async def lag(self, consumer_id: int, topic: str | None = None) -> list[PartitionLag]:
        """Return a consumer's cursor and lag in all its partitions, or in those of one topic.

        Raises:
            NotFoundError: unknown consumer, or not registered for that topic (`unknown_consumer`).
        """
        known = next((client for client in await self.clients("consumer", topic) if client.id == consumer_id), None)
        if known is None:
            scope = "" if topic is None else f" of topic {topic!r}"
            raise NotFoundError(f"unknown consumer {consumer_id}{scope}", code="unknown_consumer")
        return await find_lag(self.router, ConsumerId(consumer_id), known.topics if topic is None else (topic,))

    async def reset(
        self,
        consumer_id: int,
        topic: str,
        offset: SeekTarget | None = None,
        *,
        timestamp: int | datetime | None = None,
        partitions: Iterable[int] = (),
    ) -> None:
        """Move a consumer's cursors to an offset, "earliest", "latest", or the first record since a timestamp.

        Stop the consumer first: one that runs keeps its positions and overwrites the cursors with its next commit.

        Raises:
            NotFoundError: unknown consumer, topic or partition.
            NotAllowedError: the consumer is not registered for one of `partitions`; no cursor was moved.
            OutOfRangeError: the offset is beyond a partition's end; no cursor was moved.
        """
        target, is_timestamp = parse_seek_target(offset, timestamp)
        named = tuple(map(PartitionId, partitions))
        consumer = ConsumerId(consumer_id)
        await reset_cursors(self.router, consumer, topic, target, is_timestamp=is_timestamp, partitions=named)

    # -- records ---------------------------------------------------------------------------------

    async def producer(
        self,
        topic: str,
        name: str | None = None,
        *,
        partitions: Iterable[int] = (),
        linger_ms: int = 0,
        batch_bytes: int = 1 << 20,
        buffer_bytes: int = 64 << 20,
        compression: Literal["lz4", "zstd"] | None = None,
        delivery_timeout: float | None = None,
        digests: bool = False,
        create_topic: bool = True,
    ) -> AsyncProducer:
        """Register a producer for a topic and return it.

        With a `name` it continues the sequence of an earlier producer of that name, and fences that one. `partitions`
        receive the records without key and partition; empty means all. A record fails `delivery_timeout` seconds after
        it was accepted (default: 60, or the cluster's `timeout` if less than 30 were asked for). With `digests` it
        publishes digests of acknowledged records, for audits. A missing topic is created, unless `create_topic` is
        false or the cluster's setting `manager.creates_topics` is: then it is an error (`unknown_topic`).
        """
        options = ProducerOptions(
            linger_ms=linger_ms,
            batch_bytes=batch_bytes,
            buffer_bytes=buffer_bytes,
            compression=to_compression(compression),
            delivery_timeout_ms=default_delivery_timeout_ms(self.options.timeout_ms)
            if delivery_timeout is None
            else to_ms(delivery_timeout, "delivery_timeout"),
        )
        check_options(options)
        core = await ProducerCore.open(
            self.router,
            topic=topic,
            name=name or "",
            partitions=tuple(map(PartitionId, partitions)),
            options=options,
            deadline=self.router.deadline(),
            is_creating=create_topic,
        )
        self._keep(core)
        if digests:
            try:
                core.digest_reporter = await self._make_digest_reporter(
                    "producer", name or str(core.identity.producer_id), topic
                )
            except BaseException:
                await core.close()
                raise
        return AsyncProducer(core, self.router)

    async def consumer(
        self,
        topic: str | re.Pattern[str] | Iterable[str],
        name: str | None = None,
        *,
        consumer_id: int | None = None,
        partitions: Iterable[int] = (),
        start: Literal["earliest", "latest"] = "earliest",
        auto_commit: float | None = None,
        on_trimmed: Literal["error", "earliest"] = "error",
        idle_timeout: float | None = None,
        fetch_bytes: int = 4 << 20,
        prefetch_bytes: int = 16 << 20,
        digests: bool = False,
    ) -> AsyncConsumer:
        """Return a consumer of the records of a topic, of several topics, or of all topics that match a pattern.

        A pattern (`re.compile("logs-.*")`) matches whole names, also of topics that are created later. With a `name`,
        or the `consumer_id` of an earlier one, the cluster stores its cursors: it resumes at the last commit, a new
        consumer at `start`. A name has one user at a time: the newest one, and earlier ones get `FencedError`. Without
        a name it starts at `start` and leaves no state in the cluster.
        `auto_commit` (seconds) is the interval of automatic commits of the records that the application has finished.
        `idle_timeout` (seconds) ends an iteration after so long without a record. With `digests` it publishes digests
        of received records under its name, for audits.
        """
        if digests and not name:
            raise RequestError("digests need a consumer with a name: pass name=...", code="no_consumer_name")
        options = ConsumerOptions(
            start=start,
            auto_commit_ms=None if auto_commit is None else to_ms(auto_commit, "auto_commit"),
            on_trimmed=on_trimmed,
            fetch_bytes=fetch_bytes,
            prefetch_bytes=prefetch_bytes,
        )
        check_options(options)
        subscription = parse_subscription(topic, partitions)
        if digests and subscription.pattern is not None:
            raise RequestError("digests need topics by name, not a pattern", code="bad_topics")
        core = await ConsumerCore.open(
            self.router,
            subscription,
            name=name or "",
            consumer_id=consumer_id,
            options=options,
            deadline=self.router.deadline(),
            digest_reporters={
                one: await self._make_digest_reporter("consumer", name or "", one)
                for one in (subscription.topics if digests else ())
            },
        )
        self._keep(core)
        idle_timeout_ms = None if idle_timeout is None else to_ms(idle_timeout, "idle_timeout")
        return AsyncConsumer(core, self.router, idle_timeout_ms=idle_timeout_ms)

    # -- ranges of offsets -----------------------------------------------------------------------

    async def offsets(
        self, topic: str, at: OffsetSpecs = "latest", *, topic_id: int | None = None, max_age_ms: int = 0
    ) -> TopicOffsets:
        """Return the topic's id and, by partition, its first offset, its end offset, or the offset of a timestamp.

        `at` is "earliest", "latest" or a timestamp (ms), for all partitions or by partition. With a `topic_id`, a topic
        that was deleted and created again is refused (`topic_recreated`). Added partitions show within `max_age_ms`.
        """
        return await find_offsets(self.router, topic, at, topic_id=topic_id, age_ms_max=max_age_ms)

    def read_range(
        self,
        topic: str,
        partition: int,
        first_offset: int,
        end_offset: int,
        *,
        topic_id: int | None = None,
        fetch_bytes: int = 4 << 20,
    ) -> AsyncIterator[Batch]:
        """Yield the batches of a partition that hold a range of offsets; leaves no state in the cluster.

        The first and last batch may extend beyond the range. Raises `TrimmedError` if retention removed some of it.
        """
        reader = RangeReader(
            self.router,
            topic,
            partition,
            first_offset=first_offset,
            end_offset=end_offset,
            topic_id=topic_id,
            fetch_bytes=fetch_bytes,
        )
        return _read(reader)

    def read_replica(
        self,
        topic: str,
        partition: int,
        node: int,
        first_offset: int,
        end_offset: int,
        *,
        topic_id: int | None = None,
        fetch_bytes: int = 4 << 20,
    ) -> AsyncIterator[Batch]:
        """Yield the batches of a range of offsets as one node stores them, whether it leads the partition or not.

        For comparing replicas: unlike `read_range` it does not fill gaps. Raises `OutOfRangeError` (`past_end`) if the
        replica ends before the range and does not catch up, `NotFoundError` (`no_replica`) if the node has no replica.
        """
        reader = ReplicaReader(
            self.router,
            topic,
            partition,
            node=node,
            first_offset=first_offset,
            end_offset=end_offset,
            topic_id=topic_id,
            fetch_bytes=fetch_bytes,
        )
        return _read(reader)

    async def scan(
        self,
        topic: str,
        *,
        start: ScanBound = "earliest",
        end: ScanBound = "latest",
        partitions: Iterable[int] = (),
        schema: pa.Schema | None = None,
        with_headers: bool = False,
        progress: OnProgress | None = None,
        fetch_bytes: int = 4 << 20,
    ) -> AsyncScan:
        """Return a bounded read of a topic, as a stream of Arrow batches; leaves no state in the cluster.

        `start` and `end` are "earliest", "latest", an offset, a `datetime`, or an offset by partition; the end is at
        most the current one. With a `schema`, values are JSON objects and become its columns. `progress` is called with
        a `ReadProgress` after each fetch.
        """
        plan = await plan_scan(
            self.router,
            topic,
            start=start,
            end=end,
            partitions=tuple(partitions),
            schema=schema,
            is_with_headers=with_headers,
            fetch_bytes=fetch_bytes,
            on_progress=progress,
        )
        return AsyncScan(plan, self.router)

    async def move_cursors(self, topic: str, name: str, offsets: Mapping[int, int]) -> None:
        """Set the cursors of a named consumer, by partition, for a program that stores its own offsets."""
        await self._cursors.move(topic, name, offsets)

    # -- holds -----------------------------------------------------------------------------------

    async def hold(
        self,
        topic: str,
        name: str,
        offsets: Mapping[int, int],
        *,
        lasting: float = 60.0,
        owner: str = "",
        topic_id: int | None = None,
    ) -> None:
        """Keep a topic's records from retention for `lasting` seconds, by partition from an offset on.

        For a program that stores its own offsets: renew the hold, from its current offsets, well before it expires. It
        replaces the hold of that `name` on the topic. `owner` is shown to operators.

        Raises:
            ConflictError: too many holds (`too_many_holds`), or the topic was created again (`topic_recreated`).
            OutOfRangeError: no partition is named, or the time is too short or too long (`bad_hold`).
        """
        lasting_ms = to_ms(lasting, "lasting")
        await place_hold(self.router, topic, name, offsets, lasting_ms=lasting_ms, owner=owner, topic_id=topic_id)

    async def release_hold(self, name: str, topic: str | None = None) -> None:
        """Release a hold on one topic or on all its topics; a missing hold is no error."""
        await release_hold(self.router, name, topic)

    async def holds(self) -> list[HoldInfo]:
        """Return the holds, sorted by topic and name."""
        return await find_holds(self.router)

    # -- internals -------------------------------------------------------------------------------

    def _keep(self, core: ProducerCore | ConsumerCore) -> None:
        """Remember a producer or consumer until it is closed: `close` closes those that are left."""
        self._clients[core] = None
        core.on_closed = lambda: self._clients.pop(core, None)

    async def _make_digest_reporter(
        self, role: Literal["producer", "consumer"], name: str, topic: str
    ) -> DigestReporter:
        """Return a reporter that publishes digests of the records that a client sends or receives."""
        require_arrow()
        from quiver.client import digest_reporter

        info = await self.router.find_topic(topic, deadline=self.router.deadline(), age_ms_max=0)
        await self.create_topic(digest_reporter.TOPIC, partitions=1, retention=digest_reporter.RETENTION, exist_ok=True)
        producer = await self.producer(digest_reporter.TOPIC)
        return digest_reporter.DigestReporter(producer.core, role=role, name=name, topic=topic, topic_id=info.topic_id)

    async def _change(self, request: Request[Done], topic: str) -> None:
        self._record_index(await self._ask(request))
        self._cache.forget_topic(topic)


async def _read(reader: RangeReader) -> AsyncIterator[Batch]:
    try:
        while batches := await reader.read_next():
            for batch in batches:
                yield batch
    finally:
        reader.close()
