"""Background work of a replica: checkpoints, state snapshots, retention, and removal of trimmed log segments.

Every replica saves a checkpoint after a number of bytes, and removes the log prefix that a committed trim allows. The
leader also writes state snapshots into the log, and a trim entry when the retention policy allows it. A crash may
interrupt any step: what is due is derived from the state again.

A partition is trimmed to a state snapshot only, never to an offset in between: a replica that starts there learns the
whole state from the first entry that it keeps. A bound is therefore kept to within the distance of two snapshots: never
too early, at most a little late. If a policy has several bounds, records go as soon as any of them allows it, unless a
hold keeps them. `find_trim` and `is_snapshot_due` are pure.

What a hold keeps is decided by the metadata, which a new leader's node may not know yet. So a trim waits until it is
confirmed that the node knows all that was acknowledged before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Protocol

import msgspec

from quiver.clock import Clock
from quiver.config import PartitionSettings
from quiver.errors import DiskFullError, LogClosedError, QuiverError, StorageError, UnavailableError
from quiver.logs import facts
from quiver.model import ConsumerId, Offset, ProducerId
from quiver.partition.client_cleaner import ClientCleaner
from quiver.partition.entries import TrimEntry, TrimPoint
from quiver.partition.proposal_gate import ProposalGate
from quiver.partition.state import PartitionState
from quiver.replication import Member
from quiver.tasks import timeout

logger = logging.getLogger(__name__)

SNAPSHOTS_PER_BOUND = 8
"""State snapshots within a retention bound: records stay at most an eighth of the bound longer."""
CONFIRM_TIMEOUT_S = 1.0
"""How long a trim, and a replica that closes meanwhile, wait for the policy to be confirmed. A later round retries."""
SNAPSHOT_BYTES_MIN = 4096
"""Bytes of records that are not worth a state snapshot, however small a bound is."""


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How long records are kept; without a bound, forever."""

    age_ms: int | None = None
    """Remove records that were appended longer ago than this."""
    size_bytes: int | None = None
    """Remove the oldest records while at least this many bytes remain."""
    consumers: Collection[ConsumerId] | None = None
    """Remove records that all of these consumers have passed; one without a cursor keeps everything."""
    held_offset: Offset | None = None
    """Keep records from this offset on, regardless of the bounds: a hold protects them."""


KEEP_EVERYTHING = RetentionPolicy()


class PolicySource(Protocol):
    """Where the policy comes from that a trim must obey."""

    async def confirm(self) -> None:
        """Wait until `policy` includes everything that was acknowledged before this call.

        Raises:
            UnavailableError: that cannot be known now.
        """
        ...

    def policy(self) -> RetentionPolicy:
        """Return the policy as it is known now."""
        ...


class Maintenance:
    """The background work of one replica: `run` until `stop`, which never interrupts a step."""

    def __init__(self, member: Member, state: PartitionState, gate: ProposalGate, settings: PartitionSettings) -> None:
        self.policy = KEEP_EVERYTHING
        """The retention policy that the leader applies from the next round on."""
        self.source: PolicySource | None = None
        """What confirms the policy before a trim; None: `policy` is all there is."""
        self._member = member
        self._state = state
        self._gate = gate
        self._settings = settings
        self._work = asyncio.Event()
        self._is_stopped = False
        self._lock = asyncio.Lock()
        self.cleaner = ClientCleaner(gate, state, idle_ms=settings.dedup_window_ms)
        self._saved_bytes = state.record_bytes
        self._trimmed_index = member.log.first_index
        self._no_trim = asyncio.Event()
        """Set unless a trim is proposed and not applied."""
        self._no_trim.set()

    @property
    def is_trimming(self) -> bool:
        """Return whether a trim is proposed: records that are still there may be gone in a moment."""
        return not self._no_trim.is_set()

    async def wait_trimmed(self) -> None:
        """Wait until no trim is proposed."""
        await self._no_trim.wait()

    def note_applied(self) -> None:
        """Wake `run` if the batches that were just applied make work."""
        state = self._state
        new_bytes = state.record_bytes - self._saved_bytes
        if new_bytes >= self._settings.checkpoint_bytes or state.trimmed_index > self._trimmed_index:
            self._work.set()
        snapshot_bytes = state.trim_points[-1].record_bytes if state.trim_points else 0
        if state.record_bytes - snapshot_bytes >= self._settings.summary_bytes and self._member.is_leader:
            self._work.set()

    def note_removed(self, *, producers: Iterable[ProducerId], consumers: Iterable[ConsumerId]) -> None:
        """Wake `run` if clients that were removed from the metadata have state here."""
        if self.cleaner.note_removed(producers=producers, consumers=consumers) and self._member.is_leader:
            self._work.set()

    async def run(self, clock: Clock) -> None:
        """Do work when it is due, and check once per retention interval, until `stop`.

        Raises:
            StorageError: the disk failed; the node stops.
        """
        while not self._is_stopped:
            try:
                async with timeout(self._settings.retention_interval_ms / 1000):
                    await self._work.wait()
            except TimeoutError:
                self.cleaner.is_scan_due = True
            self._work.clear()
            await self.maintain(clock.wall_ms())

    async def maintain(self, now_ms: int) -> None:
        """Do everything that is due now, once; `now_ms` is the wall clock."""
        async with self._lock:
            if self._is_stopped:
                return
            try:
                await self._remove_trimmed()
                if self._state.record_bytes - self._saved_bytes >= self._settings.checkpoint_bytes:
                    await self._checkpoint()
            except LogClosedError:
                return  # the node stopped meanwhile
            except DiskFullError as error:  # the entries that make room are written nevertheless, if they can be
                logger.debug("state not saved", extra=facts(group=self._member.group, reason=error.message))
            if self._member.is_leader:
                await self._apply_retention(now_ms)
                await self._clean()

    async def stop(self) -> None:
        """End `run` and save a checkpoint, so that the next start has nothing to replay; idempotent.

        Raises:
            StorageError: the disk failed; the node stops.
        """
        is_saved = self._is_stopped
        self.abandon()
        async with self._lock:
            if not is_saved:
                with suppress(DiskFullError):  # the next start replays more
                    await self._checkpoint()

    def abandon(self) -> None:
        """End `run` without saving anything."""
        self._is_stopped = True
        self._work.set()

    async def _remove_trimmed(self) -> None:
        """Remove the log prefix that a committed trim allows."""
        index = self._state.trimmed_index
        if index > self._trimmed_index and await self._member.trim(index, PartitionState.blank):
            self._trimmed_index = index

    async def _checkpoint(self) -> None:
        saved_bytes = self._state.record_bytes  # read first: batches may be applied while the checkpoint is written
        await self._member.checkpoint()
        self._saved_bytes = saved_bytes

    async def _apply_retention(self, now_ms: int) -> None:
        """Write a state snapshot and a trim if they are due; after a refusal, a later round or leader retries."""
        try:
            if is_snapshot_due(self._state, self.policy, self._settings, now_ms=now_ms):
                await self._write_snapshot()
            if find_trim(self._state, self.policy, now_ms=now_ms) is not None:
                await self._trim(now_ms)
        except StorageError:
            raise
        except QuiverError as error:
            logger.debug("retention deferred", extra=facts(group=self._member.group, reason=error.message))

    async def _clean(self) -> None:
        """Drop the state of removed clients; after a refusal, a later round or leader retries."""
        try:
            await self.cleaner.clean()
        except StorageError:
            raise
        except QuiverError as error:
            logger.debug("clients not dropped yet", extra=facts(group=self._member.group, reason=error.message))

    async def _write_snapshot(self) -> None:
        """Write the state into the log, at an index that follows everything the state includes."""
        async with self._gate.quiesce():
            if not self._gate.is_current:
                return  # the new leader writes it
            done = await self._gate.propose_snapshot(self._state.entry_steps())
        await done

    async def _trim(self, now_ms: int) -> None:
        """Trim to what the policy allows, every hold that a client may count on included."""
        if self.source is not None:
            await _confirm(self.source)
        await self._gate.wait_ready()
        policy = self.policy if self.source is None else self.source.policy()
        point = find_trim(self._state, policy, now_ms=now_ms)
        if point is None:
            return  # an earlier leader has already trimmed, or a hold was placed
        outcome = self._gate.propose_entry(TrimEntry(point.index, point.offset))
        self._no_trim.clear()
        try:
            await outcome
        finally:
            self._no_trim.set()
        logger.info("records trimmed", extra=facts(group=self._member.group, first_offset=point.offset))


async def _confirm(source: PolicySource) -> None:
    try:
        async with timeout(CONFIRM_TIMEOUT_S):
            await source.confirm()
    except TimeoutError:
        raise UnavailableError("not done: the retention policy was not confirmed in time") from None


def find_trim(state: PartitionState, policy: RetentionPolicy, *, now_ms: int) -> TrimPoint | None:
    """Return the newest point to which the partition may be trimmed now; None if nothing may go."""
    points = [point for point in reversed(state.trim_points) if point.index > state.trimmed_index]
    consumed_offset = _consumed_offset(state, policy) if points else -1  # once: there may be many consumers
    return next(
        (point for point in points if _may_trim(state, point, policy, now_ms=now_ms, consumed_offset=consumed_offset)),
        None,
    )


def is_snapshot_due(
    state: PartitionState, policy: RetentionPolicy, settings: PartitionSettings, *, now_ms: int
) -> bool:
    """Return whether the log has grown, or aged, enough since its last state snapshot."""
    last = state.trim_points[-1] if state.trim_points else None
    new_bytes = state.record_bytes - (last.record_bytes if last is not None else 0)
    new_entries = state.applied_index - (last.index if last is not None else 0)
    if new_bytes >= _snapshot_distance_bytes(policy, settings) or new_entries >= settings.summary_entries:
        return True
    if policy.age_ms is None or not new_bytes:
        return False
    return now_ms - (last.newest_ms if last is not None else 0) >= policy.age_ms // SNAPSHOTS_PER_BOUND


def _snapshot_distance_bytes(policy: RetentionPolicy, settings: PartitionSettings) -> int:
    if policy.size_bytes is None:
        return settings.summary_bytes
    return min(settings.summary_bytes, max(policy.size_bytes // SNAPSHOTS_PER_BOUND, SNAPSHOT_BYTES_MIN))


def _may_trim(
    state: PartitionState, point: TrimPoint, policy: RetentionPolicy, *, now_ms: int, consumed_offset: int
) -> bool:
    """Return whether all records before a trim point may go; `consumed_offset` is what all consumers have passed."""
    if policy.held_offset is not None and point.offset > policy.held_offset:
        return False
    is_old = policy.age_ms is not None and now_ms - point.newest_ms > policy.age_ms
    is_over = policy.size_bytes is not None and state.record_bytes - point.record_bytes >= policy.size_bytes
    return is_old or is_over or point.offset <= consumed_offset


def _consumed_offset(state: PartitionState, policy: RetentionPolicy) -> int:
    """Return the offset that all consumers have passed; -1 without consumers, since nothing has been consumed.

    One step for all of them, in which no cursor moves: `CURSORS_MAX` is a few milliseconds.
    """
    consumers, cursors = policy.consumers or (), state.cursors
    if len(consumers) > len(cursors):
        return -1  # so one has no cursor
    try:
        return min(map(cursors.__getitem__, consumers), default=-1)
    except KeyError:
        return -1
