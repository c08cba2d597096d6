"""The log of one partition on disk: the Raft log and the record log in one.

Owned by one event loop. Appends, cuts and resets change what the log *is* at once and reach the disk
in that order through its `Writer`. Readers run beside it.

Invariants:
- entries are consecutive by index and records by offset, from `first_*` to `end_*`;
- `durable_end_index` ≤ `end_index`; what lies below it is on disk (by the log's durability setting) and
  stays there through any crash; it goes back only when the owner cuts the log;
- after the first failed write or sync the log takes nothing more, for good: it stays readable up to
  what was durable, and nothing is ever synced again (a second sync would lie).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from quiver.clock import Clock
from quiver.config import LogSettings
from quiver.errors import DamageError, OverloadedError, RequestError, StorageError, TrimmedError, invariant
from quiver.model import Index, Offset, Term
from quiver.record.batch import Batch
from quiver.storage.disk import Disk
from quiver.storage.executor import Executor
from quiver.storage.frames import SegmentHeader
from quiver.storage.reader import Place, Wanted, read_batches, take_wanted
from quiver.storage.recovery import Damage, Recovery, cut_damage, recover
from quiver.storage.segment import Segment, segment_name
from quiver.storage.tail import TailBudget, TailCache
from quiver.storage.truncation import remove_prefix, start_over
from quiver.storage.writer import Writer

BEGINNING = Offset(0)


class LogStatus(msgspec.Struct, frozen=True):
    """A snapshot of a log."""

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
    """A sequence of batches on disk. Make one with `Log.open`; close it with `close`."""

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
    ) -> None:
        self.directory = directory
        self.damage = recovery.damage
        """What recovery found; empty for a whole log."""
        self.warnings = recovery.warnings
        self.on_durable: Callable[[Index], None] | None = None
        """Called in the event loop whenever `durable_end_index` has grown, with its new value."""
        self.on_failure: Callable[[StorageError], None] | None = None
        """Called once, when the log has failed."""
        self._disk = disk
        self._executor = executor
        self._clock = clock
        self._settings = settings
        self._tails = tails
        self._segments = recovery.segments
        self._writer = Writer(
            directory,
            self._segments,
            disk=disk,
            executor=executor,
            clock=clock,
            settings=settings,
            report_durable=self._handle_durable,
            report_failure=self._handle_failure,
        )
        self._cuts = 0
        self._removing: frozenset[Segment] = frozenset()
        self._view_segments()

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
        discard_damage: bool = False,
        verify: bool = False,
    ) -> Log:
        """Open a log directory, making it if there is none; blocking, so that many can be opened in parallel.

        With damage found the log serves what lies before it and refuses appends, unless `discard_damage` is
        given: then everything from the first damage on is set aside, and the caller owes the cluster not to
        act as if it still had it (`log.damage` tells the range). A crash while it is set aside may leave no
        trace of the damage: note the range first, from a log opened without `discard_damage`.

        Sealed segments are believed by their footer; with `verify` they are read whole, as after a read that
        has met damage. Logs of one node share `tails`, the memory for their newest batches.

        Raises:
            DamageError: the directory cannot be understood at all.
            StorageError: the disk failed.
        """
        try:
            recovery = _open_directory(disk, directory, settings, clock.wall_ms(), verify=verify)
            damage = recovery.damage
            if damage and discard_damage:
                recovery = cut_damage(disk, directory, recovery)
            log = cls(directory, recovery, disk=disk, executor=executor, clock=clock, settings=settings, tails=tails)
            log.damage = damage
            if damage and not discard_damage:
                log._stop_at_damage()
            else:
                log._writer.open_active()
        except OSError as error:
            raise StorageError(f"{directory}: cannot open the log: {error}") from error
        return log

    def _stop_at_damage(self) -> None:
        """Serve what lies before the first damage and take nothing."""
        first = min(self.damage, key=lambda damage: damage.first_index)
        self._writer.failure = DamageError(f"{self.directory}: {first}")
        self._writer.durable_end = self._end_index = first.first_index
        segment = self._segments[self._segment_of_index(first.first_index)]
        self._end_offset, self._last_term = segment.end_offset, segment.last_term
        self._tail = TailCache(self._end_index, bytes_max=0)

    def _view_segments(self) -> None:
        """Let the log end where its segments end."""
        last = self._segments[-1]
        self._end_index, self._end_offset, self._last_term = last.end_index, last.end_offset, last.last_term
        self._tail = TailCache(last.end_index, bytes_max=self._settings.tail_cache_bytes_max, budget=self._tails)

    async def close(self) -> None:
        """Make what was appended durable, and close; idempotent. A failed log closes without an error."""
        await self._writer.close()
        self._tail.close()

    # -- what the log is -------------------------------------------------------------------------

    @property
    def first_index(self) -> Index:
        """Return the index of the oldest entry kept."""
        return self._segments[0].first_index

    @property
    def end_index(self) -> Index:
        """Return the index that the next appended entry must have."""
        return self._end_index

    @property
    def durable_end_index(self) -> Index:
        """Return the index behind the last durable entry."""
        return self._writer.durable_end

    @property
    def first_offset(self) -> Offset:
        """Return the offset of the oldest record kept."""
        return self._segments[0].first_offset

    @property
    def end_offset(self) -> Offset:
        """Return the offset that the next appended record gets."""
        return self._end_offset

    @property
    def last_term(self) -> Term:
        """Return the term of the last entry, also when retention has removed it."""
        return self._last_term

    def term_at(self, index: Index) -> Term | None:
        """Return an entry's term; None if the log does not know it (it reaches one entry below `first_index`)."""
        if not self.first_index - 1 <= index < self._end_index:
            return None
        if index >= self._tail.first_index:
            return self._tail.term_at(index)
        return self._segments[self._segment_of_index(max(index, self.first_index))].term_at(index)

    def offset_after(self, index: Index) -> Offset | None:
        """Return the offset of the first record behind an entry; None if the log does not know the entry."""
        if not self.first_index - 1 <= index < self._end_index:
            return None
        return self._end_offset if index + 1 == self._end_index else self._base_offset_of(Index(index + 1))

    def term_starts(self) -> list[tuple[Index, Term]]:
        """Return each term in the log with the first index that the log still has of it, in order."""
        starts: list[tuple[Index, Term]] = []
        durable_end = self._writer.durable_end
        for segment in self._segments:
            for start in segment.terms:
                # A segment that waits for a cut, or lies behind damage, knows more than the log has.
                if start[0] < durable_end and (not starts or starts[-1][1] != start[1]):
                    starts.append(start)
        for index in range(durable_end, self._end_index):
            term = self._tail.term_at(index)
            if not starts or starts[-1][1] != term:
                starts.append((Index(index), term))
        return starts

    def status(self) -> LogStatus:
        """Return a snapshot for people and metrics."""
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
        """Add stamped batches at the end; readers see them at once, `wait_durable` tells when they are safe.

        All or nothing: on an error none was taken. Whoever may refuse work calls `check_room` first.

        Raises:
            LogClosedError: the log is closed or has failed.
        """
        self._writer.check_open()
        self._advance_end(batches)
        self._tail.extend(batches)
        self._writer.enqueue(batches, sum([len(batch.data) for batch in batches]))

    def check_room(self, size_bytes: int) -> None:
        """Refuse work of this size while too much waits for the disk.

        Raises:
            OverloadedError: `pending_bytes_max` would be exceeded; nothing was done.
        """
        waiting_bytes = self._writer.pending_bytes
        if waiting_bytes and waiting_bytes + size_bytes > self._settings.pending_bytes_max:
            raise OverloadedError(f"{self.directory}: {waiting_bytes} bytes wait to be written; try again later")

    def _advance_end(self, batches: Sequence[Batch]) -> None:
        """Let the log end behind `batches`, which must follow it without a gap."""
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

    async def wait_durable(self, end_index: Index) -> None:
        """Wait until every entry below `end_index` is durable; waiters are woken in the order of their index.

        Raises:
            LogFailedError: the disk failed first; a restart tells what is there.
            LogClosedError: the entry was cut off, or the log was closed, before it was durable.
        """
        waiter = self._writer.wait_durable_nowait(end_index)
        if waiter is not None:
            await waiter

    def _handle_durable(self, durable_end: Index) -> None:
        self._tail.evict(durable_end)
        if self.on_durable is not None:
            self.on_durable(durable_end)

    def _handle_failure(self, error: StorageError) -> None:
        """Show only what is durable from now on."""
        if self._end_index > self._writer.durable_end:
            with suppress(StorageError):  # nothing is appended any more, wherever the log ends
                self._end_at(self._writer.durable_end)
        if self.on_failure is not None:
            self.on_failure(error)

    # -- cutting ---------------------------------------------------------------------------------

    def truncate_suffix(self, end_index: Index) -> None:
        """Drop the entries at or behind `end_index`, at once for readers; what is appended next replaces them.

        Raises:
            StorageError: the disk does not tell where they begin; nothing was dropped, and the node must stop.
        """
        self._writer.check_open()
        invariant(self.first_index <= end_index <= self._end_index, "a cut lies inside the log", end_index=end_index)
        if end_index < self._end_index:
            self._end_at(end_index)
            self._writer.cut(end_index)

    def _end_at(self, end_index: Index) -> None:
        """Let the log end at `end_index`, which lies before its end now."""
        term = self.term_at(Index(end_index - 1))
        assert term is not None, "the entry before a cut is in the log or just before it"
        self._end_offset = self._base_offset_of(end_index)
        self._cuts += 1
        self._end_index, self._last_term = end_index, term
        self._tail.truncate(end_index)

    def _base_offset_of(self, index: Index) -> Offset:
        """Return the offset at which an entry begins; reads the disk, briefly, if it is not in memory.

        Raises:
            StorageError: it cannot be read.
        """
        if index >= self._tail.first_index:
            return self._tail.get(index).header.base_offset
        segment = self._segments[self._segment_of_index(index)]
        place = Place([segment], segment.position_before_index(index), segment.size_bytes)
        wanted = Wanted(first_index=index, end_index=index + 1, bytes_max=1)
        try:
            return read_batches(self._disk, self.directory, place, wanted)[0].header.base_offset
        except OSError as error:
            raise StorageError(f"{self.directory}: entry {index} cannot be read: {error}") from error

    def start_below(self, first_index: Index) -> SegmentHeader:
        """Return the header of the segment that `truncate_prefix(first_index)` would let the log start with."""
        return self._segments[self._count_below(first_index)].header

    async def truncate_prefix(self, first_index: Index) -> None:
        """Remove the whole segments that lie below `first_index`; never the last one."""
        await self._remove_oldest(self._count_below(first_index))

    def _count_below(self, first_index: Index) -> int:
        """Return how many of the oldest segments lie below `first_index`, the last one never among them."""
        count = 0
        while count < len(self._segments) - 1 and self._segments[count].end_index <= first_index:
            count += 1
        return count

    async def roll_if_old(self) -> None:
        """Seal the active segment if it is old enough, so that it can be removed when its turn comes."""
        active = self._segments[-1]
        is_old = self._clock.wall_ms() - active.header.created_ms >= self._settings.segment_age_ms_max
        if is_old and not active.is_empty and not active.is_sealed:
            await self._writer.run_exclusively(self._writer.plan_roll)

    async def _remove_oldest(self, count: int) -> None:
        oldest = frozenset(self._segments[:count])
        if oldest:
            await self._writer.run_exclusively(partial(self._plan_removal, oldest), apply=self._finish_removal)

    def _plan_removal(self, oldest: frozenset[Segment]) -> Callable[[], None]:
        """Return the file work that removes what of `oldest` is still the log's, and not its last segment."""
        self._removing = oldest.intersection(self._segments[:-1])
        names = [segment.name for segment in self._segments if segment in self._removing]
        return partial(remove_prefix, self._disk, self.directory, names)

    def _finish_removal(self, _: None) -> None:
        # The log starts later only now that the files are gone for good: its start never goes back.
        self._segments[:] = [segment for segment in self._segments if segment not in self._removing]
        self._removing = frozenset()
        self._tail.forget(self.first_index)

    async def reset(self, *, first_index: Index, first_offset: Offset, previous_term: Term) -> None:
        """Drop everything and start over, empty, at another place (a snapshot was installed).

        The log is the new one at once, and takes appends; on disk after this returns: nothing of the old one.
        """
        self._writer.check_open()
        self._cuts += 1
        header = SegmentHeader(
            generation=self._segments[-1].header.generation + 1,
            first_index=first_index,
            first_offset=first_offset,
            previous_term=previous_term,
            created_ms=self._clock.wall_ms(),
        )
        done = self._writer.start_over(Segment(header, segment_name(first_index)))
        self._tail.close()
        self._view_segments()
        await done

    # -- reading ---------------------------------------------------------------------------------

    def read_entries_nowait(self, first_index: Index, *, end_index: Index, bytes_max: int) -> list[Batch] | None:
        """Return entries from memory, at least one if there is one; None if they must be read from disk."""
        end_index = min(end_index, self._end_index)
        if first_index < self._tail.first_index:
            return None if first_index < end_index else []
        return self._tail.take(first_index, end_index=end_index, bytes_max=bytes_max)

    async def read_entries(self, first_index: Index, *, end_index: Index, bytes_max: int) -> list[Batch]:
        """Return entries from `first_index` on, at most `bytes_max` bytes but at least one; empty at the end.

        Raises:
            TrimmedError: `first_index` lies below the log's start.
            DamageError: the next entry fails its checksum.
        """
        found = self.read_entries_nowait(first_index, end_index=end_index, bytes_max=bytes_max)
        while found is None:
            if first_index < self.first_index:
                raise TrimmedError(f"entry {first_index} was removed; the log starts at {self.first_index}")
            at = self._segment_of_index(first_index)
            position = self._segments[at].position_before_index(first_index)
            end = min(end_index, self._end_index, self._tail.first_index)
            wanted = Wanted(first_index=first_index, end_index=end, bytes_max=bytes_max)
            found = await self._read_disk(at, position, wanted)
            if found is None:
                found = self.read_entries_nowait(first_index, end_index=end_index, bytes_max=bytes_max)
        return found

    async def read_records(self, first_offset: Offset, *, end_offset: Offset, bytes_max: int) -> list[Batch]:
        """Return data batches from the one that holds `first_offset`, none that reaches past `end_offset`.

        At most `bytes_max` bytes but at least one batch; empty when `first_offset` is at the end.

        Raises:
            TrimmedError: `first_offset` lies below the log's start.
            RequestError: `first_offset` lies behind the log's end.
            DamageError: the next batch fails its checksum.
        """
        while True:
            if first_offset < self.first_offset:
                raise TrimmedError(f"offset {first_offset} was removed; the log starts at {self.first_offset}")
            if first_offset > self._end_offset:
                raise RequestError(f"offset {first_offset} lies behind the end, {self._end_offset}")
            if first_offset >= min(end_offset, self._end_offset):
                return []
            wanted = Wanted(
                first_offset=first_offset,
                end_offset=end_offset,
                end_index=self._end_index,
                bytes_max=bytes_max,
                data_only=True,
            )
            index = self._tail.index_of_offset(first_offset)
            if index is not None:
                return self._take_from_tail(index, wanted)
            at = bisect_right(self._segments, first_offset, key=_first_offset_of) - 1
            position = self._segments[at].position_before_offset(first_offset)
            wanted = msgspec.structs.replace(wanted, end_index=self._tail.first_index)
            found = await self._read_disk(at, position, wanted)
            if found is not None:
                return found

    def peek_record(self, offset: Offset) -> Batch | None:
        """Return the data batch that holds an offset, if it is in memory; it may not be committed."""
        index = self._tail.index_of_offset(offset)
        return None if index is None else self._tail.get(index)

    async def find_timestamp(
        self, timestamp: int, *, first_offset: Offset = BEGINNING, end_offset: Offset
    ) -> Offset | None:
        """Return the first offset of a range whose record is not older than `timestamp`; None if there is none.

        Both ends of the range lie between batches.

        Raises:
            DamageError: a batch on the way fails its checksum.
        """
        wanted = Wanted(
            timestamp_min=timestamp,
            first_offset=first_offset,
            end_offset=end_offset,
            end_index=0,
            bytes_max=1,
            data_only=True,
        )
        found: list[Batch] | None = None
        while found is None:
            found = await self._find_timestamp(wanted)
        for batch in found:
            return next(record.offset for record in batch.records() if record.timestamp >= timestamp)
        return None

    async def _find_timestamp(self, wanted: Wanted) -> list[Batch] | None:
        """Return the first batch that is not older than wanted, on disk or else in memory; None to look again."""
        tail_index = self._tail.first_index
        newest = wanted.timestamp_min
        at = next((n for n, segment in enumerate(self._segments) if segment.max_timestamp >= newest), None)
        if at is not None and self._segments[at].first_index < tail_index:
            segment = self._segments[at]
            # The index may lead to what is being written: do not begin behind the last entry that is on disk.
            position = min(segment.position_before_timestamp(newest), segment.position_before_index(tail_index - 1))
            found = await self._read_disk(at, position, msgspec.structs.replace(wanted, end_index=tail_index))
            if found is None or found:
                return found
        if self._tail.first_index > tail_index:
            return None  # batches have left the memory meanwhile, and the disk was not searched for them
        return self._take_from_tail(tail_index, msgspec.structs.replace(wanted, end_index=self._end_index))

    def _take_from_tail(self, first_index: Index, wanted: Wanted) -> list[Batch]:
        return take_wanted(map(self._tail.get, range(first_index, self._end_index)), wanted)

    async def _read_disk(self, at: int, first_position: int, wanted: Wanted) -> list[Batch] | None:
        """Read from segment number `at` on; None if the log was cut meanwhile and the caller must look again."""
        cuts, segments = self._cuts, self._segments[at:]
        place = Place(segments, first_position, segments[-1].size_bytes)
        try:
            found = await self._executor.submit(partial(read_batches, self._disk, self.directory, place, wanted))
        except (DamageError, FileNotFoundError) as error:
            if cuts != self._cuts or segments[0] not in self._segments:
                return None
            if isinstance(error, DamageError):
                raise
            if segments[0] in self._removing:
                raise TrimmedError(f"{segments[0].name} is being removed by retention") from None
            raise StorageError(f"{self.directory}: a segment is missing: {error}") from error
        except OSError as error:
            raise StorageError(f"{self.directory}: cannot be read: {error}") from error
        # What was cut while it was read may be mixed with what replaced it.
        return found if cuts == self._cuts else None

    def _segment_of_index(self, index: int) -> int:
        return bisect_right(self._segments, index, key=_first_index_of) - 1


def _open_directory(disk: Disk, directory: str, settings: LogSettings, now_ms: int, *, verify: bool) -> Recovery:
    """Recover a directory, or make an empty log in it."""
    _make_directory(disk, directory)
    recovery = recover(disk, directory, index_interval_bytes=settings.index_interval_bytes, trust_footers=not verify)
    if not recovery.segments:
        header = SegmentHeader(
            generation=0, first_index=Index(1), first_offset=Offset(0), previous_term=Term(0), created_ms=now_ms
        )
        recovery.segments.append(Segment(header, segment_name(1)))
        start_over(disk, directory, recovery.segments[0]).close()
    return recovery


def _make_directory(disk: Disk, path: str) -> None:
    """Make a folder and those above it. On disk after this returns: all their names."""
    parent = path.rpartition("/")[0] or ("/" if path.startswith("/") else ".")
    if not disk.exists(path):
        if parent not in ("/", "."):
            _make_directory(disk, parent)
        disk.make_directory(path)
    disk.sync_directory(parent)


def _first_index_of(segment: Segment) -> Index:
    return segment.first_index


def _first_offset_of(segment: Segment) -> Offset:
    return segment.first_offset
