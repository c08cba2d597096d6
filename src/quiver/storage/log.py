"""The log of one partition on disk: the Raft log and the record log are the same log.

Owned by one event loop. Appends, truncations and resets change the log's state immediately and reach the disk in the
same order through its `LogWriter`. Reads run concurrently with them.

Invariants:
- entries are consecutive by index and records by offset, from `first_*` to `end_*`;
- `durable_end_index` ≤ `end_index`; entries below it are on disk (according to the log's durability setting) and
  survive any crash; it decreases only when the owner truncates or resets the log;
- after the first failed write or sync the log rejects all writes permanently: it stays readable up to its durable
  end, and nothing is synced again (the kernel may report a second sync as successful although bytes were lost).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from quiver.clock import Clock
from quiver.config import LogSettings
from quiver.errors import DamageError, OverloadedError, RequestError, StorageError, TrimmedError, invariant
from quiver.model import Index, Offset, Term
from quiver.record.batch import Batch
from quiver.storage.disk import Disk, DiskSpace
from quiver.storage.disk_reads import DiskReads
from quiver.storage.executor import Executor, Lane
from quiver.storage.frames import SegmentHeader
from quiver.storage.log_directory import open_directory
from quiver.storage.reader import UNBOUNDED, ReadFilter, SegmentRange, filter_batches, read_batches
from quiver.storage.recovery import Damage, Recovery, move_damage_aside
from quiver.storage.segment import Segment, segment_name
from quiver.storage.tail import TailBudget, TailCache
from quiver.storage.truncation import remove_prefix
from quiver.storage.writer import LogTimings, LogWriter

if TYPE_CHECKING:
    from quiver.storage.sealing import LogCipher

BEGINNING = Offset(0)


class LogStatus(msgspec.Struct, frozen=True):
    """The state of a log at one moment."""

    first_index: Index
    end_index: Index
    durable_end_index: Index
    first_offset: Offset
    end_offset: Offset
    last_term: Term
    segments: int
    size_bytes: int
    pending_bytes: int
    failure: str | None
    damage: tuple[Damage, ...]


class Log:
    """A sequence of batches on disk. Create it with `Log.open`; release it with `close`."""

    def __init__(
        self,
        directory: str,
        recovery: Recovery,
        *,
        disk: Disk,
        executor: Executor,
        clock: Clock,
        settings: LogSettings,
        tails: TailBudget | None,
        timings: LogTimings | None = None,
        cipher: LogCipher | None = None,
        space: DiskSpace | None = None,
    ) -> None:
        self.directory = directory
        self.damage = recovery.damage
        """The damage that recovery found; empty for an intact log."""
        self.warnings = recovery.warnings
        self.on_durable: Callable[[Index], None] | None = None
        """Called in the event loop with the new `durable_end_index` each time it grows."""
        self.on_failure: Callable[[StorageError], None] | None = None
        """Called once, when the log fails."""
        self._disk = disk
        self._executor = executor
        self._clock = clock
        self._settings = settings
        self._tails = tails
        self._cipher = cipher
        self._segments = recovery.segments
        self._writer = LogWriter(
            directory,
            self._segments,
            disk=disk,
            executor=executor,
            clock=clock,
            settings=settings,
            timings=timings or LogTimings(),
            report_durable=self._handle_durable,
            report_failure=self._handle_failure,
            cipher=cipher,
            space=space,
        )
        self._truncations = 0
        self._removing: frozenset[Segment] = frozenset()
        self._reads = DiskReads(directory, executor)
        self._adopt_segments_end()

    # -- opening ---------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        directory: str,
        *,
        disk: Disk,
        executor: Executor,
        clock: Clock,
        settings: LogSettings,
        tails: TailBudget | None = None,
        timings: LogTimings | None = None,
        cipher: LogCipher | None = None,
        space: DiskSpace | None = None,
        discard_damage: bool = False,
        verify: bool = False,
        is_synced: bool = False,
    ) -> Log:
        """Open a log directory, creating it if it does not exist; blocking, so that many can be opened in parallel.

        If recovery finds damage, the log serves the entries before it and rejects appends. With `discard_damage`,
        everything from the first damage on is moved aside instead; the caller must not act as if the replica still
        had those entries (`log.damage` holds the range). A crash during the move may leave no trace of the damage,
        so record the range first, from a log opened without `discard_damage`.

        Recovery trusts the footer of a sealed segment; with `verify` it reads every segment completely, as it should
        after a read that found damage. Logs of one node share `tails`, the memory for their newest batches,
        `timings`, and `space`, which learns of writes that wait for room. With `cipher` every entry is encrypted on
        disk, and an entry that is not is damage. With `is_synced` the log is new and known to be durable.

        Raises:
            DamageError: the start of the log cannot be determined; nothing was changed.
            StorageError: the disk failed.
        """
        try:
            recovery = open_directory(
                disk, directory, settings, clock.wall_ms(), verify=verify, cipher=cipher, is_synced=is_synced
            )
            damage = recovery.damage
            if damage and discard_damage:
                recovery = move_damage_aside(disk, directory, recovery)
            log = cls(
                directory,
                recovery,
                disk=disk,
                executor=executor,
                clock=clock,
                settings=settings,
                tails=tails,
                timings=timings,
                cipher=cipher,
                space=space,
            )
            log.damage = damage
            if damage and not discard_damage:
                log._stop_at_damage()
            else:
                log._writer.prepare_active(is_synced=is_synced)
        except OSError as error:
            raise StorageError(f"{directory}: cannot open the log: {error}") from error
        return log

    def _stop_at_damage(self) -> None:
        """End the log at the first damage and reject writes."""
        first = min(self.damage, key=lambda damage: damage.first_index)
        self._writer.failure = DamageError(f"{self.directory}: {first}")
        self._writer.durable_end = self._end_index = first.first_index
        segment = self._segments[self._segment_of_index(first.first_index)]
        self._end_offset, self._last_term = segment.end_offset, segment.last_term
        self._tail = TailCache(self._end_index, bytes_max=0)

    def _adopt_segments_end(self) -> None:
        """Set the log's end to the end of its last segment, with an empty tail cache."""
        last = self._segments[-1]
        self._end_index, self._end_offset, self._last_term = last.end_index, last.end_offset, last.last_term
        self._tail = TailCache(last.end_index, bytes_max=self._settings.tail_cache_bytes_max, budget=self._tails)

    @property
    def is_out_of_space(self) -> bool:
        """Return whether appended entries wait for room on the disk."""
        return self._writer.is_held

    def stop_waiting(self) -> None:
        """Give up what waits for room on the disk, as `close` does: the log then rejects writes."""
        self._writer.stop_waiting()

    async def close(self) -> None:
        """Make all appended entries durable and close the files; idempotent. A failed log closes without an error.

        After this returns nothing uses the files: they can be removed.
        """
        self._reads.refuse()
        await self._writer.close()
        await self._reads.wait_ended()
        self._tail.close()

    # -- state -----------------------------------------------------------------------------------

    @property
    def first_index(self) -> Index:
        """Return the index of the oldest retained entry."""
        return self._segments[0].first_index

    @property
    def end_index(self) -> Index:
        """Return the index that the next appended entry must have."""
        return self._end_index

    @property
    def durable_end_index(self) -> Index:
        """Return the index after the last durable entry."""
        return self._writer.durable_end

    @property
    def first_offset(self) -> Offset:
        """Return the offset of the oldest retained record."""
        return self._segments[0].first_offset

    @property
    def end_offset(self) -> Offset:
        """Return the offset that the next appended record gets."""
        return self._end_offset

    @property
    def last_term(self) -> Term:
        """Return the term of the last entry, even if retention has removed it."""
        return self._last_term

    def term_at(self, index: Index) -> Term | None:
        """Return an entry's term; None if it is unknown. The term of the entry just before `first_index` is known."""
        if not self.first_index - 1 <= index < self._end_index:
            return None
        if index >= self._tail.first_index:
            return self._tail.term_at(index)
        return self._segments[self._segment_of_index(max(index, self.first_index))].term_at(index)

    def offset_after(self, index: Index) -> Offset | None:
        """Return the offset of the first record after an entry; None if the log does not contain the entry."""
        if not self.first_index - 1 <= index < self._end_index:
            return None
        return self._end_offset if index + 1 == self._end_index else self._base_offset_of(Index(index + 1))

    def term_starts(self) -> list[tuple[Index, Term]]:
        """Return each term in the log with the index of its first retained entry, in order."""
        starts: list[tuple[Index, Term]] = []
        durable_end = self._writer.durable_end
        for segment in self._segments:
            for start in segment.terms:
                # A segment with a pending truncation, or after damage, lists terms beyond the log's end.
                if start[0] < durable_end and (not starts or starts[-1][1] != start[1]):
                    starts.append(start)
        for index in range(durable_end, self._end_index):
            term = self._tail.term_at(index)
            if not starts or starts[-1][1] != term:
                starts.append((Index(index), term))
        return starts

    def status(self) -> LogStatus:
        """Return the log's state for the CLI, the dashboard and metrics."""
        return LogStatus(
            first_index=self.first_index,
            end_index=self._end_index,
            durable_end_index=self._writer.durable_end,
            first_offset=self.first_offset,
            end_offset=self._end_offset,
            last_term=self._last_term,
            segments=len(self._segments),
            size_bytes=sum(segment.size_bytes for segment in self._segments),
            pending_bytes=self._writer.pending_bytes,
            failure=str(self._writer.failure) if self._writer.failure else None,
            damage=self.damage,
        )

    # -- appending -------------------------------------------------------------------------------

    def append(self, batches: Sequence[Batch]) -> None:
        """Append stamped batches; reads see them immediately, `on_durable` reports when they are on disk.

        All or nothing: after an error no batch was appended. Call `check_room` first for work that may be rejected.

        Raises:
            LogClosedError: the log is closed or has failed; nothing was done.
        """
        self._writer.check_open()
        self._advance_end(batches)
        self._tail.extend(batches)
        self._writer.enqueue(batches, sum([len(batch.data) for batch in batches]))

    def check_room(self, size_bytes: int) -> None:
        """Reject work of this size while too many bytes, or too many logs, wait for the disk.

        Raises:
            OverloadedError: `pending_bytes_max` would be exceeded, or the executor's queue of writes is full; nothing
                was done.
        """
        self._executor.check_room(Lane.WRITES)
        waiting_bytes = self._writer.pending_bytes
        if waiting_bytes and waiting_bytes + size_bytes > self._settings.pending_bytes_max:
            raise OverloadedError(
                f"{self.directory}: not done: {waiting_bytes} bytes wait to be written "
                f"(limit {self._settings.pending_bytes_max}); retry with backoff"
            )

    def _advance_end(self, batches: Sequence[Batch]) -> None:
        """Move the log's end past `batches`, which must follow it without a gap."""
        index, offset, term = int(self._end_index), int(self._end_offset), self._last_term
        for batch in batches:
            header = batch.header
            if header.index != index or header.base_offset != offset or header.term < term:
                invariant(
                    False,  # noqa: FBT003 - the facts are costly to gather for every batch
                    "an appended batch follows the last one",
                    batch=header,
                    end_index=index,
                    end_offset=offset,
                    last_term=term,
                )
            index += 1
            offset += header.record_count
            term = header.term
        self._end_index, self._end_offset, self._last_term = Index(index), Offset(offset), term

    def _handle_durable(self, durable_end: Index) -> None:
        self._tail.evict(durable_end)
        if self.on_durable is not None:
            self.on_durable(durable_end)

    def _handle_failure(self, error: StorageError) -> None:
        """Move the log's end back to the durable end."""
        if self._end_index > self._writer.durable_end:
            with suppress(StorageError):  # the log rejects appends, so a wrong end does no harm
                self._end_at(self._writer.durable_end)
        if self.on_failure is not None:
            self.on_failure(error)

    # -- truncating ------------------------------------------------------------------------------

    def truncate_suffix(self, end_index: Index) -> None:
        """Discard the entries at or after `end_index`, immediately for reads; the next append replaces them.

        Raises:
            StorageError: their first offset cannot be read; nothing was discarded, and the node must stop.
        """
        self._writer.check_open()
        invariant(
            self.first_index <= end_index <= self._end_index, "a truncation is inside the log", end_index=end_index
        )
        if end_index < self._end_index:
            self._end_at(end_index)
            self._writer.truncate_suffix(end_index)

    def _end_at(self, end_index: Index) -> None:
        """Move the log's end back to `end_index`."""
        term = self.term_at(Index(end_index - 1))
        assert term is not None, "the entry before a truncation is in the log or just before its start"
        self._end_offset = self._base_offset_of(end_index)
        self._truncations += 1
        self._end_index, self._last_term = end_index, term
        self._tail.truncate(end_index)

    def _base_offset_of(self, index: Index) -> Offset:
        """Return the base offset of an entry; blocks on a short disk read if the entry is not in memory.

        Raises:
            StorageError: the entry cannot be read.
        """
        if index >= self._tail.first_index:
            return self._tail.get(index).header.base_offset
        segment = self._segments[self._segment_of_index(index)]
        part = SegmentRange([segment], segment.position_before_index(index), segment.size_bytes)
        read_filter = ReadFilter(first_index=index, end_index=index + 1, bytes_max=1)
        try:
            return read_batches(self._disk, self.directory, part, read_filter, self._cipher)[0].header.base_offset
        except OSError as error:
            raise StorageError(f"{self.directory}: entry {index} cannot be read: {error}") from error

    def start_below(self, first_index: Index) -> SegmentHeader:
        """Return the header of the segment that would be the first after `truncate_prefix(first_index)`."""
        return self._segments[self._count_below(first_index)].header

    async def truncate_prefix(self, first_index: Index) -> None:
        """Remove the segments that end at or below `first_index`; never the last one."""
        await self._remove_oldest(self._count_below(first_index))

    def _count_below(self, first_index: Index) -> int:
        """Return the number of oldest segments that end at or below `first_index`, not counting the last one."""
        count = 0
        while count < len(self._segments) - 1 and self._segments[count].end_index <= first_index:
            count += 1
        return count

    async def roll_if_old(self) -> None:
        """Seal the active segment if it has reached `segment_age_ms_max`, so that retention can remove it later."""
        active = self._segments[-1]
        is_old = self._clock.wall_ms() - active.header.created_ms >= self._settings.segment_age_ms_max
        if is_old and not active.is_empty and not active.is_sealed and not self._writer.is_held:
            await self._writer.run_exclusively(self._writer.plan_roll)

    async def _remove_oldest(self, count: int) -> None:
        if oldest := frozenset(self._segments[:count]):
            plan = partial(self._plan_removal, oldest)
            await self._writer.run_exclusively(plan, apply=self._finish_removal, frees=True)

    def _plan_removal(self, oldest: frozenset[Segment]) -> Callable[[], None]:
        """Return the file work that removes those of `oldest` that are still in the log and not its last segment."""
        unwritten = self._writer.unwritten_names
        kept = next((at for at, segment in enumerate(self._segments) if segment.name in unwritten), -1)
        self._removing = oldest.intersection(self._segments[:kept])
        names = [segment.name for segment in self._segments if segment in self._removing]
        return partial(remove_prefix, self._disk, self.directory, names)

    def _finish_removal(self, _: None) -> None:
        # `first_index` moves only after the files are durably removed, so that it never decreases after a crash.
        self._segments[:] = [segment for segment in self._segments if segment not in self._removing]
        self._removing = frozenset()
        self._tail.forget(self.first_index)

    async def reset(self, *, first_index: Index, first_offset: Offset, previous_term: Term) -> None:
        """Discard all entries and continue empty at another index, after a snapshot was installed.

        The log accepts appends at the new index immediately. On disk after this returns: only the new log.
        """
        self._writer.check_open()
        self._truncations += 1
        header = SegmentHeader(
            generation=self._segments[-1].header.generation + 1,
            first_index=first_index,
            first_offset=first_offset,
            previous_term=previous_term,
            created_ms=self._clock.wall_ms(),
        )
        done = self._writer.reset(Segment(header, segment_name(first_index)))
        self._tail.close()
        self._adopt_segments_end()
        await done

    # -- reading ---------------------------------------------------------------------------------

    def read_entries_nowait(self, first_index: Index, *, end_index: Index, bytes_max: int) -> list[Batch] | None:
        """Return entries from memory, at least one unless at the end; None if they must be read from disk."""
        end_index = min(end_index, self._end_index)
        if first_index < self._tail.first_index:
            return None if first_index < end_index else []
        return self._tail.take(first_index, end_index=end_index, bytes_max=bytes_max)

    async def read_entries(self, first_index: Index, *, end_index: Index, bytes_max: int) -> list[Batch]:
        """Return entries from `first_index` on, at most `bytes_max` bytes but at least one; empty at the end.

        Raises:
            TrimmedError: `first_index` is below the log's start.
            DamageError: the next entry fails its checksum.
            UnavailableError: not done; the log is closed.
        """
        found = self.read_entries_nowait(first_index, end_index=end_index, bytes_max=bytes_max)
        while found is None:
            if first_index < self.first_index:
                raise TrimmedError(f"entry {first_index} was removed: the log starts at index {self.first_index}")
            at = self._segment_of_index(first_index)
            position = self._segments[at].position_before_index(first_index)
            end = min(end_index, self._end_index, self._tail.first_index)
            read_filter = ReadFilter(first_index=first_index, end_index=end, bytes_max=bytes_max)
            found = await self._read_disk(at, position, read_filter, Lane.RECOVERY)
            if found is None:
                found = self.read_entries_nowait(first_index, end_index=end_index, bytes_max=bytes_max)
        return found

    async def read_records(
        self, first_offset: Offset, *, end_offset: Offset, bytes_max: int, first_bytes_max: int = UNBOUNDED
    ) -> list[Batch]:
        """Return data batches from the one that contains `first_offset`, none that extends beyond `end_offset`.

        At most `bytes_max` bytes but at least one batch; empty when `first_offset` is at the end.

        Raises:
            TrimmedError: `first_offset` is below the log's start.
            RequestError: `first_offset` is beyond the log's end.
            OverloadedError: not done; too many reads wait for the disk.
            DamageError: the next batch fails its checksum.
            UnavailableError: not done; the log is closed.
            LargeBatch: the first batch has more than `first_bytes_max` bytes.
        """
        while True:
            if first_offset < self.first_offset:
                raise TrimmedError(f"offset {first_offset} was removed: the log starts at offset {self.first_offset}")
            if first_offset > self._end_offset:
                raise RequestError(f"offset {first_offset} is beyond the log end offset {self._end_offset}")
            if first_offset >= min(end_offset, self._end_offset):
                return []
            read_filter = ReadFilter(
                first_offset=first_offset,
                end_offset=end_offset,
                end_index=self._end_index,
                bytes_max=bytes_max,
                first_bytes_max=first_bytes_max,
                data_only=True,
            )
            index = self._tail.index_of_offset(first_offset)
            self._tail.count_read(is_hit=index is not None)
            if index is not None:
                return self._read_tail(index, read_filter)
            at = bisect_right(self._segments, first_offset, key=attrgetter("first_offset")) - 1
            position = self._segments[at].position_before_offset(first_offset)
            read_filter = msgspec.structs.replace(read_filter, end_index=self._tail.first_index)
            found = await self._read_for_client(at, position, read_filter)
            if found is not None:
                return found

    def peek_record(self, offset: Offset) -> Batch | None:
        """Return the data batch that contains an offset, if it is in memory; it may be uncommitted."""
        index = self._tail.index_of_offset(offset)
        return None if index is None else self._tail.get(index)

    async def find_timestamp(
        self, timestamp: int, *, first_offset: Offset = BEGINNING, end_offset: Offset
    ) -> Offset | None:
        """Return the first offset of a range whose record is not older than `timestamp`; None if there is none.

        Both ends of the range must be batch boundaries.

        Raises:
            OverloadedError: not done; too many reads wait for the disk.
            DamageError: a batch that the search reads fails its checksum.
            UnavailableError: not done; the log is closed.
        """
        read_filter = ReadFilter(
            timestamp_min=timestamp,
            first_offset=first_offset,
            end_offset=end_offset,
            end_index=0,
            bytes_max=1,
            data_only=True,
        )
        found: list[Batch] | None = None
        while found is None:
            found = await self._find_timestamp(read_filter)
        # Undecoded: the tail keeps its batches, and must not keep what was decoded of them as well.
        return found[0].undecoded().find_timestamp(timestamp) if found else None

    async def _find_timestamp(self, read_filter: ReadFilter) -> list[Batch] | None:
        """Return the first matching batch, from disk or else from memory; None if the search must be repeated."""
        tail_index = self._tail.first_index
        timestamp = read_filter.timestamp_min
        at = next((n for n, segment in enumerate(self._segments) if segment.max_timestamp >= timestamp), None)
        if at is not None and self._segments[at].first_index < tail_index:
            segment = self._segments[at]
            # The sparse index may point to bytes that are being written: start no later than the last entry on disk.
            position = min(segment.position_before_timestamp(timestamp), segment.position_before_index(tail_index - 1))
            read_filter_on_disk = msgspec.structs.replace(read_filter, end_index=tail_index)
            found = await self._read_for_client(at, position, read_filter_on_disk)
            if found is None or found:
                return found
        if self._tail.first_index > tail_index:
            return None  # the cache evicted batches during the disk read, which did not search them
        return self._read_tail(tail_index, msgspec.structs.replace(read_filter, end_index=self._end_index))

    def _read_tail(self, first_index: Index, read_filter: ReadFilter) -> list[Batch]:
        return filter_batches(map(self._tail.get, range(first_index, self._end_index)), read_filter)

    async def _read_for_client(self, at: int, first_position: int, read_filter: ReadFilter) -> list[Batch] | None:
        """Read from disk as `_read_disk` does, unless too many clients wait for the disk already."""
        self._executor.check_room(Lane.READS)
        return await self._read_disk(at, first_position, read_filter, Lane.READS)

    async def _read_disk(self, at: int, first_position: int, read_filter: ReadFilter, lane: Lane) -> list[Batch] | None:
        """Read from segment number `at` on; None if the log was truncated meanwhile and the caller must retry."""
        truncations, segments = self._truncations, self._segments[at:]
        part = SegmentRange(segments, first_position, segments[-1].size_bytes)
        try:
            work = partial(read_batches, self._disk, self.directory, part, read_filter, self._cipher)
            found = await self._reads.run(work, lane)
        except (DamageError, FileNotFoundError) as error:
            if truncations != self._truncations or segments[0] not in self._segments:
                return None
            if isinstance(error, DamageError):
                raise
            if segments[0] in self._removing:
                raise TrimmedError(f"segment {segments[0].name} is being removed by retention") from None
            raise StorageError(f"{self.directory}: a segment file is missing: {error}") from error
        except OSError as error:
            raise StorageError(f"{self.directory}: cannot read the log: {error}") from error
        # A truncation during the read may have mixed discarded entries with their replacements.
        return found if truncations == self._truncations else None

    def _segment_of_index(self, index: int) -> int:
        return bisect_right(self._segments, index, key=attrgetter("first_index")) - 1
