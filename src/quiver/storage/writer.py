"""Serialize all file I/O of one log: appends, truncations, retention and resets, one task at a time.

The writer owns the segments, the open active file and the queue of batches that wait for the disk. Its tasks run in
the executor. Between two tasks it picks the next one in this order: a suffix truncation, then exclusive jobs
(retention, reset, roll), then one flush of all queued batches (group commit). A job plans its work when its turn
comes, and its result is applied before the next task begins, because the log may be truncated or replaced in between.

Durability is reported in index order, and only for entries that are on disk according to the log's durability setting.
The first failure is final: nothing is written or synced again, and every entry that was not durable is discarded.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from quiver.clock import Clock
from quiver.config import LogSettings
from quiver.errors import LogClosedError, LogFailedError, StorageError
from quiver.metrics import Histogram, now_s
from quiver.model import Index
from quiver.record.batch import Batch
from quiver.storage.disk import Disk, File
from quiver.storage.executor import Executor
from quiver.storage.flush import Flush, FlushPlanner, write_all
from quiver.storage.scan import CHUNK_BYTES
from quiver.storage.segment import Segment
from quiver.storage.truncation import replace_segments, truncate_suffix

if TYPE_CHECKING:
    from quiver.storage.sealing import LogCipher

T = TypeVar("T")
_Done = asyncio.Future[None]

MARK_AFTER_IDLE_S = 1.0
"""Idle time after the last flush before a mark that covers it is written."""


class LogTimings:
    """How long the stages of writes take; shared by all logs of a node. One value per write, not per batch."""

    __slots__ = ("fsync", "queue", "write")

    def __init__(self) -> None:
        self.queue = Histogram()
        """From the append of the oldest batch of a write until a thread begins the write."""
        self.write = Histogram()
        self.fsync = Histogram()

    def observe(self, flush: Flush, *, pending_since_s: float, sync: bool) -> None:
        """Count a finished write. Written out, like `Histogram.observe`: it is part of every awaited record."""
        for one, seconds in (
            (self.queue, flush.begun_s - pending_since_s),
            (self.write, flush.write_s),
            (self.fsync, flush.sync_s),
        ):
            if sync or one is not self.fsync:
                one.counts[bisect_left(one.bounds, seconds)] += 1
                one.total += seconds


class _Job(NamedTuple):
    """Exclusive file work that waits for its turn."""

    make_work: Callable[[], Callable[[], Any]]
    apply: Callable[[Any], None]
    done: _Done


class LogWriter:
    """Serializes all file I/O of one log. `Log` is its only user."""

    def __init__(
        self,
        directory: str,
        segments: list[Segment],
        *,
        disk: Disk,
        executor: Executor,
        clock: Clock,
        settings: LogSettings,
        timings: LogTimings,
        report_durable: Callable[[Index], None],
        report_failure: Callable[[StorageError], None],
        cipher: LogCipher | None = None,
    ) -> None:
        self.segments = segments
        self.durable_end = segments[-1].end_index
        self.failure: StorageError | None = None
        self.pending_bytes = 0
        self._directory = directory
        self._disk = disk
        self._executor = executor
        self._clock = clock
        self._settings = settings
        self._timings = timings
        self._report_durable = report_durable
        self._report_failure = report_failure
        self._planner = FlushPlanner(disk, directory, settings, cipher=cipher)
        self._file: File | None = None
        self._pending: list[Batch] = []
        self._pending_since_s = 0.0
        self._truncate_to: Index | None = None
        self._jobs: deque[_Job] = deque()
        self._is_working = False
        self._is_closing = False
        self._closing = asyncio.Lock()
        self._flushing_end: Index | None = None
        self._timer: asyncio.TimerHandle | None = None

    def open_active(self) -> None:
        """Open the active segment's file; blocking."""
        active = self.segments[-1]
        if not active.is_sealed:
            self._file = self._disk.open(f"{self._directory}/{active.name}")
            _rewrite(self._file, active.marked_bytes, active.size_bytes)
            self._file.sync()
            self._disk.sync_directory(self._directory)
            # On disk now: every byte that recovery read, and the file's name, however the previous process ended.
            self._planner.reset_active(active.size_bytes)

    # -- requests --------------------------------------------------------------------------------

    def enqueue(self, batches: Sequence[Batch], size_bytes: int) -> None:
        """Queue batches that follow the last queued one; start a flush immediately if the writer is idle."""
        if not self._pending:
            self._pending_since_s = now_s()
        self._pending.extend(batches)
        self.pending_bytes += size_bytes
        self._work()

    def truncate_suffix(self, end_index: Index) -> None:
        """Discard the entries at or after `end_index`, in the queue and on disk."""
        self._discard_pending(end_index)
        if end_index < self.segments[-1].end_index:
            self._truncate_to = end_index if self._truncate_to is None else min(end_index, self._truncate_to)
        self._work()

    def reset(self, segment: Segment) -> asyncio.Future[None]:
        """Replace all segments by `segment`, which is empty; the future completes when it is on disk."""
        self._discard_pending(Index(0))
        self._truncate_to = self._flushing_end = None
        self.segments[:] = [segment]
        self.durable_end = segment.end_index
        work = partial(replace_segments, self._disk, self._directory, segment)
        return self.run_exclusively(lambda: work, apply=partial(self._adopt, segment, segment))

    def run_exclusively(
        self, make_work: Callable[[], Callable[[], T]], *, apply: Callable[[T], None] | None = None
    ) -> asyncio.Future[None]:
        """Run file work between flushes, even if the caller stops waiting for it.

        `make_work` runs in the event loop when the job's turn comes; `apply` receives the result of the work before
        the next task begins.
        """
        self.check_open()
        return self._queue(make_work, apply or _ignore)

    def _queue(self, make_work: Callable[[], Callable[[], T]], apply: Callable[[T], None]) -> asyncio.Future[None]:
        done: _Done = asyncio.get_running_loop().create_future()
        self._jobs.append(_Job(make_work, apply, done))
        self._work()
        return done

    def plan_roll(self) -> Callable[[], None]:
        """Return the file work that seals the active segment and starts a new one, unless it is sealed or empty."""
        if self.segments[-1].is_sealed or self.segments[-1].is_empty:
            return _do_nothing
        flush = self._planner.plan_roll(self.segments, now_ms=self._clock.wall_ms())
        return partial(self._run_flush, flush)

    def check_open(self) -> None:
        """Raise `LogClosedError` if the log no longer accepts writes."""
        if self.failure is not None:
            raise LogClosedError(
                f"{self._directory}: not done: the log rejects writes: {self.failure}"
            ) from self.failure
        if self._is_closing:
            raise LogClosedError(f"{self._directory}: not done: the log is being closed")

    async def close(self) -> None:
        """Flush pending batches, mark them durable and close the file; idempotent, does not raise for a failed log."""
        async with self._closing:
            if self.failure is None:
                self._is_closing = True
                self._cancel_timer()
                await self._write_last()
            if self.failure is None:
                self.failure = LogClosedError(f"{self._directory}: the log is closed")
            self._close_file()

    async def _write_last(self) -> None:
        """Finish all tasks requested before the close, then write a mark that covers the whole file."""
        try:
            while self._pending or self._truncate_to is not None:
                await self._queue(lambda: _do_nothing, _ignore)  # jobs run before the flush, which starts next
            await self._queue(self._plan_last_mark, _ignore)
        except StorageError:
            pass  # the failure was reported; nothing more may be written

    def _plan_last_mark(self) -> Callable[[], None]:
        """Return work that syncs and marks the file, so that the next start can trust every byte after a clean stop."""
        file, size_bytes = self._file, self.segments[-1].size_bytes
        is_synced = self._planner.synced_bytes == size_bytes
        self._planner.synced_bytes = size_bytes
        flush = self._planner.plan_mark(self.segments, sync=True)

        def sync_and_mark() -> None:
            if file is not None and not is_synced:
                file.sync()
            if flush is not None:
                self._run_flush(flush)

        return sync_and_mark

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- work ------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Start the next task unless one is running."""
        if self._is_working or self.failure is not None:
            return
        if self._truncate_to is not None:
            self._begin_truncation(self._truncate_to)
        elif self._jobs:
            job = self._jobs.popleft()
            self._begin(job.make_work(), partial(_complete, job), job.done)
        elif self._pending:
            self._begin_flush()

    def _begin(self, work: Callable[[], T], then: Callable[[T], None], done: _Done | None = None) -> None:
        self._is_working = True
        self._executor.submit(work).add_done_callback(partial(self._finish, then, done))

    def _finish(self, then: Callable[[T], None], done: _Done | None, finished: asyncio.Future[T]) -> None:
        self._is_working = False
        error = finished.exception()
        if error is None:
            then(finished.result())
            self._work()
        else:
            failure = self._fail(error)
            if done is not None and not done.done():
                done.set_exception(failure)
            if not isinstance(error, OSError | StorageError):
                raise error  # a bug, not a disk error: the event loop's exception handler must see it

    def _begin_truncation(self, end_index: Index) -> None:
        self._truncate_to = None
        kept = [segment for segment in self.segments if segment.first_index <= end_index]
        work = partial(
            truncate_suffix,
            self._disk,
            self._directory,
            list(self.segments),
            end_index,
            index_interval_bytes=self._settings.index_interval_bytes,
        )
        self.segments[:] = kept
        self._begin(work, partial(self._finish_truncation, kept[-1]))

    def _finish_truncation(self, expected: Segment, truncated: tuple[Segment, File]) -> None:
        self._adopt(expected, *truncated)

    def _adopt(self, expected: Segment, replacement: Segment, file: File) -> None:
        """Continue with another active file, which is synced, unless a reset replaced the log in the meantime."""
        if self.segments[-1] is not expected:
            file.close()
            return
        self.segments[-1] = replacement
        self._close_file()
        self._file = file
        self._planner.reset_active(replacement.size_bytes)

    def _begin_flush(self) -> None:
        batches, self._pending = self._pending, []
        self.pending_bytes = 0
        sync = self._settings.durability == "fsync"
        flush = self._planner.plan(self.segments, batches, now_ms=self._clock.wall_ms(), sync=sync)
        self._flushing_end = self.segments[-1].end_index
        then = partial(self._finish_flush, flush, self._pending_since_s, sync=sync)
        self._begin(partial(self._run_flush, flush), then)

    def _run_flush(self, flush: Flush) -> None:
        """Run a flush in the executor. Only tasks use `_file`, and one task runs at a time, so it needs no lock."""
        self._file = flush.run(self._file)

    def _finish_flush(self, flush: Flush, pending_since_s: float, _: None, *, sync: bool) -> None:
        self._timings.observe(flush, pending_since_s=pending_since_s, sync=sync)
        self._planner.finish_flush(self.segments, sync=sync)
        flushed_end, self._flushing_end = self._flushing_end, None
        # A truncation during the flush lowers `_flushing_end`, a reset clears it: discarded entries are never reported.
        if flushed_end is not None and flushed_end > self.durable_end:
            self.durable_end = flushed_end
            self._report_durable(flushed_end)
        self._start_timer()

    def _discard_pending(self, end_index: Index) -> None:
        """Drop queued batches at or after `end_index`, and do not report those in flight as durable."""
        self._pending = [batch for batch in self._pending if batch.header.index < end_index]
        self.pending_bytes = sum(len(batch.data) for batch in self._pending)
        self.durable_end = min(self.durable_end, end_index)
        if self._flushing_end is not None:
            self._flushing_end = min(self._flushing_end, end_index)

    def _fail(self, error: BaseException) -> StorageError:
        """Stop permanently: after a failed sync the kernel may drop the bytes and still let the next sync succeed."""
        self.failure = failure = LogFailedError(
            f"{self._directory}: {error}; the log rejects all writes until the node restarts"
        )
        failure.__cause__ = error
        self._cancel_timer()
        self._discard_pending(self.durable_end)
        for job in self._jobs:
            if not job.done.done():
                job.done.set_exception(failure)
        self._jobs.clear()
        self._report_failure(failure)
        return failure

    # -- timer -----------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        """Schedule the next sync (durability `interval`) or the mark that covers the last flush (`fsync`)."""
        if self._timer is None and not self._is_closing and self._settings.durability != "none":
            is_fsync = self._settings.durability == "fsync"
            delay_s = MARK_AFTER_IDLE_S if is_fsync else self._settings.flush_interval_ms / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._handle_timer)

    def _handle_timer(self) -> None:
        self._timer = None
        if self._settings.durability == "interval":
            done = self.run_exclusively(self._plan_sync)
            done.add_done_callback(_retrieve)
        elif not self._is_working and not self._pending:
            flush = self._planner.plan_mark(self.segments, sync=False)
            if flush is not None:
                self._begin(partial(self._run_flush, flush), _ignore)

    def _plan_sync(self) -> Callable[[], None]:
        file = self._file
        assert file is not None, "a log that has flushed has an open file"
        self._planner.finish_flush(self.segments, sync=True)
        return file.sync

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _rewrite(file: File, first_position: int, end_position: int) -> None:
    """Write the bytes of a range again, so that the next sync includes them.

    After a failed sync the bytes stay in the page cache, where a restarted process reads them, but the kernel counts
    them as clean: the next sync would succeed without writing them.
    """
    while first_position < end_position:
        data = file.read(min(CHUNK_BYTES, end_position - first_position), first_position)
        write_all(file, [data], first_position)
        first_position += len(data)


def _do_nothing() -> None:
    """Do no file work: for jobs that only wait for their turn."""


def _ignore(_: object) -> None:
    """Ignore the result of a task that changes no bookkeeping."""


def _complete(job: _Job, result: object) -> None:
    job.apply(result)
    if not job.done.done():
        job.done.set_result(None)


def _retrieve(done: asyncio.Future[None]) -> None:
    """Mark the exception of a background job as retrieved: the log has already reported the failure."""
    done.exception()
