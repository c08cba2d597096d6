"""Operations of work queues in flight, on the leader: planned at once, proposed together, answered when committed.

The leader keeps a *planned* copy of each window, to which an operation is applied as soon as it is planned; the next
plan starts from there, so that no record is leased twice. Operations that are planned while entries are in flight are
proposed together in the next entry. A few entries may be in flight: a worker waits for one commit, not for two.

A plan depends on the plans before it. When an entry fails, the outcome of those that were proposed after it counts as
unknown, what is queued is refused, and planning starts again from the committed windows as soon as nothing is in
flight. The same happens when windows change other than by these operations (`PartitionState.queue_resets`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from quiver.errors import OutcomeUnknownError, QuiverError, UnavailableError
from quiver.model import ConsumerId
from quiver.partition.entries import QueueEntry
from quiver.partition.proposal_gate import ProposalGate, ProposalOutcome
from quiver.partition.queue_operations import QueueLeases, QueueOpen, QueueOperation, QueueTarget
from quiver.partition.queue_window import QueueWindow, apply_operation
from quiver.partition.state import PartitionState

ENTRIES_MAX = 4
"""Entries in flight; what is planned meanwhile is coalesced."""
SPANS_PER_ENTRY = 2_000
"""Spans in one entry: applying it must not hold the event loop."""


class _Pending:
    """Operations of one entry, queued or in flight."""

    __slots__ = ("done", "operations", "spans")

    def __init__(self) -> None:
        self.operations: list[QueueOperation] = []
        self.spans = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class QueueProposals:
    """The uncommitted operations of all queues of one partition, on its leader."""

    def __init__(self, gate: ProposalGate, state: PartitionState) -> None:
        self._gate = gate
        self._state = state
        self._planned: dict[ConsumerId, QueueWindow] = {}
        self._queued: deque[_Pending] = deque()
        self._in_flight: list[_Pending] = []
        self._seen_resets = state.queue_resets
        self._is_broken = False
        """Whether an entry failed, and others are in flight that were planned after it."""
        self._will_send = False
        self.on_reset: Callable[[], None] = lambda: None
        """Called when everything planned is void."""
        gate.on_new_term.append(self._reset)

    async def wait_ready(self) -> None:
        """Wait until operations can be planned; holds until the caller suspends again.

        Raises:
            NotLeaderError: this replica does not lead.
            UnavailableError: this replica is closing.
        """
        while True:
            await self._gate.wait_ready()
            if not self._is_broken and self._seen_resets == self._state.queue_resets:
                return
            last = self.settled()
            if last is None:
                self._start_again()
                return
            await asyncio.wait((last,))

    def window(self, group_id: ConsumerId) -> QueueWindow | None:
        """Return the window of a queue after everything planned; None if it has none. For reading only."""
        planned = self._planned.get(group_id)
        if planned is None:
            known = self._state.queues.get(group_id)
            if known is None:
                return None
            planned = self._planned[group_id] = known.copy()
        return planned

    def plan(
        self, operations: Sequence[QueueOperation], settled: list[tuple[int, int]] | None = None
    ) -> tuple[list[tuple[int, int]], asyncio.Future[None]]:
        """Plan operations, all in one entry; return the records with stale receipts, and the future of the commit.

        Records that were settled before are added to `settled`.

        Call it in the turn of the event loop in which `wait_ready` returned. The future fails with `UnavailableError`
        if the operations were not done, and with `OutcomeUnknownError` if that is not known.
        """
        pending = self._queued[-1] if self._queued else None
        if pending is None or pending.spans >= SPANS_PER_ENTRY:
            pending = _Pending()
            self._queued.append(pending)
        stale: list[tuple[int, int]] = []
        for operation in operations:
            self.window(operation.group_id)
            stale += apply_operation(self._planned, operation, settled)
            pending.operations.append(operation)
            pending.spans += _count_spans(operation)
        self._send_soon()
        return stale, pending.done

    def settled(self) -> asyncio.Future[None] | None:
        """Return a future for the commit of every operation planned so far; None if none is in flight."""
        if self._queued:
            return self._queued[-1].done
        return self._in_flight[-1].done if self._in_flight else None

    def _send_soon(self) -> None:
        """Propose at the end of this turn of the event loop, so that requests that came together share an entry."""
        if not self._will_send and len(self._in_flight) < ENTRIES_MAX:
            self._will_send = True
            asyncio.get_running_loop().call_soon(self._gate.contained(self._send))

    def _send(self) -> None:
        self._will_send = False
        if not self._queued or len(self._in_flight) >= ENTRIES_MAX or self._is_broken:
            return
        if self._gate.is_paused:
            self._will_send = True
            self._gate.call_when_resumed(self._send)
            return
        if not self._gate.is_ready:
            self._refuse_queued(UnavailableError("not done: this node lost leadership of the partition; retry"))
            return
        pending = self._queued.popleft()
        self._in_flight.append(pending)
        try:
            proposed = self._gate.propose_entry(QueueEntry(tuple(pending.operations)))
        except QuiverError as error:
            self._end(pending, error)
            return
        proposed.add_done_callback(self._gate.contained(lambda outcome: self._settle(pending, outcome)))
        if self._queued:
            self._send_soon()

    def _settle(self, pending: _Pending, outcome: ProposalOutcome) -> None:
        if pending in self._in_flight:  # else a proposal of an earlier term
            self._end(pending, outcome.error)

    def _end(self, pending: _Pending, error: BaseException | None) -> None:
        """Tell whoever waits for an entry its outcome."""
        self._in_flight.remove(pending)
        if error is None and self._is_broken:
            error = OutcomeUnknownError("may have been done: an earlier operation of this partition's queues failed")
        if error is not None:
            self._is_broken = True
            _reject(pending, error)
            self._refuse_queued(UnavailableError("not done: an earlier operation of this partition's queues failed"))
        elif not pending.done.done():
            pending.done.set_result(None)
        if self._is_broken and not self._in_flight:
            self._start_again()
        if self._queued:
            self._send_soon()

    def _refuse_queued(self, error: QuiverError) -> None:
        """Refuse what was not proposed; the planned windows are void with it."""
        self._is_broken = True
        queued, self._queued = self._queued, deque()
        for pending in queued:
            _reject(pending, error)
        if not self._in_flight:
            self._start_again()

    def _reset(self) -> None:
        """Begin a term: the outcome of entries in flight is unknown, queued operations were not done."""
        in_flight, self._in_flight = self._in_flight, []
        for pending in in_flight:
            _reject(pending, OutcomeUnknownError("may have been done: this node lost leadership before the commit"))
        self._refuse_queued(UnavailableError("not done: this node lost leadership of the partition; retry"))

    def _start_again(self) -> None:
        """Plan from the committed windows from now on."""
        self._is_broken = False
        self._seen_resets = self._state.queue_resets
        self._planned.clear()
        self.on_reset()


def _count_spans(operation: QueueOperation) -> int:
    if isinstance(operation, QueueLeases):
        return 1 + len(operation.again) + len(operation.fresh)
    return 1 if isinstance(operation, QueueOpen | QueueTarget) else 1 + len(getattr(operation, "spans", ()))


def _reject(pending: _Pending, error: BaseException) -> None:
    if not pending.done.done():
        pending.done.set_exception(error)
        pending.done.exception()  # marks it as retrieved: every caller may have been cancelled
