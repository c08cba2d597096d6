"""Client programs in processes of their own, which are killed and stopped as those of nodes are.

A process is a scope of the simulated loop. A killed one runs nothing any more, not even what it would do at its end; a
stopped one continues later where it was, as a zombie that has not noticed that time has passed.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING

from quiver.client.cluster import AsyncCluster
from quiver.errors import QuiverError
from quiver.testing.clusters.clients import ClientWorkload

if TYPE_CHECKING:
    from quiver.testing.clusters.world import ClusterWorld

LEVEL = 2
"""The feature level from which there are groups and work queues."""
_LOOK_S = 0.1
_DOWN_MS_MAX = 3_000
"""Longest time until a killed process is started again."""


class ProcessWorkload(ClientWorkload):
    """A client program that runs in one process after the other."""

    p_crash = 0.0
    """How likely its process is killed, at each look."""

    async def run(self) -> None:
        """Run processes until one has done everything; none while the cluster is below the feature level."""
        while not self._is_possible():
            if self.world.is_over:
                return
            self.progress += 1
            await asyncio.sleep(_LOOK_S)
        while not await self._live():
            await self.step()

    async def step(self) -> None:
        """Wait until the next process is started."""
        await asyncio.sleep(self.rng.randrange(_DOWN_MS_MAX) / 1000)

    @abstractmethod
    async def work(self, cluster: AsyncCluster) -> bool:
        """Be the program, with a cluster object that is open; return whether everything is done."""

    def stop_for(self, stopped_ms: int) -> None:
        """Stop the running process, as SIGSTOP does, and let it continue later."""
        self.world.counts[f"{self.kind} stopped"] += 1
        self.world.spawn(self._stop(stopped_ms, self._lives))

    @property
    def kind(self) -> str:
        """Return what counts call it."""
        return self.name.rpartition("-")[0]

    _lives = 0

    def _is_possible(self) -> bool:
        view = self.world.view()
        return view is not None and view.feature_level >= LEVEL

    async def _live(self) -> bool:
        """Run one process; return whether everything is done."""
        loop = self.world.loop
        self._lives += 1
        for lane in ("", *self._generations):
            self._generations[lane] += 1
        self.world.trace.record("process", self.world.now_ms, self.name, self._lives)
        with loop.node_scope(self.name):
            process = loop.create_task(self._run_process())
        while not process.done():
            await asyncio.sleep(_LOOK_S)
            if not self.world.is_healed and not process.done() and self.rng.random() < self.p_crash:
                loop.kill(self.name)
                self.world.trace.record("process_killed", self.world.now_ms, self.name)
                self.world.recorder.note(self.proc(), "crash")
                self.world.counts[f"{self.kind} killed"] += 1
                return False
        loop.kill(self.name)
        return process.result()

    async def _run_process(self) -> bool:
        cluster = self.world.connect(f"{self.name}.{self._lives}")
        await self.insist(cluster.open)
        is_done = await self.work(cluster)
        try:
            await cluster.close()
        except QuiverError as error:
            self.check(error, "close")
        return is_done

    async def _stop(self, stopped_ms: int, life: int) -> None:
        if self._lives == life and not self.world.is_healed:
            self.world.trace.record("process_stopped", self.world.now_ms, self.name, stopped_ms)
            self.world.loop.pause(self.name)
            await asyncio.sleep(stopped_ms / 1000)
        if self._lives == life:
            self.world.loop.resume(self.name)


def are_others_done(world: ClusterWorld) -> bool:
    """Return whether all clients have ended that are no processes of their own: nobody sends any more."""
    pairs = zip(world.clients, world.client_tasks, strict=True)
    return all(task.done() for client, task in pairs if not isinstance(client, ProcessWorkload))
