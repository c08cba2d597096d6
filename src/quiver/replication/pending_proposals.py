"""Those who wait for a group: proposers for their entries to be applied, readers for their barrier.

Pure bookkeeping over futures. A proposer hears exactly one of: applied; not done; unknown. What was
committed before leadership was lost is still answered with success, however late it is applied.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from typing import TypeVar

from quiver.errors import NotLeaderError, OutcomeUnknownError, QuiverError, UnavailableError
from quiver.model import Buffer, Index, NodeId, Term
from quiver.record import BatchHeader

T = TypeVar("T")


class Proposal:
    """Batches that one caller wants appended together."""

    __slots__ = ("batches", "done", "end_index", "headers", "size_bytes", "term")

    def __init__(
        self, batches: list[Buffer], done: asyncio.Future[list[BatchHeader]], term: Term | None = None
    ) -> None:
        self.batches = batches
        self.term = term
        self.size_bytes = sum(map(len, batches))
        self.done = done
        self.headers: list[BatchHeader] = []
        self.end_index = Index(0)

    def refuse(self, error: QuiverError) -> None:
        """Tell the caller that nothing was done."""
        _reject(self.done, error)


class PendingProposals:
    """The proposals and reads of one member that have no answer yet."""

    def __init__(self) -> None:
        self._proposals: deque[Proposal] = deque()
        self._asking: dict[int, asyncio.Future[Index]] = {}
        self._applying: list[tuple[Index, int, asyncio.Future[Index]]] = []

    def __len__(self) -> int:
        return len(self._proposals) + len(self._asking) + len(self._applying)

    def add_proposal(self, proposal: Proposal) -> None:
        """Let a proposal, in the log by now, wait until it is applied."""
        self._proposals.append(proposal)

    def add_read(self, context: int, done: asyncio.Future[Index]) -> None:
        """Let a read wait for its leader's proof of leadership."""
        self._asking[context] = done

    def confirm_read(self, context: int, index: Index) -> None:
        """Let a read wait until everything up to `index` is applied: leadership is proved."""
        done = self._asking.pop(context, None)
        if done is not None:
            heapq.heappush(self._applying, (index, context, done))

    def forget_read(self, context: int) -> None:
        """Drop a read that was refused at once."""
        self._asking.pop(context, None)

    def fail_read(self, context: int, *, leader: NodeId | None) -> None:
        """Tell a reader to ask elsewhere."""
        done = self._asking.pop(context, None)
        if done is not None:
            message = "leadership was lost before the read was confirmed; ask the new leader"
            _reject(done, NotLeaderError(message, leader=leader))

    def applied(self, index: Index) -> None:
        """Answer those who waited for entries up to and including `index`."""
        proposals = self._proposals
        while proposals and proposals[0].end_index <= index + 1:
            proposal = proposals.popleft()
            _resolve(proposal.done, proposal.headers)
        while self._applying and self._applying[0][0] <= index:
            _resolve(heapq.heappop(self._applying)[2], index)

    def lose(self, first_index: Index) -> None:
        """Tell proposers of entries at or behind `first_index` that another leader decides about them."""
        while self._proposals and self._proposals[-1].end_index > first_index:
            error = OutcomeUnknownError("leadership was lost before the entries were known to be committed")
            _reject(self._proposals.pop().done, error)

    def abandon(self) -> None:
        """Answer everybody who still waits: this member is closing."""
        self.lose(Index(0))
        for context in list(self._asking):
            self.fail_read(context, leader=None)
        for _, _, done in self._applying:
            _reject(done, UnavailableError("this member is closing; ask another"))
        self._applying.clear()


def _resolve(done: asyncio.Future[T], result: T) -> None:
    if not done.done():
        done.set_result(result)


def _reject(done: asyncio.Future[T], error: QuiverError) -> None:
    if not done.done():
        done.set_exception(error)
        done.exception()  # nobody may be waiting any more, and then it is nobody's mistake
