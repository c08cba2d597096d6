"""One simulated machine that runs the real `Node`, one process after the other.

The database outlives the processes, as the disk does. A node that exits is restarted; a machine whose files stay
damaged is replaced.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quiver.errors import DamageError, QuiverError, StorageError
from quiver.model import NodeId
from quiver.node import Node
from quiver.testing.clusters.environment import SimulatedDatabase, SimulatedEnvironment
from quiver.testing.simulator.machine import SimulatedMachine
from quiver.testing.simulator.report import describe, require, violated

if TYPE_CHECKING:
    from quiver.testing.clusters.world import ClusterWorld

TRIES = 3
"""How often a node with damaged files is restarted before its machine is replaced."""
STOP_MS_MAX = 60_000
"""How long a node may take to end after SIGTERM or a storage failure."""


class SimulatedHost(SimulatedMachine):
    """One machine with a real `Node` on it."""

    def __init__(self, world: ClusterWorld, node: NodeId, *, is_manager: bool) -> None:
        super().__init__(world, node)
        self.world = world
        self.is_manager = is_manager
        self.address = f"node{node}:9002"
        self.database = SimulatedDatabase()
        self.node: Node | None = None
        """The running node, once it has started."""
        self._damages_in_a_row = 0
        self._stop = asyncio.Event()

    @property
    def is_running(self) -> bool:
        """Tell whether the node's code runs and serves requests."""
        return super().is_running and self.node is not None

    def stop(self) -> None:
        """Tell the process to end in good order, as SIGTERM does."""
        if self.is_up:
            self._stop.set()
            self.world.spawn(self._require_end(self.lives))

    def wipe(self) -> None:
        """Lose the disk and the database but keep the id, which R22 forbids."""
        super().wipe()
        self.database.lose()

    # -- one process -----------------------------------------------------------------------------

    async def _run(self) -> None:
        """Run the node as `quiver node` does, until it is stopped or fails."""
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
        return SimulatedEnvironment(
            clock=self.clock,
            rng=self._rng,
            disk=self.disk,
            executor=self._make_executor(),
            database=self.database,
            incarnation=world.next_incarnation(),
            fresh_identity=f"identity-{self.id}-{self.lives}",
            address=self.address,
            medium=world.medium,
        )

    def _drop_process(self) -> None:
        self.node = None
        self.world.transport.disconnect(self.id)

    def _crash(self) -> None:
        super()._crash()
        self.database.crash(self._crash_rng)

    def _handle_exit(self, error: BaseException | None) -> None:
        """Do what a supervisor does with a process that ended: start it again, or call the operator."""
        causes = list(_leaves(error))
        self.world.trace.record("exit", self.world.now_ms, self.id, *map(repr, causes))
        for cause in causes:
            if not isinstance(cause, QuiverError | OSError):
                violated("F3", f"a node crashed: {describe(cause)}", node=self.id)
        is_damage = any(isinstance(cause, DamageError) for cause in causes)
        require(
            self.is_damaged or not is_damage,
            "F1",
            f"a disk is damaged although no fault damaged it: {error}",
            node=self.id,
        )
        self._damages_in_a_row = self._damages_in_a_row + 1 if is_damage else 0
        self._end_process()
        self.disk.restart()
        if self._damages_in_a_row > TRIES:
            self.world.replace(self)
        else:
            self.world.restart_later(self)

    async def _require_end(self, life: int) -> None:
        """Fail the run if a process does not end in time."""
        await asyncio.sleep(STOP_MS_MAX / 1000)
        if self.is_up and self.lives == life and not self.is_paused:
            violated("F3", "a node does not end", node=self.id, life=life)


def _leaves(error: BaseException | None) -> list[BaseException]:
    """Return the errors that a process ended with, also those that tasks raised together, and what they came from."""
    if error is None:
        return []
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error, *_leaves(error.__cause__ if isinstance(error, StorageError) else None)]
