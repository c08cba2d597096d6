"""Work queues on a partition's leader: leases records to workers, and settles them.

A *receive* delivers records whose leases have ended first, then those that waited, then fresh ones. It plans in one
turn of the event loop, from batches that are in memory; what it misses is read first. Records are returned only after
their leases are committed. A receive that finds nothing waits: it is woken by new records, by returned ones, by room
below the limit of records under way, or when a lease or a delay ends. Waiting receives are woken one at a time, and
each wakes the next if it leaves something.

A *settle* compares receipts with the planned windows, and answers when its operations are committed.

Leases end by the leader's wall clock. A lease that has ended changes nothing by itself: the record is leased again by
the next receive, and until then its receipt is still good. `expire` is the exception: it ends records whose last
attempt has failed, so that they become dead letters even if nobody receives.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from quiver.clock import Clock
from quiver.errors import OverloadedError, QuiverError, TrimmedError
from quiver.groups.settings import QueueSettings
from quiver.model import ConsumerId, Index, Offset
from quiver.partition.consume_handler import DefaultStart
from quiver.partition.lease_schedule import LeaseSchedule, is_due
from quiver.partition.meters import QueueMeter
from quiver.partition.proposal_gate import ProposalGate
from quiver.partition.queue_operations import (
    DeadRun,
    DeadTarget,
    QueueBurial,
    QueueKills,
    QueueOpen,
    QueueOperation,
    QueueTarget,
    Run,
)
from quiver.partition.queue_plans import (
    MAX_ATTEMPTS_REASON,
    LeasePlan,
    LeasePlanner,
    SettlePlan,
    count_outstanding,
    find_stall,
    is_exhausted,
    plan_settlement,
)
from quiver.partition.queue_proposals import QueueProposals
from quiver.partition.queue_window import QueueWindow
from quiver.partition.reads import Admit, admit_all
from quiver.partition.record_batches import READ_BYTES_MAX, HeldBatches, RecordBatches
from quiver.partition.state import PartitionState
from quiver.tasks import timeout
from quiver.wire.queue_messages import QueueLease, QueueSettle, QueueStall

QUEUES_MAX = 1_000
"""Work queues with a window in one partition."""
WAITERS_MAX = 10_000
"""Receives that may wait for records of one partition."""
TIMER_S_MAX = 1.0
"""Longest time between two looks at leases that end while receives wait: wall clocks jump."""
WAIT_S_MIN = 0.001
"""A receive with less time left does not wait: a timer may be early by a rounding error."""
KILLS_PER_ENTRY = 1_000
"""Records without an attempt left that one entry ends, as runs."""


class ReceiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One receive of a queue."""

    group_id: ConsumerId
    settings: QueueSettings
    records_max: int
    bytes_max: int
    lease_ms: int | None = None
    wait_ms: int = 0
    default_start: DefaultStart = "earliest"
    """Where a queue without a cursor starts."""
    checked_index: Index | None = None
    """The metadata index at which the group was found to be registered."""
    admit: Admit = admit_all
    """Called before records are read."""


class ReceiveResult(msgspec.Struct, frozen=True):
    """Leased records: `rows` are (timestamp, value), and key and headers if the batch has them, in lease order."""

    leases: tuple[QueueLease, ...] = ()
    rows: Sequence[tuple[object, ...]] = ()
    grant: int = 0
    deadline_ms: int = 0
    lease_ms: int = 0
    stall: QueueStall = ""


class SettleResult(msgspec.Struct, frozen=True):
    """What was not settled, and what had been before, as (first offset, count); the latest deadline of extensions."""

    stale: tuple[tuple[Offset, int], ...] = ()
    settled_before: tuple[tuple[Offset, int], ...] = ()
    deadline_ms: int = 0


class QueueStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The records of a queue in this partition; see `QueueFound`."""

    ready: int
    leased: int
    waiting: int
    dying: int
    next_offset: Offset
    first_unsettled: Offset
    first_offset: Offset
    end_offset: Offset
    stall: QueueStall


class _Queue:
    """One queue on the leader: its schedule, and the receives that wait for it."""

    __slots__ = ("in_flight_max", "schedule", "timer", "timer_s", "waiters")

    def __init__(self) -> None:
        self.schedule: LeaseSchedule | None = None
        self.waiters: deque[asyncio.Future[None]] = deque()
        self.timer: asyncio.TimerHandle | None = None
        self.timer_s = 0.0
        self.in_flight_max = 0
        """As the last receive had it."""


class QueueHandler:
    """The work queues of one partition, on its leader."""

    def __init__(
        self, gate: ProposalGate, state: PartitionState, batches: RecordBatches, meter: QueueMeter, clock: Clock
    ) -> None:
        self._gate = gate
        self._state = state
        self._batches = batches
        self._meter = meter
        self._clock = clock
        self._proposals = QueueProposals(gate, state)
        self._proposals.on_reset = self._handle_reset
        self._queues: dict[ConsumerId, _Queue] = {}
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Return how many receives wait."""
        return self._waiting

    # -- receiving -------------------------------------------------------------------------------

    async def receive(self, request: ReceiveRequest) -> ReceiveResult:
        """Lease records to a worker, and return them when that is committed; wait up to `wait_ms` for the first.

        Raises:
            NotLeaderError: not done; another replica leads.
            OverloadedError: not done; too many receives wait, or too many queues have state here.
            UnavailableError: not done.
            OutcomeUnknownError: records may have been leased; they are delivered again when the leases end.
        """
        until_s = asyncio.get_running_loop().time() + request.wait_ms / 1000
        admitted: int | None = None
        while True:
            await self._proposals.wait_ready()
            queue, window = self._open(request)
            now_ms = self._clock.wall_ms()
            if self._has_work(queue, window, request.settings.in_flight_max, now_ms):
                if admitted is None:
                    admitted = await request.admit(request.bytes_max)
                    continue
                plan = self._plan(request, HeldBatches(), admitted)
                has_read = plan.missing is not None and not plan.operations
                if has_read:
                    plan = await self._read_and_plan(request, plan, admitted)
                if plan.operations:
                    received = await self._commit(request, plan)
                    if received is not None:
                        return received
                    continue
                if plan.large_bytes:
                    admitted = await request.admit(plan.large_bytes)
                    continue
                if has_read:
                    continue  # records may have come meanwhile
            remaining_s = until_s - asyncio.get_running_loop().time()
            if remaining_s < WAIT_S_MIN:
                stall = find_stall(window, self._state.end_offset, now_ms)
                await self._wait_settled()
                return ReceiveResult(stall=stall)
            if request.group_id not in self._state.queues:
                # If its opening is refused, so is the receive: planning it again at once would keep the loop busy for
                # as long as entries are refused, such as while the disk is full.
                await self._wait_settled()
                continue
            await self._wait(queue, remaining_s)

    def _open(self, request: ReceiveRequest) -> tuple[_Queue, QueueWindow]:
        """Return a queue and its planned window, which begins at the group's cursor."""
        window = self._proposals.window(request.group_id)
        if window is None:
            self._state.check_view(request.checked_index)
            if len(self._state.queues) >= QUEUES_MAX:
                raise OverloadedError(
                    f"not done: {QUEUES_MAX} work queues, the maximum, have state in this partition; delete groups "
                    "that are not used"
                )
            start = self._state.cursor(request.group_id)
            if start is None:
                earliest = request.default_start == "earliest"
                start = self._state.first_offset if earliest else self._state.end_offset
            self._proposals.plan([QueueOpen(request.group_id, start)])
            window = self._proposals.window(request.group_id)
            assert window is not None, "it was just planned"
        queue = self._queues.get(request.group_id)
        if queue is None:
            queue = self._queues[request.group_id] = _Queue()
        if queue.schedule is None:
            queue.schedule = LeaseSchedule(window)
        queue.in_flight_max = request.settings.in_flight_max
        return queue, window

    def _has_work(self, queue: _Queue, window: QueueWindow, in_flight_max: int, now_ms: int) -> bool:
        """Return whether there may be something to deliver now."""
        if window.next_offset < self._state.end_offset and window.in_flight < in_flight_max:
            return True
        return queue.schedule is not None and queue.schedule.has_due(window, now_ms)

    async def _read_and_plan(self, request: ReceiveRequest, plan: LeasePlan, admitted: int) -> LeasePlan:
        """Read what a plan misses, and plan again, until there is something to do; keep nothing of what was read."""
        held = HeldBatches()
        with self._batches.reserve():
            while plan.missing is not None and not plan.operations:
                await self._read(plan.missing, request, held)
                await self._proposals.wait_ready()
                plan = self._plan(request, held, admitted)
        return plan

    def _plan(self, request: ReceiveRequest, held: HeldBatches, admitted: int) -> LeasePlan:
        queue, window = self._open(request)
        assert queue.schedule is not None, "an open queue has a schedule"
        planner = LeasePlanner(
            window,
            queue.schedule,
            request.settings,
            now_ms=self._clock.wall_ms(),
            find_batch=lambda offset: self._batches.find(offset, held),
            admitted=admitted,
        )
        return planner.plan(
            request.group_id,
            records_max=request.records_max,
            bytes_max=request.bytes_max,
            lease_ms=request.settings.lease_ms if request.lease_ms is None else request.lease_ms,
            end_offset=self._state.end_offset,
        )

    async def _commit(self, request: ReceiveRequest, plan: LeasePlan) -> ReceiveResult | None:
        """Commit a plan; return its records, None if it only parked or killed some."""
        _, done = self._proposals.plan(plan.operations)
        queue, window = self._open(request)
        assert queue.schedule is not None, "an open queue has a schedule"
        plan.note(queue.schedule, window)
        self._meter.dead += plan.killed
        self._wake(request.group_id)
        await self.wait_leased(done)
        if not plan.leases:
            return None
        self._meter.leased += sum(lease.count for lease in plan.leases)
        self._meter.redelivered += sum(lease.count for lease in plan.leases if lease.attempt > 1)
        lease_ms = request.settings.lease_ms if request.lease_ms is None else request.lease_ms
        return ReceiveResult(tuple(plan.leases), plan.rows, plan.grant, plan.deadline_ms, lease_ms)

    async def wait_leased(self, done: asyncio.Future[None]) -> None:
        """Wait until leases are committed: records that are returned earlier could be given to another worker."""
        await asyncio.shield(done)

    async def _read(self, offset: Offset, request: ReceiveRequest, held: HeldBatches) -> None:
        """Read what a plan misses: the batch of an offset and those after it."""
        held.begin_read()
        bytes_max = min(request.bytes_max, READ_BYTES_MAX)
        try:
            found = await self._batches.read(offset, self._state.end_offset, bytes_max)
        except TrimmedError:
            if self._state.first_offset <= offset:
                raise
            return  # trimmed meanwhile, and settled with it
        for batch in found:
            if held.is_full:
                return
            held.add(batch.undecoded())

    async def _wait_settled(self) -> None:
        """Wait until everything planned so far is committed; a deposed leader must not report that there is nothing."""
        settled = self._proposals.settled()
        await (self._gate.wait_confirmed() if settled is None else asyncio.shield(settled))

    # -- waiting -----------------------------------------------------------------------------------

    async def _wait(self, queue: _Queue, remaining_s: float) -> None:
        """Wait until there may be something to deliver, or the time is over."""
        if self._waiting >= WAITERS_MAX:
            raise OverloadedError(f"not done: {WAITERS_MAX} receives already wait for this partition; retry later")
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.waiters.append(woken)
        self._arm(queue)
        self._waiting += 1
        try:
            async with timeout(remaining_s):
                await woken
        except TimeoutError:
            pass
        except BaseException:
            if woken.done() and not woken.cancelled() and woken.exception() is None:
                self._wake_first(queue)  # it takes nothing: the next one may
            raise
        finally:
            self._waiting -= 1
            if not woken.done():
                woken.cancel()
            self._drop_ended(queue)

    def _arm(self, queue: _Queue) -> None:
        """Look at the queue again when its next lease or delay ends."""
        due_ms = queue.schedule.next_ms() if queue.schedule is not None else None
        if due_ms is None:
            return
        loop = asyncio.get_running_loop()
        delay_s = min(max(0.001, (due_ms - self._clock.wall_ms()) / 1000), TIMER_S_MAX)
        if queue.timer is None or loop.time() + delay_s < queue.timer_s:
            if queue.timer is not None:
                queue.timer.cancel()
            queue.timer_s = loop.time() + delay_s
            queue.timer = loop.call_later(delay_s, self._gate.contained(self._handle_timer), queue)

    def _handle_timer(self, queue: _Queue) -> None:
        queue.timer = None
        if queue.waiters:
            self._wake_first(queue)
            self._arm(queue)

    def _wake(self, group_id: ConsumerId) -> None:
        """Wake a waiting receive if there may be something for it."""
        queue = self._queues.get(group_id)
        if queue is None or not queue.waiters:
            return
        window = self._proposals.window(group_id)
        if (
            window is None
            or queue.schedule is None
            or self._has_work(queue, window, queue.in_flight_max, self._clock.wall_ms())
        ):
            self._wake_first(queue)
        else:
            self._arm(queue)

    def _wake_first(self, queue: _Queue) -> None:
        while queue.waiters:
            woken = queue.waiters.popleft()
            if not woken.done():
                woken.set_result(None)
                return

    def _drop_ended(self, queue: _Queue) -> None:
        """Drop receives that gave up; they would fill memory while nothing arrives."""
        while queue.waiters and queue.waiters[0].done():
            queue.waiters.popleft()
        if len(queue.waiters) > 64 and len(queue.waiters) > 2 * self._waiting:
            queue.waiters = deque(one for one in queue.waiters if not one.done())

    def handle_applied(self) -> None:
        """Wake receives that wait for records which are there now."""
        if not self._waiting:
            return
        end_offset = self._state.end_offset
        for group_id, queue in self._queues.items():
            window = self._proposals.window(group_id) if queue.waiters else None
            if window is not None and window.next_offset < end_offset and window.in_flight < queue.in_flight_max:
                self._wake_first(queue)

    def fail(self, error: QuiverError) -> None:
        """Fail every waiting receive: this replica does not lead any more, or closes."""
        for queue in self._queues.values():
            waiters, queue.waiters = queue.waiters, deque()
            for woken in waiters:
                if not woken.done():
                    woken.set_exception(error)
            if queue.timer is not None:
                queue.timer.cancel()
                queue.timer = None

    def _handle_reset(self) -> None:
        """Build the schedules again when they are needed: everything planned is void."""
        for group_id, queue in list(self._queues.items()):
            queue.schedule = None
            waiters, queue.waiters = queue.waiters, deque()
            for woken in waiters:
                if not woken.done():
                    woken.set_result(None)
            if group_id not in self._state.queues and not waiters:
                del self._queues[group_id]

    # -- settling ----------------------------------------------------------------------------------

    async def settle(self, request: QueueSettle, settings: QueueSettings) -> SettleResult:
        """Settle records by their receipts, and answer when that is committed.

        Raises:
            RequestError: not done; ranges overlap.
            NotLeaderError: not done; another replica leads.
            UnavailableError: not done.
            OutcomeUnknownError: it may have been done; repeat it.
        """
        await self._proposals.wait_ready()
        window = self._proposals.window(request.group_id)
        now_ms = self._clock.wall_ms()
        plan = plan_settlement(request, window, settings, now_ms=now_ms)
        if window is None or not plan.operations:
            await self._wait_settled()
            return SettleResult(_spans(plan.stale))
        queue = self._queues.get(request.group_id)
        keys = plan.keys(window) if queue and queue.schedule and queue.schedule.has_keys else ()
        before = (window.outstanding, window.dead_next)
        settled: list[tuple[int, int]] = []
        stale, done = self._proposals.plan(plan.operations, settled)
        self._count_settled(before, window, stale)
        self._note_settled(request.group_id, window, plan, keys)
        await asyncio.shield(done)
        return SettleResult(_spans([*plan.stale, *stale]), _spans(settled), plan.deadline_ms)

    def _note_settled(self, group_id: ConsumerId, window: QueueWindow, plan: SettlePlan, keys: Sequence[int]) -> None:
        """Schedule what was returned or extended, and wake a receive for it."""
        queue = self._queues.get(group_id)
        if queue is None or queue.schedule is None:
            return
        for first, count, time_ms in plan.hints:
            queue.schedule.add(first, count, time_ms)
        queue.schedule.release_keys(window, keys)
        self._wake(group_id)

    def _count_settled(self, before: tuple[int, int], window: QueueWindow, stale: Sequence[tuple[int, int]]) -> None:
        dead = window.dead_next - before[1]
        self._meter.dead += dead
        self._meter.acknowledged += before[0] - window.outstanding - dead
        self._meter.stale += sum(end - first for first, end in stale)

    # -- dead letters --------------------------------------------------------------------------------

    async def expire(self, group_id: ConsumerId, settings: QueueSettings) -> None:
        """Turn records whose last attempt has failed into dead letters, whether or not anybody receives."""
        if not settings.max_attempts:
            return
        now_ms = self._clock.wall_ms()
        if not any(is_exhausted(run.attempt, settings) for run in self._known_runs(group_id)):
            return
        await self._proposals.wait_ready()
        window = self._proposals.window(group_id)
        if window is None:
            return
        found = [run for run in window.runs if is_due(run, now_ms) and is_exhausted(run.attempt, settings)]
        if found:
            spans = tuple((run.first, run.count, run.grant) for run in found[:KILLS_PER_ENTRY])
            operation = QueueKills(group_id, spans, now_ms, MAX_ATTEMPTS_REASON, is_final=True)
            before = (window.outstanding, window.dead_next)
            _, done = self._proposals.plan([operation])
            self._count_settled(before, window, ())
            queue = self._queues.get(group_id)
            if queue is not None and queue.schedule is not None:
                queue.schedule.release_keys(window, [run.key for run in found[:KILLS_PER_ENTRY] if run.key])
            self._wake(group_id)
            await asyncio.shield(done)

    def _known_runs(self, group_id: ConsumerId) -> Sequence[Run]:
        window = self._state.queues.get(group_id)
        return () if window is None else window.runs

    async def bury(self, group_id: ConsumerId, end_sequence: int) -> None:
        """Forget dead letters below a sequence: they are in the dead-letter topic."""
        await self._plan_alone(QueueBurial(group_id, end_sequence))

    async def set_target(self, group_id: ConsumerId, target: DeadTarget) -> None:
        """Record where dead letters go from now on, before the first one is sent there."""
        await self._plan_alone(QueueTarget(group_id, target))

    async def _plan_alone(self, operation: QueueOperation) -> None:
        await self._proposals.wait_ready()
        _, done = self._proposals.plan([operation])
        await asyncio.shield(done)
        self._wake(operation.group_id)  # there may be room below the limit now

    def dead_letters(self, group_id: ConsumerId) -> Sequence[DeadRun]:
        """Return the committed dead letters that are not moved yet, in the order of their sequences."""
        window = self._state.queues.get(group_id)
        return () if window is None else tuple(window.dead)

    # -- status ------------------------------------------------------------------------------------

    async def describe(self, group_id: ConsumerId, settings: QueueSettings, *, start: DefaultStart) -> QueueStatus:
        """Return the state of a queue. Linearizable.

        Raises:
            NotLeaderError: another replica leads.
        """
        await self._gate.wait_confirmed()
        state, now_ms = self._state, self._clock.wall_ms()
        window = state.queues.get(group_id)
        if window is None:
            cursor = state.cursor(group_id)
            if cursor is None:
                cursor = state.first_offset if start == "earliest" else state.end_offset
            window = QueueWindow(cursor)
        counts = count_outstanding(window, now_ms)
        is_full = window.in_flight >= settings.in_flight_max
        is_stalled = not counts.ready and (is_full or window.next_offset == state.end_offset)
        return QueueStatus(
            ready=counts.ready + state.end_offset - window.next_offset,
            leased=counts.leased,
            waiting=counts.waiting,
            dying=window.in_flight - window.outstanding,
            next_offset=window.next_offset,
            first_unsettled=window.first_unsettled,
            first_offset=state.first_offset,
            end_offset=state.end_offset,
            stall=find_stall(window, state.end_offset, now_ms) if is_stalled else "",
        )


def _spans(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[Offset, int], ...]:
    """Return [first, end) ranges sorted and joined, as (first, count)."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return tuple((Offset(first), end - first) for first, end in found)
