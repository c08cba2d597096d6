"""A broker without partition data, that speaks the manager's protocol as a real one does.

Real are its metadata member (a learner of the metadata's Raft group, with its own log on a simulated disk), its store
and watch, its router, and its heartbeats with leader reports. Only the replicas are a model: `DataPlane` says at once
who leads a partition and how long a copy takes.

All such brokers share one applied copy of the metadata (`SharedMetadata`), since applying is deterministic: a broker
may see a change a few milliseconds before its own log has it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from quiver.broker.heartbeats import BrokerRegistration, HeartbeatSender
from quiver.errors import QuiverError
from quiver.manager.node_router import NodeRouter
from quiver.metadata import (
    METADATA_GROUP,
    BrokerState,
    Command,
    CommandDone,
    FinishMove,
    MetadataState,
    MetadataStore,
    MoveRow,
    MoveState,
    PartitionRow,
    PromoteMove,
    open_database,
)
from quiver.metadata.change_log import ChangeLog
from quiver.metadata.commands import command_name, decode_command
from quiver.metadata.database import Transaction
from quiver.metadata.database_writer import DatabaseWriter
from quiver.metadata.state import Change, Counters, LogPosition, View
from quiver.metadata.state_machine import MetadataStateMachine
from quiver.model import Index, NodeId, PartitionId, TopicId
from quiver.record import Batch
from quiver.replication import Replicator
from quiver.testing.clock import SimulatedClock
from quiver.testing.disk import SimulatedDisk
from quiver.testing.executor import SimulatedExecutor
from quiver.testing.harness import QUICK_DISK
from quiver.wire.messages import LeaderInfo

if TYPE_CHECKING:
    from quiver.testing.control_plane.world import ControlPlane

PartitionKey = tuple[TopicId, PartitionId]

STEP_S = 0.5
"""Interval at which a broker looks for moves and leaderships that it has something to do with."""
_GONE = (BrokerState.DEAD, BrokerState.REMOVED)


class SharedMetadata:
    """The metadata that all brokers of a simulation apply together, and the commands that led to it."""

    def __init__(self) -> None:
        self.machine = MetadataStateMachine(MetadataState(), on_failure=_raise)
        self.machine.add_listener(self)
        self.commands: Counter[str] = Counter()
        self.command_bytes: Counter[str] = Counter()
        self._changes: dict[Index, Sequence[Change]] = {}

    def changes_of(self, batches: Sequence[Batch]) -> list[Change]:
        """Return the changes of committed batches, which the first broker that has them applies."""
        changes: list[Change] = []
        for batch in batches:
            if batch.header.index > self.machine.applied_index:
                command = decode_command(batch)
                name = "raft" if command is None else command_name(command)
                self.commands[name] += 1
                self.command_bytes[name] += len(batch.payload())
                self.machine.apply([batch])
            changes += self._changes.get(batch.header.index, ())
        return changes

    def add(self, changes: Sequence[Change], _: Counters, position: LogPosition) -> None:
        """Keep the changes of one entry, for the other brokers."""
        self._changes[position.index] = tuple(changes)

    def replace(self, _: View) -> None:
        """Do nothing: nobody restores the shared copy."""


class _SharedMachine(MetadataStateMachine):
    """One broker's state machine, whose state is the shared one."""

    def __init__(self, shared: SharedMetadata) -> None:
        super().__init__(shared.machine.state, on_failure=_raise)
        self._shared = shared

    def apply(self, batches: Sequence[Batch]) -> None:
        changes = self._shared.changes_of(batches)
        for listener in self._listeners:
            listener.add(changes, self.state.counters, self.state.position)

    def restore_steps(self, state: bytes) -> Iterator[None]:  # noqa: ARG002 - the shared state is as new
        return iter(())

    def restore(self, state: bytes) -> None:  # noqa: ARG002 - the shared state is as new
        for listener in self._listeners:
            listener.replace(self.state.view())


class _NoDatabase:
    """A database that forgets everything: a broker's own database is not what is measured."""

    def attach(self) -> tuple[Counters, LogPosition]:
        return Counters(), LogPosition()

    def write(self, transaction: Transaction) -> None:
        del transaction

    def interrupt(self) -> None:
        pass


class LightBroker:
    """One broker; its disk outlives its processes."""

    def __init__(self, world: ControlPlane, node: NodeId, *, host: str) -> None:
        self.id = node
        self.address = f"{host}:{9000 + node}"
        self.leads: dict[PartitionKey, int] = {}
        """The epochs of the partitions that it leads."""
        self.heartbeats: HeartbeatSender | None = None
        self._world = world
        self._disk = SimulatedDisk()
        self._lives = 0
        self._steps: set[tuple[int, MoveState]] = set()
        """The steps of moves that it carries out at present."""

    def start(self) -> None:
        """Start a process."""
        self._lives += 1
        self._steps.clear()
        self._world.medium.identities[self.id] = f"identity-{self.id}"
        with self._world.loop.node_scope(self.id):
            self._world.loop.create_task(self._run())

    def kill(self) -> None:
        """Kill the process; its partitions elect other leaders some time later."""
        self._world.loop.kill(self.id)
        self._world.medium.disconnect(self.id)
        self._disk.restart()
        self.heartbeats = None

    @property
    def is_up(self) -> bool:
        """Return whether there is a process that takes part."""
        return self.heartbeats is not None

    def lead(self, key: PartitionKey, epoch: int) -> None:
        """Become the leader of a partition."""
        self.leads[key] = epoch
        if self.heartbeats is not None:
            self.heartbeats.send_soon()

    async def _run(self) -> None:
        world, rng = self._world, self._world.streams.stream(f"broker-{self.id}-{self._lives}")
        clock = SimulatedClock(world.loop)
        executor = SimulatedExecutor(world.loop, rng, QUICK_DISK)
        async with AsyncExitStack() as stack:
            replicator = await stack.enter_async_context(
                Replicator(
                    self.id,
                    incarnation=self._lives,
                    network=world.medium.network.port(self.id),
                    disk=self._disk,
                    executor=executor,
                    clock=clock,
                    rng=rng,
                    settings=world.settings.replication,
                    log_settings=world.settings.log,
                )
            )
            self._store = store = self._make_store(clock, executor)
            store.attach(await replicator.open_member(METADATA_GROUP, "/metadata", store.machine))
            self._router = NodeRouter(
                self.id, store, world.requester(self.id), clock=clock, rng=rng, seeds={world.primary: world.address}
            )
            self._clock = clock
            self.heartbeats = self._make_heartbeats(clock)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.heartbeats.run())
                tasks.create_task(self._step(tasks))
                tasks.create_task(store.run_compaction())

    def _make_store(self, clock: SimulatedClock, executor: SimulatedExecutor) -> MetadataStore:
        machine = _SharedMachine(self._world.shared)
        writer = DatabaseWriter(
            _NoDatabase(),
            executor,
            stored=machine.state.position,
            view=machine.state.view,
            clock=clock,
            rng=self._world.streams.stream(f"writer-{self.id}"),
            on_failure=_raise,
        )
        change_log = ChangeLog(machine)
        machine.add_listener(change_log)
        machine.add_listener(self)
        return MetadataStore(
            machine,
            writer,
            change_log,
            database=open_database("sqlite://"),
            executor=executor,
            clock=clock,
            settings=self._world.settings.metadata,
        )

    def _make_heartbeats(self, clock: SimulatedClock) -> HeartbeatSender:
        settings = self._world.settings
        return HeartbeatSender(
            BrokerRegistration(
                node=self.id, identity=f"identity-{self.id}", wire_address=self.address, roles=("broker",)
            ),
            router=self._router,
            clock=clock,
            rng=self._world.streams.stream(f"heartbeats-{self.id}-{self._lives}"),
            interval_ms=settings.manager.heartbeat_interval_ms,
            delay_ms=settings.broker.report_delay_ms,
            leads=lambda: [LeaderInfo(*key, epoch) for key, epoch in self.leads.items()],
            on_failure=_raise,
        )

    # -- what the metadata asks of it ------------------------------------------------------------

    def add(self, changes: Sequence[Change], _: Counters, __: LogPosition) -> None:
        """Lead new partitions whose preferred leader this broker is; a listener of the metadata.

        Not by a watch, which goes by the index of the shared copy, and that is ahead of this broker's log.
        """
        for change in changes:
            if isinstance(change.row, PartitionRow):
                self._bootstrap(change.row)

    def replace(self, view: View) -> None:
        """As `add`, for a restored snapshot."""
        for row in view.partitions.values():
            self._bootstrap(row)

    def _bootstrap(self, row: PartitionRow) -> None:
        if not row.epoch and row.replicas[0] == self.id:
            self._world.data.bootstrap(row.key, self.id)

    async def _step(self, tasks: asyncio.TaskGroup) -> None:
        """Carry out the steps of moves, and transfer leaderships to preferred replicas, periodically."""
        delay_ms, rounds = self._world.settings.broker.leader_balance_delay_ms, 0
        while True:
            await asyncio.sleep(STEP_S)
            for move in list(self._store.view().moves.values()):
                step = (move.move_id, move.state)
                if step not in self._steps and self._is_mine(move):
                    self._steps.add(step)
                    tasks.create_task(self._carry_out(move))
            rounds += 1
            if rounds * STEP_S * 1000 >= delay_ms:
                rounds = 0
                self._balance()

    def _is_mine(self, move: MoveRow) -> bool:
        leads = (move.topic_id, move.partition_id) in self.leads
        if move.state is MoveState.BEGUN:
            return leads
        view = self._store.view()
        source = None if move.source is None else view.brokers.get(move.source)
        is_gone = source is None or source.state in _GONE
        return leads if is_gone else move.source == self.id

    async def _carry_out(self, move: MoveRow) -> None:
        command: Command[CommandDone]
        if move.state is MoveState.BEGUN:
            await asyncio.sleep(self._world.copy_ms / 1000)
            command = PromoteMove(now_ms=self._clock.wall_ms(), move_id=move.move_id)
        else:
            command = FinishMove(now_ms=self._clock.wall_ms(), move_id=move.move_id)
        try:
            await self._router.submit(command)
        except QuiverError:
            self._steps.discard((move.move_id, move.state))
        else:
            if move.state is MoveState.BEGUN and move.source == self.id:
                self._world.data.resign((move.topic_id, move.partition_id), self.id)

    def _balance(self) -> None:
        view = self._store.view()
        for key in list(self.leads):
            row = view.partitions.get(key)
            if row is not None and row.replicas[0] != self.id:
                self._world.data.transfer(key, row.replicas[0])


class DataPlane:
    """The model of the partitions' groups: who leads each, by elections that take no time of their own."""

    def __init__(self, world: ControlPlane) -> None:
        self._world = world
        self._leaders: dict[PartitionKey, tuple[NodeId, int]] = {}

    def bootstrap(self, key: PartitionKey, broker: NodeId) -> None:
        """Let a new partition have its first leader."""
        if key not in self._leaders:
            self._leaders[key] = (broker, 1)
            self._world.brokers[broker].lead(key, 1)

    def transfer(self, key: PartitionKey, broker: NodeId) -> None:
        """Let another replica lead a partition, if it is up."""
        leader, epoch = self._leaders[key]
        if self._world.brokers[broker].is_up and leader != broker:
            self._world.brokers[leader].leads.pop(key, None)
            self._leaders[key] = (broker, epoch + 1)
            self._world.brokers[broker].lead(key, epoch + 1)

    def resign(self, key: PartitionKey, broker: NodeId) -> None:
        """Let a replica that is up lead instead of one that was moved away or died; without a majority, nobody."""
        row = self._world.view().partitions[key]
        living = [other for other in row.replicas if self._world.brokers[other].is_up and other != broker]
        if living and 2 * len(living) > len(row.replicas):
            self.transfer(key, living[0])

    def elect(self, dead: NodeId) -> None:
        """Elect leaders for all partitions that a dead broker led."""
        for key in list(self._world.brokers[dead].leads):
            self.resign(key, dead)


def _raise(error: Exception) -> None:
    raise error
