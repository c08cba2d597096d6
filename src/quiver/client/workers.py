"""Workers that run a function for every job of a queue: as many tasks, or threads, as jobs may be under way.

A job is acknowledged when the function returns and returned when it raises; while it runs, the lease is extended. A
stop is graceful: no more jobs are received, those under way may finish for a while, and what has not finished by then
is released, so that another process gets it at once and the attempt does not count.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import msgspec

from quiver.client.queue import AsyncJob, AsyncQueue
from quiver.client.queue_jobs import LeasedJob
from quiver.client.sync_queue import Job, Queue
from quiver.errors import OutcomeUnknownError, QuiverError, RequestError, UnavailableError

logger = logging.getLogger(__name__)

PAUSE_S: Final = 1.0
"""How long a worker waits after the cluster could not be reached."""
LOOK_S: Final = 0.2
"""How often the end of the grace is looked at: a second signal may have brought it forward."""
OnFailure = Callable[[LeasedJob, BaseException], object]
"""Called with a job and what its function raised, or with why it could not be settled."""


class WorkTally(msgspec.Struct):
    """What workers have done."""

    done: int = 0
    failed: int = 0
    """Functions that raised."""
    lost: int = 0
    """Jobs that were finished, but not acknowledged: they may be done again."""
    released: int = 0
    """Jobs that were under way at the end, and were given back unfinished."""


class AsyncWorkers:
    """Run a coroutine function for every job, in tasks of the running loop."""

    def __init__(
        self,
        queue: AsyncQueue,
        function: Callable[[AsyncJob], Awaitable[object]],
        *,
        concurrency: int,
        on_failure: OnFailure,
    ) -> None:
        self.tally = WorkTally()
        self._queue, self._function, self._on_failure = queue, function, on_failure
        self._concurrency = concurrency
        self._stopping = asyncio.Event()

    async def run(self, grace_s: Callable[[], float]) -> None:
        """Work until `stop` is called, then for at most `grace_s` seconds more, as it returns at that time.

        Raises:
            RequestError: the queue cannot be used (any more).
        """
        tasks = [asyncio.create_task(self._work(), name=f"worker-{number}") for number in range(self._concurrency)]
        stopping = asyncio.create_task(self._stopping.wait(), name="wait-stop")
        try:
            await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            await self._queue.stop()
            pending = set(tasks)
            if not any(task.done() and task.exception() is not None for task in tasks):
                pending = (await asyncio.wait(tasks, timeout=grace_s()))[1]
            for task in pending:
                task.cancel()
        finally:
            stopping.cancel()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def stop(self) -> None:
        """Receive no more jobs, and end when those under way have ended."""
        self._stopping.set()

    async def _work(self) -> None:
        while not self._queue.core.is_stopped:
            try:
                async for job in self._queue:
                    await self._do(job)
            except (UnavailableError, OutcomeUnknownError) as error:
                logger.warning("no jobs were received, it is retried", extra={"facts": {"error": str(error)}})
                await asyncio.sleep(PAUSE_S)
            else:
                return  # it was stopped, or nothing arrived for the idle timeout

    async def _do(self, job: AsyncJob) -> None:
        self._queue.core.keep_alive(job)
        try:
            await self._function(job)
        except Exception as error:  # noqa: BLE001 - a job may raise whatever it likes
            self.tally.failed += 1
            self._on_failure(job, error)
            with suppress(QuiverError):  # its lease expires
                if not job.is_settled:
                    await job.nack()
            return
        except asyncio.CancelledError:
            self.tally.released += 1
            with suppress(QuiverError):
                if not job.is_settled:
                    await job.release()
            raise
        finally:
            self._queue.core.alive.pop(job, None)
        await self._acknowledge(job)

    async def _acknowledge(self, job: AsyncJob) -> None:
        try:
            if not job.is_settled or job.is_lost:
                await job.ack()
            self.tally.done += 1
        except QuiverError as error:
            self.tally.lost += 1
            self._on_failure(job, error)


class ThreadWorkers:
    """Run a function for every job, in threads."""

    def __init__(
        self, queue: Queue, function: Callable[[Job], object], *, concurrency: int, on_failure: OnFailure
    ) -> None:
        self.tally = WorkTally()
        self._queue, self._function, self._on_failure = queue, function, on_failure
        self._concurrency = concurrency
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._running: dict[Job, None] = {}
        self._error: BaseException | None = None
        self._ended = threading.Semaphore(0)

    def run(self, grace_s: Callable[[], float]) -> bool:
        """Work until `stop` is called, then for at most `grace_s` seconds more, as it returns at that time.

        Return whether all functions have ended. Threads cannot be stopped: those of functions that have not are left
        running, without their jobs, and keep the process from a normal exit.

        Raises:
            RequestError: the queue cannot be used (any more).
        """
        threads = [
            threading.Thread(target=self._work, name=f"worker-{number}", daemon=True)
            for number in range(self._concurrency)
        ]
        for thread in threads:
            thread.start()
        self._stopping.wait()
        self._queue.stop()
        ended = 0
        while ended < len(threads) and (left_s := grace_s()) > 0:
            ended += self._ended.acquire(timeout=min(LOOK_S, left_s))
        left = list(self._running)
        with ThreadPoolExecutor(max_workers=max(1, len(left))) as pool:
            list(pool.map(self._release, left))
        if self._error is not None:
            raise self._error
        return not left

    def stop(self) -> None:
        """Receive no more jobs, and end when those under way have ended; also in a signal's handler."""
        self._stopping.set()

    def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    for job in self._queue:
                        self._do(job)
                except (UnavailableError, OutcomeUnknownError) as error:
                    logger.warning("no jobs were received, it is retried", extra={"facts": {"error": str(error)}})
                    self._stopping.wait(PAUSE_S)
                else:
                    return  # it was stopped, or nothing arrived for the idle timeout
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            if not (isinstance(error, RequestError) and self._stopping.is_set()):
                self._error = error
        finally:
            self._stopping.set()
            self._ended.release()

    def _do(self, job: Job) -> None:
        self._running[job] = None
        self._queue.core.keep_alive(job)
        try:
            self._function(job)
        except Exception as error:  # noqa: BLE001 - a job may raise whatever it likes
            with self._lock:
                self.tally.failed += 1
            self._on_failure(job, error)
            with suppress(QuiverError):  # its lease expires
                if not job.is_settled:
                    job.nack()
            return
        finally:
            self._running.pop(job, None)
            self._queue.core.alive.pop(job, None)
        self._acknowledge(job)

    def _acknowledge(self, job: Job) -> None:
        try:
            if not job.is_settled or job.is_lost:
                job.ack()
            with self._lock:
                self.tally.done += 1
        except QuiverError as error:
            with self._lock:
                self.tally.lost += 1
            self._on_failure(job, error)

    def _release(self, job: Job) -> None:
        with self._lock:
            self.tally.released += 1
        with suppress(QuiverError):  # its lease expires
            if not job.is_settled:
                job.release()
