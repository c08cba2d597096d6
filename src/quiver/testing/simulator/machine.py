"""One simulated machine: a disk and clocks that outlive its processes, and a supervisor that restarts them.

Everything except the disk, the clock and what a subclass adds to them is rebuilt at each start. The supervisor restarts
a process that exits; a machine whose files cannot be used is retired, and the operator replaces it under a new id
(R22).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from quiver.model import NodeId
from quiver.testing.clock import DEFAULT_WALL_START_MS, SimulatedClock
from quiver.testing.disk import SimulatedDisk
from quiver.testing.executor import SimulatedExecutor
from quiver.testing.randomness import Latency

if TYPE_CHECKING:
    from quiver.testing.simulator.world import SimulatedWorld


class SimulatedMachine(ABC):
    """One machine and its supervisor."""

    def __init__(self, world: SimulatedWorld[Any, Any], node: NodeId) -> None:
        self.id = node
        self.is_up = False
        """Whether there is a process, running or paused."""
        self.is_paused = False
        self.is_retired = False
        """Whether the machine is gone permanently, with its disk and its id."""
        self.is_damaged = False
        """Whether acknowledged bytes on its disk may be damaged."""
        self.restart_after_ms = 0
        """Restart delay after a planned power loss; 0: the supervisor draws one."""
        self.lives = 0
        """How many processes were started."""
        self._world = world
        streams = world.streams
        self.disk = SimulatedDisk(rng=streams.stream(f"disk-{node}"), on_power_loss=self._handle_power_loss)
        self.clock = SimulatedClock(
            world.loop, drift_ppm=world.knobs.drift_ppm(node), wall_start_ms=DEFAULT_WALL_START_MS + world.now_ms
        )
        self._disk_latency = world.knobs.disk_latency
        self._executor: SimulatedExecutor | None = None
        self._rng = streams.stream(f"node-{node}")
        self._executor_rng = streams.stream(f"executor-{node}")
        self._crash_rng = streams.stream(f"crash-{node}")

    @property
    def is_running(self) -> bool:
        """Return whether the node's code runs."""
        return self.is_up and not self.is_paused

    # -- processes -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process, unless one is up or the machine is retired."""
        if self.is_up or self.is_retired:
            return
        self.is_up, self.is_paused = True, False
        self.lives += 1
        self._world.trace.record("start", self._world.now_ms, self.id, self.lives)
        with self._world.loop.node_scope(self.id):
            self._world.loop.create_task(self._run())

    def kill(self, *, power_loss: bool) -> None:
        """Kill the process immediately; with `power_loss` the machine loses what is not on its disk."""
        if self.is_up:
            self._world.trace.record("power_loss" if power_loss else "kill", self._world.now_ms, self.id)
            self._end_process()
        if power_loss:
            self._crash()
        else:
            self.disk.restart()

    def pause(self) -> None:
        """Stop the node's code, as SIGSTOP does."""
        if self.is_up and not self.is_paused:
            self.is_paused = True
            self._world.loop.pause(self.id)

    def resume(self) -> None:
        """Let the node's code continue, as SIGCONT does."""
        if self.is_up and self.is_paused:
            self.is_paused = False
            self._world.loop.resume(self.id)

    def heal(self) -> None:
        """Repair the disk's faults and have a process running."""
        self.disk.heal()
        self.set_disk_latency(1)
        self.resume()
        self.start()

    # -- the disk --------------------------------------------------------------------------------

    def set_disk_latency(self, factor: float, *, spikes: bool = True) -> None:
        """Slow the disk down by a factor; without `spikes` it never stalls."""
        latency = self._world.knobs.disk_latency.scaled(factor)
        if not spikes:
            latency = Latency(latency.minimum_ms, latency.spread_ms)
        self._disk_latency = latency
        if self._executor is not None:
            self._executor.latency = latency

    def can_be_damaged(self) -> bool:
        """Return whether a majority of every electorate keeps its data if this disk is lost."""
        return self._world.can_damage(self)

    def wipe(self) -> None:
        """Lose the disk's content but keep the id, which R22 forbids."""
        self.kill(power_loss=False)
        stream = self._world.streams.stream(f"disk-{self.id}-{self.lives}")
        self.disk = SimulatedDisk(rng=stream, on_power_loss=self._handle_power_loss)
        self.is_damaged = True

    def retire(self) -> None:
        """Remove the machine permanently: its disk is lost and its id is never used again."""
        self.kill(power_loss=False)
        self.is_retired = True

    def replace(self) -> None:
        """Retire the machine and bring a new one under a new id (R22)."""
        self._world.replace(self)

    # -- what a subclass adds --------------------------------------------------------------------

    @abstractmethod
    async def _run(self) -> None:
        """Run one process of the node, in its scope on the loop."""

    @abstractmethod
    def _drop_process(self) -> None:
        """Forget what died with the process."""

    def _crash(self) -> None:
        """Lose what is not durable."""
        self.disk.crash(self._crash_rng)

    def _make_executor(self) -> SimulatedExecutor:
        """Return the disk's executor for a new process."""
        self._executor = SimulatedExecutor(
            self._world.loop,
            self._executor_rng,
            self._disk_latency,
            workers=self._world.knobs.disk_workers,
            queue_max=self._world.knobs.disk_queue_max,
        )
        return self._executor

    def _end_process(self) -> None:
        self.is_up = self.is_paused = False
        self._world.loop.kill(self.id)
        self._world.network.disconnect(self.id)
        self._drop_process()

    def _handle_power_loss(self) -> None:
        """Die in the middle of a disk operation."""
        self.kill(power_loss=True)
        self._world.restart_later(self)
