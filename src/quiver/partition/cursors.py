"""Cursors on their way: moves that arrive while an entry is in flight go together into the next one.

The leader knows where a cursor *will* be when all that is on its way has arrived, and plans the next read from there,
so that two reads of one consumer never get the same record. A plan stands on the plans before it: when an entry fails,
everything that was planned behind it is refused, too, and plans start again from what is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from quiver.errors import OutcomeUnknownError, OverloadedError, QuiverError, UnavailableError
from quiver.model import ConsumerId, Offset
from quiver.partition.entries import Cursors, build_entry
from quiver.partition.proposal_gate import ProposalGate, Proposed
from quiver.partition.state import PartitionState

CURSORS_MAX = 100_000
"""How many consumers may have a cursor in one partition: an entry of all of them has some 2 MB."""


class CursorMoves:
    """The moves of one partition's cursors that are not committed yet, on its leader."""

    def __init__(self, leading: ProposalGate, state: PartitionState, *, cursors_max: int = CURSORS_MAX) -> None:
        self._leading = leading
        self._state = state
        self._cursors_max = cursors_max
        self._planned: dict[ConsumerId, Offset] = {}
        """Where cursors will be that are in flight or queued."""
        self._queued: dict[ConsumerId, Offset] = {}
        self._queued_done: asyncio.Future[None] | None = None
        self._flying_done: asyncio.Future[None] | None = None
        leading.on_new_term.append(self._begin_term)

    def planned(self, consumer_id: ConsumerId) -> Offset | None:
        """Return where a consumer will be, never before the first record; None if it has no cursor."""
        planned = self._planned.get(consumer_id)
        if planned is None:
            return self._state.cursor(consumer_id)
        return max(planned, self._state.first_offset)

    def move(self, moves: Mapping[ConsumerId, Offset]) -> asyncio.Future[None]:
        """Begin to move cursors; to be called in the turn of the loop in which `ProposalGate.wait_ready` returned.

        The future is done when the moves are committed and applied. It fails with `UnavailableError` if they were
        not done, and with `OutcomeUnknownError` if another leader decides.

        Raises:
            OverloadedError: not done; too many consumers have cursors here.
        """
        known = len(self._state.cursors) + len(self._planned)  # at most: some may be counted twice
        if known + len(moves) > self._cursors_max and any(self.planned(consumer) is None for consumer in moves):
            raise OverloadedError(f"not done: {self._cursors_max} consumers have cursors in this partition")
        if self._queued_done is None:
            self._queued_done = asyncio.get_running_loop().create_future()
        done = self._queued_done
        self._planned.update(moves)
        self._queued.update(moves)
        if self._flying_done is None:
            self._send()
        return done

    def settled(self) -> asyncio.Future[None] | None:
        """Return what is done when all that is planned now is committed; None if nothing is on its way."""
        return self._queued_done or self._flying_done

    def _send(self) -> None:
        """Propose what is queued, as one entry."""
        if self._leading.is_held:
            self._leading.call_when_resumed(self._go_on)
            return
        done, self._queued_done = self._queued_done, None
        moves, self._queued = self._queued, {}
        assert done is not None, "something is queued"
        self._flying_done = done
        if not self._leading.is_ready:
            self._fail(UnavailableError("not done: leadership was lost"))
            return
        try:
            proposed = self._leading.propose(build_entry(Cursors(tuple(sorted(moves.items())))))
        except QuiverError as error:
            self._fail(error)
            return
        proposed.add_done_callback(lambda outcome: self._settle(done, moves, outcome))

    def _settle(self, done: asyncio.Future[None], moves: Mapping[ConsumerId, Offset], outcome: Proposed) -> None:
        if self._flying_done is not done:
            return  # of an earlier term
        error = outcome.exception()
        if error is not None:
            self._fail(error)
            return
        self._flying_done = None
        for consumer_id, offset in moves.items():
            if self._planned.get(consumer_id) == offset and consumer_id not in self._queued:
                del self._planned[consumer_id]
        if not done.done():
            done.set_result(None)
        self._go_on()

    def _go_on(self) -> None:
        if self._flying_done is None and self._queued_done is not None:
            self._send()

    def _fail(self, error: BaseException) -> None:
        """Refuse what was on its way, and all that was planned behind it."""
        flying, self._flying_done = self._flying_done, None
        _reject(flying, error)
        self._begin_term()

    def _begin_term(self) -> None:
        """Drop all plans: what flew may be done or not, what was queued is not."""
        flying, self._flying_done = self._flying_done, None
        queued, self._queued_done = self._queued_done, None
        self._planned.clear()
        self._queued.clear()
        _reject(flying, OutcomeUnknownError("leadership was lost before a cursor's move was known to be committed"))
        _reject(queued, UnavailableError("not done: a cursor's move before this one failed"))


def _reject(done: asyncio.Future[None] | None, error: BaseException) -> None:
    if done is not None and not done.done():
        done.set_exception(error)
        done.exception()  # nobody may be waiting any more
