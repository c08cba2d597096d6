"""A replica's leadership: whether it may answer, and the one way in which it proposes.

A new leader answers and checks only after everything that earlier leaders committed is applied here (R10): before
that, a retry of a batch that its predecessor took would look new, and a cursor would be an old one. It proposes only
in the very term that it has caught up in.

Proposals can be held for a moment (`settle`), so that somebody may write down a state that everything proposed
before has led to. Whoever wants to propose waits for `wait_ready` and proposes in the same turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quiver.model import Buffer, Term
from quiver.record import BatchHeader
from quiver.replication import Member

Proposed = asyncio.Future[list[BatchHeader]]


class ProposalGate:
    """The right of one replica to answer and to propose."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._pending: set[Proposed] = set()
        self._resumed: asyncio.Future[None] | None = None
        self.term: Term | None = None
        """The term that this replica has caught up in, as a leader."""
        self.on_new_term: list[Callable[[], None]] = []
        """Called when it has caught up in another term: what was planned in the last one is void."""

    @property
    def is_held(self) -> bool:
        """Tell whether proposals are held back for a moment."""
        return self._resumed is not None

    @property
    def is_current(self) -> bool:
        """Tell whether this replica leads in the term that it has caught up in."""
        raft = self._member.raft
        return self.term == raft.term and raft.is_leader

    @property
    def is_ready(self) -> bool:
        """Tell whether this replica leads, has caught up, and may propose at once."""
        return self._resumed is None and self.is_current

    async def wait_ready(self) -> None:
        """Wait until this replica may check and propose; true until the caller suspends again.

        Raises:
            NotLeaderError: it does not lead; see its `leader`.
            UnavailableError: it is closing.
        """
        while not self.is_ready:
            if self._resumed is not None:
                await asyncio.shield(self._resumed)
            else:
                await self._catch_up()

    async def wait_confirmed(self) -> None:
        """Wait until this replica has proved that it leads and has applied all that was committed before this call."""
        await self._member.read_barrier()
        await self.wait_ready()

    def propose(self, data: Buffer) -> Proposed:
        """Propose a batch; to be called in the turn of the loop in which `wait_ready` returned.

        Raises:
            UnavailableError: not done; this member is closing.
        """
        assert self.is_ready, "a replica proposes when it is ready to"
        return self._propose(data)

    @asynccontextmanager
    async def settle(self) -> AsyncIterator[None]:
        """Hold back proposals and wait until those before have an outcome; inside, the state is that of them all.

        Let nothing but one proposal, by `propose_settled`, happen inside, without suspending.
        """
        await self.wait_ready()
        self._resumed = asyncio.get_running_loop().create_future()
        try:
            while self._pending:
                await asyncio.wait(list(self._pending))
            yield
        finally:
            resumed, self._resumed = self._resumed, None
            resumed.set_result(None)

    def propose_settled(self, data: Buffer) -> Proposed:
        """Propose the one batch that `settle` is for.

        Raises:
            NotLeaderError: not done; this replica leads no more.
        """
        return self._propose(data)

    def call_when_resumed(self, callback: Callable[[], None]) -> None:
        """Call back when proposals are no longer held back."""
        assert self._resumed is not None, "proposals are held back"
        self._resumed.add_done_callback(lambda _: callback())

    def _propose(self, data: Buffer) -> Proposed:
        done = self._member.propose_nowait([data], term=self.term)
        self._pending.add(done)
        done.add_done_callback(self._pending.discard)
        return done

    async def _catch_up(self) -> None:
        """Wait, once in each term, until all that earlier leaders committed is applied here."""
        raft = self._member.raft
        term = raft.term
        await self._member.read_barrier()
        if raft.term == term != self.term:
            self.term = term
            for forget in self.on_new_term:
                forget()
