"""One simulated machine, and the real `Node` that runs on it through many lives.

Disk, clocks and database outlive the processes; everything else is made anew at each start. A supervisor stands behind
it: a node that exits is started again later, and one whose files cannot be used is given up, and the operator replaces
it under a new id (R22).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quiver.errors import DamageError, QuiverError, StorageError
from quiver.model import NodeId
from quiver.node import Node
from quiver.testing.clock import SimulatedClock
from quiver.testing.clusters.database import SimulatedDatabase
from quiver.testing.clusters.environment import SimulatedEnvironment
from quiver.testing.disk import SimulatedDisk
from quiver.testing.executor import SimulatedExecutor
from quiver.testing.finding import found, require
from quiver.testing.report import describe

if TYPE_CHECKING:
    from quiver.testing.clusters.world import ClusterWorld

TRIES = 3
"""How often a node that cannot open its damaged files is started again before its disk is given up."""
STOP_MS_MAX = 60_000
"""How long a node may take to end that was told to, or whose disk failed."""


class SimulatedHost:
    """One machine and its supervisor."""

    def __init__(self, world: ClusterWorld, node: NodeId, *, is_manager: bool) -> None:
        self.id = node
        self.world = world
        self.is_manager = is_manager
        self.address = f"node{node}:9002"
        streams = world.streams
        self.disk = SimulatedDisk(rng=streams.stream(f"disk-{node}"), on_power_loss=self._handle_power_loss)
        self.clock = SimulatedClock(world.loop, drift_ppm=world.knobs.drift_ppm(node))
        self.database = SimulatedDatabase()
        self.node: Node | None = None
        """The node that runs, once it has started."""
        self.is_up = False
        self.is_paused = False
        self.is_retired = False
        self.is_tainted = False
        self.restart_after_ms = 0
        self.lives = 0
        self._damages_in_a_row = 0
        self._stop = asyncio.Event()
        self._latency = world.knobs.disk_latency
        self._executor: SimulatedExecutor | None = None
        self._rng = streams.stream(f"node-{node}")
        self._executor_rng = streams.stream(f"executor-{node}")
        self._crash_rng = streams.stream(f"crash-{node}")

    @property
    def is_running(self) -> bool:
        """Tell whether the node's code runs and has begun to serve."""
        return self.is_up and not self.is_paused and self.node is not None

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a new life, unless there is one or there must be none."""
        if self.is_up or self.is_retired:
            return
        self.is_up, self.is_paused = True, False
        self.lives += 1
        self.world.trace.record("start", self.world.now_ms, self.id, self.lives)
        with self.world.loop.node_scope(self.id):
            self.world.loop.create_task(self._run())

    def kill(self, *, power_loss: bool) -> None:
        """End the life at once: the process alone, or the whole machine."""
        if self.is_up:
            self.world.trace.record("power_loss" if power_loss else "kill", self.world.now_ms, self.id)
            self._end()
        if power_loss:
            self.disk.crash(self._crash_rng)
            self.database.crash(self._crash_rng)
        else:
            self.disk.restart()

    def stop(self) -> None:
        """Tell the process to end in good order, as SIGTERM does."""
        if self.is_up:
            self._stop.set()
            self.world.spawn(self._require_end(self.lives))

    def pause(self) -> None:
        """Stop the node's code, as SIGSTOP does."""
        if self.is_up and not self.is_paused:
            self.is_paused = True
            self.world.loop.pause(self.id)

    def resume(self) -> None:
        """Let the node's code go on."""
        if self.is_up and self.is_paused:
            self.is_paused = False
            self.world.loop.resume(self.id)

    def may_be_damaged(self) -> bool:
        """Tell whether losing what is on this disk leaves a majority of every electorate whole."""
        return self.world.may_taint(self)

    def wipe(self) -> None:
        """Lose the disk's content, but come back under the same id as if nothing had been (R22 forbids it)."""
        self.kill(power_loss=False)
        stream = self.world.streams.stream(f"disk-{self.id}-{self.lives}")
        self.disk = SimulatedDisk(rng=stream, on_power_loss=self._handle_power_loss)
        self.database.lose()
        self.is_tainted = True

    def replace(self) -> None:
        """Give the node up with its disk, and bring a new one in its place under a new id."""
        self.world.replace(self)

    def retire(self) -> None:
        """End the node for good: its disk is lost, and its id never comes back."""
        self.kill(power_loss=False)
        self.is_retired = True

    def heal(self) -> None:
        """Let the disk work, and the process run."""
        self.disk.heal()
        self.set_disk_latency(1)
        self.resume()
        self.start()

    def set_disk_latency(self, factor: float) -> None:
        """Slow the disk down by a factor."""
        self._latency = self.world.knobs.disk_latency.scaled(factor)
        if self._executor is not None:
            self._executor.latency = self._latency

    # -- within ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Run the node as `quiver node` does, until it is told to stop or fails."""
        self._stop = asyncio.Event()
        error: BaseException | None = None
        try:
            async with Node(self.world.settings_of(self), self._environment()) as self.node:
                error = await self._serve(self.node)
        except Exception as failure:  # whatever ends a process ends it
            if self.world.loop.is_closed():
                raise  # only now are the blocks of the dead run through
            error = failure
        self._handle_exit(error)

    async def _serve(self, node: Node) -> StorageError | None:
        async with asyncio.TaskGroup() as tasks:
            failing = tasks.create_task(node.wait_failed())
            stopping = tasks.create_task(self._stop.wait())
            await asyncio.wait((failing, stopping), return_when=asyncio.FIRST_COMPLETED)
            failure = failing.result() if failing.done() else None
            failing.cancel()
            stopping.cancel()
        if failure is not None:
            self.world.trace.record("storage_failed", self.world.now_ms, self.id, str(failure))
            self.world.spawn(self._require_end(self.lives))
        return failure

    def _environment(self) -> SimulatedEnvironment:
        world = self.world
        self._executor = SimulatedExecutor(
            world.loop, self._executor_rng, self._latency, workers=world.knobs.disk_workers
        )
        return SimulatedEnvironment(
            clock=self.clock,
            rng=self._rng,
            disk=self.disk,
            executor=self._executor,
            database=self.database,
            incarnation=world.next_incarnation(),
            fresh_identity=f"identity-{self.id}-{self.lives}",
            address=self.address,
            medium=world.medium,
        )

    def _end(self) -> None:
        self.is_up = self.is_paused = False
        self.node = None
        self.world.loop.kill(self.id)
        self.world.medium.disconnect(self.id)

    def _handle_exit(self, error: BaseException | None) -> None:
        """Do what a supervisor does with a process that ended: start it again, or call the operator."""
        causes = list(_leaves(error))
        self.world.trace.record("exit", self.world.now_ms, self.id, *map(repr, causes))
        for cause in causes:
            if not isinstance(cause, QuiverError | OSError):
                found("F3", f"a node crashed: {describe(cause)}", node=self.id)
        is_damage = any(isinstance(cause, DamageError) for cause in causes)
        require(self.is_tainted or not is_damage, "F1", f"a disk that nobody damaged is damaged: {error}", node=self.id)
        self._damages_in_a_row = self._damages_in_a_row + 1 if is_damage else 0
        self._end()
        self.disk.restart()
        if self._damages_in_a_row > TRIES:
            self.world.replace(self)
        else:
            self.world.restart_later(self)

    async def _require_end(self, life: int) -> None:
        """Fail the run if a life that is to end goes on for too long."""
        await asyncio.sleep(STOP_MS_MAX / 1000)
        if self.is_up and self.lives == life and not self.is_paused:
            found("F3", "a node does not end", node=self.id, life=life)

    def _handle_power_loss(self) -> None:
        """Die in the middle of a disk operation."""
        self.kill(power_loss=True)
        self.world.restart_later(self)


def _leaves(error: BaseException | None) -> list[BaseException]:
    """Return the errors that a process ended with, also those that tasks raised together, and what they came from."""
    if error is None:
        return []
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error, *_leaves(error.__cause__ if isinstance(error, StorageError) else None)]
