"""What a receive leases and what a settle changes: plans against a queue's window, in one turn of the event loop.

Nothing here suspends, reads the log or changes a window. A plan is a list of operations, and what the leader has to
remember once they are planned. A receive decodes at most `READ_BYTES_MAX` or a single larger batch; what is left out
comes with the next one.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence

import msgspec

from quiver.errors import DecodeError, RequestError
from quiver.groups.settings import QueueSettings
from quiver.model import ConsumerId, Offset
from quiver.partition.lease_schedule import LeaseSchedule, is_due
from quiver.partition.queue_operations import (
    LEASED,
    NOT_PARKED,
    WAITING,
    FreshSpan,
    GrantedSpan,
    QueueAcks,
    QueueExtends,
    QueueKills,
    QueueLeases,
    QueueOperation,
    QueueReturns,
    Run,
)
from quiver.partition.queue_window import QueueWindow, is_current
from quiver.partition.record_batches import READ_BYTES_MAX
from quiver.record import Batch
from quiver.record.decoded import DecodedAllowance
from quiver.record.delay import find_deliver_at
from quiver.wire.queue_messages import (
    QUEUE_RANGES_MAX,
    QUEUE_RECORDS_MAX,
    QueueLease,
    QueueSettle,
    QueueStall,
)

MAX_ATTEMPTS_REASON = "max_attempts"
UNDECODABLE_REASON = "undecodable"
PARKED_MAX = 2_000
"""Fresh records that one receive parks at most: its entry must not hold the event loop."""

FindBatch = Callable[[Offset], Batch | None]
"""Returns the batch that contains an offset, if it is in memory."""


def is_exhausted(attempt: int, settings: QueueSettings) -> bool:
    """Return whether a record that was delivered so often is not delivered again."""
    return 0 < settings.max_attempts <= attempt


def hash_key(key: bytes | None) -> int:
    """Return the hash by which the records of a key are told from others; 0 without a key."""
    return 0 if key is None else zlib.crc32(key) + 1


class LeasePlan:
    """The records of one receive."""

    def __init__(self) -> None:
        self.operations: list[QueueOperation] = []
        self.leases: list[QueueLease] = []
        self.grant = 0
        self.deadline_ms = 0
        self.killed = 0
        """Records that become dead letters instead of being delivered."""
        self.missing: Offset | None = None
        """An offset whose batch must be read; the plan ends before it."""
        self.large_bytes = 0
        """What has to be admitted before the next batch can be decoded, if more than was; the plan ends before it."""
        self.again: list[tuple[int, int]] = []
        self.fresh: list[FreshSpan] = []
        self.kills: list[GrantedSpan] = []
        self.broken: list[GrantedSpan] = []
        """Fresh records whose batch cannot be decoded."""
        self.rows: list[tuple[object, ...]] = []
        """The records, in the order of the leases: copies, so that no batch is kept until the leases are committed."""
        self.hints: list[tuple[int, int, int]] = []
        self.keyed: list[tuple[int, int, int]] = []
        """(first, count, key) of fresh records with a key."""
        self.released_keys: list[int] = []

    def note(self, schedule: LeaseSchedule, window: QueueWindow) -> None:
        """Tell the schedule of what was planned."""
        for first, count, key in self.keyed:
            schedule.add_keys(first, count, key)
        for first, count, time_ms in self.hints:
            schedule.add(first, count, time_ms)
        schedule.release_keys(window, self.released_keys)

    def add_lease(self, batch: Batch, first: int, end: int, attempt: int) -> None:
        """Add neighbouring records of one batch."""
        last = self.leases[-1] if self.leases else None
        if last is not None and last.first + last.count == first and last.attempt == attempt:
            self.leases[-1] = QueueLease(last.first, last.count + end - first, attempt)
        else:
            self.leases.append(QueueLease(Offset(first), end - first, attempt))
        self.rows += batch.rows(Offset(first), Offset(end))


class LeasePlanner:
    """Chooses the records of one receive."""

    def __init__(
        self,
        window: QueueWindow,
        schedule: LeaseSchedule,
        settings: QueueSettings,
        *,
        now_ms: int,
        find_batch: FindBatch,
        admitted: int = sys.maxsize,
    ) -> None:
        """Take what to plan with; a single batch that is larger once decoded than `admitted` has to be admitted."""
        self._window = window
        self._schedule = schedule
        self._settings = settings
        self._now_ms = now_ms
        self._find_batch = find_batch
        self._plan = LeasePlan()
        self._allowance = DecodedAllowance(READ_BYTES_MAX, first_bytes_max=admitted)
        self._has_ended = False
        """Whether the next batch has no room: its records are left to the next receive."""
        self._records_left = 0
        self._bytes_left = 0

    def plan(
        self, group_id: ConsumerId, *, records_max: int, bytes_max: int, lease_ms: int, end_offset: Offset
    ) -> LeasePlan:
        """Choose records: those whose leases have ended, those that waited, then fresh ones up to `end_offset`."""
        plan, window, now_ms = self._plan, self._window, self._now_ms
        self._records_left, self._bytes_left = records_max, max(1, bytes_max)
        plan.grant, plan.deadline_ms = window.grants + 1, now_ms + lease_ms
        self._plan_again()
        first = window.next_offset
        if not self._is_full and plan.missing is None:
            self._plan_fresh(end_offset)
        if plan.kills:
            plan.operations.append(QueueKills(group_id, tuple(plan.kills), now_ms, MAX_ATTEMPTS_REASON, is_final=True))
        if plan.again or plan.fresh:
            plan.operations.append(
                QueueLeases(group_id, plan.grant, plan.deadline_ms, tuple(plan.again), first, tuple(plan.fresh))
            )
        if plan.broken:
            plan.operations.append(QueueKills(group_id, tuple(plan.broken), now_ms, UNDECODABLE_REASON, is_final=True))
        plan.killed = sum(count for _, count, _ in (*plan.kills, *plan.broken))
        return plan

    @property
    def _is_full(self) -> bool:
        is_over = self._bytes_left <= 0 or len(self._plan.leases) >= QUEUE_RANGES_MAX
        return is_over or self._has_ended or not self._records_left

    def _find(self, position: int) -> Batch | None:
        """Return the batch of an offset; None if it is not in memory, or if the plan ends before it."""
        batch = self._find_batch(Offset(position))
        if batch is None or self._allowance.take(batch):
            return batch
        self._has_ended, self._plan.large_bytes = True, self._allowance.large_bytes
        return None

    def _plan_again(self) -> None:
        plan, back = self._plan, list[Run]()
        for run in self._schedule.take(self._window, self._now_ms):
            if is_exhausted(run.attempt, self._settings):
                plan.kills.append((run.first, run.count, run.grant))
                if run.key:
                    plan.released_keys.append(run.key)
                continue
            taken = self._take_run(run)
            if taken < run.count:
                back.append(
                    Run(run.first + taken, run.count - taken, run.state, run.attempt, run.grant, run.time_ms, run.key)
                )
            if self._is_full or plan.missing is not None or len(plan.kills) >= QUEUE_RANGES_MAX:
                break
        for run in back:
            self._schedule.put_back(run)

    def _take_run(self, run: Run) -> int:
        """Lease records of an outstanding run again; return how many."""
        plan, position = self._plan, run.first
        while position < run.end and not self._is_full:
            batch = self._find(position)
            if batch is None:
                plan.missing = None if self._has_ended else Offset(position)
                break
            end = self._fit(batch, position, run.end)
            plan.add_lease(batch, position, end, run.attempt + 1)
            position = end
        if position > run.first:
            plan.again.append((run.first, position - run.first))
            plan.hints.append((run.first, position - run.first, plan.deadline_ms))
        return position - run.first

    def _fit(self, batch: Batch, first: int, end: int) -> int:
        """Return the end of what of a batch's records still fits; at least one does."""
        end = min(end, batch.header.end_offset, first + self._records_left)
        lengths = batch.record_lengths(Offset(first), Offset(end))
        total = sum(lengths)
        if total > self._bytes_left:
            total, count = lengths[0], 1
            while count < len(lengths) and total + lengths[count] <= self._bytes_left:
                total += lengths[count]
                count += 1
            end = first + count
            if end < batch.header.end_offset:
                total = self._bytes_left  # full: the next record does not fit
        self._bytes_left -= total
        self._records_left -= end - first
        return end

    # -- fresh records -----------------------------------------------------------------------------

    def _plan_fresh(self, end_offset: Offset) -> None:
        plan, position = self._plan, self._window.next_offset
        room = self._settings.in_flight_max - self._window.in_flight
        end_offset = min(end_offset, Offset(position + room))
        while position < end_offset and not self._is_full and len(plan.fresh) < PARKED_MAX:
            batch = self._find(position)
            if batch is None:
                plan.missing = position if not (self._has_ended or plan.leases or plan.fresh) else None
                return
            end = min(end_offset, batch.header.end_offset)
            try:
                is_plain = self._settings.order == "offset" and not batch.has_headers
            except DecodeError:
                self._skip_broken(position, end)
                position = end
                continue
            if is_plain:
                end = Offset(self._fit(batch, position, end))
                self._lease_fresh(batch, position, end, key=0)
            else:
                end = self._plan_each(batch, position, end)
            position = end

    def _plan_each(self, batch: Batch, first: Offset, end: Offset) -> Offset:
        """Lease or park records one by one; return the offset after the last of them."""
        plan, is_keyed = self._plan, self._settings.order == "key"
        taken = {key for _, _, key in plan.keyed}
        for position, record in enumerate(batch.records(first, end), start=first):
            if self._is_full or len(plan.fresh) >= PARKED_MAX:
                return Offset(position)
            key = hash_key(record.key) if is_keyed else 0
            deliver_at_ms = find_deliver_at(record.headers) or 0
            is_blocked = key in taken or (bool(key) and not self._schedule.is_free(self._window, key))
            if is_blocked or deliver_at_ms > self._now_ms:
                plan.fresh.append((1, deliver_at_ms, key))
                if not is_blocked:
                    plan.hints.append((position, 1, deliver_at_ms))
            else:
                self._fit(batch, position, position + 1)
                self._lease_fresh(batch, Offset(position), Offset(position + 1), key=key)
            if key:
                taken.add(key)
                plan.keyed.append((position, 1, key))
        return end

    def _lease_fresh(self, batch: Batch, first: Offset, end: Offset, *, key: int) -> None:
        plan = self._plan
        plan.fresh.append((end - first, NOT_PARKED, key))
        plan.hints.append((first, end - first, plan.deadline_ms))
        plan.add_lease(batch, first, end, 1)

    def _skip_broken(self, first: Offset, end: Offset) -> None:
        """Park records whose batch is malformed, so that they can be killed: nobody could ever read them."""
        self._plan.fresh.append((end - first, 0, 0))
        self._plan.broken.append((first, end - first, 0))


# -- settling ------------------------------------------------------------------------------------------


class SettlePlan(msgspec.Struct):
    """The operations of one settle."""

    operations: list[QueueOperation]
    stale: list[tuple[int, int]] = []
    """[first, end) of records that are stale for sure: the queue has no window."""
    hints: list[tuple[int, int, int]] = []
    deadline_ms: int = 0

    def keys(self, window: QueueWindow) -> list[int]:
        """Return the keys of the records concerned."""
        spans = (span for one in self.operations if isinstance(one, QueueAcks | QueueKills) for span in one.spans)
        return [run.key for first, count, _ in spans for run in window.overlapping(first, first + count) if run.key]


def plan_settlement(
    request: QueueSettle, window: QueueWindow | None, settings: QueueSettings, *, now_ms: int
) -> SettlePlan:
    """Return the operations of a settle.

    Raises:
        RequestError: not done; ranges overlap, or have too many records.
    """
    ranges = _ranges_of(request)
    _check_ranges(ranges)
    group_id = request.group_id
    if window is None:
        return SettlePlan([], stale=ranges)
    plan = SettlePlan([])
    operations = plan.operations
    if request.acks:
        operations.append(QueueAcks(group_id, tuple((one.first, one.count, one.grant) for one in request.acks)))
    if request.releases:
        spans = tuple((one.first, one.count, one.grant) for one in request.releases)
        operations.append(QueueReturns(group_id, spans, 0, is_counted=False))
        plan.hints += [(first, count, 0) for first, count, _ in spans]
    for returned in request.returns:
        for part in _parts(window, returned.first, returned.first + returned.count):
            _return(plan, part, group_id, returned.grant, returned.delay_ms, settings, now_ms)
    for extended in request.extends:
        deadline_ms = now_ms + extended.lease_ms
        plan.deadline_ms = max(plan.deadline_ms, deadline_ms)
        span = (extended.first, extended.count, extended.grant)
        operations.append(QueueExtends(group_id, (span,), deadline_ms))
        plan.hints.append((extended.first, extended.count, deadline_ms))
    for one in request.rejects:
        span = (one.first, one.count, one.grant)
        operations.append(QueueKills(group_id, (span,), now_ms, one.reason, is_final=False))
    return plan


def _return(
    plan: SettlePlan,
    part: tuple[int, int, Run | None],
    group_id: ConsumerId,
    grant: int,
    delay_ms: int | None,
    settings: QueueSettings,
    now_ms: int,
) -> None:
    """Plan the return of records with one state; the last attempt ends as a dead letter."""
    first, end, run = part
    span = (first, end - first, grant)
    if run is not None and is_current(run, grant) and is_exhausted(run.attempt, settings):
        plan.operations.append(QueueKills(group_id, (span,), now_ms, MAX_ATTEMPTS_REASON, is_final=False))
        return
    delay_ms = settings.retry_delay_ms(run.attempt if run is not None else 1) if delay_ms is None else delay_ms
    plan.operations.append(QueueReturns(group_id, (span,), now_ms + delay_ms, is_counted=True))
    plan.hints.append((first, end - first, now_ms + delay_ms))


def _parts(window: QueueWindow, first: int, end: int) -> Iterator[tuple[int, int, Run | None]]:
    """Yield the parts of a range: [first, end), and the run that they belong to, if they are outstanding."""
    position = first
    for run in window.overlapping(first, end):
        low, high = max(run.first, first), min(run.end, end)
        if position < low:
            yield position, low, None
        yield low, high, run
        position = high
    if position < end:
        yield position, end, None


def _ranges_of(request: QueueSettle) -> list[tuple[int, int]]:
    """Return all ranges of a settle as [first, end)."""
    return [
        *((one.first, one.first + one.count) for one in (*request.acks, *request.releases)),
        *((one.first, one.first + one.count) for one in request.returns),
        *((one.first, one.first + one.count) for one in request.extends),
        *((one.first, one.first + one.count) for one in request.rejects),
    ]


def _check_ranges(ranges: Sequence[tuple[int, int]]) -> None:
    if sum(end - first for first, end in ranges) > QUEUE_RECORDS_MAX:
        raise RequestError(f"not done: more than {QUEUE_RECORDS_MAX} records in one request; settle them in several")
    position = -1
    for first, end in sorted(ranges):
        if first < position:
            raise RequestError(f"not done: the record at offset {first} is in two ranges; settle it in one way")
        position = end


# -- status ----------------------------------------------------------------------------------------------


class WindowCounts(msgspec.Struct):
    """Outstanding records of a window by what can be done with them."""

    ready: int = 0
    leased: int = 0
    waiting: int = 0
    """Not due, or due while an earlier record of their key is under way."""


def count_outstanding(window: QueueWindow, now_ms: int) -> WindowCounts:
    """Count the outstanding records of a window."""
    found, keys = WindowCounts(), set[int]()
    for run in window.runs:
        in_turn = 0 if run.key in keys else 1 if run.key else run.count
        if run.state == LEASED and not is_due(run, now_ms):
            found.leased += run.count
        elif not is_due(run, now_ms):
            found.waiting += run.count
        else:
            found.ready += in_turn
            found.waiting += run.count - in_turn
        if run.key:
            keys.add(run.key)
    return found


def find_stall(window: QueueWindow, end_offset: Offset, now_ms: int) -> QueueStall:
    """Return why nothing could be leased, of a window of which nothing could."""
    if window.next_offset < end_offset:
        return "in_flight_max"
    waiting = [run for run in window.runs if run.state == WAITING]
    if not waiting:
        return "empty"
    return "key_order" if any(is_due(run, now_ms) for run in waiting) else "waiting"
