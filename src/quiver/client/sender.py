"""Sends one partition's batches: at most five in flight, in order, each until its outcome is known.

A record does not wait for the ones before it while these are few: its way through the cluster takes as long as it must,
not up to twice as long. Once more are in flight, records wait and share the next batch.

A `PartitionSender` is the only sender of a producer's batches to one partition. Batches are sent concurrently until one
fails. After a failure the sender starts nothing, waits until no batch is in flight, and then resends the failed batches
in order with the same bytes. The partition answers a batch that it already has with its offset. So a retry neither
duplicates nor reorders records.

The sender begins a new epoch if it abandons a batch that is perhaps committed, or if the partition expects another
sequence. The partition then refuses every batch of the old epoch that still arrives, and its answer to the new epoch
shows which records it has.

`ProducerIdentity` is the producer's id and epoch, shared by the senders of all its partitions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from quiver.client.accumulator import Accumulator
from quiver.client.inflight import InflightBatch, InflightWindow
from quiver.client.options import ProducerOptions
from quiver.errors import FencedError, NotFoundError, OutOfSequenceError, QuiverError, RequestError
from quiver.model import PartitionId, ProducerId
from quiver.routing.retry import Deadline, Retry
from quiver.routing.router import Router
from quiver.tasks import TaskSet
from quiver.wire.messages import BeginEpoch, Produce, RegisterProducerRequest, Selection, TopicInfo

if TYPE_CHECKING:
    from quiver.client.digest_reporter import DigestReporter

GAPS_MAX: Final = 3
"""How often the first batch may be out of sequence before the sender asks the partition which sequence it expects.
A resend alone repairs requests that overtook each other on the way."""
SPARSE_RECORDS: Final = 4
"""With fewer records in flight the next one is sent at once; with as many it waits, so that batches become large."""
SPARSE_BYTES: Final = 16 * 1024
"""With more bytes of all partitions pending, one batch in flight is enough for the next records to wait."""


class PartitionSender:
    """Send one partition's batches; run `run` in a task."""

    def __init__(
        self,
        topic: TopicInfo,
        partition_id: PartitionId,
        *,
        router: Router,
        identity: ProducerIdentity,
        accumulator: Accumulator,
        options: ProducerOptions,
        tasks: TaskSet,
        on_fenced: Callable[[FencedError], object],
        digest_reporter: DigestReporter | None = None,
    ) -> None:
        self._topic, self._partition_id = topic, partition_id
        self._router, self._identity, self._accumulator = router, identity, accumulator
        self._options, self._tasks, self._on_fenced = options, tasks, on_fenced
        self._digest_reporter = digest_reporter
        self._window = InflightWindow(options.compression)
        self._is_changed = False
        self._waiter: asyncio.Future[None] | None = None
        """What `run` waits for until something has changed; an `asyncio.Event` costs four times the calls."""
        self._beginning = asyncio.Lock()
        self._begun_id: ProducerId | None = None
        self._begun_epoch: int | None = None
        self._needs_new_epoch = False
        self._is_recovering = False
        self._in_flight_count = 0
        self._retry: Retry | None = None
        self._linger: asyncio.TimerHandle | None = None

    @property
    def next_sequence(self) -> int:
        """The sequence of the next record that is sent to the partition; valid after `begin`."""
        unsealed = sum(batch.count for batch in self._window.waiting if not batch.is_sealed)
        return self._window.next_sequence + unsealed + self._accumulator.waiting_records(self._partition_id)

    def wake(self) -> None:
        """Check again for batches to send."""
        self._is_changed = True
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._is_recovering or not self._is_begun:
            waiter.set_result(None)
        else:
            self._send_ready(waiter)

    def _send_ready(self, waiter: asyncio.Future[None]) -> None:
        """Do in this turn what `run`, which waits, would do in the next one: nothing has failed."""
        self._waiter = None  # what is called from here only sets `_is_changed`
        self._is_changed = False
        try:
            if self._fill_window():
                self._launch()
        except BaseException as error:  # noqa: BLE001 - it ends `run`, whose owner reports it
            waiter.set_exception(error)
            return
        self._waiter = waiter
        if self._is_changed:
            waiter.set_result(None)

    async def begin(self, *, deadline: Deadline) -> None:
        """Ask the partition which sequence it expects, unless that is known."""
        async with self._beginning:
            if self._begun_epoch is None:
                await self._begin(deadline)

    async def run(self) -> None:
        """Send batches as they become ready, until cancelled."""
        while True:
            self._is_changed = False
            if self._is_recovering:
                if not self._in_flight_count:
                    await self._recover()
                    continue
            elif self._fill_window():
                if self._is_begun:
                    self._launch()
                elif not self._in_flight_count:  # no batch of the old epoch may be in flight when a new one begins
                    await self._try_to_begin()
                    continue
            if not self._is_changed:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter

    def abandon(self, error: QuiverError) -> None:
        """Fail every batch in flight with `error`; the task of `run` must have ended."""
        for batch in self._window.open:
            batch.is_perhaps_done = batch.is_perhaps_done or batch.is_in_flight
            self._drop(batch, error)
        if self._linger is not None:
            self._linger.cancel()

    # -- epochs ----------------------------------------------------------------------------------

    @property
    def _is_begun(self) -> bool:
        is_same = self._begun_id == self._identity.producer_id and self._begun_epoch == self._identity.epoch
        return is_same and not self._needs_new_epoch

    async def _begin(self, deadline: Deadline) -> None:
        """Begin the current or, if required, a new epoch in the partition; no batch may be in flight."""
        while not self._is_begun:
            epoch = self._identity.epoch
            if self._begun_id not in (None, self._identity.producer_id):
                self._restart()
            if self._needs_new_epoch and epoch == self._begun_epoch:
                await self._ask_next_sequence(epoch, deadline)  # raises if another producer took over the name
                await self._identity.renew(after_epoch=epoch, deadline=deadline)
                continue
            is_unknown_there = self._begun_epoch is None and self._identity.is_new
            next_sequence = 0 if is_unknown_there else await self._ask_next_sequence(epoch, deadline)
            self._begun_id, self._begun_epoch, self._needs_new_epoch = self._identity.producer_id, epoch, False
            for batch in self._window.align(next_sequence):
                self._settle(
                    batch, OutOfSequenceError(f"partition {self._partition_id} has expired the state of this producer")
                )

    def _restart(self) -> None:
        """Begin from sequence 0 under a new producer id: the cluster has removed the old one with its sequences."""
        self._begun_id, self._begun_epoch, self._needs_new_epoch = None, None, False
        for batch in self._window.restart(self._identity.producer_id, self._identity.epoch):
            message = f"the producer expired before partition {self._partition_id} answered; it has registered again"
            self._settle(batch, OutOfSequenceError(message))

    async def _register_again(self, error: QuiverError, removed_id: ProducerId, deadline: Deadline) -> bool:
        """Get a new id for a producer without a name that the cluster has removed; return whether that was it.

        Nothing is lost by it: batches that were certainly not done are sent under the new id, the others fail as
        unknown. A producer with a name is not replaced: an application may count on its sequences.
        """
        if error.code != "unknown_producer" or self._identity.name:
            return False
        await self._identity.replace(removed_id, deadline=deadline)
        return True

    # -- sending ---------------------------------------------------------------------------------

    def _fill_window(self) -> bool:
        """Fill the window from the accumulator; return whether it holds any batch."""
        window, now_ms = self._window, self._router.clock.monotonic_ms()
        while len(window.waiting) < self._options.inflight_batches_max:
            # While many records are in flight an open batch waits: those that arrive meanwhile make it larger.
            open_before_ms = now_ms - self._options.linger_ms if self._is_sparse else None
            source = self._accumulator.pop_batch(self._partition_id, open_before_ms=open_before_ms)
            if source is None:
                break
            waited_ms = now_ms - source.opened_ms
            deadline = self._router.deadline(max(0, self._options.delivery_timeout_ms - waited_ms))
            window.waiting.append(InflightBatch(source, deadline))
        if self._is_sparse:
            self._set_linger()
        return bool(window.waiting)

    @property
    def _is_sparse(self) -> bool:
        window = self._window
        if not window.waiting:
            return True
        return self._accumulator.pending_bytes <= SPARSE_BYTES and window.is_sparse(SPARSE_RECORDS)

    def _set_linger(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        opened_ms = self._accumulator.opened_ms(self._partition_id)
        if opened_ms is not None:
            left_ms = max(0, opened_ms + self._options.linger_ms - self._router.clock.monotonic_ms())
            self._linger = asyncio.get_running_loop().call_later(left_ms / 1000, self.wake)

    def _launch(self) -> None:
        """Start sending every batch that is not in flight, in order."""
        for batch in self._window.open:
            if batch.is_in_flight:
                continue
            try:
                self._window.seal(batch, self._identity.producer_id, self._identity.epoch)
            except QuiverError as error:
                self._drop(batch, error)
                continue
            batch.is_in_flight = True
            self._in_flight_count += 1
            self._tasks.start(self._send(batch), f"produce-{self._partition_id}")

    async def _send(self, batch: InflightBatch) -> None:
        """Send one batch once."""
        request = Produce(
            topic_id=self._topic.topic_id,
            partition_id=self._partition_id,
        )
        try:
            produced, _ = await self._router.try_leader(
                self._topic, self._partition_id, request, (batch.data,), deadline=batch.deadline
            )
        except QuiverError as error:
            if batch.outcome.is_settled:
                return  # the producer was closed or fenced meanwhile
            batch.error = error
            batch.is_perhaps_done = batch.is_perhaps_done or error.outcome == "unknown"
            self._is_recovering = True
        else:
            if batch.outcome.is_settled:
                return
            self._retry = None
            if self._digest_reporter is not None:  # before `acknowledge`, which releases the bytes
                self._digest_reporter.add_sent(self._partition_id, batch.data, produced.base_offset)
            self._window.acknowledge(batch)
            batch.outcome.succeed(produced.base_offset)
            self._accumulator.settle(batch.outcome, batch.size_bytes)
        batch.is_in_flight = False
        self._in_flight_count -= 1
        self.wake()

    # -- failures --------------------------------------------------------------------------------

    async def _try_to_begin(self) -> None:
        """Begin the epoch before the first batch's deadline, or fail the batches that cannot wait."""
        try:
            async with self._beginning:
                asked_id, deadline = self._identity.producer_id, self._window.waiting[0].deadline
                try:
                    await self._begin(deadline)
                except NotFoundError as error:
                    if not await self._register_again(error, asked_id, deadline):
                        raise
        except FencedError as error:
            self._fence(error)
        except RequestError as error:
            for batch in self._window.open:
                self._drop(batch, error)
        except QuiverError as error:
            self._expire(error)

    async def _recover(self) -> None:
        """Handle the errors of failed batches, none of them in flight, and wait until they may be resent."""
        self._is_recovering = False
        failed = [batch for batch in self._window.open if batch.error is not None]
        errors = [batch.error for batch in failed if batch.error is not None]
        for batch in failed:
            batch.error = None
        fencing = next((error for error in errors if isinstance(error, FencedError)), None)
        if fencing is not None:
            self._handle_fenced(fencing, failed)
            return
        # Later batches failed because the first did, or are handled when they become the first.
        await self._handle_first_failure(failed[0], errors[0])

    def _handle_fenced(self, error: FencedError, failed: list[InflightBatch]) -> None:
        if all(batch.epoch < self._identity.epoch for batch in failed):
            return  # fenced by our own next epoch, which another partition's sender has begun
        self._fence(error)

    async def _handle_first_failure(self, batch: InflightBatch, error: QuiverError) -> None:
        try:
            error = await self._router.explain(error, self._topic, self._partition_id, deadline=batch.deadline)
            if await self._register_again(error, self._begun_id or self._identity.producer_id, batch.deadline):
                return
            if isinstance(error, OutOfSequenceError):
                self._count_gap(batch)
            elif isinstance(error, RequestError):
                self._drop(batch, error)
                return
            await self._wait_turn(batch, error)
            self._topic = await self._router.find_topic(self._topic.topic, deadline=batch.deadline)
        except RequestError as gone:
            self._drop(batch, gone)
        except QuiverError as late:
            self._expire(late)

    def _count_gap(self, batch: InflightBatch) -> None:
        batch.gaps += 1
        if batch.gaps >= GAPS_MAX:
            batch.gaps = 0
            self._needs_new_epoch = True

    async def _wait_turn(self, batch: InflightBatch, error: QuiverError) -> None:
        if self._retry is None:
            self._retry = self._router.retry(batch.deadline)
        if not isinstance(error, RequestError):
            await self._retry.wait_turn(error)

    def _expire(self, error: QuiverError) -> None:
        """Fail the batches past their deadline, and always the first one, whose deadline the caller waited for."""
        first, *_ = batches = self._window.open
        for batch in batches:
            if batch.deadline.is_over or batch is first:
                self._drop(batch, error)

    def _fence(self, error: FencedError) -> None:
        for batch in self._window.open:
            self._drop(batch, error)
        self._on_fenced(error)

    def _drop(self, batch: InflightBatch, error: QuiverError) -> None:
        """Fail a batch and repair the sequence after it."""
        self._retry = None
        may_arrive = self._window.is_any_perhaps_done
        self._window.drop(batch)
        if batch.is_sealed:
            if may_arrive:
                # A batch that still arrives would take this sequence: only a new epoch fences it.
                self._needs_new_epoch = True
            else:
                self._window.close_gap(batch)
        self._settle(batch, error)
        self.wake()  # the window may have room for waiting batches

    def _settle(self, batch: InflightBatch, error: QuiverError) -> None:
        batch.outcome.fail(batch.final_error(error))
        self._accumulator.settle(batch.outcome, batch.size_bytes)

    async def _ask_next_sequence(self, epoch: int, deadline: Deadline) -> int:
        def build(topic: TopicInfo) -> BeginEpoch:
            return BeginEpoch(
                topic_id=topic.topic_id,
                partition_id=self._partition_id,
                producer_id=self._identity.producer_id,
                epoch=epoch,
            )

        begun, _ = await self._router.ask_leader(self._topic.topic, self._partition_id, build, deadline=deadline)
        return begun.next_sequence


class ProducerIdentity:
    """A producer's id and current epoch.

    One identity serves all partitions of a producer. `renew` moves it to a new epoch, which fences everything sent
    before. It is fenced itself when another producer registers under the same name.
    """

    def __init__(
        self,
        router: Router,
        *,
        topic: str,
        partitions: tuple[PartitionId, ...],
        name: str,
        is_creating: bool = True,
    ) -> None:
        self.producer_id = ProducerId(-1)
        self.epoch = -1
        self.name = name
        self._router = router
        self._topics = (Selection(topic=topic, partitions=partitions),)
        self._is_creating = is_creating
        self._renewing = asyncio.Lock()

    @property
    def is_new(self) -> bool:
        """Whether the cluster registered this producer for the first time: no partition knows it."""
        return self.epoch == 0

    async def register(self, *, deadline: Deadline) -> None:
        """Get an id, or the existing id of this name with a new epoch."""
        known_id = self.producer_id if self.producer_id >= 0 else None
        request = RegisterProducerRequest(
            topics=self._topics, name=self.name, producer_id=known_id, creates_topics=self._is_creating
        )
        registered, _ = await self._router.ask(request, deadline=deadline)
        self._router.cache.record_index(registered.index)
        self.producer_id, self.epoch = registered.producer_id, registered.epoch

    async def replace(self, removed_id: ProducerId, *, deadline: Deadline) -> None:
        """Register as a new producer, instead of one that the cluster has removed; concurrent calls share it."""
        async with self._renewing:
            if self.producer_id == removed_id:
                self.producer_id = ProducerId(-1)
                await self.register(deadline=deadline)

    async def renew(self, *, after_epoch: int, deadline: Deadline) -> None:
        """Get an epoch later than `after_epoch`; concurrent calls share one renewal."""
        async with self._renewing:
            if self.epoch <= after_epoch:
                await self.register(deadline=deadline)
