"""The model of clusters: its clients, its liveness checks after healing, and its final comparison.

Operators create the topics at the beginning; at the end they provide enough brokers and drain one that is not needed.
Then moves, drains and repairs must finish, replicas must have the same bytes at the same index, and each node's
metadata must equal its own database and the metadata of every other node. The replicas' records go into the history.
"""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

from quiver.client.cluster import AsyncCluster
from quiver.clock import Rng
from quiver.errors import QuiverError, TrimmedError
from quiver.manager.client_expiry import EXPIRY_LEVEL
from quiver.metadata import BrokerState, PartitionRow, TopicState, View
from quiver.model import Index, NodeId
from quiver.partition import Replica
from quiver.record import Batch
from quiver.replication import Member
from quiver.testing.clusters.administrators import AdminWorkload, require_access_state
from quiver.testing.clusters.clients import ClientWorkload, EndOffsetWorkload, ProducerWorkload, TopicWorkload
from quiver.testing.clusters.consumers import CommitWorkload, ConsumeWorkload, ReaderWorkload
from quiver.testing.clusters.full_disks import require_accepting_while_full
from quiver.testing.clusters.holders import HolderWorkload, require_holds_expired
from quiver.testing.clusters.host import SimulatedHost
from quiver.testing.clusters.members import MemberWorkload, require_assigned, require_consumed
from quiver.testing.clusters.operations import FAULTS
from quiver.testing.clusters.outsiders import OutsiderWorkload
from quiver.testing.clusters.swarm import ALL_KINDS, ClusterKnobs, TopicPlan, draw_cluster_knobs
from quiver.testing.clusters.versions import require_metadata_versions, require_raised_above, require_versions
from quiver.testing.clusters.visitors import VisitorWorkload
from quiver.testing.clusters.workers import SETTLE_WITHIN_MS as SETTLE_QUEUES_WITHIN_MS
from quiver.testing.clusters.workers import (
    JobSenderWorkload,
    WorkerWorkload,
    dead_letter_topic,
    record_queue,
    require_queue_settled,
)
from quiver.testing.clusters.world import ClusterWorld
from quiver.testing.history import check_history, parse_history
from quiver.testing.simulator.report import SeedReport, require, violated
from quiver.testing.simulator.runner import Model
from quiver.testing.simulator.world import SimulationRun, pick

PROGRESS_WITHIN_MS = 30_000
"""F3: how long after healing a client may take to complete a call."""
END_WITHIN_MS = 60_000
"""F3: how long clients may take to end."""
SETTLE_WITHIN_MS = 120_000
"""F3: how long after healing moves, drains and repairs may take; the longest `rebuild_after_ms` is part of it."""
FOUND_WITHIN_MS = 60_000
"""F3: how long a cluster may take to form."""
_STEP_S = 0.1
_READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ClusterModel(Model[ClusterKnobs, ClusterWorld]):
    """Clusters of whole nodes."""

    option: ClassVar = "--cluster"
    stream_prefix: ClassVar = "cluster-"
    events_max: ClassVar = 4_000_000
    time_max_s: ClassVar = 900.0
    faults: ClassVar = FAULTS
    required_faults: ClassVar = ALL_KINDS

    def draw_knobs(self, rng: Rng) -> ClusterKnobs:
        """Draw the knobs of one seed."""
        return replace(draw_cluster_knobs(rng), holders=pick(rng, (0, 0, 1, 2)))

    def make_world(self, run: SimulationRun, knobs: ClusterKnobs) -> ClusterWorld:
        """Return the world of one run."""
        return ClusterWorld(run, knobs)

    async def begin(self, world: ClusterWorld) -> None:
        """Create the topics and start the clients."""
        await create_topics(world)
        world.clients = make_clients(world)
        world.client_tasks = [world.spawn(client.run()) for client in world.clients]

    async def verify(self, world: ClusterWorld) -> None:
        """Check that clients progress, that the cluster settles, and that all copies and the history agree."""
        world.is_healed = True
        if world.knobs.queue is not None or world.knobs.holders:
            world.clocks.level_all()  # leases, delays and holds end soon
        await require_progress(world)
        await require_assigned(world)
        await restore_capacity(world)
        await require_settled(world, is_loaded=True)
        await require_accepting_while_full(world)
        world.is_over = True
        await _wait_ended(world)
        await _require_expired(world)
        await require_holds_expired(world)
        await require_settled(world)
        require_queue_settled(world)
        require_consumed(world)
        await _drain(world)
        await record_queue(world)
        await compare_replicas(world)
        require_access_state(world)
        result = check_history(parse_history(io.StringIO(world.history.getvalue())))
        require(result.is_clean, "J", str(result))
        world.check_result = result

    def fill(self, report: SeedReport, world: ClusterWorld) -> None:
        """Add the figures of clients and of the checked history."""
        report.effects += world.counts
        if world.check_result is not None:
            facts = world.check_result.facts
            report.sends = Counter({outcome: facts[f"sends_{outcome}"] for outcome in ("ok", "fail", "info")})
            report.reads = facts["end_offsets_read"]
            report.consumed = facts["records_read"]


def make_clients(world: ClusterWorld, prefix: str = "") -> list[ClientWorkload]:
    """Return the client programs of a run, whose names begin with `prefix`."""
    knobs = world.knobs
    kinds: tuple[tuple[type[ClientWorkload], str, int], ...] = (
        (ProducerWorkload, "sender", knobs.senders),
        (ReaderWorkload, "reader", knobs.readers),
        (CommitWorkload, "committer", knobs.committers),
        (ConsumeWorkload, "taker", knobs.takers),
        (EndOffsetWorkload, "watcher", 1),
        (TopicWorkload, "maker", knobs.makers),
        (VisitorWorkload, "visitor", knobs.visitors),
        (AdminWorkload, "admin", knobs.admins),
        (HolderWorkload, "holder", knobs.holders),
    )
    clients = [
        kind(world, f"{prefix}{name}-{number}", knobs.topics[number % len(knobs.topics)])
        for kind, name, count in kinds
        for number in range(count)
    ]
    if knobs.queue is not None:
        topic = knobs.queue.topic
        clients += [JobSenderWorkload(world, f"{prefix}boss-{at}", topic) for at in range(knobs.queue.senders)]
        clients += [WorkerWorkload(world, f"{prefix}worker-{at}", topic) for at in range(knobs.queue.workers)]
    if knobs.members is not None:
        count, outsiders = knobs.members.members, knobs.members.outsiders
        clients += [MemberWorkload(world, f"{prefix}member-{at}", knobs.topics[0]) for at in range(count)]
        clients += [OutsiderWorkload(world, f"{prefix}outsider-{at}", knobs.topics[0]) for at in range(outsiders)]
    return clients


async def require_progress(world: ClusterWorld) -> None:
    """F3: every client completes a call soon after healing."""
    before = {client.name: client.progress for client in world.clients}
    waiting = list(world.clients)
    deadline_ms = world.now_ms + PROGRESS_WITHIN_MS
    while waiting:
        require(world.now_ms < deadline_ms, "F3", "no progress after healing", clients=[one.name for one in waiting])
        await world.wait_checked()
        waiting = [client for client in waiting if client.progress == before[client.name]]


async def _wait_ended(world: ClusterWorld) -> None:
    """F3: every client ends its work."""
    deadline_ms = world.now_ms + (END_WITHIN_MS if world.knobs.queue is None else SETTLE_QUEUES_WITHIN_MS)
    while not all(task.done() for task in world.client_tasks):
        require(world.now_ms < deadline_ms, "F3", "clients do not end")
        await _replace_dead_letter_topic(world)
        await world.wait_checked()


async def _replace_dead_letter_topic(world: ClusterWorld) -> None:
    """Delete the dead-letter topic if it was placed on machines that were already lost; the queue makes another.

    Nobody but an operator can say that such machines do not come back, and until then the letters wait.
    """
    view, plan = world.view(), world.knobs.queue
    topic = None if view is None or plan is None else view.topic(dead_letter_topic(plan))
    if view is None or topic is None:
        return
    rows = [row for row in view.partitions.values() if row.topic_id == topic.topic_id]
    if any(_is_never_led(world, row) for row in rows):
        world.trace.record("lost_dead_letters", world.now_ms, topic.name)
        async with world.connect("operator") as cluster:
            with suppress(QuiverError):  # it is looked at again
                await cluster.delete_topic(topic.name)


async def _require_expired(world: ClusterWorld) -> None:
    """E2: clients without a name that are gone expire."""
    deadline_ms = world.now_ms + SETTLE_WITHIN_MS
    while (view := world.view()) is None or (
        view.feature_level >= EXPIRY_LEVEL and any(not row.is_named for row in view.producers.values())
    ):
        require(world.now_ms < deadline_ms, "E2", "clients that are gone do not expire")
        await world.wait_checked()


async def _drain(world: ClusterWorld) -> None:
    """Read every record of every topic."""
    for topic in world.knobs.all_topics:
        await ReaderWorkload(world, f"drain-{topic.name}", topic).drain()


async def create_topics(world: ClusterWorld) -> None:
    """Wait until the cluster has formed, and make the topics that clients use."""
    deadline_ms = world.now_ms + FOUND_WITHIN_MS
    while not all(host.node is not None and host.node._is_ready.is_set() for host in world.nodes.values()):
        require(world.now_ms < deadline_ms, "F3", "the cluster does not form")
        await asyncio.sleep(_STEP_S)
    for topic in world.knobs.all_topics:

        async def create(cluster: AsyncCluster, topic: TopicPlan = topic) -> None:
            await cluster.create_topic(
                topic.name,
                topic.partitions,
                replicas=topic.replicas,
                retention=topic.retention,
                encrypted=world.knobs.encrypts,
                exist_ok=True,
            )

        await operate(world, create)


async def restore_capacity(world: ClusterWorld) -> None:
    """Have as many brokers as replicas, and empty one that is to spare."""
    while len(wanted := _wanted(world)) < world.knobs.replicas_max:
        unwanted = [host for host in world.live_nodes() if host not in wanted and _is_registered(world, host)]
        if unwanted:
            await operate(world, lambda cluster, node=unwanted[0].id: cluster.drain(node, is_undone=True))  # type: ignore[misc] # bound early
        else:
            world.add_node().start()
        await asyncio.sleep(1)
    if len(wanted) > world.knobs.replicas_max and world.streams.stream("end").random() < 0.5:
        world.trace.record("last_drain", world.now_ms, wanted[-1].id)
        await operate(world, lambda cluster: cluster.drain(wanted[-1].id))


async def operate(world: ClusterWorld, ask: Callable[[AsyncCluster], Awaitable[None]]) -> None:
    """Retry an operator's request until it is done."""
    deadline_ms = world.now_ms + FOUND_WITHIN_MS
    while True:
        try:
            async with world.connect("operator") as cluster:
                return await ask(cluster)
        except QuiverError as error:
            if world.now_ms > deadline_ms:
                violated("F3", f"an operator is refused: {error!r}", code=error.code)
        await asyncio.sleep(_STEP_S)


async def require_settled(world: ClusterWorld, *, is_loaded: bool = False) -> None:
    """F3: everything gets where it should be. Under load, a log need only reach where it ended a step ago."""
    deadline_ms = world.now_ms + SETTLE_WITHIN_MS
    goals = LogGoals(is_loaded=is_loaded)
    while unsettled := list(_unsettled(world, goals)):
        _retire_removed(world)
        require(world.now_ms < deadline_ms, "F3", "the cluster does not settle", unsettled="; ".join(unsettled[:10]))
        await asyncio.sleep(_STEP_S)
        world.check()


# -- within ------------------------------------------------------------------------------------------


def _retire_removed(world: ClusterWorld) -> None:
    """Turn off machines whose brokers were removed while the answer to the operator was on its way."""
    view = world.view()
    for host in world.live_nodes():
        broker = None if view is None else view.brokers.get(host.id)
        if broker is not None and broker.state is BrokerState.REMOVED:
            host.retire()


def _wanted(world: ClusterWorld) -> list[SimulatedHost]:
    """Return the machines that may hold replicas."""
    view = world.view()
    if view is None:
        return []
    known = [(host, view.brokers.get(host.id)) for host in world.live_nodes()]
    return [host for host, broker in known if broker is not None and not broker.is_unwanted]


def _is_registered(world: ClusterWorld, host: SimulatedHost) -> bool:
    view = world.view()
    return view is not None and host.id in view.brokers


def _left_behind(world: ClusterWorld, replica: Replica) -> int:
    """E3: return how many removed clients a replica still has state of."""
    view, state = world.view(), replica.state
    if view is None or view.feature_level < EXPIRY_LEVEL:
        return 0
    return len(view.gone_producers(state.producers.ids())) + len(view.gone_consumers(state.cursors))


class LogGoals:
    """The index that each log must be applied up to: its last one, or the last one of the previous look under load."""

    def __init__(self, *, is_loaded: bool) -> None:
        self.is_loaded = is_loaded
        self._seen: dict[str, Index] = {}

    def goal(self, name: str, last_index: Index) -> Index:
        """Return the goal of a log that now ends at `last_index`."""
        seen, self._seen[name] = self._seen.get(name, last_index), last_index
        return seen if self.is_loaded else last_index


def _unsettled(world: ClusterWorld, goals: LogGoals) -> Iterator[str]:
    view = world.view()
    if view is None or not view.brokers:
        yield "no node knows the metadata"
        return
    index = goals.goal("metadata", view.index)
    for host in world.live_nodes():
        yield from _unsettled_host(host, view, index)
    if view.moves or view.counters.is_rebalancing:
        yield f"{len(view.moves)} moves are under way, rebalancing={view.counters.is_rebalancing}"
    for partition in usable_partitions(world, view):
        yield from _unsettled_partition(world, partition, goals)


def usable_partitions(world: ClusterWorld, view: View) -> list[PartitionRow]:
    """Return the partitions of active topics, without those that were placed on machines that were already lost.

    A cluster notices a loss after a while. A topic that is created before may get a majority of its replicas on lost
    machines; it never has a leader, and so no records, until it is deleted. No fault of the budget causes that.
    """
    rows = [row for row in view.partitions.values() if view.topics[row.topic_id].state is TopicState.ACTIVE]
    return [row for row in rows if not _is_never_led(world, row)]


def _is_never_led(world: ClusterWorld, partition: PartitionRow) -> bool:
    """Return whether a partition had no leader so far and will have none: a majority of its machines is lost."""
    lost = [node for node in partition.replicas if world.nodes[node].is_retired]
    return not partition.epoch and 2 * len(lost) >= len(partition.replicas)


def _unsettled_host(host: SimulatedHost, view: View, index: Index) -> Iterator[str]:
    node = host.node
    if node is None or not node._is_ready.is_set():
        yield f"node {host.id} is not ready"
        return
    store = node._store
    if min(store.applied_index, store.stored_index) < index:
        yield f"node {host.id} has metadata {store.applied_index}, stored {store.stored_index}, of {index}"
    broker = view.brokers.get(host.id)
    wanted = (BrokerState.ALIVE,) if broker is not None and not broker.is_draining else (BrokerState.DRAINED,)
    if broker is None or broker.state not in wanted:
        yield f"node {host.id} is {None if broker is None else broker.state}"


def _unsettled_partition(world: ClusterWorld, partition: PartitionRow, goals: LogGoals) -> Iterator[str]:
    name = f"partition {partition.topic_id}/{partition.partition_id}"
    leader = world.leader(partition.group_id)
    if leader is None:
        yield f"{name} has no leader"
        return
    raft = leader[1].member.raft
    index = goals.goal(name, raft.last_index)
    if set(raft.configuration.voters) != set(partition.replicas) or raft.configuration.learners:
        yield f"{name} is on {raft.configuration}, not on {partition.replicas}"
    for node in raft.configuration.members:
        host = world.nodes[node]
        replica = world.replicas(host).get(partition.group_id)
        if host.is_retired or replica is None:
            yield f"{name} has no replica on node {node}"
        elif replica.member.applied_index < index:
            yield f"{name} on node {node} applied {replica.member.applied_index} of {index}"
        elif not goals.is_loaded and (left := _left_behind(world, replica)):
            yield f"E3: {name} on node {node} has state of {left} clients that were removed"
    for host in world.live_nodes():
        if host.id not in raft.configuration.members and partition.group_id in world.replicas(host):
            yield f"{name} is still on node {host.id}"


async def compare_replicas(world: ClusterWorld) -> None:
    """F1, F2: all replicas of a partition are equal, and all copies of the metadata."""
    view = world.view()
    assert view is not None, "the cluster has settled"
    for partition in usable_partitions(world, view):
        key = f"{view.topics[partition.topic_id].name}-{partition.partition_id}"
        await _compare_partition(world, partition, key, view.counters.feature_level)
    world.compare_metadata()
    for host in world.live_nodes():
        assert host.node is not None, "the cluster has settled"
        _compare_database(host)
        require_metadata_versions(await _read_all(host.node._member), view.counters.feature_level)
    require_raised_above(world)


async def _compare_partition(world: ClusterWorld, partition: PartitionRow, key: str, level: int) -> None:
    stored: dict[Index, tuple[NodeId, bytes]] = {}
    for node in partition.replicas:
        replica = world.replicas(world.nodes[node])[partition.group_id]
        batches = await _read_all(replica.member)
        require_versions(batches, level)
        for batch in batches:
            index, data = batch.header.index, bytes(batch.data)
            other, known = stored.setdefault(index, (node, data))
            require(known == data, "F1", "two replicas differ", key=key, index=index, nodes=(other, node))
        facts = {"key": key, "node": node, "start": replica.member.log.first_offset, "kept": replica.first_offset}
        is_complete = replica.member.log.first_offset <= replica.first_offset
        require(is_complete, "F1", "a replica does not have every record that is kept", **facts)
        if not _is_dead_letter_topic(world, key):
            await _record(world, replica, node, key)


def _is_dead_letter_topic(world: ClusterWorld, key: str) -> bool:
    """Return whether a partition has copies of records of others, which no history of sends explains."""
    plan = world.knobs.queue
    return plan is not None and key.rpartition("-")[0] == dead_letter_topic(plan)


async def _read_all(member: Member) -> list[Batch]:
    """Return every entry that is applied, from the disk."""
    log, end_index = member.log, Index(member.applied_index + 1)
    found: list[Batch] = []
    index = log.first_index
    while index < end_index:
        try:
            batches = await log.read_entries(index, end_index=end_index, bytes_max=_READ_BYTES)
        except TrimmedError:
            found, index = [], log.first_index  # the log was shortened meanwhile
            continue
        require(batches, "F1", "a replica ends early", index=index, end_index=end_index)
        found += batches
        index = Index(batches[-1].header.index + 1)
    return found


async def _record(world: ClusterWorld, replica: Replica, node: NodeId, key: str) -> None:
    """Add a replica's records to the history."""
    offset, records = replica.first_offset, []
    log = replica.member.log
    while offset < replica.high_watermark:
        for batch in await log.read_records(offset, end_offset=replica.high_watermark, bytes_max=_READ_BYTES):
            records += [(int(record.offset), (record.value or b"").decode()) for record in batch.records(offset)]
            offset = batch.header.end_offset
    world.recorder.note("comparison", "replica", key, {"replica": f"node-{node}", "records": records})
    if replica.first_offset:
        world.recorder.note("comparison", "trim", key, int(replica.first_offset))


def _compare_database(host: SimulatedHost) -> None:
    assert host.node is not None, "the cluster has settled"
    stored, known = host.database.load().view(), host.node._store.view()
    if stored.index == known.index:
        require(stored.digest() == known.digest(), "F2", "a database is not what its node knows", node=host.id)
