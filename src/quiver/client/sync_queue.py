"""The blocking work queue: any number of threads may receive from one queue object and settle its jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Self, cast

from quiver.client.arguments import check_arguments
from quiver.client.options import to_ms
from quiver.client.presentation import describe, html_table
from quiver.client.queue import AsyncQueue, check_jobs_max, to_delay_ms, to_lease_ms, to_reason
from quiver.client.queue_jobs import LeasedJob
from quiver.client.thread import LoopThread
from quiver.errors import QuiverError
from quiver.groups.settings import QueueSettings


@check_arguments
class Job(LeasedJob):
    """A record of a work queue, leased to this worker; made by `Queue.receive`.

    Example:
        for job in queue:
            with job:  # acknowledged on success, returned if it raises; its lease is extended meanwhile
                work(job.json())
    """

    queue: Queue

    def ack(self) -> None:
        """Acknowledge the job: it is done, and is never delivered again once this returns.

        Raises:
            FencedError: the lease had ended, and another worker has the job, or it is settled or a dead letter
                (`stale_receipt`): this was not done.
        """
        self.queue.thread.run(self.queue.core.settle("ack", (self,)))

    def nack(self, delay: float | None = None) -> None:
        """Return the job: it is delivered again after `delay` seconds, or as the group's backoff says.

        After the group's `max_attempts` it becomes a dead letter instead. Raises as `ack`.
        """
        self.queue.thread.run(self.queue.core.settle("return", (self,), to_delay_ms(delay)))

    def release(self) -> None:
        """Return the job unworked: it is delivered again at once, and this attempt does not count. Raises as `ack`."""
        self.queue.thread.run(self.queue.core.settle("release", (self,)))

    def reject(self, reason: str = "") -> None:
        """Make the job a dead letter now, with a reason that its record's headers will say. Raises as `ack`."""
        self.queue.thread.run(self.queue.core.settle("reject", (self,), to_reason(reason)))

    def extend(self, lease: float | None = None) -> None:
        """Let the lease end `lease` seconds from now; by default the group's lease time. Raises as `ack`."""
        self.queue.thread.run(self.queue.core.extend((self,), to_lease_ms(lease)))

    def __enter__(self) -> Self:
        self.queue.core.keep_alive(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.queue.core.alive.pop(self, None)
        if self.is_settled and not self.is_lost:
            return
        if kind is None:
            self.ack()
            return
        try:
            if issubclass(kind, Exception):
                self.nack()
            else:  # the worker is being stopped; the job is not to blame
                self.release()
        except QuiverError:
            pass  # the application's own error must not be replaced; the lease expires


class Jobs(list[Job]):
    """Jobs that were received together, and can be settled in one call."""

    def __init__(self, queue: Queue, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        self._queue = queue

    def ack(self) -> None:
        """Acknowledge all jobs that are not settled yet; see `Queue.ack`."""
        self._queue.ack(self)


@check_arguments
class Queue:
    """Share the records of a topic among workers; made by `Cluster.queue`.

    Any number of threads may receive from it at a time, and any number of processes from their own.

    Example:
        queue = cluster.queue("jobs", group="workers")
        for job in queue:
            work(job.json())
            job.ack()
    """

    def __init__(self, queue: AsyncQueue, thread: LoopThread) -> None:
        self._queue = queue
        self.core = queue.core
        self.core.make_job = partial(Job, self)  # before the first receive
        self.thread = thread

    @property
    def topic(self) -> str:
        """The topic of this queue."""
        return self._queue.topic

    @property
    def group(self) -> str:
        """The group whose workers share the records."""
        return self._queue.group

    @property
    def settings(self) -> QueueSettings:
        """The settings of the group, as they were when this object was made."""
        return self._queue.settings

    def __iter__(self) -> Iterator[Job]:
        """Yield jobs as they arrive, until `stop` is called, or none arrived for `idle_timeout`."""
        while (job := self.thread.run(self._queue.next_job())) is not None:
            yield cast("Job", job)

    def receive(self, max: int = 1, timeout: float = 1.0) -> Jobs:  # noqa: A002 - the public name
        """Return the available jobs, at most `max`; wait at most `timeout` seconds for the first."""
        jobs = self.thread.run(self.core.receive(check_jobs_max(max), to_ms(timeout, "timeout")))
        return Jobs(self, cast("list[Job]", jobs))

    def ack(self, jobs: Iterable[LeasedJob]) -> None:
        """Acknowledge jobs in one call; those that are acknowledged already are left out.

        Raises:
            FencedError: other workers have some of the jobs (`stale_receipt`); the others are acknowledged.
            ConflictError: one was returned or rejected before (`job_settled`); none was acknowledged.
        """
        self.thread.run(self.core.settle("ack", jobs))

    def nack(self, jobs: Iterable[LeasedJob], delay: float | None = None) -> None:
        """Return jobs in one call, each as a job's `nack`. Raises as `ack`."""
        self.thread.run(self.core.settle("return", jobs, to_delay_ms(delay)))

    def extend(self, jobs: Iterable[LeasedJob], lease: float | None = None) -> None:
        """Extend the leases of jobs in one call, each as a job's `extend`."""
        self.thread.run(self.core.extend(tuple(jobs), to_lease_ms(lease)))

    def stop(self) -> None:
        """Receive no more: iterations end, receives return nothing. Jobs that workers have can still be settled."""
        self.thread.run(self._queue.stop())

    def close(self) -> None:
        """Receive no more; release what no worker has taken; idempotent. Settle the jobs that you have before."""
        self.thread.run(self._queue.close())

    def __repr__(self) -> str:
        return describe(type(self), self._queue.facts())

    def _repr_html_(self) -> str:
        return html_table(type(self), self._queue.facts())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
