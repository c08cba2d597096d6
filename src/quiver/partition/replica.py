"""One replica of a partition, as its broker uses it: appends, reads, cursors.

`Replica` is the public interface; it owns the append path and composes the other parts: `ProposalGate` (when it may
answer), `Deduplicator` (batches land once), `CursorMoves` and `ConsumeHandler` (consumers), `QueueHandler` (work
queues), `FetchWaiters` (long polls) and `Maintenance` (background work). Only a leader that has caught up in its term
answers (R10); every other replica refuses with `NotLeaderError` and names the leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from quiver.clock import Clock, SystemClock
from quiver.config import PartitionSettings
from quiver.errors import (
    ConflictError,
    DecodeError,
    DiskFullError,
    NotLeaderError,
    OutOfRangeError,
    OutOfSequenceError,
    OverloadedError,
    UnavailableError,
)
from quiver.features import LEVEL_MAX, SESSIONS_LEVEL
from quiver.metrics import now_s
from quiver.model import NO_PRODUCER, Buffer, ConsumerId, GroupId, Index, NodeId, Offset, ProducerId, Term
from quiver.partition.client_cleaner import FindClients
from quiver.partition.consume_handler import (
    ConsumeHandler,
    ConsumeRequest,
    ConsumeResult,
    ConsumerStart,
    DefaultStart,
)
from quiver.partition.cursors import NO_GROUPS, CursorMoves, KnownGroups
from quiver.partition.entries import FenceEntry
from quiver.partition.maintenance import Maintenance, PolicySource, RetentionPolicy
from quiver.partition.meters import ConsumeTimings, TopicMeter
from quiver.partition.producers import Deduplicator, fenced
from quiver.partition.proposal_gate import ProposalGate, ProposalOutcome
from quiver.partition.queue_handler import QueueHandler
from quiver.partition.reads import Admit, FetchWaiters, admit_all, check_in_range, read_admitted, repair_on_damage
from quiver.partition.record_batches import RecordBatches
from quiver.partition.state import PartitionState
from quiver.raft import Role
from quiver.record import Batch, BatchHeader, Record, decode_header, verify_payload
from quiver.record.decoded import DecodedBatchBudget
from quiver.replication import Member, find_in_sync
from quiver.storage import DiskSpace
from quiver.tasks import SharedOutcome, timeout

OnRole = Callable[[Role, Term, NodeId | None], None]

SILENCE_MS_MAX = 2_000
"""A voter that has been silent for longer does not count as in sync."""
DEFAULTS = PartitionSettings()
DECODED_BYTES_MAX = 16 * 1024 * 1024
"""Bound of decoded batches of a replica that shares no budget with others."""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a replica; `in_sync` is empty unless it leads."""

    group: GroupId
    role: Role
    epoch: Term
    leader: NodeId | None
    is_ready: bool
    """Whether it leads and has applied everything that is committed."""
    first_offset: Offset
    end_offset: Offset
    """The high watermark known to this replica."""
    size_bytes: int
    """Size of its log on disk."""
    in_sync: tuple[NodeId, ...]
    voters: tuple[NodeId, ...]
    learners: tuple[NodeId, ...]
    consumers: int
    """Number of consumers with a cursor."""
    producers: int
    """Number of producers remembered for deduplication."""
    waiting: int
    """Number of readers waiting for records."""


class AppendResult(msgspec.Struct, frozen=True):
    """The offset of an appended batch; `is_duplicate` if an earlier send of the same batch put it there."""

    base_offset: Offset
    is_duplicate: bool = False


class FetchResult(msgspec.Struct, frozen=True):
    """Committed batches, starting with the one that contains the requested offset, and the partition's bounds."""

    batches: list[Batch]
    first_offset: Offset
    end_offset: Offset
    """The high watermark."""


class CursorsResult(msgspec.Struct, frozen=True):
    """Cursors in the order of the request (None: no cursor yet), and the partition's bounds."""

    cursors: tuple[Offset | None, ...]
    first_offset: Offset
    end_offset: Offset


class Replica:
    """One replica of a partition, on top of its member of the Raft group."""

    def __init__(
        self,
        member: Member,
        state: PartitionState,
        *,
        settings: PartitionSettings = DEFAULTS,
        space: DiskSpace | None = None,
        meter: TopicMeter | None = None,
        feature_level: Callable[[], int] = lambda: LEVEL_MAX,
        decoded: DecodedBatchBudget | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.on_role: OnRole | None = None
        """Called when the replica's role or leader changes."""
        self._member = member
        self._state = state
        self._space = space
        self._meter = meter or TopicMeter(ConsumeTimings())
        self._gate = ProposalGate(member, feature_level)
        self._deduplicator = Deduplicator(state.producers)
        self._gate.on_new_term.append(self._deduplicator.clear)
        self._moves = CursorMoves(self._gate, state)
        decoded = decoded or DecodedBatchBudget(DECODED_BYTES_MAX)
        self._batches = RecordBatches(member, state, self._meter.timings, decoded)
        self._consume_handler = ConsumeHandler(self._gate, state, self._moves, self._batches, self._meter.timings)
        self.queues = QueueHandler(self._gate, state, self._batches, self._meter.queues, clock or SystemClock())
        """The work queues of the partition."""
        self._waiters = FetchWaiters()
        self._maintenance = Maintenance(member, state, self._gate, settings)
        member.on_role = self._handle_role
        state.on_applied = self._handle_applied

    @property
    def member(self) -> Member:
        """Return the replica's member of the Raft group."""
        return self._member

    @property
    def state(self) -> PartitionState:
        """Return the applied state; only the replication driver changes it."""
        return self._state

    @property
    def first_offset(self) -> Offset:
        """Return the offset of the first record, as far as this replica knows."""
        return self._state.first_offset

    @property
    def high_watermark(self) -> Offset:
        """Return the first offset not known to be committed; a follower's value may be stale."""
        return self._state.end_offset

    def status(self, *, now_ms: int) -> ReplicaStatus:
        """Return a snapshot for operators and metrics; `now_ms` is the monotonic clock."""
        raft = self._member.raft_status()
        return ReplicaStatus(
            group=self._member.group,
            role=raft.role,
            epoch=raft.term,
            leader=raft.leader,
            is_ready=self._member.is_ready,
            first_offset=self._state.first_offset,
            end_offset=self._state.end_offset,
            size_bytes=self._member.log.status().size_bytes,
            in_sync=find_in_sync(raft, now_ms=now_ms, silence_ms_max=SILENCE_MS_MAX),
            voters=raft.configuration.voters,
            learners=raft.configuration.learners,
            consumers=len(self._state.cursors),
            producers=len(self._state.producers),
            waiting=len(self._waiters) + self.queues.waiting,
        )

    # -- life ------------------------------------------------------------------------------------

    async def run(self, clock: Clock) -> None:
        """Run the background work (checkpoints, state snapshots, retention) until `close`.

        Raises:
            StorageError: the disk failed; the node stops.
        """
        await self._maintenance.run(clock)

    def set_retention(self, policy: RetentionPolicy) -> None:
        """Apply this retention policy from now on."""
        self._maintenance.policy = policy

    def set_policy_source(self, source: PolicySource) -> None:
        """Confirm the retention policy there before each trim."""
        self._maintenance.source = source

    def set_clients(self, find_clients: FindClients) -> None:
        """Drop the state of clients that are no longer registered from now on, as the leader."""
        self._maintenance.cleaner.find_clients = find_clients

    def note_removed(self, *, producers: Iterable[ProducerId] = (), consumers: Iterable[ConsumerId] = ()) -> None:
        """Drop the state of these clients soon, if they are no longer registered."""
        self._maintenance.note_removed(producers=producers, consumers=consumers)

    async def maintain(self, now_ms: int) -> None:
        """Run one round of the background work immediately; `now_ms` is the wall clock."""
        await self._maintenance.maintain(now_ms)

    async def close(self) -> None:
        """End `run`, fail waiting readers, and save the state; the replicator closes the member. Idempotent.

        Raises:
            StorageError: the disk failed; the node stops.
        """
        closing = UnavailableError(f"not done: the replica of group {self._member.group} is closing; retry")
        self._waiters.fail(closing)
        self.queues.fail(closing)
        self._batches.close()
        await self._maintenance.stop()

    def abandon(self) -> None:
        """Stop immediately, without saving the state: it may be in doubt. `close` waits for what still runs."""
        message = f"not done: the replica of group {self._member.group} has stopped; retry at another"
        stopped = UnavailableError(message, code="replica_stopped")
        self._waiters.fail(stopped)
        self.queues.fail(stopped)
        self._maintenance.abandon()

    # -- producers -------------------------------------------------------------------------------

    async def append(
        self, data: Buffer, header: BatchHeader | None = None, *, checked_index: Index | None = None
    ) -> AppendResult:
        """Append a batch as its producer built it, once; return its offset when it is committed.

        Takes ownership of the buffer; `header` is its decoded header, if the caller has it. `checked_index` is the
        metadata index at which the producer was found to be registered. A producer may have at most five unanswered
        batches.

        Raises:
            DecodeError: not done; the bytes are not exactly one batch of records.
            OutOfSequenceError: not done; the batch does not follow the producer's last batch.
            FencedError: not done; the producer has begun a later epoch.
            NotLeaderError: not done; another replica leads.
            UnavailableError: not done; this replica is overloaded, its disk is nearly full, or the producer was
                checked against metadata that is too old.
            OutcomeUnknownError: it may have been done; send the identical batch again.
        """
        header = _check_batch(data, header or decode_header(data))
        await self._gate.wait_ready()
        try:
            duplicate = self._deduplicator.find_duplicate(header)
        except OutOfSequenceError:
            # A deposed leader that has not noticed yet lacks the newest batches: confirm leadership before refusing.
            await self._gate.wait_confirmed()
            duplicate = self._deduplicator.find_duplicate(header)
        if duplicate is None:
            # No await since the check: nothing may be proposed between it and this batch.
            self._admit(header.producer_id, checked_index)
            headers = await self._propose(header, data)
            self._meter.received_records += header.record_count
            self._meter.received_bytes += len(data)
            return AppendResult(headers[0].base_offset)
        if isinstance(duplicate, SharedOutcome):
            duplicate = (await duplicate)[0].base_offset
        return AppendResult(duplicate, is_duplicate=True)

    async def begin_epoch(self, producer_id: ProducerId, epoch: int, *, checked_index: Index | None = None) -> int:
        """Fence a producer's earlier epochs, durably; return the sequence that its next record must have.

        Sequences continue across epochs. Repeating the call for the same epoch is safe.

        Raises:
            FencedError: the producer has begun a later epoch.
            UnavailableError: not done; this replica does not lead or is overloaded.
            OutcomeUnknownError: it may have been done; repeat the call.
        """
        await self._gate.wait_ready()
        self._admit(producer_id, checked_index)
        self._deduplicator.check_epoch(producer_id, epoch)
        next_sequence = self._deduplicator.expected_sequence(producer_id, epoch)
        fence = FenceEntry(producer_id, epoch)
        done = self._gate.propose_entry(fence)
        self._deduplicator.add_fence(fence, done, next_sequence=next_sequence)
        await done
        committed_sequence = self._state.producers.next_sequence(producer_id, epoch)
        if committed_sequence is None:
            raise fenced(producer_id, epoch)
        return committed_sequence

    def _admit(self, producer_id: ProducerId, checked_index: Index | None) -> None:
        """Refuse a producer without state here if it may have been removed, or if there is no room for its state."""
        if producer_id == NO_PRODUCER or producer_id in self._state.producers:
            return
        self._state.check_view(checked_index)
        if self._deduplicator.is_full:
            raise OverloadedError(
                f"not done: {len(self._state.producers)} producers, the maximum, have state in this partition; those "
                "that are idle are dropped soon, retry later"
            )

    def _propose(self, header: BatchHeader, data: Buffer) -> ProposalOutcome:
        if self._space is not None:
            self._space.admit(len(data))
        if self._member.raft.is_short_of_room:
            raise DiskFullError(
                "not done: the disks of a majority of this partition's replicas are nearly full; free space on one of "
                "them, or retry later"
            )
        done = self._gate.propose(data)
        self._deduplicator.add_batch(header, done)
        return done

    # -- readers ---------------------------------------------------------------------------------

    async def fetch(self, offset: Offset, *, bytes_max: int, wait_ms: int = 0, admit: Admit = admit_all) -> FetchResult:
        """Return committed batches, starting with the one that contains `offset`; wait up to `wait_ms` for the first.

        Returns at least one batch if there is one, even if it exceeds `bytes_max`.

        Raises:
            TrimmedError: the offset is below the first record.
            OutOfRangeError: the offset is beyond the high watermark.
            NotLeaderError: another replica leads, or this one lost leadership during the wait.
            OverloadedError: too many readers wait.
        """
        await self._gate.wait_ready()
        fetched = await self._fetch(offset, bytes_max, admit)
        if wait_ms and not fetched.batches and await self._wait_past(offset, wait_ms):
            await self._gate.wait_ready()
            fetched = await self._fetch(offset, bytes_max, admit)
        self._meter.count_sent(fetched.batches)
        return fetched

    async def wait_past(self, offset: Offset) -> None:
        """Wait until there is a committed record at `offset`; cancel to stop waiting.

        Raises:
            NotLeaderError: this replica does not lead, or lost leadership during the wait.
            OverloadedError: too many readers wait.
        """
        await self._gate.wait_ready()
        if self._state.end_offset <= offset:
            await self._waiters.wait_past(offset)

    async def find_offset(self, at: Literal["earliest", "latest"] | int) -> Offset:
        """Return the first offset, the high watermark, or the offset of the first record at or after a timestamp (ms).

        Linearizable. If every record is older than the timestamp, the result is the high watermark. The records from
        the first offset on stay, if a hold keeps them that this node knows of.

        Raises:
            NotLeaderError: another replica leads.
        """
        await self._gate.wait_confirmed()
        while at == "earliest" and self._maintenance.is_trimming:  # it was decided before the hold was known
            await self._maintenance.wait_trimmed()
            await self._gate.wait_confirmed()
        first_offset, end_offset = self._state.first_offset, self._state.end_offset
        if at == "earliest":
            return first_offset
        if at == "latest":
            return end_offset
        with repair_on_damage(self._member):
            found = await self._member.log.find_timestamp(at, first_offset=first_offset, end_offset=end_offset)
        return end_offset if found is None else found

    async def read(self, first_offset: Offset, *, bytes_max: int, admit: Admit = admit_all) -> list[Batch]:
        """Return batches that this replica knows to be committed, leader or not; raises as `Log.read_records` does."""
        return await read_admitted(
            self._member.log,
            first_offset,
            end_offset=self._state.end_offset,
            bytes_max=bytes_max,
            admitted=await admit(bytes_max),
            admit=admit,
        )

    # -- consumers -------------------------------------------------------------------------------

    async def consume(
        self,
        consumer_id: ConsumerId,
        *,
        offset: Offset | None = None,
        default_start: DefaultStart = "earliest",
        records_max: int = 1,
        bytes_max: int,
        wait_ms: int = 0,
        checked_index: Index | None = None,
        groups: KnownGroups = NO_GROUPS,
        admit: Admit = admit_all,
        decoded_bytes_max: int = 0,
    ) -> ConsumeResult:
        """Return records at a consumer's cursor and move the cursor past them, in one replicated step.

        A consumer without a cursor starts at `default_start`. With `offset`, the records from that offset are returned
        and the cursor moves past them: safe to repeat. If there is no record, waits up to `wait_ms` for one.
        `checked_index` is the metadata index at which the consumer was found to be registered; `groups` is what
        that metadata says of it. With `decoded_bytes_max`, `LargeRecords` is raised if the batches take more once they
        are decoded, also a single one; nothing was done then.

        Raises:
            TrimmedError: not done; `offset` is below the first record.
            OutOfRangeError: not done; `offset` is beyond the high watermark.
            FencedError: not done; the consumer is a group with members.
            NotLeaderError: not done; another replica leads.
            UnavailableError: not done; this replica is overloaded, or an earlier move of the cursor failed.
            OutcomeUnknownError: the cursor may have moved; no records are returned.
        """
        request = ConsumeRequest(
            consumer_id=consumer_id,
            offset=offset,
            default_start=default_start,
            records_max=records_max,
            bytes_max=bytes_max,
            checked_index=checked_index,
            groups=groups,
            admit=admit,
            decoded_bytes_max=decoded_bytes_max,
        )
        consumed = await self._consume_handler.consume(request)
        if wait_ms and not consumed.batches and await self._wait_past(consumed.first_offset, wait_ms):
            consumed = await self._consume_handler.consume(request)
        self._meter.count_sent(consumed.batches)
        return consumed

    async def consume_many(
        self,
        consumers: Sequence[ConsumerStart],
        *,
        checked_index: Index | None = None,
        groups: KnownGroups = NO_GROUPS,
        admit: Admit = admit_all,
        bytes_max: int = 0,
    ) -> list[Record | None]:
        """Return the record at each consumer's cursor and move all of the cursors, in one replicated step.

        A consumer named twice gets two records. The list is shorter than `consumers` if the records are large; nothing
        was done for the consumers beyond its end. `admit` is called if a record comes out of a large batch, and, with
        `bytes_max`, if the first record has more bytes than that.

        Raises as `consume` without an offset; the error applies to all of the consumers.
        """
        records = await self._consume_handler.consume_many(
            consumers, checked_index=checked_index, groups=groups, admit=admit, bytes_max=bytes_max
        )
        self._meter.count_consumed(records)
        return records

    async def move_cursors(
        self,
        cursors: Iterable[tuple[ConsumerId, Offset | Literal["latest"]]],
        *,
        only_new: bool = False,
        session: int = 0,
        checked_index: Index | None = None,
        groups: KnownGroups = NO_GROUPS,
    ) -> None:
        """Set consumers' cursors, all or none; with `only_new`, skip consumers that already have one.

        With a `session`, it becomes the session of the consumers, which ends their earlier ones. `groups` is what the
        metadata at `checked_index` says of the consumers.

        Raises:
            FencedError: not done; a later session of a consumer exists, or, without a session, it has members.
            ConflictError: not done; a consumer that has a cursor is a work queue (`group_kind`).
            OutOfRangeError: not done; an offset is beyond the high watermark.
            UnavailableError: not done; this replica does not lead or is overloaded.
            OutcomeUnknownError: it may have been done.
        """
        wanted = list(cursors)
        await self._gate.wait_ready()
        if any(offset != "latest" and offset > self._state.end_offset for _, offset in wanted):
            await self._gate.wait_confirmed()
        end_offset = self._state.end_offset
        moves = {consumer: end_offset if offset == "latest" else offset for consumer, offset in wanted}
        for consumer, offset in moves.items():
            if not 0 <= offset <= end_offset:
                message = f"not done: offset {offset} for consumer {consumer} is not within 0 and the high watermark"
                raise OutOfRangeError(f"{message} {end_offset}", code="offset_out_of_range")
        if only_new:
            moves = {consumer: offset for consumer, offset in moves.items() if self._moves.planned(consumer) is None}
        self._check_no_queue(() if only_new else moves, groups)
        # Checked at any level: a leader whose metadata lags may not know yet that sessions exist, but its state does.
        new = self._check_users([one for one, _ in wanted], session, groups)
        begun = dict.fromkeys(new, session) if self._gate.feature_level >= SESSIONS_LEVEL else {}
        moved = (
            self._moves.move(moves, sessions=begun, checked_index=checked_index)
            if moves or begun
            else self._moves.settled()
        )
        if moved is not None:
            await asyncio.shield(moved)

    def _check_no_queue(self, consumer_ids: Iterable[ConsumerId], groups: KnownGroups) -> None:
        """Refuse to move the cursor of a work queue: it would repeat jobs that are settled, or skip others."""
        for consumer_id in consumer_ids:
            if consumer_id in self._state.queues or consumer_id in groups.queues:
                message = f"not done: group {consumer_id} is a work queue, which has no cursors to move"
                raise ConflictError(f"{message}; read its records with another group", code="group_kind")

    def _check_users(self, consumer_ids: Iterable[ConsumerId], session: int, groups: KnownGroups) -> list[ConsumerId]:
        """Return the consumers to which a session is new; raise if others use one of them (`move_cursors`)."""
        if session:
            return [one for one in consumer_ids if self._moves.check_session(one, session)]
        for consumer_id in consumer_ids:
            self._moves.check_plain(consumer_id, groups)
        return []

    def check_session(self, consumer_id: ConsumerId, session: int) -> None:
        """Raise `FencedError` if a later session of a consumer exists, as far as this replica knows."""
        self._moves.check_session(consumer_id, session)

    async def get_cursors(self, consumer_ids: Sequence[ConsumerId]) -> CursorsResult:
        """Return the consumers' cursors. Linearizable.

        Raises:
            NotLeaderError: another replica leads.
        """
        await self._gate.wait_confirmed()
        state = self._state
        found = tuple(state.cursor(consumer_id) for consumer_id in consumer_ids)
        return CursorsResult(found, state.first_offset, state.end_offset)

    # -- internals -----------------------------------------------------------------------------------

    async def _fetch(self, offset: Offset, bytes_max: int, admit: Admit) -> FetchResult:
        state = self._state
        await check_in_range(self._gate, state, offset)
        admitted = await admit(bytes_max) if offset < state.end_offset else 0
        end_offset = state.end_offset
        begun_s = now_s()
        with repair_on_damage(self._member):
            batches = await read_admitted(
                self._member.log, offset, end_offset=end_offset, bytes_max=bytes_max, admitted=admitted, admit=admit
            )
        self._meter.timings.read.observe(now_s() - begun_s)
        return FetchResult(batches, state.first_offset, end_offset)

    async def _wait_past(self, offset: Offset, wait_ms: int) -> bool:
        """Wait up to `wait_ms` for a record at `offset`; return whether there is one."""
        try:
            async with timeout(wait_ms / 1000):
                await self.wait_past(offset)
        except TimeoutError:
            return False
        return True

    def _handle_applied(self) -> None:
        self._waiters.wake(self._state.end_offset)
        self.queues.handle_applied()
        self._maintenance.note_applied()

    def _handle_role(self, role: Role, term: Term, leader: NodeId | None) -> None:
        if role is not Role.LEADER and (len(self._waiters) or self.queues.waiting):
            lost = NotLeaderError(
                f"not done: this node lost leadership of group {self._member.group} during the wait; retry",
                leader=leader,
            )
            self._waiters.fail(lost)
            self.queues.fail(lost)
        if self.on_role is not None:
            self.on_role(role, term, leader)


def _check_batch(data: Buffer, header: BatchHeader) -> BatchHeader:
    if header.is_control or header.batch_bytes != len(data):
        raise DecodeError(f"not done: the {len(data)} bytes are not exactly one batch of records")
    verify_payload(data, header)
    return header
