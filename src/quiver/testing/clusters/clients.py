"""Workloads that use a simulated cluster through the real SDK and record their calls: producers, topics, end offsets.

Each makes one step after the other until the run is over, and is restarted from time to time as programs are. Errors
that say *not done* or *unknown* are recorded as that; an error that blames the program for what it did not do is a
violation. A client whose call has an unknown outcome continues as a new process, because a process of a history has one
call at a time.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from quiver.client.cluster import AsyncCluster
from quiver.client.delivery import Deliveries
from quiver.client.prefetch import find_offset
from quiver.client.producer import AsyncProducer
from quiver.errors import FencedError, OutcomeUnknownError, QuiverError, RequestError, UnavailableError
from quiver.model import PartitionId
from quiver.testing.clusters.swarm import TopicPlan
from quiver.testing.history import RecordedCall
from quiver.testing.simulator.report import require, violated
from quiver.wire.messages import GetMetadata

if TYPE_CHECKING:
    from quiver.metadata import View
    from quiver.testing.clusters.world import ClusterWorld


_RETRY_S = 0.1


class ClientWorkload:
    """One client program; `progress` counts completed calls."""

    def __init__(self, world: ClusterWorld, name: str, topic: TopicPlan) -> None:
        self.world = world
        self.name = name
        self.topic = topic
        self.progress = 0
        self.rng = world.streams.stream(f"client-{name}")
        self.cluster: AsyncCluster = world.connect(name)
        self._generations: defaultdict[str, int] = defaultdict(int)

    async def run(self) -> None:
        """Do one thing after the other until the run is over."""
        await self.insist(self.cluster.open)
        await self.insist(self.begin)
        while not self.world.is_over:
            await self.step()
            await asyncio.sleep(self.world.knobs.step_gap_ms * 2 * self.rng.random() / 1000)
            if self.rng.random() < self.world.knobs.p_restart:
                await self.restart()
        await self.end()
        await self.cluster.close()

    async def begin(self) -> None:
        """Register, or whatever comes first; repeated until it is done."""

    @abstractmethod
    async def step(self) -> None:
        """Do one thing."""

    async def restart(self) -> None:
        """End the program and start it again."""

    async def end(self) -> None:
        """Do what comes last, once everything is healed."""

    def watch(self, view: View, before: View) -> None:
        """Look at the newest metadata, and at that of the previous look: nothing in it may contradict this client."""

    # -- the history -----------------------------------------------------------------------------

    def proc(self, lane: str = "") -> str:
        """Return the process that the history knows this client, or a part of it that works by itself, as."""
        return f"{self.name}{lane}.{self._generations[lane]}"

    def key(self, partition: int) -> str:
        """Return what the history calls a partition."""
        return f"{self.topic.name}-{partition}"

    def invoke(self, f: str, key: str | None, value: Any = None, *, lane: str = "") -> RecordedCall:
        """Record that something begins."""
        return self.world.recorder.invoke(self.proc(lane), f, key, value)

    def succeed(self, call: RecordedCall, value: Any = None) -> None:
        """Record that something was done."""
        call.ok(value)
        self.progress += 1
        self.world.counts[f"{call.f} ok"] += 1

    def fail(self, call: RecordedCall, error: QuiverError, *, lane: str = "") -> None:
        """Record what an error says of a call."""
        if error.outcome == "unknown":
            call.info(error.code)
            self._generations[lane] += 1
        else:
            call.fail(error.code)
        self.world.counts[f"{call.f} {'info' if error.outcome == 'unknown' else 'fail'}"] += 1
        self.check(error, call.f)

    def check(self, error: QuiverError, what: str) -> None:
        """Fail the run on an error that blames this program."""
        if isinstance(error, RequestError) and not isinstance(error, FencedError):
            violated("C", f"{what} of {self.name} was refused: {error!r}", code=error.code)

    async def insist(self, work: Callable[[], Awaitable[object]]) -> None:
        """Retry something until it is done."""
        while True:
            try:
                await work()
            except (UnavailableError, OutcomeUnknownError) as error:
                self.world.counts[f"begin {error.code}"] += 1
                await asyncio.sleep(_RETRY_S)
            else:
                return


class EndOffsetWorkload(ClientWorkload):
    """Asks for partitions' ends."""

    async def step(self) -> None:
        """Ask for one end."""
        partition = self.rng.randrange(self.topic.partitions)
        call = self.invoke("list_offsets", self.key(partition))
        try:
            end = await find_offset(self.cluster.router, self.topic.name, PartitionId(partition), "latest")
        except QuiverError as error:
            self.fail(call, error)
        else:
            self.succeed(call, int(end))


class TopicWorkload(ClientWorkload):
    """Creates and deletes topics of a few names, against others of its kind, and asks whether they are there."""

    async def step(self) -> None:
        """Do one thing with one name."""
        name = f"made-{self.rng.randrange(2)}"
        what, work = (("create", self._create), ("delete", self._delete), ("exists", self._exists))[
            self.rng.randrange(3)
        ]
        call = self.invoke(what, name)
        try:
            answer = await work(name)
        except QuiverError as error:
            self.fail(call, error)
        else:
            self.succeed(call, answer)
        await asyncio.sleep(0.2)

    async def _create(self, name: str) -> bool:
        replicas = 1 + self.rng.randrange(self.world.knobs.replicas_max)
        return await _unless("topic_exists", self.cluster.create_topic(name, 1, replicas=replicas))

    async def _delete(self, name: str) -> bool:
        return await _unless("unknown_topic", self.cluster.delete_topic(name))

    async def _exists(self, name: str) -> bool:
        request = GetMetadata(topics=(name,), is_linearizable=True)
        answer, _ = await self.cluster.router.ask(request, deadline=self.cluster.router.deadline())
        return bool(answer.topics)


async def _unless(code: str, work: Awaitable[None]) -> bool:
    """Do something; return False if it is refused with this code, which means that nothing changed."""
    try:
        await work
    except RequestError as error:
        if error.code != code:
            raise
        return False
    return True


class ProducerWorkload(ClientWorkload):
    """Sends idempotently under a name, several batches at a time, and registers under the same name after a restart."""

    producer: AsyncProducer

    def __init__(self, world: ClusterWorld, name: str, topic: TopicPlan) -> None:
        super().__init__(world, name, topic)
        self._count = 0
        self._acknowledged: Counter[int] = Counter()
        """By partition, how many records are there."""
        self._unknown: Counter[int] = Counter()
        """By partition, how many records are perhaps there."""

    async def begin(self) -> None:
        """Register under the name, which fences the previous holder of the name."""
        call = self.invoke("register", self.name)
        try:
            timeout_s = self.world.knobs.delivery_timeout_ms / 1000
            self.producer = await self.cluster.producer(self.topic.name, self.name, delivery_timeout=timeout_s)
        except QuiverError as error:
            self.fail(call, error)
            raise
        identity = self.producer.core.identity
        self.succeed(call, {"id": int(identity.producer_id), "epoch": identity.epoch})

    async def step(self) -> None:
        """Send some batches side by side."""
        lanes = range(1 + self.rng.randrange(self.world.knobs.lanes))
        sends = [self._send(self.producer, f"/{lane}") for lane in lanes]
        if not all(await asyncio.gather(*sends)):
            await self.insist(self.begin)  # fenced: another one has the name

    async def send_to(self, partition: int) -> bool:
        """Send a batch to one partition; tell whether the producer may continue."""
        return await self._send(self.producer, "/0", partition)

    async def _send(self, producer: AsyncProducer, lane: str, partition: int | None = None) -> bool:
        """Send a batch, to any partition unless one is given; tell whether the producer may continue."""
        if partition is None:
            partition = self.rng.randrange(producer.core.accumulator.partition_count)
        values = self.make_values()
        self._count += len(values)
        call = self.invoke("send", self.key(partition), values, lane=lane)
        try:
            spans = await (await self.put(producer, values, partition))
        except QuiverError as error:
            if error.outcome == "unknown":
                self._unknown[partition] += len(values)
            self.fail(call, error, lane=lane)
            return not isinstance(error, FencedError)
        if len(spans) != 1:
            violated("C", "a small send is in several batches", name=self.name, batches=len(spans))
        self.succeed(call, int(spans[0].first_offset))
        self._acknowledged[partition] += len(values)
        return True

    def make_values(self) -> list[str]:
        """Return the values of the next batch, which no other has."""
        count = 1 + self.rng.randrange(self.world.knobs.values_max)
        return [f"{self.name}:{self._count + at}" for at in range(count)]

    async def put(self, producer: AsyncProducer, values: list[str], partition: int) -> Deliveries:
        """Hand a batch to the SDK."""
        return await producer.send_many(values, partition=partition)

    async def restart(self) -> None:
        """Crash, or be replaced while still at work, and come back under the same name."""
        old = self.producer
        if self.rng.random() < 0.5:
            await old.abort()
        await self.insist(self.begin)
        if self.rng.random() < 0.5:
            await self._send(old, "/old")  # it does not know yet that it was replaced
        await old.abort()
        await self._check_sequence()

    async def _check_sequence(self) -> None:
        """Require that a partition answers a restarted producer with the right next sequence."""
        partition = self.rng.randrange(self.producer.core.accumulator.partition_count)
        try:
            count = await self.producer.next_sequence(partition)
        except QuiverError as error:
            self.check(error, "next_sequence")
            return
        known, unknown = self._acknowledged[partition], self._unknown[partition]
        facts = {"name": self.name, "partition": partition, "next_sequence": count, "acknowledged": known}
        require(
            known <= count <= known + unknown, "C", "a producer gets a wrong next sequence", unknown=unknown, **facts
        )
