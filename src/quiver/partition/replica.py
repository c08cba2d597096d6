"""One replica of a partition, as its broker sees it: appends that land once, reads that are current, cursors.

`Replica` is the way in and owns nothing but the parts: `leading` says when it may answer, `appending` lets batches
land once, `cursors` and `consuming` move consumers, `arrivals` lets readers wait. Only a leader that has caught up
in its term answers (R10); every other replica refuses with `NotLeaderError` and names the leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from quiver.clock import Clock
from quiver.config import PartitionSettings
from quiver.errors import NotLeaderError, OutOfRangeError, UnavailableError
from quiver.model import Buffer, ConsumerId, GroupId, NodeId, Offset, ProducerId, Term
from quiver.partition.appending import Appended, Appender
from quiver.partition.consume_handler import Consumed, ConsumeHandler, ConsumeRequest, Start, Taker, check_in_range
from quiver.partition.cursors import CursorMoves
from quiver.partition.fetch_waiters import FetchWaiters
from quiver.partition.maintenance import Housekeeping
from quiver.partition.proposal_gate import ProposalGate
from quiver.partition.repair import repairing
from quiver.partition.retention import Retention
from quiver.partition.state import PartitionState
from quiver.raft import Role
from quiver.record import Batch, Record
from quiver.replication import Member, find_in_sync
from quiver.storage import DiskSpace
from quiver.tasks import timeout

OnRole = Callable[[Role, Term, NodeId | None], None]


SILENCE_MS_MAX = 2_000
"""A voter that was not heard of for so long does not count as in sync."""
DEFAULTS = PartitionSettings()


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A replica at one moment; `in_sync` is empty unless it leads."""

    group: GroupId
    role: Role
    epoch: Term
    leader: NodeId | None
    is_ready: bool
    """Whether it leads and knows everything that is committed."""
    first_offset: Offset
    end_offset: Offset
    """The high watermark, as far as known here."""
    size_bytes: int
    """What its log takes on disk."""
    in_sync: tuple[NodeId, ...]
    voters: tuple[NodeId, ...]
    learners: tuple[NodeId, ...]
    consumers: int
    """How many have a cursor here."""
    producers: int
    """How many are remembered."""
    waiting: int
    """Readers that wait for records."""


class Fetched(msgspec.Struct, frozen=True):
    """Committed batches from the one that holds the wanted offset on, and where the partition begins and ends."""

    batches: list[Batch]
    first_offset: Offset
    end_offset: Offset
    """The high watermark."""


class CursorsRead(msgspec.Struct, frozen=True):
    """Cursors, in the order in which they were asked for (None: no cursor yet), and the partition's bounds."""

    cursors: tuple[Offset | None, ...]
    first_offset: Offset
    end_offset: Offset


class Replica:
    """One replica of a partition, over its member of the Raft group."""

    def __init__(
        self,
        member: Member,
        state: PartitionState,
        *,
        settings: PartitionSettings = DEFAULTS,
        space: DiskSpace | None = None,
    ) -> None:
        self.on_role: OnRole | None = None
        """Called when the replica's role or leader changes."""
        self._member = member
        self._state = state
        self._leading = ProposalGate(member)
        self._appender = Appender(self._leading, state, space)
        self._moves = CursorMoves(self._leading, state)
        self._consuming = ConsumeHandler(self._leading, state, self._moves, member)
        self._arrivals = FetchWaiters()
        self._housekeeping = Housekeeping(member, state, self._leading, settings)
        member.on_role = self._handle_role
        state.on_applied = self._handle_applied

    @property
    def member(self) -> Member:
        """Return the replica's part in its group."""
        return self._member

    @property
    def state(self) -> PartitionState:
        """Return what the committed batches have led to; only the driver changes it."""
        return self._state

    @property
    def first_offset(self) -> Offset:
        """Return where the records begin, as far as known here."""
        return self._state.first_offset

    @property
    def high_watermark(self) -> Offset:
        """Return the first offset not known here to be committed; perhaps not the newest one there is."""
        return self._state.end_offset

    def status(self, *, now_ms: int) -> ReplicaStatus:
        """Return a snapshot for people and metrics; `now_ms` by the monotonic clock."""
        raft = self._member.raft.status()
        return ReplicaStatus(
            group=self._member.group,
            role=raft.role,
            epoch=raft.term,
            leader=raft.leader,
            is_ready=self._member.is_leader,
            first_offset=self._state.first_offset,
            end_offset=self._state.end_offset,
            size_bytes=self._member.log.status().size_bytes,
            in_sync=find_in_sync(raft, now_ms=now_ms, silence_ms_max=SILENCE_MS_MAX),
            voters=raft.configuration.voters,
            learners=raft.configuration.learners,
            consumers=len(self._state.cursors),
            producers=len(self._state.producers),
            waiting=len(self._arrivals),
        )

    # -- life ------------------------------------------------------------------------------------

    async def run(self, clock: Clock) -> None:
        """Do what a replica does beside answering, until `close`: checkpoints, summaries, retention.

        Raises:
            StorageError: the disk failed; the node stops.
        """
        await self._housekeeping.run(clock)

    def set_retention(self, retention: Retention) -> None:
        """Let records be kept by these bounds from now on."""
        self._housekeeping.retention = retention

    async def tend(self, now_ms: int) -> None:
        """Do at once what `run` would do at its next look; `now_ms` by the wall clock."""
        await self._housekeeping.tend(now_ms)

    async def close(self) -> None:
        """End `run`, send waiting readers away, and save the state; the member is closed by its replicator. Idempotent.

        Raises:
            StorageError: the disk failed; the node stops.
        """
        self._arrivals.fail(UnavailableError("this replica is closing; ask another"))
        await self._housekeeping.stop()

    # -- producers -------------------------------------------------------------------------------

    async def append(self, data: Buffer) -> Appended:
        """Append a batch as its producer built it, once; return where it is when it is committed.

        Takes the buffer over. At most five batches of one producer may be unanswered at a time.

        Raises:
            DecodeError: not done; the bytes are not one batch of records.
            OutOfSequenceError: not done; it does not follow the producer's last batch.
            FencedError: not done; the producer has begun a later epoch.
            NotLeaderError: not done; another replica leads.
            UnavailableError: not done; this replica is overloaded or cannot take it now.
            OutcomeUnknownError: perhaps done; send the very same batch again.
        """
        return await self._appender.append(data)

    async def begin_epoch(self, producer_id: ProducerId, epoch: int) -> int:
        """Fence off a producer's earlier epochs, durably; return the sequence that its next record must have.

        Sequences go on across epochs. Asking again for the same epoch is fine.

        Raises:
            FencedError: the producer has begun a later epoch.
            UnavailableError: not done; this replica does not lead or is overloaded.
            OutcomeUnknownError: perhaps done; ask again.
        """
        return await self._appender.begin_epoch(producer_id, epoch)

    # -- readers ---------------------------------------------------------------------------------

    async def fetch(self, offset: Offset, *, bytes_max: int, wait_ms: int = 0) -> Fetched:
        """Return committed batches from the one that holds `offset`; wait for one, at most `wait_ms`, if there is none.

        At least one batch is returned if there is one, however large it is.

        Raises:
            TrimmedError: the offset lies below the first record.
            OutOfRangeError: the offset lies behind the high watermark.
            NotLeaderError: another replica leads, or this one has lost leadership while it waited.
            OverloadedError: too many wait.
        """
        await self._leading.wait_ready()
        fetched = await self._fetch(offset, bytes_max)
        if wait_ms and not fetched.batches and await self._wait_past(offset, wait_ms):
            await self._leading.wait_ready()
            fetched = await self._fetch(offset, bytes_max)
        return fetched

    async def wait_past(self, offset: Offset) -> None:
        """Wait until there is a committed record at `offset`; cancel to give up.

        Raises:
            NotLeaderError: this replica does not lead, or no longer.
            OverloadedError: too many wait.
        """
        await self._leading.wait_ready()
        if self._state.end_offset <= offset:
            await self._arrivals.wait_past(offset)

    async def find_offset(self, at: Literal["earliest", "latest"] | int) -> Offset:
        """Return the first offset, the high watermark, or the first record not older than a timestamp (ms).

        The answer is no older than the call. If every record is older than the timestamp it is the high watermark.

        Raises:
            NotLeaderError: another replica leads.
        """
        await self._leading.wait_confirmed()
        first_offset, end_offset = self._state.first_offset, self._state.end_offset
        if at == "earliest":
            return first_offset
        if at == "latest":
            return end_offset
        with repairing(self._member):
            found = await self._member.log.find_timestamp(at, first_offset=first_offset, end_offset=end_offset)
        return end_offset if found is None else found

    async def read_end_offset(self) -> Offset:
        """Return the high watermark, no older than this call.

        Raises:
            UnavailableError: this replica does not lead, or is overloaded.
        """
        return await self.find_offset("latest")

    async def read(self, first_offset: Offset, *, bytes_max: int) -> list[Batch]:
        """Return batches that are committed as far as known here, leader or not; see `Log.read_records` for errors."""
        return await self._member.log.read_records(first_offset, end_offset=self._state.end_offset, bytes_max=bytes_max)

    # -- consumers -------------------------------------------------------------------------------

    async def consume(
        self,
        consumer_id: ConsumerId,
        *,
        offset: Offset | None = None,
        default_start: Start = "earliest",
        records_max: int = 1,
        bytes_max: int,
        wait_ms: int = 0,
    ) -> Consumed:
        """Return records at a consumer's cursor, and move it behind them in the same replicated step.

        A consumer without a cursor begins at `default_start`. With `offset` the records from there are returned,
        and the cursor is set behind them: safe to repeat. If there is none, one is waited for, at most `wait_ms`.

        Raises:
            TrimmedError: not done; `offset` lies below the first record.
            OutOfRangeError: not done; `offset` lies behind the high watermark.
            NotLeaderError: not done; another replica leads.
            UnavailableError: not done; this replica is overloaded, or a move before this one failed.
            OutcomeUnknownError: the cursor may have moved, and nothing is returned.
        """
        wish = ConsumeRequest(
            consumer_id=consumer_id,
            offset=offset,
            default_start=default_start,
            records_max=records_max,
            bytes_max=bytes_max,
        )
        consumed = await self._consuming.consume(wish)
        if wait_ms and not consumed.batches and await self._wait_past(consumed.first_offset, wait_ms):
            consumed = await self._consuming.consume(wish)
        return consumed

    async def take_each(self, takers: Sequence[Taker]) -> list[Record | None]:
        """Return the record at each consumer's cursor, and move all of them in one replicated step.

        A consumer that is named twice gets two. The list ends early if the records are large: nothing was done for
        those behind.

        Raises as `consume` without an offset; then nothing was done for anybody, or all is unknown.
        """
        return await self._consuming.take_each(takers)

    async def move_cursors(
        self, cursors: Iterable[tuple[ConsumerId, Offset | Literal["latest"]]], *, only_new: bool = False
    ) -> None:
        """Set consumers' cursors; with `only_new` leave those alone that have one. All of them move, or none.

        Raises:
            OutOfRangeError: not done; an offset lies behind the high watermark.
            UnavailableError: not done; this replica does not lead or is overloaded.
            OutcomeUnknownError: perhaps done.
        """
        wanted = list(cursors)
        await self._leading.wait_ready()
        if any(offset != "latest" and offset > self._state.end_offset for _, offset in wanted):
            await self._leading.wait_confirmed()
        end_offset = self._state.end_offset
        moves = {consumer: end_offset if offset == "latest" else offset for consumer, offset in wanted}
        if any(not 0 <= offset <= end_offset for offset in moves.values()):
            raise OutOfRangeError(f"a cursor is set behind the end, {end_offset}", code="offset_out_of_range")
        if only_new:
            moves = {consumer: offset for consumer, offset in moves.items() if self._moves.planned(consumer) is None}
        moved = self._moves.move(moves) if moves else self._moves.settled()
        if moved is not None:
            await asyncio.shield(moved)

    async def get_cursors(self, consumer_ids: Sequence[ConsumerId]) -> CursorsRead:
        """Return where consumers are, no older than this call.

        Raises:
            NotLeaderError: another replica leads.
        """
        await self._leading.wait_confirmed()
        state = self._state
        found = tuple(state.cursor(consumer_id) for consumer_id in consumer_ids)
        return CursorsRead(found, state.first_offset, state.end_offset)

    # -- parts -----------------------------------------------------------------------------------

    async def _fetch(self, offset: Offset, bytes_max: int) -> Fetched:
        state = self._state
        await check_in_range(self._leading, state, offset)
        end_offset = state.end_offset
        with repairing(self._member):
            batches = await self._member.log.read_records(offset, end_offset=end_offset, bytes_max=bytes_max)
        return Fetched(batches, state.first_offset, end_offset)

    async def _wait_past(self, offset: Offset, wait_ms: int) -> bool:
        """Wait for a record at `offset`; tell whether it came in time."""
        try:
            async with timeout(wait_ms / 1000):
                await self.wait_past(offset)
        except TimeoutError:
            return False
        return True

    def _handle_applied(self) -> None:
        self._arrivals.wake(self._state.end_offset)
        self._housekeeping.note_applied()

    def _handle_role(self, role: Role, term: Term, leader: NodeId | None) -> None:
        if role is not Role.LEADER and len(self._arrivals):
            self._arrivals.fail(NotLeaderError("leadership was lost while a reader waited", leader=leader))
        if self.on_role is not None:
            self.on_role(role, term, leader)
