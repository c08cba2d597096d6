"""The asyncio interface to a cluster: administration of topics, brokers and clients; creates producers and consumers.

Every call has one total deadline for all its attempts (`timeout`). It returns a result or raises an error of
`quiver.errors`, and reports an outcome as *unknown* only if it is. `close` also closes its producers and consumers.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from copy import copy
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

import msgspec

from quiver.client.administration import AsyncClusterAdministration
from quiver.client.arguments import check_arguments
from quiver.client.cluster_queues import AsyncClusterQueues
from quiver.client.consumer import AsyncConsumer, trace_consumer
from quiver.client.consumer_core import ConsumerCore, Subscription, parse_subscription
from quiver.client.cursors import NamedCursors
from quiver.client.diagnosis import Diagnose
from quiver.client.discovery import HttpGet, explain_failure, http_get, locate, parse_seeds, wire_addresses
from quiver.client.frames import require_arrow
from quiver.client.group_consumer import GroupConsumerCore
from quiver.client.group_options import Member, OnPartitions, parse_member
from quiver.client.membership_host import MakeTransport, MembershipHost
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
from quiver.client.queue_core import QueueCore
from quiver.client.ranges import OffsetSpecs, OnProgress, RangeReader, ReplicaReader, TopicOffsets, find_offsets
from quiver.client.scan import AsyncScan, ScanBound, plan_scan
from quiver.client.topics import TopicDescription, describe_topic
from quiver.clock import Clock, Rng
from quiver.errors import OverloadedError, RequestError, UnavailableError
from quiver.model import PartitionId
from quiver.record import Batch
from quiver.routing.created_topic import check_encrypted
from quiver.routing.metadata_cache import MetadataCache
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.routing.transport import Transport
from quiver.tracing import Tracing
from quiver.wire.messages import (
    AddPartitionsRequest,
    ConfigureTopicRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
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
class AsyncCluster(AsyncClusterQueues, AsyncClusterAdministration):
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
        make_transport: MakeTransport | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Accept addresses of some nodes; `owned` is opened before the first request and closed after the last.

        `make_transport` makes the connections of group memberships, which run on a thread of their own; without it
        they use `transport` and run on the loop that uses this object.
        """
        self.options = options or ClusterOptions()
        check_options(self.options)
        self._seeds = parse_seeds(addresses)
        self._transport, self._owned, self._http_get, self._diagnose = transport, owned, http_get, diagnose
        self._rng, self._tracing = rng, tracing
        self._cache = MetadataCache(clock)
        self.router = Router(transport, self._cache, clock=clock, rng=rng, options=self.options)
        self._cursors = NamedCursors(self.router)
        self._membership_host = MembershipHost(self.router, make_transport)
        self._made = AsyncExitStack()
        self._clients: dict[ProducerCore | ConsumerCore | QueueCore, None] = {}
        """Producers, consumers and queues that are open, the oldest first."""
        self.is_left_cleanly = False
        """Whether the block that uses it has ended without an error: members of groups have finished their records."""

    async def open(self) -> Self:
        """Connect to the cluster and fetch its nodes.

        Raises:
            UnavailableError: none of the addresses answered within `timeout`, or `CONNECT_MS_MAX` if that is less; in
                two seconds if no address can be one of a cluster (`not_reached`).
        """
        try:
            if self._owned is not None:
                await self._made.enter_async_context(self._owned)
            self._made.push_async_callback(self._membership_host.close)
            self._made.push_async_callback(self._close_clients)
            deadline = self.router.deadline(min(self.options.timeout_ms, CONNECT_MS_MAX))
            await self._find_nodes(deadline)
        except BaseException:
            await self._made.aclose()
            raise
        return self

    async def _find_nodes(self, deadline: Deadline) -> None:
        located = await self._locate(deadline)
        # All given addresses stay in use: the one that answered first may know no other node and be gone for good soon.
        self._cache.seeds = tuple(wire_addresses(self._seeds, located))
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
        """Close all producers, consumers and queues of this cluster object, then the connections; idempotent."""
        await self._made.aclose()

    async def _close_clients(self) -> None:
        async with AsyncExitStack() as closing:  # closes the newest first, and all of them even if one fails
            for core in self._clients:
                if isinstance(core, GroupConsumerCore):
                    closing.push_async_callback(core.close, is_finished=self.is_left_cleanly)
                else:
                    closing.push_async_callback(core.close)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_left_cleanly = kind is None
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
        if self._tracing is not None:
            core.trace(self._tracing)
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
        group: str | None = None,
        instance: str = "",
        rack: str = "",
        session_timeout: float = 10.0,
        max_processing_time: float | None = None,
        commit_on_release: bool = True,
        on_assign: OnPartitions | None = None,
        on_revoke: OnPartitions | None = None,
    ) -> AsyncConsumer:
        """Return a consumer of the records of a topic, of several topics, or of all topics that match a pattern.

        A pattern (`re.compile("logs-.*")`) matches whole names, also of topics that are created later. With a `name`,
        or the `consumer_id` of an earlier one, the cluster stores its cursors: it resumes at the last commit, a new
        consumer at `start`. A name has one user at a time: the newest one, and earlier ones get `FencedError`. Without
        a name it starts at `start` and leaves no state in the cluster.

        With a `group` it is a member: members share the partitions of their topics and the cursors of the consumer
        with that name, and each reads what is assigned to it at the time. The SDK's own thread shows that it lives; if
        its process is gone for `session_timeout` seconds, or it takes longer than `max_processing_time` for what it
        received, others get its partitions. Positions are committed before a partition is released and at the end, with
        `commit_on_release`. `on_assign` and `on_revoke` get topics and partitions, while it waits for records or
        closes; in threads they run in one of the SDK's. An `instance` is restarted without a rebalance; partitions with
        leaders in the `rack` are preferred.
        `auto_commit` (seconds) is the interval of automatic commits of the records that the application has finished.
        `idle_timeout` (seconds) ends an iteration after so long without a record. With `digests` it publishes digests
        of received records under its name, for audits.
        """
        options = ConsumerOptions(
            start=start,
            auto_commit_ms=None if auto_commit is None else to_ms(auto_commit, "auto_commit"),
            on_trimmed=on_trimmed,
            fetch_bytes=fetch_bytes,
            prefetch_bytes=prefetch_bytes,
        )
        check_options(options)
        subscription = parse_subscription(topic, partitions)
        idle_timeout_ms = None if idle_timeout is None else to_ms(idle_timeout, "idle_timeout")
        member = parse_member(
            group, instance, rack, session_timeout, max_processing_time, commit_on_release, on_assign, on_revoke
        )
        if member is None:
            core = await self._open_consumer(subscription, name or "", consumer_id, options, is_digesting=digests)
        else:
            member.check_alone(name, consumer_id, subscription.partitions, is_digesting=digests)
            core = await self._join_group(subscription, member, options)
        consumer = AsyncConsumer(core, self.router, idle_timeout_ms=idle_timeout_ms)
        if self._tracing is not None:
            trace_consumer(consumer, self._tracing)
        return consumer

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

    # -- internals -------------------------------------------------------------------------------

    def _keep(self, core: ProducerCore | ConsumerCore | QueueCore) -> None:
        """Remember a producer, consumer or queue until it is closed: `close` closes those that are left."""
        self._clients[core] = None
        core.on_closed = lambda: self._clients.pop(core, None)

    async def _open_consumer(
        self,
        subscription: Subscription,
        name: str,
        consumer_id: int | None,
        options: ConsumerOptions,
        *,
        is_digesting: bool,
    ) -> ConsumerCore:
        if is_digesting and not name:
            raise RequestError("not done: digests need a consumer with a name: pass name=...", code="no_consumer_name")
        if is_digesting and subscription.pattern is not None:
            raise RequestError("not done: digests need topics by name, not a pattern", code="bad_topics")
        core = await ConsumerCore.open(
            self.router,
            subscription,
            name=name,
            consumer_id=consumer_id,
            options=options,
            deadline=self.router.deadline(),
            digest_reporters={
                one: await self._make_digest_reporter("consumer", name, one)
                for one in (subscription.topics if is_digesting else ())
            },
        )
        self._keep(core)
        return core

    async def _join_group(self, subscription: Subscription, member: Member, options: ConsumerOptions) -> ConsumerCore:
        core = await GroupConsumerCore.open_member(
            self.router, subscription, options=options, member=member, host=self._membership_host
        )
        self._keep(core)
        return core

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
