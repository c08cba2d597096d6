"""Everything that changes a log's files, in order, one piece of work at a time.

The writer owns the segments, the open active file and the queue of batches that wait for the disk.
Its pieces of work run in the executor; between two of them it looks at what has been asked for
meanwhile: first a cut of the suffix, then exclusive jobs (retention, reset, roll), then a flush of all
batches that wait (group commit).

Durability is reported in order, and only for what is on disk by the log's setting. The first failure is
final: nothing is written or synced again, and all that was not durable is given up.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from quiver.clock import Clock
from quiver.config import LogSettings
from quiver.errors import LogClosedError, LogFailedError, StorageError
from quiver.model import Index
from quiver.record.batch import Batch
from quiver.storage.disk import Disk, File
from quiver.storage.executor import Executor
from quiver.storage.flush import Flush, Planner
from quiver.storage.segment import Segment
from quiver.storage.truncation import cut_suffix

T = TypeVar("T")

MARK_AFTER_IDLE_S = 1.0
"""How long after the last flush a mark is written that vouches for it."""


class Writer:
    """The one who writes a log's files. `Log` is its only user."""

    def __init__(
        self,
        directory: str,
        segments: list[Segment],
        *,
        disk: Disk,
        executor: Executor,
        clock: Clock,
        settings: LogSettings,
        report_durable: Callable[[Index], None],
        report_failure: Callable[[StorageError], None],
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
        self._report_durable = report_durable
        self._report_failure = report_failure
        self._planner = Planner(disk, directory, settings)
        self._file: File | None = None
        self._pending: list[Batch] = []
        self._cut_to: Index | None = None
        self._jobs: deque[tuple[Callable[[], Callable[[], Any]], asyncio.Future[Any]]] = deque()
        self._is_working = False
        self._flushing_end: Index | None = None
        self._waiters: list[tuple[Index, int, asyncio.Future[None]]] = []
        self._waiters_made = 0
        self._timer: asyncio.TimerHandle | None = None

    def open_active(self) -> None:
        """Open the active segment's file; blocking."""
        active = self.segments[-1]
        if not active.is_sealed:
            self._file = self._disk.open(f"{self._directory}/{active.name}")
            self._file.sync()  # what was read back is on disk from here on, whoever wrote it
            self._planner.replaced(active.size_bytes)

    # -- requests --------------------------------------------------------------------------------

    def enqueue(self, batches: Sequence[Batch], size_bytes: int) -> None:
        """Queue batches, which follow those queued before, for the next flush."""
        self._pending.extend(batches)
        self.pending_bytes += size_bytes
        self._work()

    def cut(self, end_index: Index) -> None:
        """Give up the entries at or behind `end_index`, in the queue and on disk."""
        self._forget_pending(end_index)
        if end_index < self.segments[-1].end_index:
            self._cut_to = end_index if self._cut_to is None else min(end_index, self._cut_to)
        self._reject_waiters(LogClosedError("the entry was replaced before it was durable"), after=end_index)
        self._work()

    def start_over(self, segment: Segment) -> list[str]:
        """Let `segment`, empty and not on disk yet, be all of the log; return the files that are to go."""
        old_names = [old.name for old in self.segments]
        self._forget_pending(Index(0))
        self._cut_to = self._flushing_end = None
        self.segments[:] = [segment]
        self.durable_end = segment.end_index
        self._reject_waiters(LogClosedError("the log was replaced by a snapshot"), after=Index(0))
        return old_names

    def adopt_file(self, file: File) -> None:
        """Go on with another active file, which is durable as it is."""
        if self._file is not None:
            self._file.close()
        self._file = file
        self._planner.replaced(self.segments[-1].size_bytes)

    def run_exclusively(self, make_work: Callable[[], Callable[[], T]]) -> asyncio.Future[T]:
        """Run file work between flushes. `make_work` is called in the loop when its turn comes."""
        self.check_open()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.append((make_work, done))
        self._work()
        return done

    def plan_roll(self) -> Callable[[], None]:
        """Return the file work that seals the active segment and begins a new one."""
        flush = self._planner.plan_roll(self.segments, now_ms=self._clock.wall_ms())
        return partial(self._run_flush, flush)

    async def wait_durable(self, end_index: Index) -> None:
        """Wait until every entry below `end_index` is durable; see `Log.wait_durable`."""
        if end_index <= self.durable_end:
            return
        if self.failure is not None:
            raise self.failure
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters_made += 1
        heapq.heappush(self._waiters, (end_index, self._waiters_made, waiter))
        await waiter

    def check_open(self) -> None:
        """Raise `LogClosedError` if nothing can be written any more."""
        if self.failure is not None:
            raise LogClosedError(f"{self._directory}: the log takes no appends: {self.failure}") from self.failure

    async def close(self) -> None:
        """Write what waits, vouch for it, and close the file; idempotent, never raises for a failed log."""
        if self.failure is None:
            try:
                await self._flush_all()
                await self.run_exclusively(self._plan_last_mark)
            except StorageError:
                pass  # the failure has been reported; there is nothing left to write
        if self.failure is None:
            self.failure = LogClosedError(f"{self._directory}: the log is closed")
        self._cancel_timer()
        if self._file is not None:
            self._file.close()
            self._file = None

    async def _flush_all(self) -> None:
        """Wait until nothing is queued; a job's turn comes only when no flush is under way."""
        while self._pending or self._cut_to is not None:
            end = Index(self._pending[-1].header.index + 1) if self._pending else self.durable_end
            await self.run_exclusively(lambda: _do_nothing)
            await self.wait_durable(end)

    def _plan_last_mark(self) -> Callable[[], None]:
        """Return work that syncs and marks: a clean stop leaves nothing that a restart could doubt."""
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

    # -- work ------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Begin the next piece of work unless one is under way."""
        if self._is_working or self.failure is not None:
            return
        if self._cut_to is not None:
            self._begin_cut(self._cut_to)
        elif self._jobs:
            make_work, done = self._jobs.popleft()
            self._begin(make_work(), partial(_resolve, done), done)
        elif self._pending:
            self._begin_flush()

    def _begin(self, work: Callable[[], T], then: Callable[[T], None], done: asyncio.Future[Any] | None = None) -> None:
        self._is_working = True
        self._executor.submit(work).add_done_callback(partial(self._finish, then, done))

    def _finish(self, then: Callable[[T], None], done: asyncio.Future[Any] | None, finished: asyncio.Future[T]) -> None:
        self._is_working = False
        error = finished.exception()
        if error is None:
            then(finished.result())
            self._work()
        else:
            self._fail(error)
            if done is not None and not done.done():
                done.set_exception(self.failure or error)

    def _begin_cut(self, end_index: Index) -> None:
        self._cut_to = None
        kept = [segment for segment in self.segments if segment.first_index <= end_index]
        work = partial(
            cut_suffix,
            self._disk,
            self._directory,
            list(self.segments),
            end_index,
            index_interval_bytes=self._settings.index_interval_bytes,
        )
        self.segments[:] = kept
        self._begin(work, self._finish_cut)

    def _finish_cut(self, shortened: tuple[Segment, File]) -> None:
        self.segments[-1], file = shortened
        self.adopt_file(file)

    def _begin_flush(self) -> None:
        batches, self._pending = self._pending, []
        self.pending_bytes = 0
        sync = self._settings.durability == "fsync"
        flush = self._planner.plan(self.segments, batches, now_ms=self._clock.wall_ms(), sync=sync)
        self._flushing_end = self.segments[-1].end_index
        self._begin(partial(self._run_flush, flush), partial(self._finish_flush, sync=sync))

    def _run_flush(self, flush: Flush) -> None:
        """Carry out a flush in the executor. Only work, of which one piece runs at a time, touches `_file`."""
        self._file = flush.run(self._file)

    def _finish_flush(self, _: None, *, sync: bool) -> None:
        self._planner.flushed(self.segments, sync=sync)
        flushed_end, self._flushing_end = self._flushing_end, None
        if flushed_end is not None and flushed_end > self.durable_end:
            self.durable_end = flushed_end
            self._wake_waiters()
            self._report_durable(flushed_end)
        self._start_timer()

    def _forget_pending(self, end_index: Index) -> None:
        """Drop queued batches at or behind `end_index`, and do not report those in flight as durable."""
        self._pending = [batch for batch in self._pending if batch.header.index < end_index]
        self.pending_bytes = sum(len(batch.data) for batch in self._pending)
        self.durable_end = min(self.durable_end, end_index)
        if self._flushing_end is not None:
            self._flushing_end = min(self._flushing_end, end_index)

    def _fail(self, error: BaseException) -> None:
        """Stop for good: a failed sync may have dropped bytes that a second one would call safe."""
        if not isinstance(error, OSError | StorageError):
            raise error
        self.failure = LogFailedError(f"{self._directory}: {error}; the log takes no more appends")
        self.failure.__cause__ = error
        self._cancel_timer()
        self._forget_pending(self.durable_end)
        self._reject_waiters(self.failure, after=Index(0))
        for _, done in self._jobs:
            done.set_exception(self.failure)
        self._jobs.clear()
        self._report_failure(self.failure)

    # -- waiters ---------------------------------------------------------------------------------

    def _wake_waiters(self) -> None:
        while self._waiters and self._waiters[0][0] <= self.durable_end:
            waiter = heapq.heappop(self._waiters)[2]
            if not waiter.done():
                waiter.set_result(None)

    def _reject_waiters(self, error: StorageError, *, after: Index) -> None:
        """Fail those who wait for an entry at or behind `after`."""
        kept = []
        for item in self._waiters:
            if item[0] <= after:
                kept.append(item)
            elif not item[2].done():
                item[2].set_exception(error)
        heapq.heapify(kept)
        self._waiters = kept

    # -- what happens later ----------------------------------------------------------------------

    def _start_timer(self) -> None:
        """Look again after a while: to sync (durability `interval`) or to vouch for the last flush."""
        if self._timer is None and self._settings.durability != "none":
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
        self._planner.flushed(self.segments, sync=True)
        return file.sync

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _do_nothing() -> None:
    """Stand for work when only its turn is waited for."""


def _ignore(_: None) -> None:
    """Take the result of work that nobody waits for."""


def _resolve(done: asyncio.Future[T], result: T) -> None:
    if not done.done():
        done.set_result(result)


def _retrieve(done: asyncio.Future[None]) -> None:
    """Mark the exception of a background job as seen: the failure has been reported by the log itself."""
    if not done.cancelled():
        done.exception()
