"""The work queues of a cluster, from threads: the part of `sync.Cluster` that opens, describes and configures them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

from quiver.client.arguments import check_arguments
from quiver.client.cluster import AsyncCluster
from quiver.client.queue_groups import QueueDescription
from quiver.client.sync_queue import Queue
from quiver.client.thread import LoopThread

T = TypeVar("T")


@check_arguments
class ClusterQueues(ABC):
    """Work queues; `Cluster` provides the asyncio cluster and the thread."""

    _cluster: AsyncCluster
    _thread: LoopThread

    def queue(
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
    ) -> Queue:
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
        opening = self._cluster.queue(
            topic,
            group,
            lease=lease,
            max_attempts=max_attempts,
            backoff=backoff,
            backoff_max=backoff_max,
            backoff_multiplier=backoff_multiplier,
            in_flight_max=in_flight_max,
            order=order,
            dead_letter_topic=dead_letter_topic,
            start=start,
            prefetch=prefetch,
            max_processing_time=max_processing_time,
            idle_timeout=idle_timeout,
            receive_bytes=receive_bytes,
        )
        return Queue(self._run(opening), self._thread)

    def queues(self) -> list[QueueDescription]:
        """Return all work queues, sorted by group, without their partitions."""
        return self._run(self._cluster.queues())

    def describe_queue(self, group: str) -> QueueDescription:
        """Return a work queue with the state of every partition, as reported by its leader."""
        return self._run(self._cluster.describe_queue(group))

    def configure_queue(
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
        changing = self._cluster.configure_queue(
            group,
            lease=lease,
            max_attempts=max_attempts,
            backoff=backoff,
            backoff_max=backoff_max,
            backoff_multiplier=backoff_multiplier,
            in_flight_max=in_flight_max,
            order=order,
            dead_letter_topic=dead_letter_topic,
        )
        self._run(changing)

    @abstractmethod
    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of the work, which runs in the cluster's thread."""
