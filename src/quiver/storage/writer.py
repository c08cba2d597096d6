"""Everything that changes a log's files, in order, one piece of work at a time.

The writer owns the segments, the open active file and the queue of batches that wait for the disk.
Its pieces of work run in the executor; between two of them it looks at what has been asked for
meanwhile: first a cut of the suffix, then exclusive jobs (retention, reset, roll), then a flush of all
batches that wait (group commit). A job decides what it does when its turn comes, and what follows from it
is applied before the next piece of work begins: between the two the log may have been cut or replaced.

Durability is reported in order, and only for what is on disk by the log's setting. The first failure is
final: nothing is written or synced again, and all that was not durable is given up.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from quiver.clock import Clock
from quiver.config import LogSettings
from quiver.errors import LogClosedError, LogFailedError, StorageError
from quiver.model import Index
from quiver.record.batch import Batch
from quiver.storage.disk import Disk, File
from quiver.storage.executor import Executor
from quiver.storage.flush import Flush, Planner, write_all
from quiver.storage.scan import CHUNK_BYTES
from quiver.storage.segment import Segment
from quiver.storage.truncation import cut_suffix, start_over

T = TypeVar("T")
_Done = asyncio.Future[None]

MARK_AFTER_IDLE_S = 1.0
"""How long after the last flush a mark is written that vouches for it."""


class _Job(NamedTuple):
    """File work that waits for its turn."""

    make_work: Callable[[], Callable[[], Any]]
    apply: Callable[[Any], None]
    done: _Done


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
        self._jobs: deque[_Job] = deque()
        self._is_working = False
        self._is_closing = False
        self._closing = asyncio.Lock()
        self._flushing_end: Index | None = None
        self._is_gathering = False
        self._waiters: deque[tuple[Index, _Done]] = deque()
        """Who waits for what to be durable, by index."""
        self._timer: asyncio.TimerHandle | None = None

    def open_active(self) -> None:
        """Open the active segment's file; blocking."""
        active = self.segments[-1]
        if not active.is_sealed:
            self._file = self._disk.open(f"{self._directory}/{active.name}")
            _write_again(self._file, active.vouched_bytes, active.size_bytes)
            self._file.sync()
            self._disk.sync_directory(self._directory)
            # On disk now: all that was read back, under its name, whoever wrote it and however that ended.
            self._planner.replaced(active.size_bytes)

    # -- requests --------------------------------------------------------------------------------

    def enqueue(self, batches: Sequence[Batch], size_bytes: int) -> None:
        """Queue batches, which follow those queued before; a flush begins at once if none is under way."""
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

    def start_over(self, segment: Segment) -> asyncio.Future[None]:
        """Let `segment`, empty and not on disk yet, be all of the log; the future tells when it is on disk."""
        self._forget_pending(Index(0))
        self._cut_to = self._flushing_end = None
        self.segments[:] = [segment]
        self.durable_end = segment.end_index
        self._reject_waiters(LogClosedError("the log was replaced by a snapshot"), after=Index(0))
        work = partial(start_over, self._disk, self._directory, segment)
        return self.run_exclusively(lambda: work, apply=partial(self._adopt, segment, segment))

    def run_exclusively(
        self, make_work: Callable[[], Callable[[], T]], *, apply: Callable[[T], None] | None = None
    ) -> asyncio.Future[None]:
        """Run file work between flushes, whether or not somebody still waits for it when its turn comes.

        `make_work` is called in the loop at its turn, `apply` with what the work returned before the next turn.
        """
        self.check_open()
        return self._queue(make_work, apply or _ignore)

    def _queue(self, make_work: Callable[[], Callable[[], T]], apply: Callable[[T], None]) -> asyncio.Future[None]:
        done: _Done = asyncio.get_running_loop().create_future()
        self._jobs.append(_Job(make_work, apply, done))
        self._work()
        return done

    def plan_roll(self) -> Callable[[], None]:
        """Return the file work that seals the active segment and begins a new one, if it still holds anything."""
        if self.segments[-1].is_sealed or self.segments[-1].is_empty:
            return _do_nothing
        flush = self._planner.plan_roll(self.segments, now_ms=self._clock.wall_ms())
        return partial(self._run_flush, flush)

    def wait_durable_nowait(self, end_index: Index) -> asyncio.Future[None] | None:
        """Return what to wait for until every entry below `end_index` is durable; None if all are."""
        if end_index <= self.durable_end:
            return None
        if self.failure is not None:
            raise self.failure
        waiter: _Done = asyncio.get_running_loop().create_future()
        if not self._waiters or end_index >= self._waiters[-1][0]:
            self._waiters.append((end_index, waiter))
        else:
            insort(self._waiters, (end_index, waiter), key=_index_of)
        return waiter

    def check_open(self) -> None:
        """Raise `LogClosedError` if nothing can be written any more."""
        if self.failure is not None:
            raise LogClosedError(f"{self._directory}: the log takes no appends: {self.failure}") from self.failure
        if self._is_closing:
            raise LogClosedError(f"{self._directory}: the log is being closed")

    async def close(self) -> None:
        """Write what waits, vouch for it, and close the file; idempotent, never raises for a failed log."""
        async with self._closing:
            if self.failure is None:
                self._is_closing = True
                self._cancel_timer()
                await self._write_last()
            if self.failure is None:
                self.failure = LogClosedError(f"{self._directory}: the log is closed")
            self._reject_waiters(self.failure, after=self.durable_end)
            self._close_file()

    async def _write_last(self) -> None:
        """Wait until all that was asked for before the close is done, and a mark vouches for it."""
        try:
            while self._pending or self._cut_to is not None:
                await self._queue(lambda: _do_nothing, _ignore)  # its turn is before the flush, which begins then
            await self._queue(self._plan_last_mark, _ignore)
        except StorageError:
            pass  # the failure has been reported; there is nothing left to write

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

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- work ------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Begin the next piece of work unless one is under way."""
        if self._is_working or self.failure is not None:
            return
        if self._cut_to is not None:
            self._begin_cut(self._cut_to)
        elif self._jobs:
            job = self._jobs.popleft()
            self._begin(job.make_work(), partial(_complete, job), job.done)
        elif self._pending and not self._is_gathering:
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
                raise error  # a fault of this program: the event loop's handler shall hear of it

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
        self._begin(work, partial(self._finish_cut, kept[-1]))

    def _finish_cut(self, segment: Segment, shortened: tuple[Segment, File]) -> None:
        self._adopt(segment, *shortened)

    def _adopt(self, expected: Segment, replacement: Segment, file: File) -> None:
        """Go on with another active file, which is on disk as it is, unless the log was replaced meanwhile."""
        if self.segments[-1] is not expected:
            file.close()
            return
        self.segments[-1] = replacement
        self._close_file()
        self._file = file
        self._planner.replaced(replacement.size_bytes)

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
            if self._wake_waiters():
                # Those it woke come first: what they append now, all of them, joins the next flush.
                self._is_gathering = True
                asyncio.get_running_loop().call_soon(self._end_gathering)
            self._report_durable(flushed_end)
        self._start_timer()

    def _end_gathering(self) -> None:
        self._is_gathering = False
        self._work()

    def _forget_pending(self, end_index: Index) -> None:
        """Drop queued batches at or behind `end_index`, and do not report those in flight as durable."""
        self._pending = [batch for batch in self._pending if batch.header.index < end_index]
        self.pending_bytes = sum(len(batch.data) for batch in self._pending)
        self.durable_end = min(self.durable_end, end_index)
        if self._flushing_end is not None:
            self._flushing_end = min(self._flushing_end, end_index)

    def _fail(self, error: BaseException) -> StorageError:
        """Stop for good: a failed sync may have dropped bytes that a second one would call safe."""
        self.failure = failure = LogFailedError(f"{self._directory}: {error}; the log takes no more appends")
        failure.__cause__ = error
        self._cancel_timer()
        self._forget_pending(self.durable_end)
        self._reject_waiters(failure, after=Index(0))
        for job in self._jobs:
            if not job.done.done():
                job.done.set_exception(failure)
        self._jobs.clear()
        self._report_failure(failure)
        return failure

    # -- waiters ---------------------------------------------------------------------------------

    def _wake_waiters(self) -> int:
        """Tell those whose entries are durable now; return how many there were."""
        waiters, durable_end, woken = self._waiters, self.durable_end, 0
        while waiters and waiters[0][0] <= durable_end:
            waiter = waiters.popleft()[1]
            if not waiter.done():
                waiter.set_result(None)
                woken += 1
        return woken

    def _reject_waiters(self, error: StorageError, *, after: Index) -> None:
        """Fail those who wait for an entry at or behind `after`."""
        rejected = []
        while self._waiters and self._waiters[-1][0] > after:
            rejected.append(self._waiters.pop()[1])
        for waiter in reversed(rejected):
            if not waiter.done():
                waiter.set_exception(error)

    # -- what happens later ----------------------------------------------------------------------

    def _start_timer(self) -> None:
        """Look again after a while: to sync (durability `interval`) or to vouch for the last flush."""
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
        self._planner.flushed(self.segments, sync=True)
        return file.sync

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _index_of(waiter: tuple[Index, _Done]) -> Index:
    return waiter[0]


def _write_again(file: File, first_position: int, end_position: int) -> None:
    """Make the system owe the disk what it may have given up.

    After a failed sync the bytes stay in the cache, where a restarted process reads them, but count as written:
    the next sync would succeed without them.
    """
    while first_position < end_position:
        data = file.read(min(CHUNK_BYTES, end_position - first_position), first_position)
        write_all(file, [data], first_position)
        first_position += len(data)


def _do_nothing() -> None:
    """Stand for work when only its turn is waited for."""


def _ignore(_: object) -> None:
    """Take the result of work that nothing follows from."""


def _complete(job: _Job, result: object) -> None:
    job.apply(result)
    if not job.done.done():
        job.done.set_result(None)


def _retrieve(done: asyncio.Future[None]) -> None:
    """Mark the exception of a background job as seen: the failure has been reported by the log itself."""
    done.exception()
