"""Workers of a work queue and those who send jobs to it, and what must be so at the end.

Workers do everything that they may: acknowledge, return, release, reject, extend, work too long, forget. Their
processes are killed and stopped. Once everything is healed they settle what is left. `quiver.testing.history.queues`
judges what they saw; here are the checks of the replicated state: Q1, no more records are under way than allowed; Q2,
all replicas have the same windows; Q3, in the end no record is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from quiver.client.cluster import AsyncCluster
from quiver.client.delivery import Deliveries
from quiver.client.producer import AsyncProducer
from quiver.client.queue import AsyncJob, AsyncQueue
from quiver.client.queue_jobs import LeasedJob, LeaseGrant, Range, to_ranges
from quiver.errors import FencedError, NotFoundError, OutcomeUnknownError, QuiverError, UnavailableError
from quiver.groups.settings import dead_letter_topic_of
from quiver.metadata import PartitionRow, View
from quiver.model import ConsumerId, PartitionId
from quiver.partition.queue_window import QueueWindow, freeze_windows, frozen_parts
from quiver.record import Record
from quiver.record.delay import find_deliver_at
from quiver.record.queue_headers import (
    DEAD_ATTEMPTS_HEADER,
    DEAD_OFFSET_HEADER,
    DEAD_PARTITION_HEADER,
    DEAD_REASON_HEADER,
)
from quiver.testing.clock import DEFAULT_WALL_START_MS
from quiver.testing.clusters.clients import ProducerWorkload
from quiver.testing.clusters.processes import LEVEL, ProcessWorkload, are_others_done
from quiver.testing.clusters.swarm import QueuePlan, TopicPlan
from quiver.testing.simulator.report import require

if TYPE_CHECKING:
    from quiver.testing.clusters.world import ClusterWorld

_MS = 1_000_000
_DELAY_MS_MAX = 1_500
_RETRY_S = 0.2
_BATCH_MAX = 4
"""Most records of one send: with an order of keys they are worked on one after the other."""
SETTLE_WITHIN_MS = 120_000
"""Q3: how long workers may take to settle everything, once all faults are over."""


class JobSenderWorkload(ProducerWorkload):
    """Sends jobs, some with keys, some to be delivered later."""

    async def step(self) -> None:
        """Send one small batch."""
        if not await self._send(self.producer, "/0"):
            await self.insist(self.begin)
        await asyncio.sleep(0.1 + 0.3 * self.rng.random())

    def make_values(self) -> list[str]:
        """Return the values of the next batch."""
        return super().make_values()[:_BATCH_MAX]

    async def put(self, producer: AsyncProducer, values: list[str], partition: int) -> Deliveries:
        """Hand a batch to the SDK, perhaps with a key and a time."""
        plan = _plan_of(self.world)
        number = self.rng.randrange(plan.keys + 1)
        deliver_at_ms = None
        if self.rng.random() < plan.p_delayed:
            deliver_at_ms = DEFAULT_WALL_START_MS + self.world.now_ms + self.rng.randrange(_DELAY_MS_MAX)
        return await producer.send_many(
            values, key=f"key-{number}" if number else None, partition=partition, deliver_at=deliver_at_ms
        )


class WorkerWorkload(ProcessWorkload):
    """Receives jobs and settles them, one way or the other."""

    def __init__(self, world: ClusterWorld, name: str, topic: TopicPlan) -> None:
        super().__init__(world, name, topic)
        self.plan = _plan_of(world)
        self.p_crash = self.plan.p_crash
        self._sent_ns: dict[tuple[int, int, int], int] = {}
        """When the request that leased a job was sent, by partition, offset and grant."""

    async def work(self, cluster: AsyncCluster) -> bool:
        """Work until everything is settled, or until the program is restarted."""
        queue = await self._open(cluster)
        while not (self.world.is_over and is_drained(self.world)):
            await self._step(queue)
            await asyncio.sleep(self.world.knobs.step_gap_ms * 2 * self.rng.random() / 1000)
            if not self.world.is_healed and self.rng.random() < self.world.knobs.p_restart:
                await queue.close()
                return False
        await queue.close()
        return True

    def watch(self, view: View, before: View) -> None:
        """Q1: never are more records under way than the queue allows."""
        del before
        for _, window in _windows(self.world, view):
            facts = {"in_flight": window.in_flight, "in_flight_max": self.plan.settings.in_flight_max}
            require(window.in_flight <= facts["in_flight_max"], "Q1", "too many records are under way", **facts)

    # -- receiving -------------------------------------------------------------------------------

    async def _open(self, cluster: AsyncCluster) -> AsyncQueue:
        settings = self.plan.settings
        while True:
            try:
                queue = await cluster.queue(
                    self.topic.name,
                    self.plan.group,
                    lease=settings.lease_ms / 1000,
                    max_attempts=settings.max_attempts,
                    backoff=settings.backoff_ms / 1000,
                    backoff_max=settings.backoff_max_ms / 1000,
                    backoff_multiplier=settings.backoff_multiplier,
                    in_flight_max=settings.in_flight_max,
                    order=settings.order,
                    prefetch=self.plan.prefetch,
                )
            except (UnavailableError, OutcomeUnknownError) as error:
                self.world.counts[f"queue {error.code}"] += 1
                await asyncio.sleep(_RETRY_S)
            else:
                break
        make_job = queue.core.make_job

        def make(record: Record, attempt: int, grant: LeaseGrant, ends_ms: int) -> LeasedJob:
            place = (grant.partition_id, record.offset, grant.grant)
            self._sent_ns[place] = self._to_ns(cluster, ends_ms - grant.lease_ms)
            return make_job(record, attempt, grant, ends_ms)

        queue.core.make_job = make
        self._cluster = cluster
        return queue

    def _to_ns(self, cluster: AsyncCluster, monotonic_ms: int) -> int:
        """Return a time of a client's monotonic clock as one of the history."""
        return self.world.loop.now_ns - (cluster.router.clock.monotonic_ms() - monotonic_ms) * _MS

    async def _step(self, queue: AsyncQueue) -> None:
        count = 1 + self.rng.randrange(8)
        call = self.invoke("receive", None, {"group": self.plan.group, "max": count})
        try:
            jobs = await queue.receive(count, timeout=0.3)
        except QuiverError as error:
            self.fail(call, error)
            return
        self.succeed(call, [self._row(job) for job in jobs])
        if jobs and self.rng.random() < self.plan.p_pause and not self.world.is_healed:
            self.stop_for(self.rng.randrange(3 * self.plan.settings.lease_ms))
            await asyncio.sleep(0.001)
        if self.world.is_healed or self.rng.random() < 0.3:
            await self._settle_batch(queue, "ack", jobs)
        else:
            for job in jobs:
                await self._handle(queue, job)

    def _row(self, job: AsyncJob) -> list[object]:
        """Return a delivery as the history has it."""
        deliver_at_ms = find_deliver_at(job.headers)
        return [
            self.key(job.partition),
            int(job.offset),
            (job.value or b"").decode(),
            job.attempt,
            job.grant.grant,
            self._sent_ns[job.partition, job.offset, job.grant.grant],
            self._to_ns(self._cluster, job.ends_ms),
            None if job.key is None else job.key.decode(),
            None if deliver_at_ms is None else (deliver_at_ms - DEFAULT_WALL_START_MS) * _MS,
        ]

    # -- settling --------------------------------------------------------------------------------

    async def _handle(self, queue: AsyncQueue, job: AsyncJob) -> None:
        """Do with a job what workers do."""
        draw, lease_ms = self.rng.random(), self.plan.settings.lease_ms
        if draw < 0.5:
            await self._settle(job, "ack", job.ack)
        elif draw < 0.6:
            await self._settle(job, "return", job.nack, self.plan.settings.retry_delay_ms(job.attempt))
        elif draw < 0.68:
            delay_ms = self.rng.randrange(_DELAY_MS_MAX)
            await self._settle(job, "return", lambda: job.nack(delay=delay_ms / 1000), delay_ms)
        elif draw < 0.74:
            await self._settle(job, "reject", lambda: job.reject("not mine"))
        elif draw < 0.8:
            longer_ms = 1 + self.rng.randrange(2 * lease_ms)
            await self._settle(job, "extend", lambda: job.extend(longer_ms / 1000), longer_ms)
            await self._settle(job, "ack", job.ack)
        elif draw < 0.86:
            await asyncio.sleep(self.rng.randrange(2 * lease_ms) / 1000)
            kind, work = ("ack", job.ack) if self.rng.random() < 0.7 else ("release", job.release)
            await self._settle(job, kind, work)
        elif draw < 0.91:
            queue.core.keep_alive(job)
            await asyncio.sleep(self.rng.randrange(2 * lease_ms) / 1000)
            await self._settle(job, "ack", job.ack)
            queue.core.alive.pop(job, None)
        elif draw < 0.96:
            await self._settle(job, "release", job.release)
        # else it is forgotten, and delivered again

    async def _settle(self, job: AsyncJob, kind: str, work: Callable[[], Awaitable[None]], ms: int = 0) -> None:
        records = [[int(job.offset), job.grant.grant]]
        argument = {"group": self.plan.group, "kind": kind, "records": records, "ms": ms}
        call = self.invoke("settle", self.key(job.partition), argument)
        try:
            await work()
        except FencedError:
            self.succeed(call, records)
            self.world.counts[f"{kind} refused"] += 1
        except QuiverError as error:
            self.fail(call, error)
        else:
            self.succeed(call, [])
            self.world.counts[kind] += 1

    async def _settle_batch(self, queue: AsyncQueue, kind: str, jobs: Sequence[AsyncJob]) -> None:
        """Acknowledge by receipts alone, as a gateway does."""
        by_partition: dict[PartitionId, list[Range]] = {}
        for leased, found in to_ranges(jobs).items():
            by_partition.setdefault(leased.partition_id, []).extend(found)
        for partition_id, ranges in by_partition.items():
            records = [[first + at, grant] for first, count, grant in ranges for at in range(count)]
            argument = {"group": self.plan.group, "kind": kind, "records": records, "ms": 0}
            call = self.invoke("settle", self.key(partition_id), argument)
            try:
                refused = await queue.core.settle_ranges("ack", partition_id, ranges)
            except QuiverError as error:
                self.fail(call, error)
            else:
                self.succeed(call, sorted([offset, grant] for grant, offset in refused.stale))
                self.world.counts[kind] += len(records)


# -- the end -----------------------------------------------------------------------------------------


def is_drained(world: ClusterWorld) -> bool:
    """Return whether no record of the queue is under way, or to be leased, or to be moved."""
    view = world.view()
    if view is None or not are_others_done(world):
        return False
    for partition in _partitions(world, view):
        leader = world.leader(partition.group_id)
        if leader is None:
            return False
        state = leader[1].state
        window = state.queues.get(_group_id(world, view))
        is_empty = state.end_offset == 0 if window is None else _is_settled(window, state.end_offset)
        if not is_empty:
            return False
    return True


def require_queue_settled(world: ClusterWorld) -> None:
    """Q2, Q3: in the end all replicas have the same window, and no record is under way in it."""
    view = world.view()
    if view is None or world.knobs.queue is None or view.feature_level < LEVEL:
        return
    require(is_drained(world), "Q3", "records of a queue are under way at the end")
    for partition in _partitions(world, view):
        rows = {
            node: tuple(frozen_parts(freeze_windows(replica.state.queues)))
            for node in partition.replicas
            if (replica := world.replicas(world.nodes[node]).get(partition.group_id)) is not None
        }
        require(len(set(rows.values())) <= 1, "Q2", "windows of replicas differ", partition=partition.partition_id)


async def record_queue(world: ClusterWorld) -> None:
    """Add the queue's settings and its dead letters to the history."""
    plan, view = world.knobs.queue, world.view()
    if plan is None or view is None or view.feature_level < LEVEL:
        return
    keys = [f"{plan.topic.name}-{partition.partition_id}" for partition in _partitions(world, view)]
    note = {"group": plan.group, "keys": keys, "max_attempts": plan.settings.max_attempts}
    note |= {"order": plan.settings.order, "clock_error_ms": world.clocks.error_ms}
    world.recorder.note("comparison", "queue", None, note)
    letters = await _read_letters(world, dead_letter_topic(plan))
    world.counts["dead letters"] += len(letters)
    world.recorder.note("comparison", "dead", None, {"group": plan.group, "letters": letters})


def dead_letter_topic(plan: QueuePlan) -> str:
    """Return where the queue's dead letters go."""
    return dead_letter_topic_of(plan.settings, topic=plan.topic.name, group=plan.group)


async def _read_letters(world: ClusterWorld, topic: str) -> list[list[object]]:
    plan = _plan_of(world)
    async with world.connect("undertaker") as cluster:
        try:
            consumer = await cluster.consumer(topic)
        except NotFoundError:
            return []
        letters = []
        while await consumer.size():
            for record in await consumer.poll(100, timeout=1.0):
                facts = {name: (value or b"").decode() for name, value in record.headers}
                letters.append(
                    [
                        f"{plan.topic.name}-{facts[DEAD_PARTITION_HEADER]}",
                        int(facts[DEAD_OFFSET_HEADER]),
                        (record.value or b"").decode(),
                        int(facts[DEAD_ATTEMPTS_HEADER]),
                        facts[DEAD_REASON_HEADER],
                    ]
                )
        await consumer.close()
    return letters


def _plan_of(world: ClusterWorld) -> QueuePlan:
    assert world.knobs.queue is not None, "this world has a queue"
    return world.knobs.queue


def _group_id(world: ClusterWorld, view: View) -> ConsumerId:
    name = _plan_of(world).group
    found = (row.consumer_id for row in view.consumers.values() if row.request_id == name)
    return next(found, ConsumerId(-1))


def _partitions(world: ClusterWorld, view: View) -> list[PartitionRow]:
    topic = view.topic(_plan_of(world).topic.name)
    return [] if topic is None else [one for one in view.partitions.values() if one.topic_id == topic.topic_id]


def _windows(world: ClusterWorld, view: View) -> Iterator[tuple[PartitionRow, QueueWindow]]:
    group_id = _group_id(world, view)
    for partition in _partitions(world, view):
        for host in world.running():
            replica = world.replicas(host).get(partition.group_id)
            window = None if replica is None else replica.state.queues.get(group_id)
            if window is not None:
                yield partition, window


def _is_settled(window: QueueWindow, end_offset: int) -> bool:
    return not window.runs and not window.dead and window.next_offset == end_offset
