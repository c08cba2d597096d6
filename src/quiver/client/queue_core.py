"""The dispatcher of a work queue: one per queue object, shared by all workers of the process that use it.

`QueueCore` is shared by the asyncio and the blocking queue. It asks the partitions' leaders for as many records as its
workers are waiting for, so that single receives of many workers share few requests, and settles jobs in the same way
(`queue_settler`). It asks partitions that may have records without waiting, in turn, and waits at all of them only if
none has any; so a worker that waits for one record can get more than that, at most one for each other partition.
What no worker takes is released soon, so that another process gets it, and its attempt does not count.

A job inside `with` is kept alive: its lease is extended while the worker's code runs. It runs on the event loop that
opened it. A receive in flight is never cancelled, except when the queue is closed and the cluster does not answer:
records that it leases would be lost to every worker until their leases end.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from quiver.backoff import Backoff
from quiver.client.delivery import copy_error
from quiver.client.options import QueueOptions
from quiver.client.queue_jobs import (
    LeasedJob,
    LeaseGrant,
    Range,
    Refusals,
    SettleKind,
    find_lost,
    merge_refusals,
    raise_lost,
    to_ranges,
)
from quiver.client.queue_place import QueuePlace
from quiver.client.queue_rooms import QueueRooms, ReserveRoom, release_nothing
from quiver.client.queue_settler import PartitionSettler, check_topic, name_deleted
from quiver.errors import (
    DecodeError,
    FencedError,
    NotFoundError,
    OutcomeUnknownError,
    QuiverError,
    RequestError,
    UnavailableError,
)
from quiver.groups.settings import QueueSettings
from quiver.model import ConsumerId, Offset, PartitionId
from quiver.record import Record
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.tasks import TaskSet
from quiver.wire.messages import TopicInfo
from quiver.wire.queue_messages import QUEUE_RECORDS_MAX, QueueReceive, QueueReceived, decode_queue_records

logger = logging.getLogger(__name__)

EMPTY_MS: Final = 50
"""How long a partition counts as empty after it had no more records."""
EXPECTED_MS: Final = 500
"""How long others do not ask for the records that one request was sent for; after it, its leader may be gone."""
RELEASE_MS: Final = 200
"""How long records that no worker takes are kept, unless they were prefetched."""
TICK_MS: Final = 200
"""Interval of everything that is due some time: leases, retries, records to release."""
RETRY_MS_FIRST: Final = 50
RETRY_MS_MAX: Final = 1_000
CLOSE_MS: Final = 5_000
"""Longest time that a closing queue waits for its requests, and for the release of its records."""

MakeJob = Callable[[Record, int, LeaseGrant, int], LeasedJob]


class _Waiter(msgspec.Struct, eq=False):
    """A worker that waits for jobs."""

    wants: int
    future: asyncio.Future[list[LeasedJob]]
    begun_ms: int
    ends_ms: int
    timer: asyncio.TimerHandle | None = None


class QueueCore:
    """One queue object: a group's view of one topic."""

    def __init__(
        self,
        topic: TopicInfo,
        group: str,
        group_id: ConsumerId,
        *,
        router: Router,
        options: QueueOptions,
        settings: QueueSettings,
        make_job: MakeJob,
        reserve_room: ReserveRoom | None = None,
    ) -> None:
        self.topic, self.group, self.group_id = topic, group, group_id
        self.options, self.settings = options, settings
        self.make_job, self._rooms = make_job, QueueRooms(reserve_room)
        self.alive: dict[LeasedJob, int] = {}
        """Jobs whose leases are extended, and until when (monotonic); changed by any thread."""
        self.on_closed: Callable[[], object] = lambda: None
        self._router, self._clock = router, router.clock
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskSet(self._crashed)
        self._lease_ms = settings.lease_ms
        self._places: list[QueuePlace] = []
        self._turn = 0
        self._waiters: dict[_Waiter, None] = {}
        self._demand = 0
        self._buffer: deque[LeasedJob] = deque()
        self._buffered_ms = 0
        """When the buffer got its first job, or a worker took one last."""
        self._received_ms = self._clock.monotonic_ms()
        """When a worker asked for jobs last."""
        self._answered_ms = -1
        self._error: QuiverError | None = None
        """The last error of a leader that could not be asked."""
        self._failure: QuiverError | None = None
        self.is_stopped = False
        """Whether no more jobs are received."""
        self._is_closing = False
        self._is_scheduled = False
        self._add_places(topic)
        self._tasks.start(self._run_ticks(), "queue-ticks")

    # -- receiving -------------------------------------------------------------------------------

    @property
    def buffered_count(self) -> int:
        """Jobs that no worker has taken yet."""
        return len(self._buffer)

    async def receive(self, jobs_max: int, timeout_ms: int) -> list[LeasedJob]:
        """Return available jobs, at most `jobs_max`; wait at most `timeout_ms` for the first.

        Raises:
            UnavailableError: no partition could be asked in this time.
            RequestError: the group or the topic cannot be used (any more).
        """
        if self._failure is not None:
            raise copy_error(self._failure)
        if self.is_stopped:
            return []
        now_ms = self._received_ms = self._clock.monotonic_ms()
        if not self._waiters and (jobs := self._take(jobs_max, now_ms)):
            if self.options.prefetch:
                self._schedule()
            return jobs
        future: asyncio.Future[list[LeasedJob]] = self._loop.create_future()
        waiter = _Waiter(wants=jobs_max, future=future, begun_ms=now_ms, ends_ms=now_ms + timeout_ms)
        waiter.timer = self._loop.call_later(timeout_ms / 1000, self._expire, waiter)
        self._waiters[waiter] = None
        self._demand += jobs_max
        self._schedule()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._put_back(future.result())
            raise
        finally:
            self._forget(waiter)

    def _expire(self, waiter: _Waiter) -> None:
        """End a wait, or let requests that are being answered end it."""
        if waiter.future.done():
            return
        is_late = self._clock.monotonic_ms() >= waiter.ends_ms + self._router.options.attempt_timeout_ms
        if not is_late and (self._is_scheduled or not all(_has_answered(place, waiter) for place in self._places)):
            waiter.timer = self._loop.call_later(0.005, self._expire, waiter)
            return
        if self._answered_ms < waiter.begun_ms and self._error is not None:
            waiter.future.set_exception(copy_error(self._error))
        else:
            waiter.future.set_result([])
        self._forget(waiter)

    def _forget(self, waiter: _Waiter) -> None:
        if self._waiters.pop(waiter, self) is None:
            self._demand -= waiter.wants
        if waiter.timer is not None:
            waiter.timer.cancel()
            waiter.timer = None

    def _take(self, jobs_max: int, now_ms: int) -> list[LeasedJob]:
        """Return buffered jobs whose leases have not ended."""
        buffer = self._buffer
        jobs: list[LeasedJob] = []
        while buffer and len(jobs) < jobs_max:
            job = buffer.popleft()
            self._rooms.take(job)
            if job.ends_ms > now_ms:  # else it is delivered again, perhaps elsewhere
                jobs.append(job)
        self._buffered_ms = now_ms
        return jobs

    def _put_back(self, jobs: Sequence[LeasedJob]) -> None:
        """Return jobs to the buffer of a worker that was cancelled before it got them."""
        if not self._buffer:
            self._buffered_ms = self._clock.monotonic_ms()
        self._buffer.extendleft(reversed(jobs))
        self._schedule()

    def _hand_out(self, now_ms: int) -> None:
        while self._waiters and self._buffer:
            waiter = next(iter(self._waiters))
            if jobs := self._take(waiter.wants, now_ms):
                if not waiter.future.done():
                    waiter.future.set_result(jobs)
                else:
                    self._buffer.extendleft(reversed(jobs))
                self._forget(waiter)

    # -- asking leaders --------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Ask leaders in the next turn of the loop, when all workers of this one have said what they need."""
        if not self._is_scheduled and not self.is_stopped:
            self._is_scheduled = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._is_scheduled = False
        now_ms = self._clock.monotonic_ms()
        self._hand_out(now_ms)
        if self.is_stopped:
            return
        wanted = self._demand + self._prefetch_wanted(now_ms) - len(self._buffer)
        expected = sum(one.expected for one in self._places if one.is_asked and now_ms - one.sent_ms < EXPECTED_MS)
        unmet = wanted - expected
        count = len(self._places)
        for step in range(count):
            if unmet <= 0:
                return
            place = self._places[(self._turn + step) % count]
            if not place.is_asked and place.empty_until_ms <= now_ms:
                self._turn = (self._turn + step + 1) % count
                number = min(unmet, QUEUE_RECORDS_MAX)
                unmet -= number
                # Without other partitions to ask there is no reason to ask this one twice.
                self._ask(place, number, wait_ms=self._wait_ms(now_ms) if count == 1 else 0, is_expected=True)
        if unmet > 0 and not expected:
            self._wait_everywhere(unmet, now_ms)

    def _wait_everywhere(self, unmet: int, now_ms: int) -> None:
        """Wait for records at every partition, with a share of the demand at each."""
        wait_ms = self._wait_ms(now_ms)
        if any(one.is_asked and not one.is_polled for one in self._places) or not wait_ms:
            return
        number = min(math.ceil(unmet / len(self._places)), QUEUE_RECORDS_MAX)
        for place in self._places:
            if not place.is_asked and place.empty_until_ms <= now_ms + EMPTY_MS:
                self._ask(place, number, wait_ms=wait_ms, is_expected=False)

    def _wait_ms(self, now_ms: int) -> int:
        """Return how long leaders may wait for records: not longer than the most patient worker does."""
        if self._prefetch_wanted(now_ms):
            return self.options.wait_ms
        last_ms = max((one.ends_ms for one in self._waiters), default=now_ms)
        return max(0, min(self.options.wait_ms, last_ms - now_ms))

    def _prefetch_wanted(self, now_ms: int) -> int:
        """Return how many jobs to keep ready: none once no worker has asked for longer than a lease."""
        is_used = now_ms - self._received_ms <= self._lease_ms and not self.is_stopped
        return self.options.prefetch if is_used else 0

    def _ask(self, place: QueuePlace, number: int, *, wait_ms: int, is_expected: bool) -> None:
        place.is_asked, place.is_polled = True, bool(wait_ms)
        place.expected = number if is_expected else 0
        place.sent_ms = self._clock.monotonic_ms()
        self._tasks.start(self._receive(place, number, wait_ms), f"receive-{place.partition_id}")

    async def _receive(self, place: QueuePlace, number: int, wait_ms: int) -> None:
        def build(info: TopicInfo, room_bytes: int) -> QueueReceive:
            check_topic(info, self.topic.topic_id)
            return QueueReceive(
                topic_id=info.topic_id,
                partition_id=place.partition_id,
                group_id=self.group_id,
                records_max=number,
                bytes_max=self.options.receive_bytes,
                wait_ms=wait_ms,
                decoded_bytes_max=room_bytes,
            )

        async def ask(room_bytes: int) -> tuple[QueueReceived, memoryview]:
            deadline = self._router.deadline(self._router.options.attempt_timeout_ms + wait_ms)
            return await self._router.ask_leader(
                self.topic.topic,
                place.partition_id,
                lambda info: build(info, room_bytes),
                deadline=deadline,
                wait_ms=wait_ms,
            )

        jobs, release = list[LeasedJob](), release_nothing
        try:
            (received, payload), release = await self._rooms.receive(ask)
            jobs = self._accept(place, number, received, payload)
            self._buffer += jobs
        except QuiverError as error:
            self._handle_error(place, error)
        finally:
            self._rooms.keep(jobs, release)
            place.is_asked = place.is_polled = False
            place.expected = 0
            place.checked_ms = self._clock.monotonic_ms()
            self._schedule()

    def _accept(self, place: QueuePlace, number: int, received: QueueReceived, payload: memoryview) -> list[LeasedJob]:
        now_ms = self._answered_ms = self._clock.monotonic_ms()
        place.backoff.reset()
        self._error = None
        records = decode_queue_records(payload) if received.leases else []
        if len(records) != sum(lease.count for lease in received.leases):
            raise DecodeError("the leader's answer has another number of records than of leases", code="bad_answer")
        if len(records) < number and len(payload) < self.options.receive_bytes // 2:
            place.empty_until_ms = now_ms + EMPTY_MS
        if not records:
            return []
        if not self._buffer:
            self._buffered_ms = now_ms
        self._lease_ms = received.lease_ms
        topic, partition_id, make_job = self.topic.topic, place.partition_id, self.make_job
        grant = LeaseGrant(
            self.group, self.group_id, topic, self.topic.topic_id, partition_id, received.grant, received.lease_ms
        )
        ends_ms = place.sent_ms + received.lease_ms
        at, jobs = iter(records), list[LeasedJob]()
        for lease in received.leases:
            attempt = lease.attempt
            for offset in range(lease.first, lease.first + lease.count):
                one = next(at)
                record = Record(Offset(offset), one.timestamp, one.key, one.value, one.headers, partition_id, topic)
                jobs.append(make_job(record, attempt, grant, ends_ms))
        return jobs

    def _handle_error(self, place: QueuePlace, error: QuiverError) -> None:
        """Ask again later; if asking cannot help, fail the workers that wait now."""
        error = name_deleted(error, self.group)
        place.empty_until_ms = self._clock.monotonic_ms() + round(place.backoff.next_ms())
        if isinstance(error, UnavailableError | OutcomeUnknownError):
            if self._error is None:
                facts = {"topic": self.topic.topic, "partition": place.partition_id, "error": str(error)}
                logger.warning("a partition of the queue does not answer, it is asked again", extra={"facts": facts})
            self._error = error
            return
        self._fail_waiters(error)

    def _fail_waiters(self, error: QuiverError) -> None:
        for waiter in list(self._waiters):
            if not waiter.future.done():
                waiter.future.set_exception(copy_error(error))
            self._forget(waiter)

    # -- settling --------------------------------------------------------------------------------

    async def settle(self, kind: SettleKind, jobs: Iterable[LeasedJob], argument: Any = None) -> None:
        """Acknowledge, return, release or reject jobs; those for which the same was done before are left out.

        Raises:
            FencedError: some were delivered to other workers or settled meanwhile (`stale_receipt`); all others are
                settled.
            ConflictError: one was settled differently before (`job_settled`); none was settled now.
            RequestError: one is of another group or topic (`foreign_job`); none was settled now.
        """
        begun: list[LeasedJob] = []
        lost: list[LeasedJob] = []
        is_known = is_not_done = False
        try:
            for job in jobs:
                if job.settled is None:
                    job.settled = "in_progress"
                    begun.append(job)
                elif job.settled == "lost":
                    lost.append(job)
                else:
                    job.check_settled(kind)
            if begun:
                lost += await self._send(kind, begun, argument)
                is_known = True
        except QuiverError as error:
            is_not_done = error.outcome == "not_done" and len(begun) == 1  # of several, others may be done
            raise
        finally:
            alive = self.alive
            for job in begun:
                job.settled = kind if is_known else None
                job.is_doubtful |= not (is_known or is_not_done)
                if alive:
                    alive.pop(job, None)
        for job in lost:
            job.settled = "lost"
        raise_lost(lost, others=len(begun) - len(lost))

    async def extend(self, jobs: Sequence[LeasedJob], lease_ms: int | None) -> None:
        """Let leases end in `lease_ms` from now; None: in the group's lease time.

        Raises:
            FencedError: some were delivered to other workers, or are settled (`stale_receipt`); others are extended.
            ConflictError: one was settled before (`job_settled`); none was extended.
            RequestError: one is of another group or topic (`foreign_job`); none was extended.
        """
        unique = dict.fromkeys(jobs)  # no record is named twice in a request
        lost = [job for job in unique if job.settled == "lost"]
        asked = [job for job in unique if job.settled != "lost"]
        for job in asked:
            job.check_unsettled()
        lasting_ms = self._lease_ms if lease_ms is None else lease_ms
        ends_ms = self._clock.monotonic_ms() + lasting_ms
        refused = await self._send("extend", asked, lasting_ms)
        for job in asked:
            job.ends_ms = ends_ms
        for job in refused:
            job.ends_ms = 0
            self.alive.pop(job, None)
            if job.settled is None and not job.is_doubtful:  # else the call that settles it says how that ended
                job.settled = "lost"
        lost += refused
        raise_lost(lost, others=len(unique) - len(lost))

    async def settle_ranges(
        self, kind: SettleKind, partition_id: PartitionId, ranges: Sequence[Range], argument: Any = None
    ) -> Refusals:
        """Settle by receipts, which may be of another process; return those for which nothing was done.

        A record may be named under several grants, as a worker does that got it again.
        """
        if self._failure is not None:
            raise copy_error(self._failure)
        if not 0 <= partition_id < len(self._places):
            message = f"not done: topic {self.topic.topic!r} has no partition {partition_id}"
            raise NotFoundError(message, code="unknown_partition")
        futures = self._places[partition_id].settler.add(kind, ranges, argument)
        await asyncio.wait(futures)
        return merge_refusals(future.result() for future in futures)

    async def _send(self, kind: SettleKind, jobs: Sequence[LeasedJob], argument: Any) -> list[LeasedJob]:
        """Settle or extend jobs; return those that are lost."""
        if self._failure is not None and kind != "release":
            raise copy_error(self._failure)
        waiting: list[tuple[LeaseGrant, asyncio.Future[Refusals]]] = []
        by_grant = to_ranges(jobs)
        for grant in by_grant:
            self._check_grant(grant)
        for grant, ranges in by_grant.items():
            futures = self._places[grant.partition_id].settler.add(kind, ranges, argument)
            waiting += [(grant, future) for future in futures]
        if len(waiting) > 1:
            await asyncio.wait([future for _, future in waiting])
        return find_lost(jobs, [(grant, await future) for grant, future in waiting])

    def _check_grant(self, grant: LeaseGrant) -> None:
        """Refuse jobs that came from elsewhere: their receipts would name leases of other workers here."""
        if (grant.topic, grant.group_id) != (self.topic.topic, self.group_id):
            raise RequestError(
                f"not done: jobs of group {grant.group!r} on topic {grant.topic!r} cannot be settled by the queue of "
                f"group {self.group!r} on topic {self.topic.topic!r}; use the queue that they came from, or job.ack()",
                code="foreign_job",
            )
        check_topic(self.topic, grant.topic_id)

    # -- what is due some time -------------------------------------------------------------------

    def keep_alive(self, job: LeasedJob) -> None:
        """Extend a job's lease again and again, until it is settled; from any thread."""
        lasting_ms = self.options.max_processing_ms
        self.alive[job] = self._clock.monotonic_ms() + (1 << 60 if lasting_ms is None else lasting_ms)

    async def _run_ticks(self) -> None:
        refreshed_ms = self._clock.monotonic_ms()
        while True:
            await asyncio.sleep(max(1, min(TICK_MS, self._lease_ms // 6)) / 1000)
            now_ms = self._clock.monotonic_ms()
            self._extend_due(now_ms)
            self._release_due(now_ms)
            if self._waiters:
                self._schedule()
            if now_ms - refreshed_ms >= self.options.refresh_ms:
                refreshed_ms = now_ms
                self._tasks.start(self._follow_topic(), "follow-topic")

    def _extend_due(self, now_ms: int) -> None:
        due = [job for job, until_ms in self.alive.copy().items() if self._is_extended(job, until_ms, now_ms)]
        if self._prefetch_wanted(now_ms):
            due += [job for job in self._buffer if self._is_extended(job, 1 << 60, now_ms)]
        if due:
            self._tasks.start(self._extend_quietly(due), "extend")

    def _is_extended(self, job: LeasedJob, until_ms: int, now_ms: int) -> bool:
        is_due = 0 < job.ends_ms <= now_ms + job.grant.lease_ms * 2 // 3  # 0: it is lost
        return is_due and now_ms < until_ms and not job.is_extending and not job.is_settled

    async def _extend_quietly(self, jobs: list[LeasedJob]) -> None:
        jobs = [job for job in jobs if not job.is_settled]
        for job in jobs:
            job.is_extending = True
        try:
            await self.extend(jobs, None)
        except FencedError:
            pass  # who settles the job learns of it
        except QuiverError as error:
            logger.warning("leases were not extended, it is retried", extra={"facts": {"error": str(error)}})
        finally:
            for job in jobs:
                job.is_extending = False

    def _release_due(self, now_ms: int) -> None:
        if self._buffer and now_ms - self._buffered_ms >= RELEASE_MS and not self._prefetch_wanted(now_ms):
            jobs = self._take(len(self._buffer), now_ms)
            if jobs:
                self._tasks.start(self._release_quietly(jobs), "release")

    async def _release_quietly(self, jobs: list[LeasedJob]) -> None:
        try:
            await self.settle("release", jobs)
        except QuiverError as error:
            facts = {"count": len(jobs), "error": str(error)}
            logger.warning("jobs were not released, their leases expire", extra={"facts": facts})

    async def _follow_topic(self) -> None:
        """Use partitions that were added to the topic."""
        with suppress(QuiverError):  # receives report errors to the workers
            deadline, age_ms = self._router.deadline(), self.options.refresh_ms
            info = await self._router.find_topic(self.topic.topic, deadline=deadline, age_ms_max=age_ms)
            if info.topic_id == self.topic.topic_id:
                self._add_places(info)

    def _add_places(self, info: TopicInfo) -> None:
        for number in range(len(self._places), len(info.partitions)):
            partition_id = PartitionId(number)
            settler = PartitionSettler(
                info, partition_id, self.group, self.group_id, router=self._router, tasks=self._tasks
            )
            backoff = Backoff(self._router.rng, first_ms=RETRY_MS_FIRST, max_ms=RETRY_MS_MAX)
            self._places.append(QueuePlace(partition_id, settler, backoff))

    # -- the end ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Receive no more: workers that wait get nothing. Jobs can still be settled, and are kept alive."""
        self.is_stopped = True
        for waiter in list(self._waiters):
            if not waiter.future.done():
                waiter.future.set_result([])
            self._forget(waiter)

    async def close(self) -> None:
        """Receive no more, settle what workers have settled so far, and release what none has taken; idempotent."""
        if self._is_closing:
            return
        self._is_closing = self.is_stopped = True
        closed = RequestError(f"not done: the queue of topic {self.topic.topic!r} is closed", code="closed")
        self._failure = self._failure or closed
        self._fail_waiters(closed)
        try:
            deadline = self._router.deadline(CLOSE_MS)
            await self._wait_until(lambda: not any(place.is_asked for place in self._places), deadline)
            now_ms = self._clock.monotonic_ms()
            if jobs := self._take(len(self._buffer), now_ms):
                self._tasks.start(self._release_quietly(jobs), "release")
                await asyncio.sleep(0)
            await self._wait_until(lambda: all(place.settler.is_idle for place in self._places), deadline)
        finally:
            self._rooms.close()
            self.alive.clear()
            for place in self._places:
                place.settler.abandon(closed)
            await self._tasks.close()
            self.on_closed()

    async def _wait_until(self, is_so: Callable[[], bool], deadline: Deadline) -> None:
        while not is_so() and not deadline.is_over:  # noqa: ASYNC110 - the tasks of many partitions; once, at the end
            await asyncio.sleep(0.005)

    def _crashed(self, error: BaseException) -> None:
        failure = UnavailableError(
            f"the queue of topic {self.topic.topic!r} crashed: {error!r}; open it again", code="queue_failed"
        )
        failure.__cause__ = error
        self._failure = failure
        self._fail_waiters(failure)


def _has_answered(place: QueuePlace, waiter: _Waiter) -> bool:
    """Return whether a partition has no answer under way that a worker should still wait for."""
    if place.is_polled:
        return True
    return place.checked_ms >= waiter.begun_ms and not (place.is_asked and place.sent_ms <= waiter.ends_ms)
