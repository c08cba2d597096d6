"""Group commit: one flush writes all pending batches; it is planned on the event loop and run in the executor.

`FlushPlanner.plan` chooses positions, marks and segment rolls and updates the bookkeeping; it does no I/O. `Flush.run`
then executes the plan in the executor and touches only files. A log runs one flush at a time; batches that arrive
meanwhile join the next one.

On disk after `Flush.run` returns: all its batches, if `sync`; a sealed segment and the name of a new one always. If it
raises, any prefix or torn part of them may be on disk, and none of it has been reported as durable. If it raises
because the disk is full, it has given back what it wrote to the segment that did not fit; run again, it continues with
that segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from quiver.config import LogSettings
from quiver.errors import StorageError
from quiver.metrics import now_s
from quiver.model import Buffer
from quiver.record.batch import Batch
from quiver.record.header import SEALED_EXTRA_BYTES
from quiver.storage.disk import IOV_MAX, Disk, File, is_out_of_space
from quiver.storage.frames import MARK_BYTES, SEGMENT_HEADER_BYTES, SegmentHeader, encode_mark
from quiver.storage.segment import Segment, segment_name

if TYPE_CHECKING:
    from quiver.storage.sealing import LogCipher


class SegmentWrite:
    """The bytes that one flush writes to one segment file."""

    __slots__ = ("buffers", "footer", "is_new", "name", "position", "to_seal")

    def __init__(self, segment: Segment, *, is_new: bool) -> None:
        self.name = segment.name
        self.is_new = is_new
        self.position = 0 if is_new else segment.size_bytes
        self.buffers: list[Buffer] = [segment.header.encode()] if is_new else []
        self.to_seal: list[tuple[int, int]] = []
        """Of an encrypted log: which of the buffers are batches, and their indexes."""
        self.footer: bytes | None = None

    def add_to_seal(self, batch: Batch) -> None:
        """Append a batch that is to be sealed when the flush runs."""
        self.to_seal.append((len(self.buffers), batch.header.index))
        self.buffers.append(batch.data)

    def seal(self, cipher: LogCipher) -> None:
        """Replace the batches by their sealed forms; takes time, so it runs in the executor."""
        for at, index in self.to_seal:
            self.buffers[at] = cipher.seal_batch(self.buffers[at], index)
        self.to_seal.clear()  # a flush that met the end of the disk runs again


class Flush:
    """The file writes of one flush."""

    def __init__(self, disk: Disk, directory: str, *, sync: bool, cipher: LogCipher | None = None) -> None:
        self._disk = disk
        self._directory = directory
        self._sync = sync
        self._cipher = cipher
        self.writes: list[SegmentWrite] = []
        self.begun_s = 0.0
        """When a thread began to run it."""
        self.write_s = 0.0
        self.sync_s = 0.0
        self._finished = 0
        """How many writes are done: a flush that met the end of the disk continues after them."""
        self._interrupted: File | None = None

    def run(self, file: File | None) -> File | None:
        """Execute the writes, starting with the active `file`, if it is open; return the one that is active then."""
        self.begun_s = now_s()
        for write in self.writes[self._finished :]:
            if self._interrupted is not None:
                file, self._interrupted = self._interrupted, None
            elif write.is_new:
                file = self._disk.open(f"{self._directory}/{write.name}", create=True)
            elif file is None:
                file = self._disk.open(f"{self._directory}/{write.name}")
            try:
                self._write_segment(file, write)
            except BaseException as error:
                if is_out_of_space(error):
                    self._interrupt(file, write)
                else:
                    file.close()  # the log has failed, and only this flush holds a file that it created
                raise
            self._finished += 1
        return file

    def close(self) -> None:
        """Close the file of a flush that met the end of the disk and is not run again."""
        if self._interrupted is not None:
            self._interrupted.close()
            self._interrupted = None

    def _interrupt(self, file: File, write: SegmentWrite) -> None:
        """Give back what was written in vain: votes and snapshots need it while the log waits."""
        self._interrupted = file
        with suppress(OSError):  # else torn bytes stay at the end, as after a crash; the next run writes over them
            file.truncate(write.position)

    def _write_segment(self, file: File, write: SegmentWrite) -> None:
        if self._cipher is not None:
            write.seal(self._cipher)
        buffers = write.buffers if write.footer is None else [*write.buffers, write.footer]
        begun_s = now_s()
        write_all(file, buffers, write.position)
        written_s = now_s()
        if self._sync or write.is_new or write.footer is not None:
            sync_finally(file)  # on disk now: these batches, and the footer if the segment is sealed
        if write.is_new:
            self._disk.sync_directory(self._directory)  # on disk now: the new segment's name
        self.write_s += written_s - begun_s
        self.sync_s += now_s() - written_s
        if write.footer is not None:
            file.close()


class FlushPlanner:
    """Assigns file positions to batches. Owns the active segment's bookkeeping for its log."""

    def __init__(self, disk: Disk, directory: str, settings: LogSettings, *, cipher: LogCipher | None = None) -> None:
        self._disk = disk
        self._directory = directory
        self._settings = settings
        self._cipher = cipher
        self._extra_bytes = 0 if cipher is None else SEALED_EXTRA_BYTES
        """How many bytes longer a batch is on disk."""
        self.synced_bytes = SEGMENT_HEADER_BYTES
        """Bytes at the start of the active segment's file that are known to be synced."""
        self.marked_bytes = SEGMENT_HEADER_BYTES
        """Bytes of the file that the newest mark covers; the header needs no mark."""

    def plan(self, segments: list[Segment], batches: Sequence[Batch], *, now_ms: int, sync: bool) -> Flush:
        """Plan the append of batches, rolling segments when due; extends `segments` and their bookkeeping."""
        flush = Flush(self._disk, self._directory, sync=sync, cipher=self._cipher)
        active = segments[-1]
        if not active.is_sealed:
            flush.writes.append(self._begin_write(active))
        for batch in batches:
            size_bytes = len(batch.data) + self._extra_bytes
            if active.is_sealed or self._must_roll(active, size_bytes, now_ms):
                active = self._roll(flush, segments, now_ms)
            if self._cipher is None:
                flush.writes[-1].buffers.append(batch.data)
            else:
                flush.writes[-1].add_to_seal(batch)
            active.add(
                batch.header,
                position=active.size_bytes,
                size_bytes=size_bytes,
                index_interval_bytes=self._settings.index_interval_bytes,
            )
        return flush

    def plan_roll(self, segments: list[Segment], *, now_ms: int) -> Flush:
        """Plan to seal the active segment and start a new one."""
        flush = self.plan(segments, (), now_ms=now_ms, sync=True)
        self._roll(flush, segments, now_ms)
        return flush

    def plan_mark(self, segments: list[Segment], *, sync: bool) -> Flush | None:
        """Plan a mark that covers the synced bytes, without batches; None if the newest mark already covers them."""
        if segments[-1].is_sealed or self.synced_bytes <= self.marked_bytes:
            return None
        return self.plan(segments, (), now_ms=0, sync=sync)

    def finish_flush(self, segments: list[Segment], *, sync: bool) -> None:
        """Record that the last planned flush is complete."""
        if sync:
            self.synced_bytes = segments[-1].size_bytes

    def reset_active(self, size_bytes: int) -> None:
        """Record that another file is active now, which is synced up to `size_bytes` and covered by no mark."""
        self.synced_bytes, self.marked_bytes = size_bytes, SEGMENT_HEADER_BYTES

    def _begin_write(self, active: Segment) -> SegmentWrite:
        write = SegmentWrite(active, is_new=False)
        if self.synced_bytes > self.marked_bytes:
            write.buffers.append(encode_mark(self.synced_bytes))
            self.marked_bytes = self.synced_bytes
            active.size_bytes += MARK_BYTES
        return write

    def _must_roll(self, active: Segment, batch_bytes: int, now_ms: int) -> bool:
        settings = self._settings
        is_full = active.size_bytes + batch_bytes > settings.segment_bytes_max
        is_due = is_full or now_ms - active.header.created_ms >= settings.segment_age_ms_max
        return is_due and not active.is_empty

    def _roll(self, flush: Flush, segments: list[Segment], now_ms: int) -> Segment:
        before = segments[-1]
        if not before.is_sealed:
            # Synced with the footer before the next file exists: a successor proves to recovery that the seal is whole.
            flush.writes[-1].footer = before.seal().encode()
        header = SegmentHeader(
            generation=before.header.generation,
            first_index=before.end_index,
            first_offset=before.end_offset,
            previous_term=before.last_term,
            created_ms=now_ms,
        )
        segments.append(Segment(header, segment_name(header.first_index)))
        flush.writes.append(SegmentWrite(segments[-1], is_new=True))
        self.reset_active(SEGMENT_HEADER_BYTES)
        return segments[-1]


def sync_finally(file: File) -> None:
    """Make a file durable. A failed sync is final even if it fails for want of room: earlier bytes may be lost, too."""
    try:
        file.sync()
    except OSError as error:
        if is_out_of_space(error):
            raise StorageError(f"sync failed: {error}") from error
        raise


def write_all(file: File, buffers: Sequence[Buffer], position: int) -> None:
    """Write all buffers in order, continuing after a short write.

    Raises:
        OSError: as the disk raises it; some of the bytes may have been written.
    """
    for first in range(0, len(buffers), IOV_MAX):
        position = _write_some(file, buffers[first : first + IOV_MAX], position)


def _write_some(file: File, buffers: Sequence[Buffer], position: int) -> int:
    end = position + sum(map(len, buffers))
    position += file.write(buffers, position)
    while position < end:
        # Rare: a short write. A disk that can write nothing raises an error instead.
        buffers = _last_bytes(buffers, end - position)
        position += file.write(buffers, position)
    return end


def _last_bytes(buffers: Sequence[Buffer], length: int) -> list[Buffer]:
    """Return views of the last `length` bytes of `buffers`, none of them empty."""
    rest: list[Buffer] = []
    for buffer in reversed(buffers):
        if length <= 0:
            break
        rest.append(memoryview(buffer)[-length:])
        length -= len(buffer)
    return rest[::-1]
