"""Programs that use a simulated cluster through the real SDK, and write down what they ask and what they are told.

Each does one step after the other until the run is over, and is restarted now and then as programs are. Errors that
say *not done* or *unknown* are recorded as that; an error that blames the program for what it did not do is a finding.
A client whose call has an unknown outcome goes on as a new process, as the judge wants it.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from quiver.client.cluster import AsyncCluster
from quiver.client.prefetch import find_offset
from quiver.errors import FencedError, OutcomeUnknownError, QuiverError, RequestError, UnavailableError
from quiver.model import PartitionId
from quiver.testing.clusters.swarm import TopicPlan
from quiver.testing.finding import found
from quiver.testing.judge import Call
from quiver.wire.messages import GetMetadata

if TYPE_CHECKING:
    from quiver.testing.clusters.world import ClusterWorld

_RETRY_S = 0.1


class Client:
    """One program; `progress` counts what it got done."""

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

    # -- the history -----------------------------------------------------------------------------

    def proc(self, lane: str = "") -> str:
        """Return the process that the history knows this client, or a part of it that works by itself, as."""
        return f"{self.name}{lane}.{self._generations[lane]}"

    def key(self, partition: int) -> str:
        """Return what the history calls a partition."""
        return f"{self.topic.name}-{partition}"

    def invoke(self, f: str, key: str | None, value: Any = None, *, lane: str = "") -> Call:
        """Record that something begins."""
        return self.world.recorder.invoke(self.proc(lane), f, key, value)

    def succeed(self, call: Call, value: Any = None) -> None:
        """Record that something was done."""
        call.ok(value)
        self.progress += 1
        self.world.counts[f"{call.f} ok"] += 1

    def fail(self, call: Call, error: QuiverError, *, lane: str = "") -> None:
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
            found("C", f"{what} of {self.name} was refused: {error!r}", code=error.code)

    async def insist(self, work: Callable[[], Awaitable[object]]) -> None:
        """Do something, however often it must be tried."""
        while True:
            try:
                await work()
            except (UnavailableError, OutcomeUnknownError) as error:
                self.world.counts[f"begin {error.code}"] += 1
                await asyncio.sleep(_RETRY_S)
            else:
                return


class Watcher(Client):
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


class Maker(Client):
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
    """Do something; tell whether it changed anything: a refusal with this code says that it did not."""
    try:
        await work
    except RequestError as error:
        if error.code != code:
            raise
        return False
    return True
