"""Cursor moves in flight: moves requested while an entry is in flight are batched into the next entry.

The leader tracks the *planned* position of each cursor, after every move in flight, and plans the next read from there,
so that two reads of one consumer never get the same record. A plan depends on the plans before it: when an entry fails,
all later moves are refused as well, and planning restarts from the committed cursors.

A *session* numbers the users of a consumer. It begins with an entry of the partition, and from then on moves of earlier
sessions are refused: a consumer that was opened again elsewhere cannot move the cursor of its successor.

A move without a session is one of an operator, of an HTTP client, or of a program that stores its own offsets. It does
not end the session, and it is refused while a member of a group has the partition (`check_plain`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from quiver.errors import FencedError, OutcomeUnknownError, OverloadedError, QuiverError, UnavailableError
from quiver.model import SESSION_BITS, ConsumerId, Index, Offset
from quiver.partition.entries import CursorsEntry
from quiver.partition.proposal_gate import ProposalGate, ProposalOutcome
from quiver.partition.state import PartitionState

CURSORS_MAX = 100_000
"""Consumers that may have a cursor in one partition: an entry with all of them is about 2 MB."""


class KnownGroups(msgspec.Struct, frozen=True):
    """What the metadata that this node has applied says of the groups among the consumers of a request."""

    epoch_max: int = 0
    """No epoch that it knows is higher: it does not know whether a group has members who began a later one."""
    active: frozenset[ConsumerId] = frozenset()
    """Those that have members."""
    queues: frozenset[ConsumerId] = frozenset()
    """Those that are work queues."""


NO_GROUPS = KnownGroups()


class CursorMoves:
    """The uncommitted cursor moves of one partition, on its leader."""

    def __init__(self, gate: ProposalGate, state: PartitionState, *, cursors_max: int = CURSORS_MAX) -> None:
        self._gate = gate
        self._state = state
        self._cursors_max = cursors_max
        self._planned: dict[ConsumerId, Offset] = {}
        """Positions of the cursors whose moves are in flight or queued."""
        self._queued: dict[ConsumerId, Offset] = {}
        self._planned_sessions: dict[ConsumerId, int] = {}
        self._queued_sessions: dict[ConsumerId, int] = {}
        self._queued_done: asyncio.Future[None] | None = None
        self._in_flight_done: asyncio.Future[None] | None = None
        gate.on_new_term.append(self._reset)

    def planned(self, consumer_id: ConsumerId) -> Offset | None:
        """Return a consumer's planned cursor, at least the first offset; None if it has no cursor."""
        planned = self._planned.get(consumer_id)
        if planned is None:
            return self._state.cursor(consumer_id)
        return max(planned, self._state.first_offset)

    def check_session(self, consumer_id: ConsumerId, session: int) -> bool:
        """Return whether a session is new to the partition.

        Raises:
            FencedError: not done; a later session of the consumer exists.
        """
        current = self._session(consumer_id)
        if session < current:
            raise FencedError(
                f"not done: consumer {consumer_id} was opened again since, and the newer one reads this partition now; "
                "use another name to read beside it"
            )
        return session > current

    def check_plain(self, consumer_id: ConsumerId, groups: KnownGroups) -> None:
        """Refuse to use a consumer without a session while a member of a group may have the partition.

        Call it in the turn of the event loop that plans the move. It needs no coordinator: a member begins its epoch
        here before it reads, and metadata that is at least as new as that epoch knows whether the group has members.

        Raises:
            FencedError: not done; the consumer is a group with members (`group_active`).
            UnavailableError: not done; a member began an epoch that is newer than this node's metadata.
        """
        if consumer_id in groups.active:
            raise FencedError(
                f"not done: consumer {consumer_id} is a group with members, and only they move its cursors; stop them, "
                "or use another name to read beside them",
                code="group_active",
            )
        current = self._session(consumer_id)
        if current > groups.epoch_max and _is_epoch(current):
            message = f"not done: a member of group {consumer_id} has begun to read this partition"
            raise UnavailableError(f"{message}, and this node's metadata is older than that; retry", code="behind")

    def _session(self, consumer_id: ConsumerId) -> int:
        return self._planned_sessions.get(consumer_id, self._state.sessions.get(consumer_id, 0))

    def move(
        self,
        moves: Mapping[ConsumerId, Offset],
        *,
        sessions: Mapping[ConsumerId, int] | None = None,
        checked_index: Index | None = None,
    ) -> asyncio.Future[None]:
        """Start to move cursors and to begin `sessions`, which are new to the partition.

        Call it in the turn of the event loop in which `ProposalGate.wait_ready` returned.

        `checked_index` is the metadata index at which the consumers were found to be registered.

        The future is done when the moves are committed and applied. It fails with `UnavailableError` if they were
        not done, and with `OutcomeUnknownError` if a new leader decides their outcome.

        Raises:
            OverloadedError: not done; too many consumers have cursors in this partition.
            UnavailableError: not done; a new consumer was checked against metadata that is too old.
        """
        if [one for one in moves if one not in self._planned and self._state.cursor(one) is None]:
            self._state.check_view(checked_index)
            known = len(self._state.cursors) + len(self._planned)  # an upper bound: a consumer may be counted twice
            if known + len(moves) > self._cursors_max:
                raise OverloadedError(
                    f"not done: {self._cursors_max} consumers, the maximum, have cursors in this partition; forget "
                    "some with `quiver consumer forget`, or wait until unused ones expire"
                )
        if self._queued_done is None:
            self._queued_done = asyncio.get_running_loop().create_future()
        done = self._queued_done
        self._planned.update(moves)
        self._queued.update(moves)
        self._planned_sessions.update(sessions or {})
        self._queued_sessions.update(sessions or {})
        if self._in_flight_done is None:
            self._send()
        return done

    def settled(self) -> asyncio.Future[None] | None:
        """Return a future for the commit of every move planned so far; None if no move is in flight."""
        return self._queued_done or self._in_flight_done

    def _send(self) -> None:
        """Propose the queued moves as one entry."""
        if self._gate.is_paused:
            self._gate.call_when_resumed(self._send_queued)
            return
        done, self._queued_done = self._queued_done, None
        moves, self._queued = self._queued, {}
        sessions, self._queued_sessions = self._queued_sessions, {}
        assert done is not None, "moves are queued"
        self._in_flight_done = done
        if not self._gate.is_ready:
            self._fail(UnavailableError("not done: this node lost leadership of the partition; retry"))
            return
        try:
            entry = CursorsEntry(tuple(sorted(moves.items())), tuple(sorted(sessions.items())))
            proposed = self._gate.propose_entry(entry)
        except QuiverError as error:
            self._fail(error)
            return
        proposed.add_done_callback(self._gate.contained(lambda outcome: self._settle(done, moves, outcome)))

    def _settle(self, done: asyncio.Future[None], moves: Mapping[ConsumerId, Offset], outcome: ProposalOutcome) -> None:
        if self._in_flight_done is not done:
            return  # a proposal of an earlier term
        error = outcome.error
        if error is not None:
            self._fail(error)
            return
        self._in_flight_done = None
        for consumer_id, offset in moves.items():
            if self._planned.get(consumer_id) == offset and consumer_id not in self._queued:
                del self._planned[consumer_id]
        if self._planned_sessions:
            begun = self._state.sessions
            planned = self._planned_sessions.items()
            self._planned_sessions = {id_: one for id_, one in planned if one > begun.get(id_, 0)}
        if not done.done():
            done.set_result(None)
        self._send_queued()

    def _send_queued(self) -> None:
        if self._in_flight_done is None and self._queued_done is not None:
            self._send()

    def _fail(self, error: BaseException) -> None:
        """Refuse the moves in flight and every move planned after them."""
        in_flight, self._in_flight_done = self._in_flight_done, None
        _reject(in_flight, error)
        self._reset()

    def _reset(self) -> None:
        """Drop all plans: the outcome of moves in flight is unknown, queued moves were not done."""
        in_flight, self._in_flight_done = self._in_flight_done, None
        queued, self._queued_done = self._queued_done, None
        for plans in (self._planned, self._queued, self._planned_sessions, self._queued_sessions):
            plans.clear()
        _reject(
            in_flight,
            OutcomeUnknownError("may have been done: this node lost leadership before the cursor's move was committed"),
        )
        _reject(queued, UnavailableError("not done: an earlier cursor move of this partition failed; retry"))


def _is_epoch(session: int) -> bool:
    """Return whether a session is the epoch of an assignment: those of plain consumers have random low bits."""
    return session & ((1 << SESSION_BITS) - 1) == 0


def _reject(done: asyncio.Future[None] | None, error: BaseException) -> None:
    if done is not None and not done.done():
        done.set_exception(error)
        done.exception()  # marks it as retrieved: every caller may have been cancelled
