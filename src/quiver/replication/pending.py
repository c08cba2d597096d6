"""Work of one member that waits: proposals, reads, and outputs of the core.

- `PendingProposals` tracks the futures of callers. A proposal gets exactly one result: applied; not done; unknown. An
  entry that was committed before leadership was lost still succeeds, however late it is applied.
- `OutputQueue` keeps the core's outputs in order while one of them waits for the disk. The core runs ahead of what has
  been carried out; the queue knows where the log will end once all of it has been.

Bookkeeping only: nothing here writes, sends or reads a clock.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from quiver.errors import NotLeaderError, OutcomeUnknownError, QuiverError, UnavailableError
from quiver.metrics import Histogram, now_s
from quiver.model import Buffer, Index, NodeId, Offset, Term
from quiver.raft import Output
from quiver.record import Batch, BatchHeader
from quiver.storage import StoredSnapshot
from quiver.tasks import SharedOutcome

T = TypeVar("T")


class Proposal:
    """Batches of one caller, to be appended together."""

    __slots__ = ("batches", "begun_s", "done", "end_index", "headers", "size_bytes", "term")

    def __init__(self, batches: list[Buffer], done: SharedOutcome[list[BatchHeader]], term: Term | None = None) -> None:
        self.begun_s = now_s()
        self.batches = batches
        self.term = term
        self.size_bytes = sum(map(len, batches))
        self.done = done
        self.headers: list[BatchHeader] = []
        self.end_index = Index(0)

    def refuse(self, error: QuiverError) -> None:
        """Fail the proposal: nothing was done."""
        self.done.reject(error)


class PendingProposals:
    """The proposals and reads of one member that have no result yet."""

    def __init__(self, latency: Histogram) -> None:
        """`latency` gets the time from a proposal to its application, once for proposals applied together."""
        self._latency = latency
        self._proposals: deque[Proposal] = deque()
        self._unconfirmed: dict[int, asyncio.Future[Index]] = {}
        self._confirmed: list[tuple[Index, int, asyncio.Future[Index]]] = []

    def __len__(self) -> int:
        return len(self._proposals) + len(self._unconfirmed) + len(self._confirmed)

    @property
    def has_confirmed_reads(self) -> bool:
        """Return whether reads wait for entries to be applied."""
        return bool(self._confirmed)

    def add_proposal(self, proposal: Proposal) -> None:
        """Track a proposal that has been appended, until it is applied."""
        self._proposals.append(proposal)

    def add_read(self, context: int, done: asyncio.Future[Index]) -> None:
        """Track a read until its leader has confirmed its leadership."""
        self._unconfirmed[context] = done

    def confirm_read(self, context: int, index: Index) -> None:
        """Track a read whose leadership is confirmed, until everything up to `index` is applied."""
        done = self._unconfirmed.pop(context, None)
        if done is not None:
            heapq.heappush(self._confirmed, (index, context, done))

    def forget_read(self, context: int) -> None:
        """Drop a read that the core refused."""
        self._unconfirmed.pop(context, None)

    def fail_read(self, context: int, *, leader: NodeId | None) -> None:
        """Fail a read: leadership was lost before it was confirmed."""
        done = self._unconfirmed.pop(context, None)
        if done is not None:
            message = "leadership was lost before the read was confirmed; retry at the new leader"
            _reject(done, NotLeaderError(message, leader=leader))

    def applied(self, index: Index) -> None:
        """Complete the proposals and reads that wait for entries up to and including `index`."""
        proposals = self._proposals
        if proposals and proposals[0].end_index <= index + 1:
            self._latency.observe(now_s() - proposals[0].begun_s)
        while proposals and proposals[0].end_index <= index + 1:
            proposal = proposals.popleft()
            proposal.done.resolve(proposal.headers)
        while self._confirmed and self._confirmed[0][0] <= index:
            _resolve(heapq.heappop(self._confirmed)[2], index)

    def lose(self, first_index: Index) -> None:
        """Fail the proposals with entries at or after `first_index`: their outcome is up to another leader."""
        while self._proposals and self._proposals[-1].end_index > first_index:
            error = OutcomeUnknownError("leadership was lost before the entries were known to be committed")
            self._proposals.pop().done.reject(error)

    def fail(self, unknown: OutcomeUnknownError, unavailable: UnavailableError) -> None:
        """Fail everything that still waits: proposals as unknown, reads as not done."""
        while self._proposals:
            self._proposals.pop().done.reject(unknown)
        for done in [*self._unconfirmed.values(), *(item[2] for item in self._confirmed)]:
            _reject(done, unavailable)
        self._unconfirmed.clear()
        self._confirmed.clear()

    def abandon(self) -> None:
        """Fail everything that still waits: this member is closing."""
        self.lose(Index(0))
        for context in list(self._unconfirmed):
            self.fail_read(context, leader=None)
        for _, _, done in self._confirmed:
            _reject(done, UnavailableError("this member is closing; retry at another"))
        self._confirmed.clear()


class PendingOutput(msgspec.Struct):
    """An output of the core, with the batches or the snapshot that it refers to."""

    output: Output
    batches: Sequence[Batch] = ()
    snapshot: StoredSnapshot | None = None


class OutputQueue:
    """The output that is being carried out, and those that wait for it, in order."""

    __slots__ = ("_waiting", "current")

    def __init__(self) -> None:
        self.current = PendingOutput(Output(Term(0), None))
        self._waiting: deque[PendingOutput] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def append(self, step: PendingOutput) -> None:
        """Add an output at the end."""
        self._waiting.append(step)

    def pop(self) -> PendingOutput:
        """Remove and return the first output."""
        return self._waiting.popleft()

    def end_offset(self) -> Offset | None:
        """Return the log's end offset once all of these are carried out; None: the same as now."""
        for step in (*reversed(self._waiting), self.current):
            if step.batches:
                return step.batches[-1].header.end_offset
            if step.snapshot is not None:
                return step.snapshot.end_offset
        return None


def _resolve(done: asyncio.Future[T], result: T) -> None:
    if not done.done():
        done.set_result(result)


def _reject(done: asyncio.Future[T], error: QuiverError) -> None:
    if not done.done():
        done.set_exception(error)
        done.exception()  # mark as retrieved: asyncio would log it if the caller is gone
