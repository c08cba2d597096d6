"""One partition's way out: at most five batches under way, in order, each until its outcome is known.

It is the only one that sends a producer's batches to a partition. As long as all goes well, batches fly side by side.
At the first failure nothing more is launched; when all that fly have landed, the failed ones are judged in order and
sent again in order, the same bytes: what the partition already has, it answers with its offset. So a retry neither
doubles nor reorders.

When a batch is given up although it was perhaps done, or the partition expects another sequence than the one sent, the
sender puts a new epoch between then and now: whatever still travels of the old one is refused, and the partition's
answer tells what it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from quiver.client.accumulator import Accumulator
from quiver.client.identity import Identity
from quiver.client.inflight import InflightBatch, Parcels
from quiver.client.options import ProducerOptions
from quiver.client.tasks import Tasks
from quiver.errors import FencedError, OutOfSequenceError, QuiverError, RequestError
from quiver.model import PartitionId
from quiver.routing.retry import Deadline, Retry
from quiver.routing.router import Router
from quiver.wire.messages import BeginEpoch, Produce, TopicInfo

if TYPE_CHECKING:
    from quiver.client.digest_reporter import DigestReporter

GAPS_MAX: Final = 3
"""How often the first batch of all may be out of sequence before the partition is asked what it expects; requests that
overtook each other on their way come right by being sent again."""


class PartitionSender:
    """Send one partition's batches; run `run` in a task."""

    def __init__(
        self,
        topic: TopicInfo,
        partition_id: PartitionId,
        *,
        router: Router,
        identity: Identity,
        accumulator: Accumulator,
        options: ProducerOptions,
        tasks: Tasks,
        on_fenced: Callable[[FencedError], object],
        digest_reporter: DigestReporter | None = None,
    ) -> None:
        self._topic, self._partition_id = topic, partition_id
        self._router, self._identity, self._accumulator = router, identity, accumulator
        self._options, self._tasks, self._on_fenced = options, tasks, on_fenced
        self._digest_reporter = digest_reporter
        self._parcels = Parcels(options.compression)
        self._changed = asyncio.Event()
        self._beginning = asyncio.Lock()
        self._begun_epoch: int | None = None
        self._needs_new_epoch = False
        self._is_recovering = False
        self._flying = 0
        self._retry: Retry | None = None
        self._linger: asyncio.TimerHandle | None = None

    @property
    def next_sequence(self) -> int:
        """The sequence that the next record will get that is sent to the partition; known once `begin` was called."""
        unsealed = sum(parcel.count for parcel in self._parcels.waiting if not parcel.is_sealed)
        return self._parcels.next_sequence + unsealed + self._accumulator.waiting_records(self._partition_id)

    def wake(self) -> None:
        """Look again for something to do."""
        self._changed.set()

    async def begin(self, *, deadline: Deadline) -> None:
        """Learn from the partition which sequence it expects, unless that is known."""
        async with self._beginning:
            if self._begun_epoch is None:
                await self._begin(deadline)

    async def run(self) -> None:
        """Send what there is to send, until cancelled."""
        while True:
            self._changed.clear()
            if self._is_recovering:
                if not self._flying:
                    await self._recover()
                    continue
            elif self._fill_window():
                if self._is_begun:
                    self._launch()
                elif not self._flying:  # what flies uses the old epoch: it must land before the new one is begun
                    await self._try_to_begin()
                    continue
            await self._changed.wait()

    def abandon(self, error: QuiverError) -> None:
        """Give up everything that is under way; the task must have ended."""
        for parcel in self._parcels.open:
            parcel.is_perhaps_done = parcel.is_perhaps_done or parcel.is_flying
            self._drop(parcel, error)
        if self._linger is not None:
            self._linger.cancel()

    # -- epochs ----------------------------------------------------------------------------------

    @property
    def _is_begun(self) -> bool:
        return self._begun_epoch == self._identity.epoch and not self._needs_new_epoch

    async def _begin(self, deadline: Deadline) -> None:
        """Begin the producer's present epoch in the partition, or a new one if there must be one; nothing flies."""
        while not self._is_begun:
            epoch = self._identity.epoch
            if self._needs_new_epoch and epoch == self._begun_epoch:
                await self._ask_next_sequence(epoch, deadline)  # raises if another has the name: then it is theirs
                await self._identity.renew(after_epoch=epoch, deadline=deadline)
                continue
            is_unknown_there = self._begun_epoch is None and self._identity.is_new
            next_sequence = 0 if is_unknown_there else await self._ask_next_sequence(epoch, deadline)
            self._begun_epoch, self._needs_new_epoch = epoch, False
            for parcel in self._parcels.align(next_sequence):
                self._settle(parcel, OutOfSequenceError("the partition has forgotten this producer"))

    # -- sending ---------------------------------------------------------------------------------

    def _fill_window(self) -> bool:
        """Take batches until enough are under way; tell whether there is anything to do."""
        parcels = self._parcels
        while len(parcels) < self._options.inflight_batches_max:
            # An open batch waits while another is under way: what arrives meanwhile makes it worth its round.
            is_idle = not parcels.waiting
            open_before_ms = self._router.clock.monotonic_ms() - self._options.linger_ms if is_idle else None
            source = self._accumulator.take(self._partition_id, open_before_ms=open_before_ms)
            if source is None:
                break
            waited_ms = self._router.clock.monotonic_ms() - source.opened_ms
            deadline = self._router.deadline(max(0, self._options.delivery_timeout_ms - waited_ms))
            parcels.waiting.append(InflightBatch(source, deadline))
        if not parcels.waiting:
            self._set_linger()
        return bool(parcels.waiting)

    def _set_linger(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        opened_ms = self._accumulator.opened_ms(self._partition_id)
        if opened_ms is not None:
            left_ms = max(0, opened_ms + self._options.linger_ms - self._router.clock.monotonic_ms())
            self._linger = asyncio.get_running_loop().call_later(left_ms / 1000, self._changed.set)

    def _launch(self) -> None:
        """Start everything that waits, in order."""
        for parcel in self._parcels.open:
            if parcel.is_flying:
                continue
            try:
                self._parcels.seal(parcel, self._identity.producer_id, self._identity.epoch)
            except QuiverError as error:
                self._drop(parcel, error)
                continue
            parcel.is_flying = True
            self._flying += 1
            self._tasks.start(self._fly(parcel), f"produce-{self._partition_id}")

    async def _fly(self, parcel: InflightBatch) -> None:
        """Send one parcel, once."""
        request = Produce(
            topic_id=self._topic.topic_id,
            partition_id=self._partition_id,
        )
        try:
            produced, _ = await self._router.try_leader(
                self._topic, self._partition_id, request, (parcel.data,), deadline=parcel.deadline
            )
        except QuiverError as error:
            if parcel.outcome.is_settled:
                return  # everything was given up meanwhile
            parcel.error = error
            parcel.is_perhaps_done = parcel.is_perhaps_done or error.outcome == "unknown"
            self._is_recovering = True
        else:
            if parcel.outcome.is_settled:
                return
            self._retry = None
            if self._digest_reporter is not None:
                self._digest_reporter.take_sent(self._partition_id, parcel.data, produced.base_offset)
            self._parcels.acknowledge(parcel)
            parcel.outcome.succeed(produced.base_offset)
            self._accumulator.settle(parcel.outcome, parcel.size_bytes)
        parcel.is_flying = False
        self._flying -= 1
        self._changed.set()

    # -- trouble ---------------------------------------------------------------------------------

    async def _try_to_begin(self) -> None:
        """Begin the epoch in time for the first parcel, or give up those that cannot wait."""
        try:
            async with self._beginning:
                await self._begin(self._parcels.waiting[0].deadline)
        except FencedError as error:
            self._fence(error)
        except RequestError as error:
            for parcel in self._parcels.open:
                self._drop(parcel, error)
        except QuiverError as error:
            self._expire(error)

    async def _recover(self) -> None:
        """Judge the failed parcels, all of which have landed, and wait until they may fly again."""
        self._is_recovering = False
        failed = [parcel for parcel in self._parcels.open if parcel.error is not None]
        errors = [parcel.error for parcel in failed if parcel.error is not None]
        for parcel in failed:
            parcel.error = None
        fencing = next((error for error in errors if isinstance(error, FencedError)), None)
        if fencing is not None:
            self._judge_fence(fencing, failed)
            return
        # Those behind it failed because it did, or will be judged when they are first.
        await self._judge_first(failed[0], errors[0])

    def _judge_fence(self, error: FencedError, failed: list[InflightBatch]) -> None:
        if all(parcel.epoch < self._identity.epoch for parcel in failed):
            return  # by our own next epoch, which another partition's sender has begun
        self._fence(error)

    async def _judge_first(self, parcel: InflightBatch, error: QuiverError) -> None:
        try:
            error = await self._router.explain(error, self._topic, self._partition_id, deadline=parcel.deadline)
            if isinstance(error, OutOfSequenceError):
                self._doubt_sequence(parcel)
            elif isinstance(error, RequestError):
                self._drop(parcel, error)
                return
            await self._wait_turn(parcel, error)
            self._topic = await self._router.find_topic(self._topic.topic, deadline=parcel.deadline)
        except RequestError as gone:
            self._drop(parcel, gone)
        except QuiverError as late:
            self._expire(late)

    def _doubt_sequence(self, parcel: InflightBatch) -> None:
        parcel.gaps += 1
        if parcel.gaps >= GAPS_MAX:
            parcel.gaps = 0
            self._needs_new_epoch = True

    async def _wait_turn(self, parcel: InflightBatch, error: QuiverError) -> None:
        if self._retry is None:
            self._retry = self._router.retry(parcel.deadline)
        if not isinstance(error, RequestError):
            await self._retry.wait_turn(error)

    def _expire(self, error: QuiverError) -> None:
        """Give up the parcels whose time is over, and the first in any case: nobody waited for it in vain."""
        first, *_ = parcels = self._parcels.open
        for parcel in parcels:
            if parcel.deadline.is_over or parcel is first:
                self._drop(parcel, error)

    def _fence(self, error: FencedError) -> None:
        for parcel in self._parcels.open:
            self._drop(parcel, error)
        self._on_fenced(error)

    def _drop(self, parcel: InflightBatch, error: QuiverError) -> None:
        """Give a parcel up and put right what that does to the sequence."""
        self._retry = None
        may_turn_up = self._parcels.is_any_perhaps_done
        self._parcels.drop(parcel)
        if parcel.is_sealed:
            if may_turn_up:
                self._needs_new_epoch = True
            else:
                self._parcels.close_gap(parcel)
        self._settle(parcel, error)
        self._changed.set()  # there may be room for what waits

    def _settle(self, parcel: InflightBatch, error: QuiverError) -> None:
        parcel.outcome.fail(parcel.verdict(error))
        self._accumulator.settle(parcel.outcome, parcel.size_bytes)

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
