"""Serialize all file I/O of one log: appends, truncations, retention and resets, one task at a time.

The writer owns the segments, the active file and the queue of batches that wait for the disk. The file is open while
the log is in use: it is opened by the first write and put away, synced, when the log is idle. Its tasks run in the
executor. Between two tasks it picks the next one in this order: a suffix truncation, then exclusive jobs
(retention, reset, roll), then one flush of all queued batches (group commit). A job plans its work when its turn
comes, and its result is applied before the next task begins, because the log may be truncated or replaced in between.

Durability is reported in index order, and only for entries that are on disk according to the log's durability setting.
The first failure is final: nothing is written or synced again, and every entry that was not durable is discarded.

A full disk is no failure: work that does not fit is *held* and tried again until there is room. Its entries are not
durable, hence acknowledged to nobody, and meanwhile nothing is done but the removal of old segments.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from quiver.clock import Clock
from quiver.config import LogSettings
from quiver.errors import LogClosedError, LogFailedError, StorageError
from quiver.logs import facts
from quiver.metrics import Histogram, now_s
from quiver.model import Index
from quiver.record.batch import Batch
from quiver.storage.disk import ROOM_RETRY_S, Disk, DiskSpace, File, is_out_of_space
from quiver.storage.executor import Executor
from quiver.storage.flush import Flush, FlushPlanner, sync_finally, write_all
from quiver.storage.scan import CHUNK_BYTES
from quiver.storage.segment import Segment
from quiver.storage.truncation import replace_segments, truncate_suffix

if TYPE_CHECKING:
    from quiver.storage.sealing import LogCipher
logger = logging.getLogger(__name__)

T = TypeVar("T")
_Done = asyncio.Future[None]

PUT_AWAY_AFTER_IDLE_S = 10.0
"""Idle time, at least, after which the active file is marked and closed until the next write; at most twice as long."""


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
    frees: bool = False
    """Whether it removes old segments and writes nothing: then it runs on a full disk, too."""
    replaces: bool = False
    """Whether it replaces the whole log, so that what is held for the old one need not be written."""


class _Task(NamedTuple):
    """File work that runs, or is held until there is room for it."""

    work: Callable[[], Any]
    then: Callable[[Any], None]
    done: _Done | None
    job: _Job | None = None
    """The job that it is the work of, if any."""


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
        space: DiskSpace | None = None,
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
        self._idle_timer: asyncio.TimerHandle | None = None
        """Runs while the active file is open."""
        self._was_used = False
        """Whether a task has ended since the idle timer was started."""
        self._space = space
        self._held: _Task | None = None
        self._may_remove = True
        """Whether removals may be tried while work is held: false after one found no room until the next retry."""
        self._retry_timer: asyncio.TimerHandle | None = None
        self._flush: Flush | None = None
        self._is_impatient = False

    @property
    def is_held(self) -> bool:
        """Return whether work waits for room on the disk."""
        return self._held is not None

    @property
    def unwritten_names(self) -> frozenset[str]:
        """Return the segments that held work writes to."""
        flush = self._flush if self._held is not None else None
        return frozenset() if flush is None else frozenset(write.name for write in flush.writes)

    def prepare_active(self, *, is_synced: bool = False) -> None:
        """Make the active segment durable, unless it is known to be, and continue with it; blocking."""
        active = self.segments[-1]
        if active.is_sealed:
            return
        if active.is_covered:
            active.size_bytes = active.marked_bytes  # only the mark may be lost; the first write begins with the same
        elif not is_synced:
            file = self._disk.open(f"{self._directory}/{active.name}")
            try:
                _rewrite(file, active.marked_bytes, active.size_bytes)
                file.sync()
            finally:
                file.close()
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
        self.check_open()
        return self._queue(_Job(lambda: work, partial(self._adopt, segment, segment), _make_done(), replaces=True))

    def run_exclusively(
        self,
        make_work: Callable[[], Callable[[], T]],
        *,
        apply: Callable[[T], None] | None = None,
        frees: bool = False,
    ) -> asyncio.Future[None]:
        """Run file work between flushes, even if the caller stops waiting for it.

        `make_work` runs in the event loop when the job's turn comes; `apply` receives the result of the work before
        the next task begins. With `frees` it also runs while other work is held: it removes nothing of
        `unwritten_names`.
        """
        self.check_open()
        return self._queue(_Job(make_work, apply or _ignore, _make_done(), frees))

    def _queue(self, job: _Job) -> asyncio.Future[None]:
        self._jobs.append(job)
        self._work()
        return job.done

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

    def stop_waiting(self) -> None:
        """Give up work that is held, and whatever meets the end of the disk from now on: the log is to be closed."""
        self._is_impatient = True
        if self._held is not None and not self._is_working:
            self._give_up(self._held)

    async def close(self) -> None:
        """Flush pending batches, mark them durable and close the file; idempotent, does not raise for a failed log."""
        async with self._closing:
            if self.failure is None:
                self._is_closing = True
                self._cancel_timers()
                self.stop_waiting()
            if self.failure is None:
                await self._write_last()
            if self.failure is None:
                self.failure = LogClosedError(f"{self._directory}: the log is closed")
            self._close_file()

    async def _write_last(self) -> None:
        """Finish all tasks requested before the close, then write a mark that covers the whole file."""
        try:
            while self._pending or self._truncate_to is not None:
                await self._queue(
                    _Job(lambda: _do_nothing, _ignore, _make_done())
                )  # jobs run before the flush, which starts next
            await self._queue(_Job(self._plan_last_mark, _ignore, _make_done()))
        except StorageError:
            pass  # the failure was reported; nothing more may be written

    def _plan_last_mark(self) -> Callable[[], None]:
        """Return work that syncs and marks the file, so that the next start can trust every byte after a clean stop.

        A file that was put away is synced.
        """
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
        if self._held is not None and any(job.replaces for job in self._jobs):
            self._drop(self._held)
        if self._held is not None:
            self._work_without_room(self._held)
        elif self._truncate_to is not None:
            self._begin_truncation(self._truncate_to)
        elif self._jobs:
            self._begin_job(self._jobs.popleft())
        elif self._pending:
            self._begin_flush()

    def _begin(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        self._run_task(_Task(work, then, None))

    def _begin_job(self, job: _Job) -> None:
        self._run_task(_Task(job.make_work(), partial(_complete, job), job.done, job))

    def _run_task(self, task: _Task) -> None:
        self._is_working = True
        self._executor.submit(task.work).add_done_callback(partial(self._finish, task))

    def _finish(self, task: _Task, finished: asyncio.Future[Any]) -> None:
        self._is_working = False
        error, done = finished.exception(), task.done
        if error is None:
            if task is self._held:
                self._release()
            task.then(finished.result())
            self._watch_idleness()
            self._work()
        elif is_out_of_space(error):
            self._meet_end(task)
        else:
            failure = self._fail(error)
            if done is not None and not done.done():
                done.set_exception(failure)
            if not isinstance(error, OSError | StorageError):
                raise error  # a bug, not a disk error: the event loop's exception handler must see it

    def _meet_end(self, task: _Task) -> None:
        """Hold a task that found no room. A removal beside held work waits instead: only one task is held at a time."""
        if self._held is None or task is self._held:
            self._hold(task)
            return
        assert task.job is not None, "only jobs run while work is held"
        self._jobs.appendleft(task.job)
        self._may_remove = False
        self._work()

    def _hold(self, task: _Task) -> None:
        """Wait for room, unless the log is to be closed."""
        if self._held is None:
            if self._space is not None:
                self._space.begin_stall()
            logger.warning("disk full, log waits for room", extra=facts(directory=self._directory))
        self._held = task
        self._may_remove = True
        if self._is_impatient:
            self._give_up(task)
            return
        self._retry_timer = asyncio.get_running_loop().call_later(ROOM_RETRY_S, self._retry)
        self._work()

    def _retry(self) -> None:
        self._retry_timer = None
        if self._held is None or self.failure is not None:
            return
        if self._is_working:  # a removal, which makes room
            self._retry_timer = asyncio.get_running_loop().call_later(ROOM_RETRY_S, self._retry)
        else:
            self._run_task(self._held)

    def _release(self) -> None:
        """Stop holding: the work was done, or the log ends without it."""
        if self._held is None:
            return
        self._held = None
        self._may_remove = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        if self._space is not None:
            self._space.end_stall()

    def _work_without_room(self, held: _Task) -> None:
        """Start the next removal of old segments while other work is held."""
        if self._is_impatient:
            self._give_up(held)
            return
        job = next((job for job in self._jobs if job.frees and self._may_remove), None)
        if job is not None:
            self._jobs.remove(job)
            self._begin_job(job)

    def _drop(self, held: _Task) -> None:
        """Forget held work of a log that is about to be replaced."""
        self._release()
        if self._flush is not None:
            self._flush.close()
            self._flush = None
        if held.done is not None and not held.done.done():
            held.done.set_result(None)
        replacement = next(job for job in self._jobs if job.replaces)
        self._jobs.remove(replacement)
        self._jobs.appendleft(replacement)  # next: the file that other jobs would use is closed

    def _give_up(self, held: _Task) -> None:
        """End the log without what did not fit: none of it was durable, and recovery removes what is torn."""
        failure = LogClosedError(f"{self._directory}: the log was closed while it waited for room on the disk")
        self._end(failure)
        if held.done is not None and not held.done.done():
            held.done.set_exception(failure)

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
        self._flush = flush
        self._file = flush.run(self._file)
        self._flush = None

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
        failure = LogFailedError(f"{self._directory}: {error}; the log rejects all writes until the node restarts")
        failure.__cause__ = error
        self._end(failure)
        self._report_failure(failure)
        return failure

    def _end(self, failure: StorageError) -> None:
        """Reject everything from now on, and discard what is not durable."""
        self.failure = failure
        self._cancel_timers()
        self._release()
        if self._flush is not None:
            self._flush.close()
        self._discard_pending(self.durable_end)
        for job in self._jobs:
            if not job.done.done():
                job.done.set_exception(failure)
        self._jobs.clear()

    # -- timer -----------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        """Schedule the next sync, if the log's durability is `interval`."""
        if self._timer is None and not self._is_closing and self._settings.durability == "interval":
            delay_s = self._settings.flush_interval_ms / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._handle_timer)

    def _handle_timer(self) -> None:
        self._timer = None
        done = self.run_exclusively(self._plan_sync)
        done.add_done_callback(_retrieve)

    def _plan_sync(self) -> Callable[[], None]:
        file = self._file
        self._planner.finish_flush(self.segments, sync=True)
        return _do_nothing if file is None else partial(sync_finally, file)

    def _watch_idleness(self) -> None:
        """Note that a task has ended, and see to it that the file is put away when none follows."""
        self._was_used = True
        if self._idle_timer is None and self._file is not None and not self._is_closing:
            self._start_idle_timer()

    def _start_idle_timer(self) -> None:
        self._was_used = False
        self._idle_timer = asyncio.get_running_loop().call_later(PUT_AWAY_AFTER_IDLE_S, self._handle_idle_timer)

    def _handle_idle_timer(self) -> None:
        self._idle_timer = None
        if self._was_used or self._is_working or self._held is not None:
            self._start_idle_timer()
        elif self._file is not None:
            mark = self._planner.plan_mark(self.segments, sync=False)
            self._begin(partial(self._put_away, mark), _ignore)

    def _put_away(self, mark: Flush | None) -> None:
        """Mark and close the active file, in the executor; by the mark a start knows that the last flush is synced.

        Synced before it is closed: of bytes in a closed file, no failure would be reported.
        """
        if mark is not None:
            self._run_flush(mark)
        if self._file is not None:
            sync_finally(self._file)
            self._close_file()

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._idle_timer = None


def _rewrite(file: File, first_position: int, end_position: int) -> None:
    """Write the bytes of a range again, so that the next sync includes them.

    After a failed sync the bytes stay in the page cache, where a restarted process reads them, but the kernel counts
    them as clean: the next sync would succeed without writing them.
    """
    while first_position < end_position:
        data = file.read(min(CHUNK_BYTES, end_position - first_position), first_position)
        write_all(file, [data], first_position)
        first_position += len(data)


def _make_done() -> _Done:
    return asyncio.get_running_loop().create_future()


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
