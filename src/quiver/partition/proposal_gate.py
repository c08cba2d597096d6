"""Decides when a replica may answer, and makes all of its proposals.

A new leader answers and checks requests only after it has applied everything that earlier leaders committed (R10).
Before that, a retry of a batch that its predecessor accepted would look new, and a cursor would be stale. It proposes
only in the term in which it has caught up.

`quiesce` pauses proposals for a moment, so that a state snapshot covers every proposal made before it. A caller that
proposes awaits `wait_ready` and then proposes without suspending in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

from quiver.errors import QuiverError
from quiver.features import LEVEL_MAX
from quiver.model import Buffer, Term
from quiver.partition.entries import PartitionEntry, build_entry, join_snapshot_entry
from quiver.record import BatchHeader, seal_control_batch
from quiver.replication import Member
from quiver.tasks import SharedOutcome, gather_in_steps

ProposalOutcome = SharedOutcome[list[BatchHeader]]


class ProposalGate:
    """The permission of one replica to answer and to propose."""

    def __init__(self, member: Member, feature_level: Callable[[], int] = lambda: LEVEL_MAX) -> None:
        self._member = member
        self._feature_level = feature_level
        self._pending: deque[ProposalOutcome] = deque()
        """Proposals in order; those at the front that have an outcome are dropped with the next proposal."""
        self._resumed: asyncio.Future[None] | None = None
        self.term: Term | None = None
        """The term in which this replica has caught up as the leader."""
        self.on_new_term: list[Callable[[], None]] = []
        """Called when the replica has caught up in a new term; everything planned in the previous term is void."""

    @property
    def is_paused(self) -> bool:
        """Return whether `quiesce` is holding proposals back."""
        return self._resumed is not None

    @property
    def is_current(self) -> bool:
        """Return whether this replica leads in the term in which it has caught up."""
        return self._member.leads_in(self.term)

    @property
    def is_ready(self) -> bool:
        """Return whether this replica leads, has caught up, and may propose immediately."""
        return self._resumed is None and self.is_current

    @property
    def feature_level(self) -> int:
        """The feature level of the cluster, as this node knows it."""
        return self._feature_level()

    async def wait_ready(self) -> None:
        """Wait until this replica may check and propose; holds until the caller suspends again.

        Raises:
            NotLeaderError: this replica does not lead; the error names the leader, if known.
            UnavailableError: this replica is closing.
        """
        while not self.is_ready:
            if self._resumed is not None:
                await asyncio.shield(self._resumed)
            else:
                await self._catch_up()

    async def wait_confirmed(self) -> None:
        """Wait until a quorum confirms this leader and everything committed before this call is applied."""
        await self._member.read_barrier()
        await self.wait_ready()

    def propose(self, data: Buffer) -> ProposalOutcome:
        """Propose a batch; call it in the same turn of the event loop in which `wait_ready` returned.

        Raises:
            UnavailableError: not done; this member is closing.
        """
        # A proposal of a replica that is not ready is refused by its member, by the term.
        return self._propose(data)

    def propose_entry(self, entry: PartitionEntry) -> ProposalOutcome:
        """Propose an entry that is not records, as `propose` does, or as the one proposal of a `quiesce` block.

        Raises:
            ConflictError: not done; the cluster's feature level does not allow the entry yet.
            UnavailableError: not done; this member is closing or no longer leads.
        """
        return self._propose(build_entry(entry, level=self._feature_level()))

    async def propose_snapshot(self, document: Iterator[bytes]) -> ProposalOutcome:
        """Propose a state snapshot, encoded in steps, as the one proposal of a `quiesce` block; as `propose_entry`."""
        batch = join_snapshot_entry(await gather_in_steps(document), level=self._feature_level())
        await asyncio.sleep(0)
        seal_control_batch(batch, timestamp=0)
        await asyncio.sleep(0)
        return self._propose(batch)

    @asynccontextmanager
    async def quiesce(self) -> AsyncIterator[None]:
        """Pause proposals and wait until every earlier one has an outcome; inside, the state includes all of them.

        The body makes at most one proposal, with `propose_entry` or `propose_snapshot`. It may suspend: nothing is
        proposed here meanwhile, and a proposal is refused if the term has changed.
        """
        await self.wait_ready()
        self._resumed = asyncio.get_running_loop().create_future()
        try:
            for proposal in tuple(self._pending):
                with suppress(QuiverError):
                    await proposal
            yield
        finally:
            resumed, self._resumed = self._resumed, None
            resumed.set_result(None)

    def call_when_resumed(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the current `quiesce` block ends."""
        assert self._resumed is not None, "proposals are paused"
        self._resumed.add_done_callback(self.contained(lambda _: callback()))

    def contained(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Return a callback of this partition whose unexpected error stops the partition and not the node."""
        return self._member.guard.callback(callback)

    def _propose(self, data: Buffer) -> ProposalOutcome:
        # The term pins the proposal to the leadership that was checked: a later term must refuse it.
        done = self._member.propose_nowait([data], term=self.term)
        pending = self._pending
        while pending and pending[0].is_done:
            pending.popleft()
        pending.append(done)
        return done

    async def _catch_up(self) -> None:
        """Wait, once per term, until everything that earlier leaders committed is applied here."""
        member = self._member
        term = member.term
        await member.read_barrier()
        if member.term == term != self.term:
            self.term = term
            for forget in self.on_new_term:
                forget()
