"""What a replica does beside answering: checkpoints, summaries, trims, and a log that gets shorter.

Every replica takes a checkpoint after so many bytes, and removes from its log what a committed trim allows. The leader,
besides, writes a summary now and then, and a trim when retention lets records go. Each step can be cut off by a
crash: what is due is found from the state again.
"""

from __future__ import annotations

import asyncio
import logging

from quiver.clock import Clock
from quiver.config import PartitionSettings
from quiver.errors import LogClosedError, QuiverError, StorageError
from quiver.logs import facts
from quiver.partition.entries import Summary, Trim, build_entry
from quiver.partition.proposal_gate import ProposalGate
from quiver.partition.retention import KEEP_EVERYTHING, find_trim, is_summary_due
from quiver.partition.state import PartitionState
from quiver.replication import Member
from quiver.tasks import timeout

logger = logging.getLogger(__name__)


class Housekeeping:
    """The background work of one replica. `run` is its life; `stop` ends it between two pieces of work."""

    def __init__(
        self, member: Member, state: PartitionState, leading: ProposalGate, settings: PartitionSettings
    ) -> None:
        self.retention = KEEP_EVERYTHING
        """What the leader goes by from its next look on."""
        self._member = member
        self._state = state
        self._leading = leading
        self._settings = settings
        self._work = asyncio.Event()
        self._is_stopped = False
        self._at_work = asyncio.Lock()
        self._saved_bytes = state.record_bytes
        self._trimmed_index = member.log.first_index

    def note_applied(self) -> None:
        """Look whether what was just applied makes work."""
        state = self._state
        new_bytes = state.record_bytes - self._saved_bytes
        if new_bytes >= self._settings.checkpoint_bytes or state.trimmed_index > self._trimmed_index:
            self._work.set()
        summarised_bytes = state.marks[-1].record_bytes if state.marks else 0
        if state.record_bytes - summarised_bytes >= self._settings.summary_bytes and self._member.raft.is_leader:
            self._work.set()

    async def run(self, clock: Clock) -> None:
        """Do what is due, when it is due, until `stop`.

        Raises:
            StorageError: the disk failed; the node stops.
        """
        while not self._is_stopped:
            try:
                async with timeout(self._settings.retention_interval_ms / 1000):
                    await self._work.wait()
            except TimeoutError:
                pass
            self._work.clear()
            await self.tend(clock.wall_ms())

    async def tend(self, now_ms: int) -> None:
        """Do once what is due now."""
        async with self._at_work:
            if self._is_stopped:
                return
            try:
                await self._shorten()
                if self._state.record_bytes - self._saved_bytes >= self._settings.checkpoint_bytes:
                    await self._checkpoint()
            except LogClosedError:
                return  # the node has stopped under it
            if self._member.raft.is_leader:
                await self._retain(now_ms)

    async def stop(self) -> None:
        """Let `run` end, and save the state, so that the next start has nothing to replay; idempotent.

        Raises:
            StorageError: the disk failed; the node stops.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        self._work.set()
        async with self._at_work:
            await self._checkpoint()

    async def _shorten(self) -> None:
        """Remove what a committed trim allows."""
        index = self._state.trimmed_index
        if index > self._trimmed_index and await self._member.trim(index, PartitionState.blank):
            self._trimmed_index = index

    async def _checkpoint(self) -> None:
        saved_bytes = self._state.record_bytes
        await self._member.checkpoint()
        self._saved_bytes = saved_bytes

    async def _retain(self, now_ms: int) -> None:
        """Write a summary or a trim, if one is due; a refusal means that it is for another leader, or for later."""
        try:
            if is_summary_due(self._state, self.retention, self._settings, now_ms=now_ms):
                await self._summarise()
            if find_trim(self._state, self.retention, now_ms=now_ms) is not None:
                await self._trim(now_ms)
        except StorageError:
            raise
        except QuiverError as error:
            logger.debug("retention put off", extra=facts(group=self._member.group, reason=error.message))

    async def _summarise(self) -> None:
        """Write down the state that everything proposed before has led to; nothing else is proposed meanwhile."""
        async with self._leading.settle():
            if not self._leading.is_current:
                return  # another leader will
            done = self._leading.propose_settled(build_entry(Summary(self._state.contents())))
        await asyncio.shield(done)

    async def _trim(self, now_ms: int) -> None:
        await self._leading.wait_ready()
        mark = find_trim(self._state, self.retention, now_ms=now_ms)
        if mark is None:
            return  # an earlier leader has seen to it
        await asyncio.shield(self._leading.propose(build_entry(Trim(mark.index, mark.offset))))
        logger.info("records trimmed", extra=facts(group=self._member.group, first_offset=mark.offset))
