"""The core of a consumer that is a member of a group: it reads the partitions that the group's coordinator gives it.

`GroupConsumerCore` follows the assignment of its `GroupMembership` without pausing partitions that stay:

- granted: it begins the assignment's epoch in the partition, which fences every earlier owner there, starts at the
  group's cursor, and calls `on_assign` before it returns the first record;
- revoked: it returns no further record of the partition. Once the application has finished those that it received,
  it calls `on_revoke`, commits the position and releases the partition;
- lost (the member expired, or the group was restarted): it drops the partition and calls `on_revoke`. A position that
  was not committed cannot be any more; the next `commit` raises `FencedError`, once, and moves nothing.

The application has finished the records that it received when it asks for the next ones, or closes the consumer.
Callbacks run only while it waits for records, opens or closes the consumer, and no record is returned meanwhile.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from quiver.client.consumer_core import ConsumerCore, OnSlice, Place, Slice, Subscription
from quiver.client.cursors import ConsumerCursors
from quiver.client.group_membership import GroupMembership, MembershipView, find_changes
from quiver.client.group_options import Member, OnPartitions, glob_of
from quiver.client.membership_host import MembershipHost, Stop
from quiver.client.options import ConsumerOptions
from quiver.client.prefetch import PartitionPrefetcher
from quiver.errors import FencedError, NotFoundError, QuiverError, RequestError
from quiver.groups.limits import TOPICS_MAX
from quiver.model import Offset
from quiver.record import Batch
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.wire.group_messages import AssignedPartition, JoinGroup

logger = logging.getLogger(__name__)

OPEN_ASSIGNMENT_MS: Final = 1_000
"""How long opening waits for the first partitions; without any, the consumer is open and gets them later."""
BEGINNING_MAX: Final = 64
"""Partitions that are begun at the same time."""
BEGIN_MS_MAX: Final = 5_000
"""Longest time of one attempt to begin a partition, so that those without a leader do not keep others waiting."""
REOPEN_MS: Final = 300
"""Wait before a partition that could not be begun is tried again."""
ANNOUNCE_MS_MAX: Final = 200
"""How long the call of `on_assign` waits for further partitions that are being begun."""
RELEASE_MS_MAX: Final = 5_000
"""Longest time that a commit may delay the release of a partition; without it, the next owner repeats records."""


class GroupConsumerCore(ConsumerCore):
    """One member of a group; `open_member` it on the loop that reads."""

    def __init__(
        self,
        subscription: Subscription,
        *,
        router: Router,
        options: ConsumerOptions,
        member: Member,
        host: MembershipHost,
    ) -> None:
        self.group = member.options
        super().__init__(
            subscription, name=self.group.group, consumer_id=None, router=router, options=options, digest_reporters={}
        )
        self._host, self._on_assign, self._on_revoke = host, member.on_assign, member.on_revoke
        self._membership: GroupMembership | None = None
        self._stop_membership: Stop | None = None
        self._held: dict[Place, AssignedPartition] = {}
        self._partition_cursors: dict[Place, ConsumerCursors] = {}
        self._unannounced: dict[Place, PartitionPrefetcher] = {}
        """Readers that do not read yet: `on_assign` has not been called for them."""
        self._dropped: list[Place] = []
        """Lost partitions for which `on_revoke` has not been called yet."""
        self._lent: dict[PartitionPrefetcher, tuple[Offset, bool]] = {}
        """Readers whose records the application has received and not finished: the position before, and whether it
        iterates over them, which finishes all but the last."""
        self._lost: list[Place] = []
        """Lost partitions with positions that were not committed: the next commit reports them."""
        self._beginning: set[AssignedPartition] = set()
        self._beginning_room = asyncio.Semaphore(BEGINNING_MAX)
        self._releasing: set[AssignedPartition] = set()
        """Partitions that are being released, until the coordinator has confirmed it."""
        self._is_leaving = False
        self._fenced_ms = 0
        """When a partition refused this member last."""
        self._announce_at_ms: int | None = None
        """When `on_assign` is called even if further partitions are being begun."""
        self._asking_count = 0
        self._step_due = asyncio.Event()
        self._not_calling_back = asyncio.Event()
        self._not_calling_back.set()
        self._callback_error: BaseException | None = None

    @classmethod
    async def open_member(
        cls,
        router: Router,
        subscription: Subscription,
        *,
        options: ConsumerOptions,
        member: Member,
        host: MembershipHost,
    ) -> GroupConsumerCore:
        """Join a group; return when the first partitions are there, or when none came for a while."""
        core = cls(subscription, router=router, options=options, member=member, host=host)
        deadline = router.deadline()
        try:
            await core._join(deadline)
            await core._wait_first_assignment(deadline)
        except BaseException:
            await core.close(is_committing=False)
            raise
        return core

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that it subscribes to; with a pattern, those of its partitions, sorted."""
        return self.subscription.topics or tuple(sorted({topic for topic, _ in self.readers}))

    @property
    def places(self) -> list[Place]:
        """The topics and partitions that the application knows to be read, sorted: `on_assign` was called for them."""
        return sorted(self.readers.keys() - self._unannounced.keys())

    @property
    def view(self) -> MembershipView:
        """What the member knows of its membership."""
        return MembershipView() if self._membership is None else self._membership.view

    # -- joining and leaving ---------------------------------------------------------------------

    async def _join(self, deadline: Deadline) -> None:
        glob = glob_of(self.subscription.pattern)
        topics = self.subscription.topics
        if self.subscription.pattern is not None and glob is None:
            topics = await self._find_topics(deadline)
        loop = asyncio.get_running_loop()
        membership = GroupMembership(
            await self._host.start(),
            JoinGroup(
                group=self.group.group,
                topics=topics,
                pattern=glob or "",
                instance=self.group.instance,
                rack=self.group.rack,
                session_timeout_ms=self.group.session_timeout_ms,
                start=self.options.start,
                client=self._host.process_name,
            ),
            on_change=lambda: _call_soon(loop, self._step_due.set),
            is_abandoned=loop.is_closed,
            processing_ms_max=self.group.processing_ms_max,
        )
        self._membership = membership
        await self._host.run(membership.join(deadline))
        self.consumer_id = membership.group_id
        self._stop_membership = self._host.begin(
            membership.run(), "group-member", lambda error: _call_soon(loop, lambda: self._crashed(error))
        )
        self._tasks.start(self._follow_assignment(), "follow-assignment")
        if self.subscription.pattern is not None and glob is None:
            self._tasks.start(self._follow_pattern(topics), "follow-pattern")

    async def _find_topics(self, deadline: Deadline) -> tuple[str, ...]:
        topics = tuple(await self._find_matches(deadline))
        if not topics:
            message = (
                f"not done: no topic matches {self._pattern_text()} yet; create one first, or use a pattern of letters,"
                " `.` and `.*` only, which the cluster matches itself"
            )
            raise NotFoundError(message, code="unknown_topic")
        if len(topics) > TOPICS_MAX:
            message = f"not done: {self._pattern_text()} matches {len(topics)} topics; a member names {TOPICS_MAX}"
            raise RequestError(f"{message}: use a pattern of letters, `.` and `.*` only", code="too_many_topics")
        return topics

    def _pattern_text(self) -> str:
        pattern = self.subscription.pattern
        return "" if pattern is None else repr(pattern.pattern)

    async def _follow_pattern(self, topics: tuple[str, ...]) -> None:
        """Subscribe to topics that are created later, for a pattern that the cluster cannot match itself."""
        while True:
            await asyncio.sleep(self.options.refresh_ms / 1000)
            with suppress(QuiverError):  # tried again, and membership reports what stays wrong
                found = await self._find_topics(self._router.deadline())
                if found != topics and self._membership is not None:
                    await self._host.run(self._membership.subscribe(found, self._router.deadline()))
                    topics = found

    async def _wait_first_assignment(self, deadline: Deadline) -> None:
        waiting_ms = min(deadline.remaining_ms, OPEN_ASSIGNMENT_MS)
        limit = Deadline(self._router.clock, waiting_ms)
        while (not self.readers or self._beginning) and self._failure is None and not limit.is_over:
            self._changed.clear()
            await self._changed.wait(limit.remaining_ms / 1000)
        if self._failure is not None:
            raise self._failure

    async def close(self, *, is_committing: bool = True, is_finished: bool = True) -> None:
        """Commit unless `is_committing` is false, release all partitions, leave the group; idempotent.

        Unless `is_finished`, the application may not have finished the records that it received last.
        """
        try:
            if self._membership is not None and self._failure is None:
                is_finished = is_finished and is_committing
                with self._asking(is_finished=is_finished):
                    await self._leave(is_committing=is_committing)
        finally:
            membership, self._membership = self._membership, None
            if self._stop_membership is not None:
                await self._stop_membership()
            if membership is not None and membership.group_id is not None:
                with suppress(QuiverError):  # it expires
                    await self._host.run(membership.leave(self._router.deadline()))
                self._router.cache.record_index(membership.view.index)
            await super().close(is_committing=False)

    async def _leave(self, *, is_committing: bool) -> None:
        self._is_leaving = True
        for reader in self.readers.values():
            reader.retire()
        await self._not_calling_back.wait()
        self._rewind_lent()
        await self._call_back(self._on_revoke, self.places)
        if is_committing and (self.group.commits_on_release or self.options.auto_commit_ms is not None):
            try:
                await self.commit(self._router.deadline())
            except FencedError as fenced:
                self._log_fenced(fenced)
        if is_committing and (error := self._pop_callback_error()) is not None:
            raise error

    # -- records ---------------------------------------------------------------------------------

    async def wait_batch(self, deadline: Deadline) -> tuple[PartitionPrefetcher, Batch] | None:
        """Wait for a batch with unread records; the application has finished all that it received before."""
        with self._asking():
            await self._let_step_happen()
            while True:
                found = await super().wait_batch(deadline)
                if self._not_calling_back.is_set():
                    return self._lend(found, is_iterated=self._asking_count == 1)
                await self._not_calling_back.wait()

    async def consume(
        self, records_max: int, deadline: Deadline, *, is_to_end: bool, on_slice: OnSlice | None = None
    ) -> list[Slice]:
        """Return records and advance the positions; the application has finished all that it received before."""
        with self._asking():
            await self._let_step_happen()
            return await super().consume(records_max, deadline, is_to_end=is_to_end, on_slice=on_slice)

    async def _wait_more(self, deadline: Deadline, is_to_end: bool) -> tuple[PartitionPrefetcher, Batch] | None:  # noqa: FBT001 - private
        while True:
            found = await super()._wait_more(deadline, is_to_end)
            if self._not_calling_back.is_set():
                return self._lend(found)
            await self._not_calling_back.wait()

    async def _let_step_happen(self) -> None:
        """Let what waited for the application happen first: while records are at hand, it never waits otherwise."""
        if self._asking_count == 1 and self._step_due.is_set():
            await asyncio.sleep(0)
            await self._not_calling_back.wait()

    def _lend(
        self, found: tuple[PartitionPrefetcher, Batch] | None, *, is_iterated: bool = False
    ) -> tuple[PartitionPrefetcher, Batch] | None:
        if found is not None:
            self._lent.setdefault(found[0], (found[0].position, is_iterated))
        return found

    def _rewind_lent(self) -> None:
        """Go back to the records that the application received and may not have finished."""
        for reader, (before, is_iterated) in self._lent.items():
            if reader.position > before:
                reader.position = Offset(reader.position - 1) if is_iterated else before

    def peek(self) -> tuple[PartitionPrefetcher, Batch] | None:
        """Return a prefetched batch with unread records, if there is one."""
        if (error := self._pop_callback_error()) is not None:
            raise error
        return None if self._is_doubtful() and self._failure is None else super().peek()

    def _is_doubtful(self) -> bool:
        """Whether it may have lost its partitions: it was fenced, or its process stood still for too long.

        Then it returns no record until a heartbeat that was begun since has ended.
        """
        if self._membership is None:
            return False
        turned_ms = self._membership.turned_ms
        is_old = self._router.clock.monotonic_ms() - turned_ms > self.group.session_timeout_ms
        return is_old or turned_ms < self._fenced_ms

    @contextmanager
    def _asking(self, *, is_finished: bool = True) -> Iterator[None]:
        """Mark that the application waits for records: it has finished those that it received."""
        if not self._asking_count and is_finished:
            self._lent.clear()
            if self._membership is not None and self._membership.busy_since_ms is not None:
                self._membership.busy_since_ms = None
                if self.group.processing_ms_max is not None and not self.view.member_id:
                    self._host.begin(self._membership.resume(), "resume-member", self._crashed)
        self._asking_count += 1
        if self._is_step_left():
            self._step_due.set()
        try:
            yield
        finally:
            self._asking_count -= 1
            if self._lent and self._membership is not None:
                self._membership.busy_since_ms = self._router.clock.monotonic_ms()

    def _handle_reader_error(self, reader: PartitionPrefetcher, error: QuiverError) -> None:
        """Drop a partition that is not this member's any more; raise every other error."""
        is_deleted = isinstance(error, NotFoundError) and error.code in ("unknown_topic", "unknown_partition")
        if not isinstance(error, FencedError) and not is_deleted:
            raise error
        self._lose(reader, is_fenced=not is_deleted)

    # -- commits ---------------------------------------------------------------------------------

    async def commit(self, deadline: Deadline) -> None:
        """Store the position in every partition where it differs from the cursor."""
        await super().commit(deadline)
        lost, self._lost = self._lost, []
        if lost := [place for place in lost if await self._is_topic_left(place[0], deadline)]:
            shown = ", ".join(f"{topic}/{partition}" for topic, partition in sorted(set(lost))[:10])
            message = (
                f"not done for {shown}: the group has given them to another member; records that were not committed"
                " before are delivered again"
            )
            raise FencedError(message)

    async def _is_topic_left(self, topic: str, deadline: Deadline) -> bool:
        try:
            await self._router.find_topic(topic, deadline=deadline, age_ms_max=0)
        except NotFoundError:  # deleted: nobody reads it
            return False
        return True

    async def _commit_one(self, reader: PartitionPrefetcher, position: Offset, deadline: Deadline) -> None:
        try:
            await super()._commit_one(reader, position, deadline)
        except FencedError:
            self._lose(reader, is_fenced=True)  # `commit` reports it

    async def _commit_if_due(self) -> None:
        try:
            await super()._commit_if_due()
        except FencedError as error:
            self._log_fenced(error)

    def _log_fenced(self, error: FencedError) -> None:
        """Log a refused commit that the application did not ask for: it loses nothing by it."""
        facts = {"group": self.group.group, "error": str(error)}
        logger.warning("an automatic commit of a group member was fenced", extra={"facts": facts})

    def _cursors_of(self, reader: PartitionPrefetcher) -> ConsumerCursors:
        place = (reader.topic, reader.partition_id)
        if self.readers.get(place) is not reader:
            raise FencedError(
                f"partition {reader.partition_id} of topic {reader.topic!r} is not this member's any more"
            )
        return self._partition_cursors[place]

    # -- following the assignment ----------------------------------------------------------------

    async def _follow_assignment(self) -> None:
        while True:
            await self._step_due.wait()
            self._step_due.clear()
            if self._is_leaving:
                return
            if (failure := self.view.failure) is not None:
                self._failure = failure
            else:
                await self._step()
            self._changed.set()

    async def _step(self) -> None:
        """Do what can be done now to follow the assignment; partitions that stay are not touched.

        Only callbacks are waited for: a partition without a leader must not delay what happens to the others.
        """
        view = self.view
        self._router.cache.record_index(view.index)
        changes = find_changes({place: one.epoch for place, one in self._held.items()}, view)
        for place in changes.lost:
            self._lose(self.readers[place])
        for one in changes.revoked:
            if not (reader := self.readers[_place(one)]).is_retired:
                reader.retire()
        self._releasing &= set(view.revoking)
        await self._announce_lost()
        await self._release([one for one in changes.revoked if self._is_releasable(one)])
        self._begin_release([one for one in changes.unused if one not in self._releasing])
        for one in changes.granted:
            if one not in self._beginning:
                self._beginning.add(one)
                self._tasks.start(self._begin(one), f"begin-{one.partition_id}")
        await self._announce_granted()

    def _is_step_left(self) -> bool:
        """Whether a part of the last step waited for the application."""
        return bool(self._dropped or self._unannounced or any(reader.is_retired for reader in self.readers.values()))

    def _is_releasable(self, one: AssignedPartition) -> bool:
        is_callback_possible = self._on_revoke is None or bool(self._asking_count)
        return is_callback_possible and one not in self._releasing and self.readers[_place(one)] not in self._lent

    async def _release(self, partitions: Sequence[AssignedPartition]) -> None:
        """Call `on_revoke`, then commit and release partitions whose records are finished."""
        self._releasing |= set(partitions)
        await self._call_back(self._on_revoke, [at for at in map(_place, partitions) if at not in self._unannounced])
        self._begin_release(partitions)

    def _begin_release(self, partitions: Sequence[AssignedPartition]) -> None:
        if partitions:
            self._releasing |= set(partitions)
            self._tasks.start(self._commit_and_release(partitions), "release")

    async def _commit_and_release(self, partitions: Sequence[AssignedPartition]) -> None:
        readers = [self.readers[at] for at in map(_place, partitions) if at in self.readers]
        if self.group.commits_on_release or self.options.auto_commit_ms is not None:
            await asyncio.gather(*map(self._commit_released, readers))
        for reader in readers:
            self._forget(reader)
        if self._membership is not None:
            await self._host.run(self._membership.release(partitions))

    async def _commit_released(self, reader: PartitionPrefetcher) -> None:
        if reader.position == reader.committed:
            return
        deadline = self._router.deadline(min(self._router.options.timeout_ms, RELEASE_MS_MAX))
        try:
            await super()._commit_one(reader, reader.position, deadline)
        except QuiverError as error:
            facts = {"group": self.group.group, "topic": reader.topic, "partition": reader.partition_id}
            logger.warning(
                "a position was not committed before its partition was released; records are delivered again",
                extra={"facts": {**facts, "error": str(error)}},
            )

    async def _begin(self, one: AssignedPartition) -> None:
        """Begin the epoch of a partition and find the position in it; a failure is tried again."""
        cursors = ConsumerCursors(self._router, one.topic, self.consumer_id, session=one.epoch)
        try:
            async with self._beginning_room:
                deadline = self._router.deadline(min(self._router.options.timeout_ms, BEGIN_MS_MAX))
                position, _ = await cursors.find_start(one.partition_id, one.start, deadline=deadline)
        except QuiverError as error:
            # No leader now, deleted, or the next owner has begun already: the assignment changes, or it works later.
            facts = {"group": self.group.group, "topic": one.topic, "partition": one.partition_id, "error": str(error)}
            logger.info("a partition of a group could not be begun, it is tried again", extra={"facts": facts})
            await asyncio.sleep(REOPEN_MS / 1000)
        else:
            self._add_partition(one, position, cursors)
        finally:
            self._beginning.discard(one)
            self._step_due.set()

    def _add_partition(self, one: AssignedPartition, position: Offset, cursors: ConsumerCursors) -> None:
        """Read a partition, unless it is not this member's any more."""
        if one not in self.view.owned or self._is_leaving:
            return
        place = _place(one)
        if place in self.readers:  # at an earlier epoch
            self._lose(self.readers[place])
        reader = self._make_reader(one.topic, one.partition_id, position, cursors)
        reader.committed = position
        self._held[place], self._partition_cursors[place] = one, cursors
        self._unannounced[place] = self.readers[place] = reader

    async def _announce_granted(self) -> None:
        if not self._unannounced or (self._on_assign is not None and not self._asking_count):
            return
        if self._on_assign is not None and self._beginning and not self._is_announcement_due():
            return
        self._announce_at_ms = None
        granted, self._unannounced = self._unannounced, {}
        await self._call_back(self._on_assign, sorted(granted))
        for reader in granted.values():
            reader.start()

    def _is_announcement_due(self) -> bool:
        """Whether the others that are being begun were waited for long enough, to be announced in one call."""
        now_ms = self._router.clock.monotonic_ms()
        if self._announce_at_ms is None:
            self._announce_at_ms = now_ms + ANNOUNCE_MS_MAX
            asyncio.get_running_loop().call_later(ANNOUNCE_MS_MAX / 1000, self._step_due.set)
        return now_ms >= self._announce_at_ms

    async def _announce_lost(self) -> None:
        if self._dropped and (self._on_revoke is None or self._asking_count):
            dropped, self._dropped = self._dropped, []
            await self._call_back(self._on_revoke, sorted(dropped))

    def _lose(self, reader: PartitionPrefetcher, *, is_fenced: bool = False) -> None:
        """Drop a partition that is another member's; remember it if its position was not committed."""
        if is_fenced and self._membership is not None:
            self._fenced_ms = self._router.clock.monotonic_ms()
            self._host.begin(self._membership.check(), "check-member", self._crashed)
        place = (reader.topic, reader.partition_id)
        if reader.position != reader.committed:
            self._lost.append(place)
        if self.readers.get(place) is reader and place not in self._unannounced:
            self._dropped.append(place)
        self._forget(reader)
        self._step_due.set()

    def _forget(self, reader: PartitionPrefetcher) -> None:
        reader.retire()
        self._lent.pop(reader, None)
        place = (reader.topic, reader.partition_id)
        if self.readers.get(place) is reader:
            del self.readers[place], self._partition_cursors[place], self._held[place]
            self._unannounced.pop(place, None)

    # -- callbacks -------------------------------------------------------------------------------

    async def _call_back(self, callback: OnPartitions | None, places: Iterable[Place]) -> None:
        """Call the application; no record is returned meanwhile. Its error is raised where it asks for records."""
        given = [(topic, int(partition)) for topic, partition in places]
        if callback is None or not given:
            return
        self._not_calling_back.clear()
        try:
            answer = callback(given)
            if inspect.isawaitable(answer):
                await answer
        except Exception as error:  # noqa: BLE001 - the application's, whatever it is
            self._callback_error = error
        finally:
            self._not_calling_back.set()
            self._changed.set()

    def _pop_callback_error(self) -> BaseException | None:
        error, self._callback_error = self._callback_error, None
        return error


def _place(one: AssignedPartition) -> Place:
    return (one.topic, one.partition_id)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Run a call on a loop from any thread, or in its own; do nothing if the loop is closed."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        call()
        return
    with suppress(RuntimeError):  # the application's loop has ended
        loop.call_soon_threadsafe(call)
