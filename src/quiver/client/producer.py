"""The producer: accepts records, packs them into batches, and reports their offsets.

`ProducerCore` does everything except waiting for buffer room and for outcomes, which differs between `AsyncProducer`
and the `Producer` for threads in `sync`. Records may be added from any thread; everything else runs on the event loop
that opened the core.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from quiver.client.accumulator import Accumulator
from quiver.client.arguments import checked
from quiver.client.batching import (
    RECORD_BYTES,
    RecordColumns,
    RecordHeaders,
    RecordSource,
    StoredBatch,
    arrow_columns,
    check_timestamp,
    cut_columns,
    cut_values,
    delayed_headers,
    find_deliver_at_ms,
    is_columnar,
    partition_of,
    split_by_key,
    to_bytes,
    to_headers,
)
from quiver.client.delivery import Deliveries, Delivery, Outcome, copy_error
from quiver.client.options import ProducerOptions
from quiver.client.presentation import describe, html_table
from quiver.client.sender import PartitionSender, ProducerIdentity
from quiver.errors import FencedError, OutcomeUnknownError, OverloadedError, QuiverError, RequestError, UnavailableError
from quiver.model import PartitionId, ProducerId
from quiver.record import Batch, Value
from quiver.record.delay import DELIVER_AT_HEADER
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.tasks import TaskSet
from quiver.tasks import timeout as within
from quiver.wire.messages import TopicInfo

if TYPE_CHECKING:
    from quiver.client.digest_reporter import DigestReporter
    from quiver.tracing import Tracing

Put = Callable[[], tuple[Outcome, int] | None]
"""Puts a chunk into the accumulator; returns its outcome and first index in the batch, or None without room."""


class ProducerCore:
    """One producer of one topic; `open` it on the loop that sends."""

    def __init__(
        self,
        topic: TopicInfo,
        partitions: tuple[PartitionId, ...],
        *,
        router: Router,
        identity: ProducerIdentity,
        options: ProducerOptions,
    ) -> None:
        self.topic = topic
        self._partitions = partitions
        self.identity = identity
        self.digest_reporter: DigestReporter | None = None
        """Publishes digests of acknowledged records, if requested; set before the first record is sent."""
        self.options = options
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskSet(self._crashed)
        self._senders: dict[PartitionId, PartitionSender] = {}
        self.accumulator = Accumulator(
            partitions or tuple(PartitionId(number) for number in range(len(topic.partitions))),
            partition_count=len(topic.partitions),
            clock=router.clock,
            batch_bytes=options.batch_bytes,
            buffer_bytes=options.buffer_bytes,
            announce=self._announce,
        )
        self.extend = self.accumulator.extend
        self._is_closed = False
        self.on_closed: Callable[[], object] = lambda: None

    @classmethod
    async def open(
        cls,
        router: Router,
        *,
        topic: str,
        name: str,
        partitions: tuple[PartitionId, ...],
        options: ProducerOptions,
        deadline: Deadline,
        is_creating: bool = True,
    ) -> ProducerCore:
        """Register a producer and return it; a missing topic is created if `is_creating`."""
        identity = ProducerIdentity(router, topic=topic, partitions=partitions, name=name, is_creating=is_creating)
        await identity.register(deadline=deadline)
        # Not from the cache: the topic may have been deleted and created again since.
        info = await router.find_topic(topic, deadline=deadline, age_ms_max=0)
        core = cls(info, partitions, router=router, identity=identity, options=options)
        core._tasks.start(core._follow_topic(), "follow-topic")
        return core

    def trace(self, tracing: Tracing) -> None:
        """Make spans of what is sent from now on; call it before the first record."""
        self.add = tracing.trace_add(self.add, self.topic.topic, to_headers)  # type: ignore[method-assign]
        self.extend = tracing.trace_extend(self.extend, self.topic.topic)

    # -- accepting, from any thread --------------------------------------------------------------

    def add(
        self,
        value: Value,
        key: Value,
        partition: int | None,
        timestamp: int | None,
        headers: RecordHeaders | None,
    ) -> Delivery | None:
        """Accept one record; None if there is no room for it now."""
        if type(value) is str:
            try:
                value = value.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"not sent: the text cannot be encoded as UTF-8: {error}") from error
        elif type(value) is not bytes:
            value = to_bytes(value)
        # Checked here: a batch that cannot be built would take down the records of others in it.
        stored_headers = None if headers is None else to_headers(headers)
        if timestamp is not None:
            check_timestamp(timestamp)
        if key is None and partition is None:
            return self.accumulator.add(value, None, None, timestamp, stored_headers)
        stored_key = to_bytes(key)
        target = self.choose(stored_key, partition)
        return self.accumulator.add(value, target, stored_key, timestamp, stored_headers)

    def choose(self, key: bytes | None, partition: int | None) -> PartitionId | None:
        """Return the partition of a record; None if it may go to any."""
        if partition is not None:
            if type(partition) is not int:
                message = f"not sent: a partition is a number, not {partition!r:.60}"
                raise RequestError(message, code="unknown_partition")
            self.accumulator.check_partition(PartitionId(partition))
            return PartitionId(partition)
        return None if key is None else partition_of(key, self.accumulator.partition_count)

    def add_batch(
        self, values: Sequence[bytes | None], key: bytes | None, partition: int | None
    ) -> tuple[Outcome, int] | None:
        """Accept values into one batch, all or none; return its outcome and the index of the first value in it.

        None if the buffer has no room for them now.
        """
        size_bytes = sum(len(value or b"") for value in values) + RECORD_BYTES * len(values)
        return self.accumulator.extend(values, self.choose(key, partition), key, size_bytes=size_bytes)

    def delay(self, headers: RecordHeaders | None, delay: object, deliver_at: object) -> RecordHeaders | None:
        """Return the headers of a record with its delay for work queues, if it has one."""
        deliver_at_ms = find_deliver_at_ms(delay, deliver_at, self._router.clock)
        return headers if deliver_at_ms is None else delayed_headers(to_headers(headers or ()), deliver_at_ms)

    def chunks(
        self,
        values: Any,
        key: Value,
        partition: int | None,
        delay: object = None,
        deliver_at: object = None,
    ) -> Iterable[tuple[Put, int, int]]:
        """Yield lazily the chunks to put into the accumulator, each with its bytes and its number of records."""
        stored_key = to_bytes(key)
        target = self.choose(stored_key, partition)
        delayed = self.delay(None, delay, deliver_at)
        headers = None if delayed is None else to_headers(delayed)
        if headers is not None and (is_columnar(values) or isinstance(values, Batch)):
            message = f"not sent: columns and batches have headers of their own: put {DELIVER_AT_HEADER} into them"
            raise RequestError(message, code="bad_delay")
        if is_columnar(values):
            yield from self._column_chunks(values, stored_key, target)
            return
        if isinstance(values, Batch):
            yield self._put_stored(values, stored_key, target), len(values.data), len(values)
            return
        for chunk, size_bytes in cut_values(values, self.options.batch_bytes):
            # A chunk that finds no room is put again later, so its names are bound now.
            yield (
                lambda chunk=chunk, size_bytes=size_bytes: self.extend(  # type: ignore[misc] # bound early
                    chunk, target, stored_key, size_bytes=size_bytes, headers=headers
                ),
                size_bytes,
                len(chunk),
            )

    def _column_chunks(
        self, values: Any, key: bytes | None, target: PartitionId | None
    ) -> Iterable[tuple[Put, int, int]]:
        columns = arrow_columns(values)
        if key is not None:
            import pyarrow as pa

            columns["key"] = pa.repeat(pa.scalar(key, pa.large_binary()), len(columns["value"]))
        count = self.accumulator.partition_count
        for own_target, part in [(target, columns)] if target is not None else split_by_key(columns, count):
            for piece, size_bytes in cut_columns(part, self.options.batch_bytes):
                yield self._put_columns(piece, own_target, size_bytes), size_bytes, len(piece["value"])

    def _put_columns(self, columns: Any, target: PartitionId | None, size_bytes: int) -> Put:
        clock = self._router.clock

        def build(partition_id: PartitionId) -> RecordSource:
            now_ms, timestamp = clock.monotonic_ms(), clock.wall_ms()
            return RecordColumns(partition_id, columns, opened_ms=now_ms, timestamp=timestamp, size_bytes=size_bytes)

        return self._put_whole(build, target, size_bytes)

    def _put_stored(self, batch: Batch, key: bytes | None, target: PartitionId | None) -> Put:
        if key is not None or batch.header.is_control:
            raise RequestError("not sent: a stored batch is forwarded unchanged: pass no key, and no control batch")
        batch.verify()  # resealing computes a new checksum, which would hide damage from now on
        clock = self._router.clock
        return self._put_whole(
            lambda partition_id: StoredBatch(partition_id, batch, opened_ms=clock.monotonic_ms()),
            target,
            len(batch.data),
        )

    def _put_whole(
        self, build: Callable[[PartitionId], RecordSource], target: PartitionId | None, size_bytes: int
    ) -> Put:
        def put() -> tuple[Outcome, int] | None:
            outcome = self.accumulator.put(build, target, size_bytes)
            return None if outcome is None else (outcome, 0)

        return put

    def pop_error(self) -> QuiverError | None:
        """Return the first failure since the last call and clear it."""
        error, self.accumulator.first_error = self.accumulator.first_error, None
        return None if error is None else copy_error(error)

    # -- on the loop -----------------------------------------------------------------------------

    async def next_sequence(self, partition: int, *, deadline: Deadline) -> int:
        """Return the sequence of the next record for a partition."""
        self.accumulator.check_partition(PartitionId(partition))
        sender = self._sender(PartitionId(partition))
        await sender.begin(deadline=deadline)
        return sender.next_sequence

    async def drain(self) -> None:
        """Send all accepted records and wait until every outcome is known, success or failure."""
        for outcome in self.accumulator.close_open():
            await wait_settled(outcome)
        if self.digest_reporter is not None:
            await self.digest_reporter.flush()

    async def close(self, *, is_draining: bool = True) -> None:
        """Refuse further records; send the accepted ones, or fail them if not `is_draining`; idempotent."""
        if self._is_closed:
            return
        try:
            if is_draining:
                await self.drain()
        finally:
            self._is_closed = True
            closed = UnavailableError("not sent: the producer is closed", code="closed")
            left = self.accumulator.refuse(closed)
            await self._tasks.close()
            self._abandon(left, closed)
            self.on_closed()
            if self.digest_reporter is not None:
                await self.digest_reporter.close()

    def grow(self, partition_count: int) -> None:
        """Use partitions that were added to the topic; a count that is not larger than the known one is ignored."""
        if partition_count > self.accumulator.partition_count:
            self.accumulator.grow(partition_count, is_for_all=not self._partitions)

    async def _follow_topic(self) -> None:
        """Check periodically for added partitions; keys then map to all of them."""
        age_ms_max = self._router.options.metadata_age_ms_max
        while True:
            await asyncio.sleep(age_ms_max / 1000)
            with suppress(QuiverError):  # the senders report errors to the application
                deadline = self._router.deadline()
                info = await self._router.find_topic(self.topic.topic, deadline=deadline, age_ms_max=age_ms_max)
                if info.topic_id == self.topic.topic_id:
                    self.topic = info
                    self.grow(len(info.partitions))

    def _announce(self) -> None:
        """Schedule `_wake_senders` on the loop; called from any thread that adds records."""
        if asyncio._get_running_loop() is self._loop:
            self._loop.call_soon(self._wake_senders)
        else:
            self._loop.call_soon_threadsafe(self._wake_senders)

    def _wake_senders(self) -> None:
        for partition in self.accumulator.drain_dirty():
            self._sender(partition).wake()

    def _sender(self, partition: PartitionId) -> PartitionSender:
        sender = self._senders.get(partition)
        if sender is None:
            sender = PartitionSender(
                self.topic,
                partition,
                router=self._router,
                identity=self.identity,
                accumulator=self.accumulator,
                options=self.options,
                tasks=self._tasks,
                on_fenced=self._fenced,
                digest_reporter=self.digest_reporter,
            )
            self._senders[partition] = sender
            if not self._is_closed:
                self._tasks.start(sender.run(), f"send-{partition}")
        return sender

    def _fenced(self, error: FencedError) -> None:
        """Fail all pending records: another producer took over the name, so no partition accepts them again."""
        for source in self.accumulator.refuse(error):
            source.outcome.fail(error)
            self.accumulator.settle(source.outcome, source.size_bytes)

    def _crashed(self, error: BaseException) -> None:
        """Fail all records as unknown after an unexpected error in a task: those in flight may be committed."""
        unknown = OutcomeUnknownError(
            f"the producer of topic {self.topic.topic!r} crashed: {error!r}; create a new one", code="producer_failed"
        )
        unknown.__cause__ = error
        self._abandon(self.accumulator.refuse(unknown), unknown)

    def _abandon(self, sources: Iterable[RecordSource], error: QuiverError) -> None:
        for source in sources:
            source.outcome.fail(error)
            self.accumulator.settle(source.outcome, source.size_bytes)
        for sender in self._senders.values():
            sender.abandon(error)


def record_bytes(value: Value, key: Value) -> int:
    """Return the bytes that a record occupies in the buffer."""
    return RECORD_BYTES + len(to_bytes(value) or b"") + len(to_bytes(key) or b"")


def encode_json(value: Any) -> bytes:
    """Return a value as JSON; dates become ISO 8601. Raises `RequestError` for what JSON cannot hold."""
    try:
        encoded = msgspec.json.encode(value)
        if b"null" in encoded:  # what msgspec writes for such numbers, too
            _check_numbers(msgspec.to_builtins(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"not sent: the value cannot be written as JSON: {error}", code="bad_json") from error
    return encoded


def _check_numbers(value: Any) -> None:
    """Raise `ValueError` if a value holds NaN or an infinity."""
    if isinstance(value, dict):
        for each in value.values():
            _check_numbers(each)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            _check_numbers(each)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"JSON has no number {value}")


def late_error(timeout: float) -> OutcomeUnknownError:
    """Return the error of a flush that took too long."""
    message = f"may have been done: not every outcome is known within {timeout} s; the rest is still in flight"
    return OutcomeUnknownError(message, code="timeout")


async def wait_settled(outcome: Outcome) -> None:
    """Wait until the outcome of a batch is known, success or failure."""
    with suppress(QuiverError):
        await outcome


class AsyncProducer:
    """Send records to a topic; made by `AsyncCluster.producer`.

    Example:
        producer = await cluster.producer("logs", name="web-1")
        position = await producer.send("hello")
        await producer.send_many(f"line {number}" for number in range(1000))
        await producer.flush()
    """

    def __init__(self, core: ProducerCore, router: Router) -> None:
        """Accept an open core; for use inside the SDK only."""
        self.core = core
        self._router = router

    @property
    def producer_id(self) -> ProducerId:
        """The id that the cluster assigned; a name always gets the same id."""
        return self.core.identity.producer_id

    @property
    def topic(self) -> str:
        """The topic of this producer."""
        return self.core.topic.topic

    @property
    def pending_bytes(self) -> int:
        """Bytes of accepted records whose outcome is not known yet."""
        return self.core.accumulator.pending_bytes

    def send(
        self,
        value: Value,
        key: Value = None,
        partition: int | None = None,
        timestamp: int | None = None,
        headers: RecordHeaders | None = None,
        *,
        delay: float | None = None,
        deliver_at: int | datetime | None = None,
    ) -> Delivery:
        """Accept a record and return a delivery; `await` it for the partition and offset.

        The partition is the given one, else the hash of the key, else any. Work queues deliver it after `delay` seconds
        or at `deliver_at` (a `datetime` or milliseconds); other consumers at once. Never waits: see `wait_room`.

        Raises:
            OverloadedError: the buffer holds `buffer_bytes`; the record was not accepted.
            FencedError: another producer registered under the same name; this record was not accepted.
            RequestError: the record is not valid; it was not accepted.
        """
        if delay is not None or deliver_at is not None:
            headers = self.core.delay(headers, delay, deliver_at)
        delivery = self.core.add(value, key, partition, timestamp, headers)
        if delivery is None:
            raise OverloadedError(
                "not sent: the buffer is full; await producer.wait_room() and retry", code="buffer_full"
            )
        return delivery

    def send_json(
        self,
        value: Any,
        key: Value = None,
        partition: int | None = None,
        timestamp: int | None = None,
        headers: RecordHeaders | None = None,
        *,
        delay: float | None = None,
        deliver_at: int | datetime | None = None,
    ) -> Delivery:
        """Accept a record whose value is JSON, made of any value that JSON can hold; otherwise as `send`."""
        encoded = encode_json(value)
        return self.send(encoded, key, partition, timestamp, headers, delay=delay, deliver_at=deliver_at)

    @checked
    async def wait_room(self, size_bytes: int = 1) -> None:
        """Wait until the buffer has room for `size_bytes` more."""
        accumulator = self.core.accumulator
        while True:
            loop = asyncio.get_running_loop()
            freed: asyncio.Future[None] = loop.create_future()
            if accumulator.on_room(size_bytes, lambda freed=freed: freed.done() or freed.set_result(None)):  # type: ignore[misc] # bound early
                return
            await freed

    async def send_many(
        self,
        values: Any,
        key: Value = None,
        partition: int | None = None,
        *,
        delay: float | None = None,
        deliver_at: int | datetime | None = None,
    ) -> Deliveries:
        """Accept many records, waiting while the buffer is full; return one delivery for all of them.

        `values` is an iterable of text and bytes, an Arrow array, or columns: an Arrow table, a pandas or polars frame,
        or a mapping, with `value` and optionally `key`, `timestamp` and `headers`. A batch that was read is sent
        unchanged. Without a partition or key they are spread over the partitions batch by batch. `delay` and
        `deliver_at` are as in `send`, for text and bytes only: columns have headers of their own.
        """
        parts: list[tuple[Outcome, int, int]] = []
        for put, size_bytes, count in self.core.chunks(values, key, partition, delay, deliver_at):
            while (placed := put()) is None:
                await self.wait_room(size_bytes)
            parts.append((*placed, count))
            await asyncio.sleep(0)  # a long iterable must not block the loop that sends
        return Deliveries(parts)

    @checked
    async def next_sequence(self, partition: int) -> int:
        """Return the sequence of the next record for a partition: the number of records this producer ever sent there.

        Right after a restart under the same name it is the number of records that the partition already has: skip so
        many to resume exactly.
        """
        return await self.core.next_sequence(partition, deadline=self._router.deadline())

    @checked
    async def flush(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - ends the wait, not the sending
        """Send all records accepted so far and wait until every outcome is known, at most `timeout` seconds.

        Raises:
            OutcomeUnknownError: not every outcome is known after `timeout`; the records are still being sent.
            QuiverError: the first failure of any record since the last flush.
        """
        try:
            async with within(timeout):
                await self.core.drain()
        except TimeoutError:
            assert timeout is not None
            raise late_error(timeout) from None
        if (error := self.core.pop_error()) is not None:
            raise error

    async def close(self) -> None:
        """Flush, then close; idempotent. Raises as `flush`."""
        await self.core.close()
        if (error := self.core.pop_error()) is not None:
            raise error

    async def abort(self) -> None:
        """Close without sending pending records; their deliveries fail as not done, or unknown if they were sent."""
        await self.core.close(is_draining=False)

    def __repr__(self) -> str:
        return describe(type(self), self.facts())

    def _repr_html_(self) -> str:
        return html_table(type(self), self.facts())

    def facts(self) -> dict[str, object]:
        """Return what this producer knows of itself. For use inside the SDK only."""
        return {
            "topic": self.topic,
            "name": self.core.identity.name or None,
            "producer_id": self.producer_id,
            "pending_bytes": self.pending_bytes,
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
        else:
            await self.core.close()
