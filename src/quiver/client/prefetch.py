"""The prefetcher of one partition: fetches batches from the leader ahead of the application.

A `PartitionPrefetcher` owns the application's position in the partition and the batches fetched from there on. A task
fetches until `prefetch_bytes` are buffered; the application reads the buffered batches without waiting.

Invariants: `position` is the offset after the last record that the application received. The buffered batches begin at
or before it and have no gap, so that no record is ever skipped. A seek discards everything fetched before it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from quiver.client.options import ConsumerOptions
from quiver.errors import DamageError, QuiverError, TrimmedError
from quiver.model import ConsumerId, Offset, PartitionId
from quiver.record import Batch, decode_batches
from quiver.routing.router import Router
from quiver.tasks import TaskSet
from quiver.wire.messages import Fetch, Fetched, FindOffset, TopicInfo

if TYPE_CHECKING:
    from quiver.client.digest_reporter import DigestReporter

IDLE_MS_MIN: Final = 20
"""Minimum interval between two fetches that return no records, even if the leader answers immediately."""


class PartitionPrefetcher:
    """Prefetch one partition from a position on."""

    def __init__(
        self,
        topic: str,
        partition_id: PartitionId,
        position: Offset,
        *,
        router: Router,
        options: ConsumerOptions,
        tasks: TaskSet,
        on_change: Callable[[], object],
        digest_reporter: DigestReporter | None = None,
        reader_id: tuple[ConsumerId, int] | None = None,
    ) -> None:
        """Start at `position`; `on_change` is called when a batch was buffered or fetching failed.

        With a `reader_id`, a consumer and its session, fetches fail once a later session of the consumer reads.
        """
        self._reader_id = reader_id
        self.topic, self.partition_id = topic, partition_id
        self.position = position
        self.committed: Offset | None = None
        """The cursor stored in the cluster; None: not known."""
        self.end_offset: Offset | None = None
        """The high watermark of the last answer; None: no answer since the last seek."""
        self.generation = 0
        """Number of seeks so far."""
        self.is_retired = False
        """Whether it returns no more records: its partition is given to another member of the group."""
        self.skipped_count = 0
        """Records that retention removed before they were read, and that `on_trimmed="earliest"` skipped."""
        self._router, self._options, self._tasks, self._on_news = router, options, tasks, on_change
        self._digest_reporter, self._digested_end = digest_reporter, position
        """The reporter of received records, and the first offset that was not reported to it."""
        self._batches: deque[Batch] = deque()
        self._buffered_bytes = 0
        self._fetch_offset = position
        self._error: QuiverError | None = None
        self._has_room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- called by the consumer ------------------------------------------------------------------

    @property
    def is_caught_up(self) -> bool:
        """Whether the position has reached the high watermark of the last answer."""
        return self.end_offset is not None and self.position >= self.end_offset

    def peek(self) -> Batch | None:
        """Return the batch that holds the record at the position, if it is buffered."""
        batches = self._batches
        while batches and batches[0].header.end_offset <= self.position:
            self._add_to_digest(batches[0])
            self._buffered_bytes -= len(batches.popleft().data)
            self._has_room.set()
        return batches[0] if batches else None

    def digest_delivered(self) -> None:
        """Report all records up to the position to the digest reporter, if there is one."""
        for batch in self._batches if self._digest_reporter is not None else ():
            if batch.header.base_offset >= self.position:
                break
            self._add_to_digest(batch)

    def pop_error(self) -> QuiverError | None:
        """Return the error that stopped fetching, if any, and resume fetching."""
        error, self._error = self._error, None
        if error is not None:
            self._has_room.set()
        return error

    def start(self) -> None:
        """Start prefetching, unless it is retired or has started."""
        if self.is_retired or (self._task is not None and not self._task.done() and not self._task.cancelling()):
            return
        self._task = self._tasks.start(self._run(self.generation), f"read-{self.partition_id}")

    def stop(self) -> None:
        """Stop prefetching."""
        if self._task is not None:
            self._task.cancel()

    def retire(self) -> None:
        """Stop for good, and return no further record; the position stays, to be committed."""
        self.is_retired = True
        self.stop()
        self.generation += 1
        # Not the position: a thread that iterates may be advancing it.
        self._error = None
        self._batches.clear()
        self._buffered_bytes = 0
        self.end_offset = Offset(0)  # nothing is left to wait for

    def seek(self, offset: Offset) -> None:
        """Discard the buffer and continue at another offset."""
        self.stop()
        self.digest_delivered()
        self.generation += 1
        self.position = self._fetch_offset = self._digested_end = offset
        self.end_offset = self._error = None
        self._batches.clear()
        self._buffered_bytes = 0
        self.start()

    # -- fetching --------------------------------------------------------------------------------

    async def _run(self, generation: int) -> None:
        while generation == self.generation:
            if self._error is not None or (self._buffered_bytes >= self._options.prefetch_bytes and self._batches):
                self._has_room.clear()
                await self._has_room.wait()
                continue
            begun_ms = self._router.clock.monotonic_ms()
            try:
                is_progress = await self._fetch()
            except TrimmedError as error:
                await self._handle_trimmed(error)
                continue
            except QuiverError as error:
                self._fail(error)
                continue
            passed_ms = self._router.clock.monotonic_ms() - begun_ms
            is_early = not is_progress and passed_ms < IDLE_MS_MIN
            # After progress for one turn: an application that waits for records gets them before the next ones are
            # asked for.
            await asyncio.sleep((IDLE_MS_MIN - passed_ms) / 1000 if is_early else 0)

    async def _fetch(self) -> bool:
        """Fetch the next batches; return whether there were any."""
        offset, wait_ms = self._fetch_offset, self._options.wait_ms

        def build(topic: TopicInfo) -> Fetch:
            return Fetch(
                topic_id=topic.topic_id,
                partition_id=self.partition_id,
                offset=offset,
                bytes_max=self._options.fetch_bytes,
                wait_ms=wait_ms,
                reader=self._reader_id,
            )

        deadline = self._router.deadline()
        answer = await self._router.ask_leader(self.topic, self.partition_id, build, deadline=deadline, wait_ms=wait_ms)
        return self._accept(*answer)

    def _accept(self, fetched: Fetched, payload: memoryview) -> bool:
        before = self._fetch_offset
        for batch in decode_batches(payload):
            header = batch.header
            if header.is_control or header.end_offset <= self._fetch_offset:
                continue
            if header.base_offset > self._fetch_offset:
                place = f"topic {self.topic!r} partition {self.partition_id}"
                missing = f"offsets {self._fetch_offset} to {header.base_offset - 1}"
                raise DamageError(f"{place}: the leader's answer has a gap, {missing} are missing", code="gap")
            self._batches.append(batch)
            self._buffered_bytes += len(batch.data)
            self._fetch_offset = header.end_offset
        self.end_offset = fetched.end_offset
        self._on_news()
        return self._fetch_offset > before

    async def _handle_trimmed(self, error: TrimmedError) -> None:
        if self._options.on_trimmed == "error" or self.peek() is not None:
            self._fail(error)
            return
        try:
            first_offset = await find_offset(self._router, self.topic, self.partition_id, "earliest")
        except QuiverError as failure:
            self._fail(failure)
            return
        self.skipped_count += max(0, first_offset - self.position)
        self.position = self._fetch_offset = self._digested_end = max(first_offset, self.position)

    def _add_to_digest(self, batch: Batch) -> None:
        """Report the received records of one batch that were not reported yet."""
        if self._digest_reporter is None:
            return
        first = Offset(max(self._digested_end, batch.header.base_offset))
        end = Offset(min(self.position, batch.header.end_offset))
        if first < end:
            self._digest_reporter.add_received(self.partition_id, batch, first, end)
            self._digested_end = end

    def _fail(self, error: QuiverError) -> None:
        self._error = error
        self._on_news()


async def find_offset(router: Router, topic: str, partition_id: PartitionId, at: int | str) -> Offset:
    """Return a partition's first offset ("earliest"), high watermark ("latest"), or the offset of a timestamp (ms)."""

    def build(info: TopicInfo) -> FindOffset:
        return FindOffset(
            topic_id=info.topic_id,
            partition_id=partition_id,
            at=at,  # type: ignore[arg-type] # one of the two words or a number, checked by the caller
        )

    found, _ = await router.ask_leader(topic, partition_id, build, deadline=router.deadline())
    return found.offset
