"""Collect the proposals of one turn of the event loop, and pass them to the core together.

They share one append, one message per follower and one flush. Each is stamped with term, index and base offset, and
gets exactly one result, also if the code between here and the log fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from quiver.clock import Clock
from quiver.errors import DiskFullError, OutcomeUnknownError, OverloadedError, QuiverError, UnavailableError
from quiver.model import Buffer, Index, Offset, Term
from quiver.raft import Output, Raft
from quiver.record import Batch, BatchHeader
from quiver.replication.entries import decode_entry
from quiver.replication.fault_guard import FaultGuard
from quiver.replication.pending import PendingProposals, Proposal
from quiver.storage import DiskSpace, Log
from quiver.tasks import SharedOutcome


class Proposer:
    """The proposals of one member that are not appended yet."""

    def __init__(
        self,
        *,
        raft: Raft,
        log: Log,
        space: DiskSpace,
        pending: PendingProposals,
        clock: Clock,
        guard: FaultGuard,
        end_offset: Callable[[], Offset],
        carry_out: Callable[[Output, Sequence[Batch]], None],
        not_leader: Callable[[], UnavailableError],
        on_appended: Callable[[Index], None],
    ) -> None:
        self._raft = raft
        self._log = log
        self._space = space
        self._pending = pending
        self._clock = clock
        self._end_offset = end_offset
        self._carry_out = carry_out
        self._not_leader = not_leader
        self._on_appended = on_appended
        self._queued: list[Proposal] = []
        self._propose_soon = guard.callback(self._propose_queued)

    def add(self, batches: Sequence[Buffer], term: Term | None) -> SharedOutcome[list[BatchHeader]]:
        """Propose batches at the end of this turn; with `term`, only in exactly that term."""
        done: SharedOutcome[list[BatchHeader]] = SharedOutcome()
        self._queued.append(Proposal(list(batches), done, term))
        if len(self._queued) == 1:
            asyncio.get_running_loop().call_soon(self._propose_soon)
        return done

    def refuse(self, error: QuiverError) -> None:
        """Refuse every queued proposal: nothing was done."""
        queued, self._queued = self._queued, []
        for proposal in queued:
            proposal.refuse(error)

    def _propose_queued(self) -> None:
        queued, self._queued = self._queued, []
        current, proposals = self._raft.term, list[Proposal]()
        for proposal in queued:
            if proposal.term is None or proposal.term == current:
                proposals.append(proposal)
            else:
                proposal.refuse(self._not_leader())
        if proposals:
            try:
                self._propose(proposals)
            except BaseException:
                unknown = OutcomeUnknownError("may have been done: this member failed while it appended; retry")
                for proposal in proposals:
                    proposal.refuse(unknown)
                raise

    def _propose(self, proposals: Sequence[Proposal]) -> None:
        try:
            size_bytes = sum([proposal.size_bytes for proposal in proposals])
            self._space.check_control(size_bytes)
            self._log.check_room(size_bytes)
            term, index = self._raft.next_slot()
            batches = self._stamp(proposals, term, index)
            output = self._raft.propose([decode_entry(batch) for batch in batches], self._clock.monotonic_ms())
        except (OverloadedError, DiskFullError) as error:
            for proposal in proposals:
                proposal.refuse(error)
        except QuiverError:
            for proposal in proposals:
                proposal.refuse(self._not_leader())
        else:
            for proposal in proposals:
                self._pending.add_proposal(proposal)
            self._on_appended(proposals[-1].end_index)
            self._carry_out(output, batches)

    def _stamp(self, proposals: Sequence[Proposal], term: Term, index: Index) -> list[Batch]:
        now_ms, offset = self._clock.wall_ms(), self._end_offset()
        stamped: list[Batch] = []
        for proposal in proposals:
            for data in proposal.batches:
                batch = Batch.stamped(data, term=term, index=index, base_offset=offset, append_timestamp=now_ms)
                index, offset = Index(index + 1), batch.header.end_offset
                proposal.headers.append(batch.header)
                stamped.append(batch)
            proposal.end_index = index
        return stamped
