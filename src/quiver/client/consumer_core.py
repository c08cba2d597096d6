"""The core of a consumer: reads the partitions of its topics, commits its positions, and resumes from them.

`ConsumerCore` is shared by the asyncio and the blocking consumer. It reads the topics that it names, or all topics that
match a pattern, also those that are created later. It runs on the event loop that opened it; the records of a returned
batch may be read in any thread. A position advances when the application receives a record, never when a record is only
prefetched. A commit stores positions, so after a crash records may repeat but none is skipped.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from quiver.client.cursors import ConsumerCursors, register_consumer
from quiver.client.options import TIME_MS_MAX, ConsumerOptions
from quiver.client.prefetch import PartitionPrefetcher, find_offset
from quiver.errors import (
    NotFoundError,
    OutcomeUnknownError,
    OutOfRangeError,
    QuiverError,
    RequestError,
    UnavailableError,
)
from quiver.model import ConsumerId, Offset, PartitionId
from quiver.record import Batch, Record
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.tasks import TaskSet, TimedEvent, gather_first_error
from quiver.wire.messages import CursorsFound

if TYPE_CHECKING:
    from quiver.client.digest_reporter import DigestReporter

logger = logging.getLogger(__name__)

INTERNAL_TOPIC_PREFIX: Final = "quiver."
"""Topics of Quiver's own, such as `quiver.digests`: no pattern matches them."""

SeekTarget = int | Literal["earliest", "latest"]
Place = tuple[str, PartitionId]
"""A topic and a partition."""
Slice = tuple[PartitionPrefetcher, Batch, Offset, Offset]
"""The records of a batch from the first offset up to the second, and the reader of its partition."""
OnSlice = Callable[[Slice], object]
"""Called for each slice as it arrives, on the event loop; it must not block."""


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer reads: topics by name, or by a pattern that their whole name matches."""

    topics: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    partitions: tuple[PartitionId, ...] = ()
    """Only these partitions, of one topic; empty: all."""

    def matches(self, topic: str) -> bool:
        """Return whether the pattern matches a topic."""
        is_match = self.pattern is not None and self.pattern.fullmatch(topic) is not None
        return is_match and not topic.startswith(INTERNAL_TOPIC_PREFIX)


def parse_subscription(topic: str | re.Pattern[str] | Iterable[str], partitions: Iterable[int]) -> Subscription:
    """Return what the arguments of `Cluster.consumer` select; raise `RequestError` for what is ambiguous."""
    chosen = tuple(map(PartitionId, partitions))
    if isinstance(topic, re.Pattern):
        if not isinstance(topic.pattern, str):
            raise RequestError("not done: a pattern of topics is one of text, not of bytes", code="bad_topics")
        subscription = Subscription(pattern=topic, partitions=chosen)
    else:
        topics = (topic,) if isinstance(topic, str) else tuple(dict.fromkeys(topic))
        if not topics or not all(isinstance(name, str) for name in topics):
            message = "name a topic, a list of topics, or a pattern: re.compile('logs-.*')"
            raise RequestError(message, code="bad_topics")
        subscription = Subscription(topics=topics, partitions=chosen)
    if chosen and len(subscription.topics) != 1:
        raise RequestError("not done: partitions can be chosen for one topic only", code="several_topics")
    return subscription


class ConsumerCore:
    """One consumer of one or several topics; `open` it on the loop that reads."""

    def __init__(
        self,
        subscription: Subscription,
        *,
        name: str,
        consumer_id: int | None,
        router: Router,
        options: ConsumerOptions,
        digest_reporters: dict[str, DigestReporter],
    ) -> None:
        self.subscription = subscription
        self.name = name
        self.consumer_id = None if consumer_id is None else ConsumerId(consumer_id)
        """The id that the cluster assigned; None: without a name, or a pattern has matched no topic yet."""
        self.session = 0
        """Orders the users of a name; the highest one is the only one that reads and commits."""
        self.options = options
        self.readers: dict[Place, PartitionPrefetcher] = {}
        self._cursors: dict[str, ConsumerCursors] = {}
        self._router = router
        self._digest_reporters = digest_reporters
        self._tasks = TaskSet(self._crashed)
        self._changed = TimedEvent()
        self._turn = 0
        self._failure: QuiverError | None = None
        self._committed_ms = router.clock.monotonic_ms()
        self.on_closed: Callable[[], object] = lambda: None

    @classmethod
    async def open(
        cls,
        router: Router,
        subscription: Subscription,
        *,
        name: str,
        consumer_id: int | None,
        options: ConsumerOptions,
        deadline: Deadline,
        digest_reporters: dict[str, DigestReporter],
    ) -> ConsumerCore:
        """Register a consumer, find its position in every partition and start prefetching."""
        core = cls(
            subscription,
            name=name,
            consumer_id=consumer_id,
            router=router,
            options=options,
            digest_reporters=digest_reporters,
        )
        if not core.is_named and options.auto_commit_ms is not None:
            raise RequestError(
                "not done: auto_commit needs a consumer with a name: pass name=...", code="no_consumer_name"
            )
        try:
            topics = subscription.topics or await core._find_matches(deadline)
            await core._add_topics(topics, deadline=deadline)
        except BaseException:
            await core._tasks.close()
            raise
        if not subscription.partitions:
            core._tasks.start(core._follow_topics(), "follow-topics")
        return core

    @property
    def is_named(self) -> bool:
        """Whether the cluster stores its cursors."""
        return bool(self.name) or self.consumer_id is not None

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that it reads now, sorted if they match a pattern."""
        return self.subscription.topics or tuple(sorted(self._cursors))

    @property
    def places(self) -> list[Place]:
        """The topics and partitions that the application knows to be read, sorted."""
        return sorted(self.readers)

    @property
    def topic(self) -> str:
        """Its only topic; raises `RequestError` if it may read several."""
        if len(self.subscription.topics) != 1:
            message = f"this consumer reads several topics: pass topic=..., one of {', '.join(self.topics)}"
            raise RequestError(message, code="several_topics")
        return self.subscription.topics[0]

    # -- records ---------------------------------------------------------------------------------

    async def wait_batch(self, deadline: Deadline) -> tuple[PartitionPrefetcher, Batch] | None:
        """Wait for a batch with unread records, from the partitions in turn; None if the deadline passed."""
        while True:
            await self._commit_if_due()
            if (found := self.peek()) is not None:
                return found
            self._changed.clear()
            if self.peek() is None and not await self._wait_change(deadline):
                return None

    def peek(self) -> tuple[PartitionPrefetcher, Batch] | None:
        """Return a prefetched batch with unread records, if there is one.

        Raises:
            QuiverError: a partition cannot be read, or this consumer failed or is closed.
        """
        if self._failure is not None:
            raise self._failure
        readers = list(self.readers.values())
        for step in range(len(readers)):
            reader = readers[(self._turn + step) % len(readers)]
            if (batch := reader.peek()) is not None:
                self._turn += step + 1
                return reader, batch
            if (error := reader.pop_error()) is not None:
                self._handle_reader_error(reader, error)
        return None

    async def consume(
        self, records_max: int, deadline: Deadline, *, is_to_end: bool, on_slice: OnSlice | None = None
    ) -> list[Slice]:
        """Return records and advance the positions: the first available, or with `is_to_end` all up to the end.

        If it is cancelled, or `on_slice` raises, the positions go back: the application has received no record.
        """
        slices: list[Slice] = []
        try:
            await self._collect(slices, records_max, deadline, is_to_end=is_to_end, on_slice=on_slice)
        except BaseException:
            if self._failure is None:
                rewind(slices)
            raise
        return slices

    async def _collect(
        self,
        slices: list[Slice],
        records_max: int,
        deadline: Deadline,
        *,
        is_to_end: bool,
        on_slice: OnSlice | None,
    ) -> None:
        count = 0
        while count < records_max:
            try:
                found = await self.wait_batch(deadline) if not slices else await self._wait_more(deadline, is_to_end)
            except QuiverError:
                if slices:
                    break  # positions have advanced past these records, so return them; the error is raised again later
                raise
            if found is None:
                break
            reader, batch = found
            first = Offset(max(reader.position, batch.header.base_offset))
            end = Offset(min(batch.header.end_offset, first + records_max - count))
            reader.position = end
            count += end - first
            slices.append((reader, batch, first, end))
            if on_slice is not None:
                on_slice(slices[-1])

    async def _wait_more(self, deadline: Deadline, is_to_end: bool) -> tuple[PartitionPrefetcher, Batch] | None:  # noqa: FBT001 - private
        while (found := self.peek()) is None:
            if not is_to_end or all(reader.is_caught_up for reader in self.readers.values()):
                return None
            self._changed.clear()
            if self.peek() is None and not await self._wait_change(deadline):
                return None
        return found

    async def _wait_change(self, deadline: Deadline) -> bool:
        """Wait until a reader changed or a commit is due; False if the deadline passed."""
        remaining_ms = deadline.remaining_ms
        if not remaining_ms:
            return False
        await self._changed.wait(min(remaining_ms, self._commit_due_in_ms()) / 1000)
        return True

    # -- positions and commits -------------------------------------------------------------------

    def reader(self, partition: int, topic: str | None = None) -> PartitionPrefetcher:
        """Return the reader of a partition; raise `NotFoundError` if this consumer does not read it."""
        name = self.topic if topic is None else topic
        reader = self.readers.get((name, PartitionId(partition)))
        if reader is None:
            message = f"this consumer does not read partition {partition} of topic {name!r}"
            raise NotFoundError(message, code="unknown_partition")
        return reader

    async def commit(self, deadline: Deadline) -> None:
        """Store the position in every partition where it differs from the cursor."""
        if not self.is_named:
            message = "not done: a consumer without a name has no cursor in the cluster; pass name=..."
            raise RequestError(message, code="no_consumer_name")
        self._committed_ms = self._router.clock.monotonic_ms()
        moved = [(reader, reader.position) for reader in self.readers.values() if reader.position != reader.committed]
        await self._publish_digests()  # before the cursors move: an audit must not miss a committed record
        results = await asyncio.gather(
            *(self._commit_one(reader, position, deadline) for reader, position in moved), return_exceptions=True
        )
        for result in results:
            if result is not None:
                raise result

    async def seek(
        self, partition: int | None, target: SeekTarget, *, is_timestamp: bool, topic: str | None = None
    ) -> None:
        """Continue at another offset of a partition, or of all partitions; all of them are found before one moves."""
        if topic is not None and topic not in self.topics:
            raise NotFoundError(f"not done: this consumer does not read topic {topic!r}", code="unknown_topic")
        if partition is None:
            readers = [reader for reader in self.readers.values() if topic in (None, reader.topic)]
        else:
            readers = [self.reader(partition, topic)]
        if isinstance(target, int) and not is_timestamp:
            if target < 0:
                raise OutOfRangeError(f"not done: offset {target} is negative")
            offsets = [Offset(target)] * len(readers)
        else:
            offsets = await gather_first_error(
                find_offset(self._router, reader.topic, reader.partition_id, target) for reader in readers
            )
        for reader, offset in zip(readers, offsets, strict=True):
            reader.seek(offset)

    async def size(self, deadline: Deadline) -> int:
        """Return the number of committed records not returned yet, over all partitions."""
        founds = await self._find_bounds(deadline, self.readers.values())
        return sum(
            max(0, found.end_offset - max(reader.position, found.first_offset)) for reader, found in founds.items()
        )

    async def end_offsets(self, topic: str | None, deadline: Deadline) -> dict[PartitionId, Offset]:
        """Return the current high watermark of every partition of a topic."""
        name = self.topic if topic is None else topic
        founds = await self._find_bounds(deadline, [reader for reader in self.readers.values() if reader.topic == name])
        return {reader.partition_id: found.end_offset for reader, found in founds.items()}

    async def close(self, *, is_committing: bool = True) -> None:
        """Commit if `auto_commit` is set and `is_committing`, then stop reading; idempotent."""
        try:
            if is_committing and self.options.auto_commit_ms is not None and self._failure is None:
                await self.commit(self._router.deadline())
            with (
                nullcontext() if is_committing else suppress(QuiverError)
            ):  # the application's own error must not be replaced
                await self._close_digest_reporters()
        finally:
            self._failure = self._failure or RequestError(f"the consumer of {self._what()} is closed", code="closed")
            await self._tasks.close()
            self._changed.set()
            self.on_closed()

    # -- topics ----------------------------------------------------------------------------------

    async def _find_matches(self, deadline: Deadline) -> list[str]:
        """Return the topics that the pattern matches now."""
        found = await self._router.refresh_all(deadline=deadline)
        return sorted(info.topic for info in found if self.subscription.matches(info.topic))

    async def _add_topics(self, topics: Sequence[str], *, deadline: Deadline) -> None:
        """Register for topics and read them, from their cursors or from `start` on."""
        if not topics:
            return
        partitions = self.subscription.partitions
        if self.is_named:
            self.consumer_id, session = await register_consumer(
                self._router,
                topics,
                name=self.name,
                consumer_id=self.consumer_id,
                partitions=partitions,
                start=self.options.start,
                deadline=deadline,
            )
            self.session = self.session or session
        for topic in topics:
            # Partitions given by the caller are checked now: waiting for one that does not exist would never end.
            info = await self._router.find_topic(topic, deadline=deadline, age_ms_max=0 if partitions else None)
            if unknown := set(partitions) - {partition.partition_id for partition in info.partitions}:
                raise NotFoundError(
                    f"not done: topic {topic!r} has no partition {min(unknown)}", code="unknown_partition"
                )
            self._cursors[topic] = ConsumerCursors(self._router, topic, self.consumer_id, session=self.session)
            wanted = partitions or [partition.partition_id for partition in info.partitions]
            await self._add(topic, wanted, self.options.start, deadline=deadline)

    async def _add(
        self,
        topic: str,
        partitions: Sequence[PartitionId],
        start: Literal["earliest", "latest"],
        *,
        deadline: Deadline,
    ) -> None:
        cursors = self._cursors[topic]
        starts = await gather_first_error(
            cursors.find_start(partition, start, deadline=deadline) for partition in partitions
        )
        for partition, (position, is_cursor) in zip(partitions, starts, strict=True):
            reader = self._make_reader(topic, partition, position, cursors)
            reader.committed = position if is_cursor else None
            self.readers[topic, partition] = reader
            reader.start()

    def _make_reader(
        self, topic: str, partition: PartitionId, position: Offset, cursors: ConsumerCursors
    ) -> PartitionPrefetcher:
        return PartitionPrefetcher(
            topic,
            partition,
            position,
            router=self._router,
            options=self.options,
            tasks=self._tasks,
            on_change=self._changed.set,
            digest_reporter=self._digest_reporters.get(topic),
            reader_id=cursors.reader_id,
        )

    async def _follow_topics(self) -> None:
        """Check periodically for added partitions and topics; they are read from their first record on."""
        while True:
            await asyncio.sleep(self.options.refresh_ms / 1000)
            with suppress(UnavailableError, OutcomeUnknownError, NotFoundError):  # the readers report errors
                await self._follow_once(self._router.deadline())

    async def _follow_once(self, deadline: Deadline) -> None:
        if self.subscription.pattern is not None:
            matches = await self._find_matches(deadline)
            self._drop_topics(set(self._cursors) - set(matches))
            await self._add_topics([topic for topic in matches if topic not in self._cursors], deadline=deadline)
        for topic in list(self._cursors):
            info = await self._router.find_topic(topic, deadline=deadline, age_ms_max=self.options.refresh_ms)
            known = {partition for name, partition in self.readers if name == topic}
            if added := {partition.partition_id for partition in info.partitions} - known:
                await self._add(topic, sorted(added), "earliest", deadline=deadline)

    def _drop_topics(self, topics: Iterable[str]) -> None:
        """Stop reading topics that were deleted."""
        for topic in topics:
            del self._cursors[topic]
            for place in [place for place in self.readers if place[0] == topic]:
                self.readers.pop(place).stop()

    # -- internals -------------------------------------------------------------------------------

    def _handle_reader_error(self, reader: PartitionPrefetcher, error: QuiverError) -> None:  # noqa: ARG002 - of groups
        """Raise the error that stopped a reader."""
        raise error

    def _cursors_of(self, reader: PartitionPrefetcher) -> ConsumerCursors:
        """Return the cursors under whose session a partition is read and committed."""
        return self._cursors[reader.topic]

    async def _find_bounds(
        self, deadline: Deadline, readers: Iterable[PartitionPrefetcher]
    ) -> dict[PartitionPrefetcher, CursorsFound]:
        asked = list(readers)
        finding = (self._cursors_of(reader).find(reader.partition_id, deadline=deadline) for reader in asked)
        return dict(zip(asked, await gather_first_error(finding), strict=True))

    async def _publish_digests(self) -> None:
        """Publish digests of all returned records, if requested; call before a cursor moves past them."""
        if not self._digest_reporters or self._failure is not None:
            return
        for reader in self.readers.values():
            reader.digest_delivered()
        for reporter in self._digest_reporters.values():
            await reporter.flush()

    async def _close_digest_reporters(self) -> None:
        await self._publish_digests()
        for reporter in self._digest_reporters.values():
            await reporter.close()

    async def _commit_one(self, reader: PartitionPrefetcher, position: Offset, deadline: Deadline) -> None:
        await self._cursors_of(reader).move(reader.partition_id, position, deadline=deadline)
        reader.committed = position

    async def _commit_if_due(self) -> None:
        if self._commit_due_in_ms() > 0:
            return
        try:
            await self.commit(self._router.deadline())
        except (UnavailableError, OutcomeUnknownError) as error:
            facts = {"topic": self._what(), "error": str(error)}
            logger.warning("automatic commit failed, it is retried", extra={"facts": facts})

    def _commit_due_in_ms(self) -> int:
        interval_ms = self.options.auto_commit_ms
        if interval_ms is None or all(reader.position == reader.committed for reader in self.readers.values()):
            return TIME_MS_MAX
        return max(0, self._committed_ms + interval_ms - self._router.clock.monotonic_ms())

    def _crashed(self, error: BaseException) -> None:
        failure = UnavailableError(
            f"the consumer of {self._what()} crashed: {error!r}; create a new one", code="consumer_failed"
        )
        failure.__cause__ = error
        self._failure = failure
        self._changed.set()

    def _what(self) -> str:
        pattern = self.subscription.pattern
        if pattern is not None:
            return f"topics that match {pattern.pattern!r}"
        names = ", ".join(map(repr, self.subscription.topics))
        return f"topic{'s' if len(self.subscription.topics) > 1 else ''} {names}"


def iterate(reader: PartitionPrefetcher, batch: Batch) -> Iterator[Record]:
    """Yield a batch's records from the position on and advance it with each; stop after a seek."""
    generation = reader.generation
    for record in batch.records(reader.position, partition=reader.partition_id, topic=reader.topic):
        reader.position = record.offset + 1  # type: ignore[assignment] # an Offset; this line runs for every record
        yield record
        if reader.generation != generation:
            return


def rewind(slices: Sequence[Slice]) -> None:
    """Continue again at the first record of every reader."""
    firsts: dict[PartitionPrefetcher, Offset] = {}
    for reader, _, first, _ in slices:
        firsts.setdefault(reader, first)
    for reader, first in firsts.items():
        reader.seek(first)


def records_of(slices: Sequence[Slice]) -> list[Record]:
    """Return the records of slices."""
    found: list[Record] = []
    for reader, batch, first, end in slices:
        found.extend(batch.records(first, end, partition=reader.partition_id, topic=reader.topic))
    return found
