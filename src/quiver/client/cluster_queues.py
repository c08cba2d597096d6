"""The work queues of a cluster: the part of `AsyncCluster` that opens, describes and configures them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Literal

from quiver.client.arguments import check_arguments
from quiver.client.options import QueueOptions, check_options, to_ms
from quiver.client.queue import AsyncJob, AsyncQueue
from quiver.client.queue_core import QueueCore
from quiver.client.queue_groups import (
    QueueDescription,
    configure_queue,
    describe_queue,
    list_queues,
    make_change,
    open_group,
)
from quiver.routing.router import Router


@check_arguments
class AsyncClusterQueues(ABC):
    """Work queues; `AsyncCluster` provides the router and closes the queues."""

    router: Router

    async def queue(
        self,
        topic: str,
        group: str,
        *,
        lease: float | None = None,
        max_attempts: int | None = None,
        backoff: float | None = None,
        backoff_max: float | None = None,
        backoff_multiplier: float | None = None,
        in_flight_max: int | None = None,
        order: Literal["offset", "key"] | None = None,
        dead_letter_topic: str | None = None,
        start: Literal["earliest", "latest"] = "earliest",
        prefetch: int = 0,
        max_processing_time: float | None = None,
        idle_timeout: float | None = None,
        receive_bytes: int = 4 << 20,
    ) -> AsyncQueue:
        """Return a topic as a work queue, whose records the workers of a group share.

        A record is leased to one worker for `lease` seconds (default 30) and delivered again unless it is acknowledged
        by then. A job that is returned waits for `backoff` seconds (1), longer with each attempt, up to `backoff_max`
        (300); after `max_attempts` (5; 0: unlimited) it goes to `dead_letter_topic` (`TOPIC.GROUP.dead`). Per
        partition, at most `in_flight_max` records (10,000) are under way. With `order="key"`, at most one record of a
        key is. These are settings of the group: the first to use a group sets them, and others leave them out.

        The rest is of this object. `start` is where a new group begins. `prefetch` jobs are received before a worker
        asks for them. A job inside `with` keeps its lease, at most for `max_processing_time` seconds. `idle_timeout`
        (seconds) ends an iteration after so long without a job.

        Raises:
            NotFoundError: unknown topic.
            ConflictError: the group has other settings (`queue_settings`; see `configure_queue`), or is used to read
                streams (`group_kind`).
        """
        change = make_change(
            lease=lease,
            max_attempts=max_attempts,
            backoff=backoff,
            backoff_max=backoff_max,
            backoff_multiplier=backoff_multiplier,
            in_flight_max=in_flight_max,
            order=order,
            dead_letter_topic=dead_letter_topic,
        )
        options = QueueOptions(
            prefetch=prefetch,
            receive_bytes=receive_bytes,
            max_processing_ms=None
            if max_processing_time is None
            else to_ms(max_processing_time, "max_processing_time"),
        )
        check_options(options)
        deadline = self.router.deadline()
        group_id, settings = await open_group(self.router, topic, group, change, start=start, deadline=deadline)
        info = await self.router.find_topic(topic, deadline=deadline)
        idle_timeout_ms = None if idle_timeout is None else to_ms(idle_timeout, "idle_timeout")
        queue = AsyncQueue(self.router, idle_timeout_ms=idle_timeout_ms)
        queue.core = QueueCore(
            info,
            group,
            group_id,
            router=self.router,
            options=options,
            settings=settings,
            make_job=partial(AsyncJob, queue),
        )
        self._keep(queue.core)
        return queue

    async def queues(self) -> list[QueueDescription]:
        """Return all work queues, sorted by group, without their partitions."""
        return await list_queues(self.router, deadline=self.router.deadline())

    async def describe_queue(self, group: str) -> QueueDescription:
        """Return a work queue with the state of every partition, as reported by its leader."""
        return await describe_queue(self.router, group, deadline=self.router.deadline())

    async def configure_queue(
        self,
        group: str,
        *,
        lease: float | None = None,
        max_attempts: int | None = None,
        backoff: float | None = None,
        backoff_max: float | None = None,
        backoff_multiplier: float | None = None,
        in_flight_max: int | None = None,
        order: Literal["offset", "key"] | None = None,
        dead_letter_topic: str | None = None,
    ) -> None:
        """Change settings of a work queue for all its workers, as in `queue`; those that are not given stay.

        Jobs that are leased keep their leases.

        Raises:
            NotFoundError: unknown group.
            ConflictError: the group reads streams (`not_a_queue`).
        """
        change = make_change(
            lease=lease,
            max_attempts=max_attempts,
            backoff=backoff,
            backoff_max=backoff_max,
            backoff_multiplier=backoff_multiplier,
            in_flight_max=in_flight_max,
            order=order,
            dead_letter_topic=dead_letter_topic,
        )
        await configure_queue(self.router, group, change, deadline=self.router.deadline())

    @abstractmethod
    def _keep(self, core: QueueCore) -> None:
        """Close a queue with the cluster object, unless it is closed before."""
