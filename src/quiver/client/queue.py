"""The asyncio work queue: jobs that many workers share, and that are delivered again until one acknowledges them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Self, cast

from quiver.client.arguments import check_arguments
from quiver.client.options import to_ms
from quiver.client.presentation import describe, html_table
from quiver.client.queue_core import QueueCore
from quiver.client.queue_jobs import LeasedJob
from quiver.errors import OutOfRangeError, QuiverError
from quiver.groups.settings import DELAY_MS_MAX, LEASE_MS_MAX, QueueSettings
from quiver.routing.router import Router
from quiver.wire.queue_messages import REASON_CHARACTERS_MAX

JOBS_MAX = 100_000
"""Most jobs of one `receive`."""


def check_jobs_max(jobs_max: int) -> int:
    """Return the number of jobs of a receive; raise `OutOfRangeError` if it is out of range."""
    if not 1 <= jobs_max <= JOBS_MAX:
        raise OutOfRangeError(f"not done: max={jobs_max} is out of range; allowed are 1 to {JOBS_MAX}")
    return jobs_max


def to_delay_ms(delay: float | None) -> int | None:
    """Return the delay of a retry in ms; None: as the group's backoff says."""
    if delay is None:
        return None
    if not 0 <= delay * 1000 <= DELAY_MS_MAX:
        raise OutOfRangeError(f"not done: delay={delay!r} is out of range; allowed are 0 to {DELAY_MS_MAX // 1000} s")
    return round(delay * 1000)


def to_lease_ms(lease: float | None) -> int | None:
    """Return the time of an extension in ms; None: the group's lease."""
    if lease is None:
        return None
    if not 1 <= lease * 1000 <= LEASE_MS_MAX:
        raise OutOfRangeError(
            f"not done: lease={lease!r} is out of range; allowed are 0.001 to {LEASE_MS_MAX // 1000} s"
        )
    return round(lease * 1000)


def to_reason(reason: str) -> str:
    """Return the reason of a rejection, as much of it as is kept."""
    return reason[:REASON_CHARACTERS_MAX]


@check_arguments
class AsyncJob(LeasedJob):
    """A record of a work queue, leased to this worker; made by `AsyncQueue.receive`.

    Example:
        async for job in queue:
            async with job:  # acknowledged on success, returned if it raises; its lease is extended meanwhile
                await work(job.json())
    """

    queue: AsyncQueue

    async def ack(self) -> None:
        """Acknowledge the job: it is done, and is never delivered again once this returns.

        Raises:
            FencedError: the lease had ended, and another worker has the job, or it is settled or a dead letter
                (`stale_receipt`): this was not done.
        """
        await self.queue.core.settle("ack", (self,))

    async def nack(self, delay: float | None = None) -> None:
        """Return the job: it is delivered again after `delay` seconds, or as the group's backoff says.

        After the group's `max_attempts` it becomes a dead letter instead. Raises as `ack`.
        """
        await self.queue.core.settle("return", (self,), to_delay_ms(delay))

    async def release(self) -> None:
        """Return the job unworked: it is delivered again at once, and this attempt does not count. Raises as `ack`."""
        await self.queue.core.settle("release", (self,))

    async def reject(self, reason: str = "") -> None:
        """Make the job a dead letter now, with a reason that its record's headers will say. Raises as `ack`."""
        await self.queue.core.settle("reject", (self,), to_reason(reason))

    async def extend(self, lease: float | None = None) -> None:
        """Let the lease end `lease` seconds from now; by default the group's lease time. Raises as `ack`."""
        await self.queue.core.extend((self,), to_lease_ms(lease))

    async def __aenter__(self) -> Self:
        self.queue.core.keep_alive(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        core = self.queue.core
        core.alive.pop(self, None)
        if self.is_settled and not self.is_lost:
            return
        if kind is None:
            await self.ack()
            return
        try:
            if issubclass(kind, Exception):
                await self.nack()
            else:  # the worker is being stopped; the job is not to blame
                await self.release()
        except QuiverError:
            pass  # the application's own error must not be replaced; the lease expires


class AsyncJobs(list[AsyncJob]):
    """Jobs that were received together, and can be settled in one call."""

    def __init__(self, queue: AsyncQueue, jobs: Sequence[AsyncJob]) -> None:
        super().__init__(jobs)
        self._queue = queue

    async def ack(self) -> None:
        """Acknowledge all jobs that are not settled yet; see `AsyncQueue.ack`."""
        await self._queue.ack(self)


@check_arguments
class AsyncQueue:
    """Share the records of a topic among workers; made by `AsyncCluster.queue`.

    Any number of tasks may receive from it at a time, and any number of processes from their own.

    Example:
        queue = await cluster.queue("jobs", group="workers")
        async for job in queue:
            await work(job.json())
            await job.ack()
    """

    def __init__(self, router: Router, *, idle_timeout_ms: int | None) -> None:
        self.core: QueueCore  # set by the cluster, right after
        self._router = router
        self._idle_timeout_ms = idle_timeout_ms

    @property
    def topic(self) -> str:
        """The topic of this queue."""
        return self.core.topic.topic

    @property
    def group(self) -> str:
        """The group whose workers share the records."""
        return self.core.group

    @property
    def settings(self) -> QueueSettings:
        """The settings of the group, as they were when this object was made."""
        return self.core.settings

    async def __aiter__(self) -> AsyncIterator[AsyncJob]:
        """Yield jobs as they arrive, until `stop` is called, or none arrived for `idle_timeout`."""
        while (job := await self.next_job()) is not None:
            yield job

    async def next_job(self) -> AsyncJob | None:
        """Return the next job; None at the end of an iteration. For use inside the SDK only."""
        idle_ms = self._idle_timeout_ms
        while not self.core.is_stopped:
            jobs = await self.core.receive(1, self._router.options.timeout_ms if idle_ms is None else idle_ms)
            if jobs:
                return cast("AsyncJob", jobs[0])
            if idle_ms is not None:
                return None
        return None

    async def receive(self, max: int = 1, timeout: float = 1.0) -> AsyncJobs:  # noqa: A002, ASYNC109 - public names
        """Return the available jobs, at most `max`; wait at most `timeout` seconds for the first."""
        jobs = await self.core.receive(check_jobs_max(max), to_ms(timeout, "timeout"))
        return AsyncJobs(self, cast("list[AsyncJob]", jobs))

    async def ack(self, jobs: Iterable[LeasedJob]) -> None:
        """Acknowledge jobs in one call; those that are acknowledged already are left out.

        Raises:
            FencedError: other workers have some of the jobs (`stale_receipt`); the others are acknowledged.
            ConflictError: one was returned or rejected before (`job_settled`); none was acknowledged.
        """
        await self.core.settle("ack", jobs)

    async def nack(self, jobs: Iterable[LeasedJob], delay: float | None = None) -> None:
        """Return jobs in one call, each as a job's `nack`. Raises as `ack`."""
        await self.core.settle("return", jobs, to_delay_ms(delay))

    async def extend(self, jobs: Iterable[LeasedJob], lease: float | None = None) -> None:
        """Extend the leases of jobs in one call, each as a job's `extend`."""
        await self.core.extend(tuple(jobs), to_lease_ms(lease))

    async def stop(self) -> None:
        """Receive no more: iterations end, receives return nothing. Jobs that workers have can still be settled."""
        self.core.stop()

    async def close(self) -> None:
        """Receive no more; release what no worker has taken; idempotent. Settle the jobs that you have before."""
        await self.core.close()

    def __repr__(self) -> str:
        return describe(type(self), self.facts())

    def _repr_html_(self) -> str:
        return html_table(type(self), self.facts())

    def facts(self) -> dict[str, object]:
        """Return what this queue knows of itself. For use inside the SDK only."""
        return {"topic": self.topic, "group": self.group, "group_id": self.core.group_id}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.core.close()
