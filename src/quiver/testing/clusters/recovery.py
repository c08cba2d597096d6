"""The model of clusters that lose a majority for good and are recovered: `quiver recover` in the simulation.

After chaos and healing, while clients work, most nodes are lost with their disks at one moment; the others are killed,
some of them cut off before. The operator recovers the survivors with the code of `quiver recover`, on their simulated
disks; sometimes its machine fails in the middle, and the work is done again. Then the survivors are started.

L1: what the plan does not give up is not lost: every record that a client saw or that was acknowledged, before the
offset that the plan names, is there, and so is every record of the copy that a partition goes on with. L2: the
recovered cluster serves again: new clients, new brokers and all checks of `ClusterModel` begin with what is left.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from quiver.client.consumer import AsyncConsumer
from quiver.client.producer import AsyncProducer
from quiver.clock import Rng
from quiver.errors import ConflictError, QuiverError
from quiver.features import LEVEL_MAX
from quiver.metadata import TopicState
from quiver.model import Offset
from quiver.operations.recover import PartitionPlan, RecoveryPlan, carry_out, make_plan
from quiver.operations.survivors import StoppedNodes
from quiver.replication.member_files import open_files
from quiver.storage.log import Log
from quiver.testing.clock import SimulatedClock
from quiver.testing.clusters.host import SimulatedHost
from quiver.testing.clusters.model import (
    FOUND_WITHIN_MS,
    ClusterModel,
    make_clients,
    require_progress,
    require_settled,
    restore_capacity,
)
from quiver.testing.clusters.swarm import ClusterKnobs, draw_cluster_knobs
from quiver.testing.clusters.world import DATA, ClusterWorld
from quiver.testing.executor import SimulatedExecutor
from quiver.testing.history import Recorder, parse_history
from quiver.testing.history.events import HistoryOperation, pair_events
from quiver.testing.mounted_disks import MountedDisks
from quiver.testing.simulator.report import require, violated
from quiver.testing.simulator.world import QUICK_DISK

_OPERATOR: Final = "operator"
_QUIET_S: Final = 2.0
"""How long all nodes are down before the operator begins: until no supervisor starts one any more."""
_P_CUT_OFF: Final = 0.5
_P_INTERRUPTED: Final = 0.4
_READ_BYTES: Final = 64 * 1024

Records = dict[int, str]
"""What a partition has: by offset, the value."""


@dataclass(slots=True)
class Recovery:
    """What one recovery promised, and what its best copies had."""

    plan: RecoveryPlan | None = None
    """None: the survivors had every majority, and nothing was to be done."""
    copies: dict[str, Records] = field(default_factory=dict)
    """By partition, the records of the copy that it goes on with."""

    @property
    def may_lose_metadata(self) -> bool:
        """Return whether the last changes of the metadata may be lost."""
        return self.plan is not None and not self.plan.has_managers

    def limit(self, key: str) -> int | None:
        """Return the offset before which a partition loses nothing; None: it loses nothing at all."""
        planned = {} if self.plan is None else {name_of(one): one for one in self.plan.partitions}
        one = planned.get(key)
        return None if one is None else one.committed_offset if one.best is not None else 0


@dataclass(frozen=True, slots=True)
class RecoveryModel(ClusterModel):
    """Clusters of whole nodes that lose a majority at the end."""

    option: ClassVar = "--recovery"
    stream_prefix: ClassVar = "recovery-"
    survivors: int | None = None
    """How many nodes are left; None: fewer than half, as drawn."""

    def draw_knobs(self, rng: Rng) -> ClusterKnobs:
        """Draw the knobs of one seed: there is a majority to lose."""
        knobs = draw_cluster_knobs(rng)
        return replace(knobs, managers=max(3, knobs.managers), queue=None, members=None)

    async def verify(self, world: ClusterWorld) -> None:
        """Lose most nodes, recover the others, check what is left, and check that they serve."""
        await require_progress(world)
        rng = world.streams.stream("disaster")
        survivors = await lose_majority(world, rng, self.survivors)
        recovery = await _Operator(world, survivors, rng).recover()
        await start(world, survivors, recovery.plan)
        await check_kept(world, recovery)
        await ClusterModel.verify(self, world)


async def lose_majority(world: ClusterWorld, rng: Rng, count: int | None = None) -> list[SimulatedHost]:
    """Lose most nodes at once; return the others, stopped."""
    hosts = [host for host in world.running() if host.node is not None and host.node._is_ready.is_set()]
    count = count or 1 + rng.randrange(max(1, (len(hosts) - 1) // 2))
    survivors = [hosts.pop(rng.randrange(len(hosts))) for _ in range(count)]
    for host in survivors:
        if rng.random() < _P_CUT_OFF:
            world.network.isolate(host.id)
    await asyncio.sleep(rng.randrange(2_500) / 1000)
    world.trace.record("disaster", world.now_ms, *(host.id for host in survivors))
    for host in world.live_nodes():
        if host in survivors:
            host.kill(power_loss=rng.random() < 0.7)
        else:
            host.retire()
    await _end_clients(world)
    world.network.heal()
    await asyncio.sleep(_QUIET_S)
    for host in survivors:
        host.kill(power_loss=False)
    return sorted(survivors, key=lambda host: host.id)


async def _end_clients(world: ClusterWorld) -> None:
    """Kill the client programs: what they were doing is unknown."""
    for task in world.client_tasks:
        task.cancel()
    await asyncio.gather(*world.client_tasks, return_exceptions=True)
    for client in world.clients:
        with suppress(QuiverError):
            for part in vars(client).values():
                if isinstance(part, AsyncProducer):
                    await part.abort()
                elif isinstance(part, AsyncConsumer):
                    await part.close()
            await client.cluster.close()
    world.clients, world.client_tasks = [], []


class _Operator:
    """One operator with the survivors' disks on its machine."""

    def __init__(self, world: ClusterWorld, survivors: Sequence[SimulatedHost], rng: Rng) -> None:
        self._world = world
        self._survivors = survivors
        self._rng = rng
        self._directories = [f"/node-{host.id}{DATA}" for host in survivors]
        self._clock = SimulatedClock(world.loop)

    async def recover(self) -> Recovery:
        """Carry out a plan, perhaps after an attempt that a power loss ended; what the first plan says counts."""
        recovery = Recovery()
        is_interrupted = self._rng.random() < _P_INTERRUPTED
        if is_interrupted:
            await self._run(recovery, break_off_ms=1 + self._rng.randrange(400))
        await self._run(recovery)
        return recovery

    async def _run(self, recovery: Recovery, break_off_ms: int | None = None) -> None:
        """Run one process of `quiver recover`; power is lost while it works, or as soon as it is done."""
        loop = self._world.loop
        with loop.node_scope(_OPERATOR):
            work = loop.create_task(self._recover(recovery))
        if break_off_ms is None:
            await work
        else:
            await asyncio.sleep(break_off_ms / 1000)
        loop.kill(_OPERATOR)
        for host in self._survivors:
            host.disk.crash(self._rng)
        self._world.trace.record("recovered", self._world.now_ms, work.done())

    async def _recover(self, recovery: Recovery) -> None:
        world = self._world
        disk = MountedDisks({f"/node-{host.id}": host.disk for host in self._survivors})
        executor = SimulatedExecutor(world.loop, world.streams.stream("recovery"), QUICK_DISK)
        async with StoppedNodes(self._survivors[0].keys, disk=disk, executor=executor, clock=self._clock) as nodes:
            try:
                plan = await make_plan(nodes, self._directories)
            except ConflictError as error:
                require(error.code == "majority_present", "L2", f"no plan: {error}")
                return
            copies = {name_of(one): await _read_copy(nodes, one) for one in plan.partitions}
            if recovery.plan is None:
                recovery.plan, recovery.copies = plan, copies
            await carry_out(nodes, plan, self._directories, now_ms=self._clock.wall_ms())


async def _read_copy(nodes: StoppedNodes, planned: PartitionPlan) -> Records:
    if planned.best is None:
        return {}
    files = await open_files(nodes.storage, planned.best.directory, bootstrap=None)
    try:
        return await _read(files.log, files.log.first_offset, files.log.end_offset)
    finally:
        await files.log.close()


async def _read(log: Log, offset: Offset, end_offset: Offset) -> Records:
    found: Records = {}
    while offset < end_offset:
        for batch in await log.read_records(offset, end_offset=end_offset, bytes_max=_READ_BYTES):
            found.update((int(record.offset), (record.value or b"").decode()) for record in batch.records(offset))
            offset = batch.header.end_offset
    return found


async def start(world: ClusterWorld, survivors: Sequence[SimulatedHost], plan: RecoveryPlan | None) -> None:
    """Start the survivors, the manager first, and wait until they lead and serve everything that is left."""
    committed = 0 if plan is None else plan.metadata.commit_index
    if plan is not None:  # what only lost managers had may be decided otherwise now
        world.digests = {index: digest for index, digest in world.digests.items() if index <= committed}
    for host in sorted(survivors, key=lambda host: plan is not None and host.id != plan.manager):
        host.level_max = LEVEL_MAX
        host.start()
        await asyncio.sleep(0.2)
    deadline_ms = world.now_ms + FOUND_WITHIN_MS
    while not all(host.node is not None and host.node._is_ready.is_set() for host in survivors):
        require(world.now_ms < deadline_ms, "L2", "the recovered cluster does not start")
        await world.wait_checked()
    await restore_capacity(world)
    await require_settled(world)


async def check_kept(world: ClusterWorld, recovery: Recovery) -> None:
    """L1: compare what there is with what clients knew; then begin a new history with what there is."""
    found: dict[str, tuple[int, Records]] = {}
    view = world.view()
    assert view is not None, "the cluster has settled"
    for partition in view.partitions.values():
        topic, leader = view.topics[partition.topic_id], world.leader(partition.group_id)
        if topic.state is TopicState.ACTIVE and leader is not None:
            replica = leader[1]
            records = await _read(replica.member.log, replica.first_offset, replica.high_watermark)
            found[f"{topic.name}-{partition.partition_id}"] = (int(replica.first_offset), records)
    first = {f"{topic.name}-{number}" for topic in world.knobs.topics for number in range(topic.partitions)}
    operations = pair_events(parse_history(io.StringIO(world.history.getvalue())))
    for key, offset, value in _known(operations):
        limit = recovery.limit(key)
        if key not in found and recovery.may_lose_metadata and key not in first:
            continue  # the last changes of the metadata may be lost: partitions that were added
        if limit is None or offset < limit:
            _require_kept(found, key, offset, value, "a record is lost that the plan does not give up")
    for key, records in recovery.copies.items():
        for offset, value in records.items():
            _require_kept(found, key, offset, value, "a record of a survivor is lost")
    failed = {value for one in operations if one.f == "send" and one.outcome == "fail" for value in one.argument}
    present = failed.intersection(value for _, records in found.values() for value in records.values())
    require(not present, "L1", "records are there whose sends failed", values=sorted(present)[:3])
    _begin_history(world, found)


def _known(operations: Sequence[HistoryOperation]) -> Iterator[tuple[str, int, str]]:
    """Yield every record that was acknowledged or seen: its partition, offset and value."""
    for one in operations:
        if one.outcome != "ok" or one.key is None:
            continue
        if one.f == "send":
            yield from ((one.key, one.result + at, value) for at, value in enumerate(one.argument))
        elif one.f in ("poll", "consume"):
            yield from ((one.key, offset, value) for offset, value in one.result)


def _require_kept(found: dict[str, tuple[int, Records]], key: str, offset: int, value: str, text: str) -> None:
    if key not in found:
        violated("L1", f"{text}: the whole partition", key=key)
    first_offset, records = found[key]
    if offset >= first_offset:
        there = records.get(offset)
        require(there == value, "L1", text, key=key, offset=offset, value=value, there=there)


def _begin_history(world: ClusterWorld, found: dict[str, tuple[int, Records]]) -> None:
    """Begin a history in which all that there is was sent before, and new clients that know nothing else."""
    world.history = io.StringIO()
    world.recorder = Recorder(world.history, lambda: world.loop.now_ns)
    for key, (first_offset, records) in found.items():
        if first_offset:
            world.recorder.note("before", "trim", key, first_offset)
        for offset, value in sorted(records.items()):
            world.recorder.invoke("before", "send", key, [value]).ok(offset)
    world.knobs = replace(world.knobs, makers=0)  # which topics of theirs are left is not known
    world.clients = make_clients(world, prefix="later-")
    world.client_tasks = [world.spawn(client.run()) for client in world.clients]


def name_of(planned: PartitionPlan) -> str:
    """Return what the history calls a partition."""
    return f"{planned.topic}-{planned.partition}"
