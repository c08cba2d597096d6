"""Managers with their administration on a simulated loop, and a way to ask them: what the manager's tests share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import metadata_cluster
from metadata_world import NOW_MS, register_broker

from quiver.config import ManagerSettings
from quiver.errors import OutcomeUnknownError, QuiverError, UnavailableError
from quiver.manager import Administration, Manager
from quiver.metadata import Command, FinishMove, Move, MoveState, PromoteMove, View
from quiver.metadata.commands import encode_payload
from quiver.model import Buffer, NodeId
from quiver.testing import SimulatedClock
from quiver.wire.messages import BeatInfo, Heartbeat, LeaderInfo, Request, Response, SubmitCommand, request_name
from quiver.wire.serving import Caller

R = TypeVar("R", bound=Response)

ANY_NODE = NodeId(99)
DELAY_S = 0.001
"""How long a request, or an answer, is under way."""
QUICK = ManagerSettings(
    heartbeat_interval_ms=200,
    suspect_after_ms=1_000,
    dead_after_ms=3_000,
    rebuild_after_ms=5_000,
    record_interval_ms=1_000,
    reconcile_interval_ms=500,
    purge_delay_ms=10_000,
)


class Wire:
    """The twin of the wire: calls the handler of the node at an address, in that node's scope, with delays."""

    def __init__(self, cluster: World) -> None:
        self._cluster = cluster
        self.asked: list[tuple[NodeId, str]] = []
        """Whom was asked what."""
        self.loses_answer: Callable[[Request[Any]], bool] = lambda request: False
        self.loses_request: Callable[[Request[Any]], bool] = lambda request: False

    async def call(
        self,
        address: str,
        request: Request[R],
        payload: Sequence[Buffer] = (),
        *,
        timeout_ms: int,
        caller: NodeId | None = ANY_NODE,
    ) -> tuple[R, memoryview]:
        manager = self._cluster.at(address)
        await asyncio.sleep(DELAY_S)
        if manager is None or not manager.is_serving or self.loses_request(request):
            raise UnavailableError(f"{address} was not reached", code="not_reached")
        self.asked.append((manager.id, request_name(request)))
        if manager.id in self._cluster.hanging:
            await asyncio.sleep(timeout_ms / 1000)
            raise OutcomeUnknownError(f"{address} did not answer")
        who = manager.caller(timeout_ms, node=caller)
        with self._cluster.loop.node_scope(manager.id):
            handling = manager.administration.handle(who, cast("Any", request), memoryview(b"".join(payload)))
            task = self._cluster.loop.create_task(handling)
        lives, end = manager.lives, self._cluster.loop.time() + timeout_ms / 1000
        while not task.done():
            if not manager.is_up or manager.lives != lives or self._cluster.loop.time() >= end:
                task.cancel()
                raise OutcomeUnknownError(f"{address} did not answer")
            await asyncio.sleep(DELAY_S)
        await asyncio.sleep(DELAY_S)
        response, parts = task.result()
        if self.loses_answer(request):
            raise OutcomeUnknownError(f"the answer of {address} was lost")
        return cast("R", response), memoryview(b"".join(parts))


class WorldManager(metadata_cluster.Manager):
    """A manager that answers requests."""

    administration: Administration

    @property
    def world(self) -> World:
        assert isinstance(self.cluster, World)
        return self.cluster

    @property
    def is_serving(self) -> bool:
        return self.is_up and hasattr(self, "administration")

    def caller(self, timeout_ms: int, *, node: NodeId | None = None) -> Caller:
        """Return who asks this node, with a deadline by its own clock, as its server would."""
        deadline_ms = self.clock.monotonic_ms() + timeout_ms
        return Caller(name="test", address="host:1", deadline_ms=deadline_ms, node=node)

    async def work(self) -> None:
        now_ms = self.cluster.loop.now_ns // 1_000_000
        self.clock = SimulatedClock(self.cluster.loop, wall_start_ms=NOW_MS + now_ms)  # on from life to life
        self.administration = Administration(
            self.id,
            self.store,
            self.world.wire,
            clock=self.clock,
            settings=self.world.manager_settings,
            seeds=self.world.addresses,
            heartbeats=getattr(self, "manager", None),
        )
        await asyncio.Event().wait()


class WorkingManager(WorldManager):
    """A manager that does a manager's work, too."""

    manager: Manager

    async def work(self) -> None:
        now_ms = self.cluster.loop.now_ns // 1_000_000
        clock = SimulatedClock(self.cluster.loop, wall_start_ms=NOW_MS + now_ms)
        settings = self.world.manager_settings
        async with Manager(self.store, clock=clock, settings=settings, cluster_id="c1") as self.manager:
            await super().work()


class World(metadata_cluster.Cluster):
    """Managers, the wire between them, and ways to ask."""

    def __init__(
        self, directory: Path, managers: int = 3, *, manager_settings: ManagerSettings = QUICK, **settings: Any
    ) -> None:
        self.manager_settings = manager_settings
        self.wire = Wire(self)
        self.hanging: set[NodeId] = set()
        """Nodes that take requests and never answer."""
        self.addresses = {NodeId(number): f"host{number}:9002" for number in range(1, managers + 1)}
        super().__init__(directory, managers, **settings)

    def make_manager(self, node: NodeId) -> WorldManager:
        return WorldManager(self, node)

    def at(self, address: str) -> WorldManager | None:
        number = NodeId(int(address.removeprefix("host").split(":")[0]))
        return cast("WorldManager | None", self.managers.get(number))

    def working(self, number: int) -> WorkingManager:
        manager = self.managers[NodeId(number)]
        assert isinstance(manager, WorkingManager)
        return manager

    @property
    def view(self) -> View:
        """Return what the newest of the managers knows."""
        views = [manager.store.view() for manager in self.managers.values() if manager.is_up]
        return max(views, key=lambda view: view.index)

    async def join(self, *numbers: int) -> None:
        """Register brokers."""
        for number in numbers:
            await self.submit(register_broker(number))

    async def ask(
        self,
        request: Request[R],
        payload: bytes = b"",
        *,
        of: int | None = None,
        caller: NodeId | None = None,
        timeout_ms: int = 5_000,
    ) -> R:
        """Ask a node, by default one that is not the primary, as a client does."""
        node = (await self.replica()).id if of is None else NodeId(of)
        await self.wait(lambda: cast("WorldManager", self.managers[node]).is_serving or None)
        parts = [payload] if payload else []
        address = f"host{node}:9002"
        response, _ = await self.wire.call(address, request, parts, timeout_ms=timeout_ms, caller=caller)
        return response

    async def ask_directly(self, manager: metadata_cluster.Manager, request: Request[Any], *, timeout_ms: int) -> None:
        """Ask a node past the wire, whose faults are then those of its own requests alone."""
        assert isinstance(manager, WorldManager)
        caller = manager.caller(timeout_ms)
        await manager.administration.handle(caller, cast("Any", request), memoryview(b""))


class WorkingWorld(World):
    """A world whose managers work, and brokers that beat and carry out moves as long as they are `living`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.living: set[int] = set()
        self.leads: dict[int, tuple[LeaderInfo, ...]] = {}
        self.clients: dict[int, tuple[BeatInfo, ...]] = {}
        self.moves_at_once: list[Counter[NodeId]] = []
        """How many moves each broker had under way, and under 0 all, whenever somebody looked."""

    def make_manager(self, node: NodeId) -> WorldManager:
        return WorkingManager(self, node)

    async def join(self, *numbers: int) -> None:
        """Let brokers live; they register by themselves."""
        self.living.update(numbers)
        for number in numbers:
            self.loop.create_task(self._live(number))
        await self.wait(lambda: self.living <= self.view.brokers.keys() or None)

    async def _live(self, number: int) -> None:
        while number in self.living:
            with suppress(QuiverError):
                await self._beat(number)
            await asyncio.sleep(self.manager_settings.heartbeat_interval_ms / 1000)

    async def _beat(self, number: int) -> None:
        beat = Heartbeat(
            node=NodeId(number),
            identity=f"identity-{number}",
            leads=self.leads.get(number, ()),
            clients=self.clients.get(number, ()),
        )
        seed = next(manager.id for manager in self.managers.values() if manager.is_up)
        taken, _ = await self.wire.call(f"host{seed}:9002", beat, timeout_ms=1_000)
        if not taken.is_known:
            await self.submit_by_wire(register_broker(number, now_ms=self._wall_ms()))

    async def carry_out_moves(self) -> None:
        """Do what partitions' leaders and sources do about moves, for ever."""
        while True:
            await asyncio.sleep(0.05)
            view = self.view
            moves = view.moves.values()
            self.moves_at_once.append(
                Counter(
                    broker for move in moves for broker in (move.source, move.target, NodeId(0)) if broker is not None
                )
            )
            for move in moves:
                with suppress(QuiverError):
                    await self._carry_out(view, move)

    async def _carry_out(self, view: View, move: Move) -> None:
        voters = view.partitions[move.topic_id, move.partition_id].replicas
        has_majority = 2 * len(self.living.intersection(voters)) > len(voters)
        if not has_majority:
            return
        if move.state is MoveState.PROMOTED:
            await self.submit_by_wire(FinishMove(now_ms=self._wall_ms(), move_id=move.move_id))
        elif move.target in self.living:
            await self.submit_by_wire(PromoteMove(now_ms=self._wall_ms(), move_id=move.move_id))

    async def submit_by_wire(self, command: Command[Any]) -> None:
        seed = next(manager.id for manager in self.managers.values() if manager.is_up)
        await self.wire.call(f"host{seed}:9002", SubmitCommand(), [encode_payload(command)], timeout_ms=1_000)

    def _wall_ms(self) -> int:
        return NOW_MS + self.loop.now_ns // 1_000_000


def run(
    test: Callable[[World], Coroutine[Any, Any, None]],
    *,
    managers: int = 3,
    make_world: Callable[..., World] = World,
    **settings: Any,
) -> None:
    """Run `async def test(world)` over started managers of a formed cluster."""

    async def main(cluster: metadata_cluster.Cluster) -> None:
        assert isinstance(cluster, World)
        await test(cluster)

    metadata_cluster.simulate(main, managers=managers, make_cluster=make_world, **settings)
