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

from quiver.access import AccessControl, AuditLog
from quiver.clock import Clock
from quiver.config import EncryptionSettings, ManagerSettings
from quiver.dispatch import RequestDispatcher
from quiver.errors import OutcomeUnknownError, QuiverError, UnavailableError
from quiver.features import LEVEL_MAX
from quiver.manager import AdminService, Manager, NodeRouter
from quiver.metadata import Command, FinishMove, MetadataStore, MoveRow, MoveState, PromoteMove, View
from quiver.metadata.commands import encode_payload
from quiver.model import Buffer, NodeId
from quiver.testing import SimulatedClock
from quiver.testing.transport import SimulatedTransport
from quiver.wire.messages import BeatInfo, BrokerHeartbeatRequest, LeaderInfo, SubmitCommand
from quiver.wire.requests import Request, Response, request_name

R = TypeVar("R", bound=Response)

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
    """The simulated transport, with what a test wants to go wrong."""

    def __init__(self, cluster: World) -> None:
        self.transport = SimulatedTransport(cluster.loop, cluster.network, cluster.streams.stream("requests"))
        self.asked: list[tuple[str, str]] = []
        """Who, by address, was asked what."""
        self.hanging: set[str] = set()
        """Addresses of nodes that take requests and never answer."""
        self.loses_answer: Callable[[Request[Any]], bool] = lambda request: False
        self.loses_request: Callable[[Request[Any]], bool] = lambda request: False

    def port(self, node: NodeId | None) -> Port:
        return Port(self, node)


class Port:
    """One node's, or a client's, way to ask."""

    def __init__(self, wire: Wire, node: NodeId | None) -> None:
        self._wire = wire
        self._requester = wire.transport.port(node)

    async def call(
        self, address: str, request: Request[R], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[R, memoryview]:
        wire = self._wire
        if wire.loses_request(request):
            raise UnavailableError(f"{address} was not reached", code="not_reached")
        wire.asked.append((address, request_name(request)))
        if address in wire.hanging:
            await asyncio.sleep(timeout_ms / 1000)
            raise OutcomeUnknownError(f"{address} did not answer")
        answer = await self._requester.call(address, request, payload, timeout_ms=timeout_ms)
        if wire.loses_answer(request):
            raise OutcomeUnknownError(f"the answer of {address} was lost")
        return answer


class WorldManager(metadata_cluster.Manager):
    """A manager that answers requests."""

    admin: AdminService

    @property
    def world(self) -> World:
        assert isinstance(self.cluster, World)
        return self.cluster

    @property
    def is_serving(self) -> bool:
        return self.is_up and hasattr(self, "admin")

    @property
    def address(self) -> str:
        return f"host{self.id}:9002"

    def _drop_process(self) -> None:
        super()._drop_process()
        self.world.wire.transport.disconnect(self.id)

    async def work(self) -> None:
        now_ms = self.cluster.loop.now_ns // 1_000_000
        clock = SimulatedClock(self.cluster.loop, wall_start_ms=NOW_MS + now_ms)  # on from life to life
        rng = self.cluster.streams.stream(f"router-{self.id}-{self.lives}")
        transport = self.world.wire.port(self.id)
        router = NodeRouter(self.id, self.store, transport, clock=clock, rng=rng, seeds=self.world.addresses)
        self.admin = AdminService(
            self.store,
            router,
            clock=clock,
            settings=self.world.manager_settings,
            heartbeats=getattr(self, "manager", None),
            encryption=self.world.encryption,
        )
        dispatcher = RequestDispatcher(self.store, clock, open_access(self.store, clock))
        dispatcher.add(self.admin.handlers())
        self.world.wire.transport.serve(self.address, self.id, dispatcher.handle, clock=clock)
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
        self,
        directory: Path,
        managers: int = 3,
        *,
        manager_settings: ManagerSettings = QUICK,
        encryption: EncryptionSettings | None = None,
        **settings: Any,
    ) -> None:
        self.manager_settings = manager_settings
        self.encryption = encryption
        self.addresses = {NodeId(number): f"host{number}:9002" for number in range(1, managers + 1)}
        super().__init__(directory, managers, **settings)
        self.wire = Wire(self)

    def make_node(self, node: NodeId) -> WorldManager:
        return WorldManager(self, node)

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
        response, _ = await self.wire.port(caller).call(
            f"host{node}:9002", request, [payload] if payload else [], timeout_ms=timeout_ms
        )
        return response


class WorkingWorld(World):
    """A world whose managers work, and brokers that beat and carry out moves as long as they are `living`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.living: set[int] = set()
        self.leads: dict[int, tuple[LeaderInfo, ...]] = {}
        self.clients: dict[int, tuple[BeatInfo, ...]] = {}
        self.emptied_ms: dict[int, int] = {}
        self.moves_at_once: list[Counter[NodeId]] = []
        """How many moves each broker had under way, and under 0 all, whenever somebody looked."""

    def make_node(self, node: NodeId) -> WorldManager:
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
        beat = BrokerHeartbeatRequest(
            node=NodeId(number),
            identity=f"identity-{number}",
            leads=self.leads.get(number, ()),
            clients=self.clients.get(number, ()),
            emptied_ms=self.emptied_ms.get(number),
            level_max=LEVEL_MAX,
        )
        seed = next(manager.id for manager in self.managers.values() if manager.is_up)
        taken, _ = await self.wire.port(NodeId(number)).call(f"host{seed}:9002", beat, timeout_ms=1_000)
        if not taken.is_known:
            await self.submit_by_wire(register_broker(number, now_ms=self._wall_ms()), sender=NodeId(number))

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

    async def _carry_out(self, view: View, move: MoveRow) -> None:
        voters = view.partitions[move.topic_id, move.partition_id].replicas
        has_majority = 2 * len(self.living.intersection(voters)) > len(voters)
        if not has_majority:
            return
        if move.state is MoveState.PROMOTED:
            await self.submit_by_wire(FinishMove(now_ms=self._wall_ms(), move_id=move.move_id), sender=move.target)
        elif move.target in self.living:
            await self.submit_by_wire(PromoteMove(now_ms=self._wall_ms(), move_id=move.move_id), sender=move.target)

    async def submit_by_wire(self, command: Command[Any], *, sender: NodeId) -> None:
        seed = next(manager.id for manager in self.managers.values() if manager.is_up)
        await self.wire.port(sender).call(
            f"host{seed}:9002", SubmitCommand(level_max=LEVEL_MAX), [encode_payload(command)], timeout_ms=1_000
        )

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


def open_access(store: MetadataStore, clock: Clock) -> AccessControl:
    """Return the access control of a node that needs no credentials."""
    audit = AuditLog(node=NodeId(0), clock=clock)
    return AccessControl(view=store.view, clock=clock, is_open=True, audit=audit)
