"""Harness of the broker tests: whole nodes on a simulated loop, network, transport and disk, with SQLite files.

Every node is a metadata voter and a broker. No liveness checks run: the primary uses heartbeats only as reports of
leaders, so the tests alone decide which node is dead. In a *managed* cluster the first three nodes are full managers,
and the others are brokers that learn the metadata.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from quiver.access import AccessControl, AuditLog
from quiver.broker import Broker, BrokerRegistration
from quiver.clock import Clock, Rng
from quiver.config import BrokerSettings, LogSettings, ManagerSettings, PartitionSettings, ReplicationSettings, Settings
from quiver.dispatch import RequestDispatcher
from quiver.errors import (
    NotLeaderError,
    OutcomeUnknownError,
    UnavailableError,
)
from quiver.manager import AdminService, Manager, NodeRouter
from quiver.metadata import (
    ALL_ROLES,
    METADATA_GROUP,
    BeginMove,
    Command,
    CreateTopicCommand,
    Database,
    InitCluster,
    LeaderReport,
    MetadataStore,
    ReportLeaders,
    View,
    open_database,
    sqlite_url,
)
from quiver.model import GroupId, Index, NodeId, Offset, PartitionId, TopicId
from quiver.raft import Configuration
from quiver.record import Batch, build_batch
from quiver.replication import Replicator
from quiver.storage import Executor
from quiver.storage.frames import SEGMENT_HEADER_BYTES
from quiver.storage.scan import SegmentFrame, decode_frame
from quiver.testing import SimulatedClock, SimulatedTransport
from quiver.testing.harness import HarnessNode, SimulatedHarness
from quiver.wire.messages import BrokerHeartbeatRequest, Fetch, HeartbeatReceived, Produce, Produced
from quiver.wire.requests import Request, Response
from quiver.wire.serving import Answer, Caller

R = TypeVar("R", bound=Response)
C = TypeVar("C")

DIRECTORY = "/data"
SETTINGS = Settings(
    log=LogSettings(segment_bytes_max=4096, tail_cache_bytes_max=2000, tail_caches_bytes_max=3000),
    replication=ReplicationSettings(hibernation=False),
    manager=ManagerSettings(
        heartbeat_interval_ms=200, suspect_after_ms=1_000, dead_after_ms=3_000, rebuild_after_ms=2_000
    ),
    partition=PartitionSettings(summary_bytes=4096, checkpoint_bytes=8192, retention_interval_ms=500),
    broker=BrokerSettings(leader_balance_delay_ms=1_000, openings_max=4),
)
CALL_TIMEOUT_MS = 3_000
MANAGERS = 3
"""How many nodes of a managed cluster are managers."""


class Node(HarnessNode):
    """One node: a voter of the metadata or a learner, and a broker."""

    def __init__(self, cluster: Cluster, node: NodeId) -> None:
        super().__init__(cluster, node)
        self.cluster = cluster
        self.path = cluster.directory / f"node-{node}.db"
        self.identity = f"identity-{node}"
        self.address = f"node{node}:9002"
        self.database: Database
        self.store: MetadataStore
        self.administration: AdminService
        self.replicator: Replicator
        self.broker: Broker | None = None
        self._stop: asyncio.Event

    @property
    def is_manager(self) -> bool:
        return not self.cluster.is_managed or self.id <= MANAGERS

    @property
    def is_up(self) -> bool:
        return self.is_alive and self.broker is not None

    def _drop_process(self) -> None:
        self.cluster.transport.disconnect(self.id)
        self.database.close()
        self.broker = None

    def lose_database(self) -> None:
        for path in self.cluster.directory.glob(f"{self.path.name}*"):
            path.unlink()

    async def stop(self) -> None:
        """End the node in good order."""
        self._stop.set()
        await self.cluster.wait(lambda: self.broker is None or None)
        self.kill()

    def stored_batches(self, group: GroupId) -> list[bytes]:
        """Return every batch in a replica's segments, in order, as it is on disk."""
        found: list[bytes] = []
        for path in self.disk.paths():
            if path.startswith(f"{DIRECTORY}/groups/{group}/") and path.endswith(".log"):
                data, at = self.disk.read_file(path), SEGMENT_HEADER_BYTES
                while isinstance(frame := decode_frame(data, at), SegmentFrame):
                    at = frame.end
                    found += [bytes(frame.data)] if frame.header is not None else []
        return found

    async def _run(self, bootstrap: Configuration | None) -> None:
        cluster = self.cluster
        executor, clock, rng = self._make_executor(workers=4), SimulatedClock(cluster.loop), self._make_rng()
        self._stop = asyncio.Event()
        self.database = open_database(sqlite_url(str(self.path)))
        self.replicator = replicator = self._make_replicator(
            settings=cluster.settings.replication,
            log_settings=cluster.settings.log,
            executor=executor,
            clock=clock,
            rng=rng,
        )
        self.store = await MetadataStore.open(
            self.database, executor=executor, clock=clock, rng=rng, on_failure=replicator.fail
        )
        async with replicator:
            directory = f"{DIRECTORY}/metadata"
            self.store.attach(
                await replicator.open_member(METADATA_GROUP, directory, self.store.machine, bootstrap=bootstrap)
            )
            manager = Manager(self.store, clock=clock, settings=self.cluster.settings.manager, cluster_id="c1")
            async with manager if cluster.is_managed and self.is_manager else nullcontext():
                await self._serve(executor, clock, rng, manager)
            self.broker = None

    async def _serve(self, executor: Executor, clock: Clock, rng: Rng, manager: Manager) -> None:
        cluster = self.cluster
        transport = cluster.transport.port(self.id, name=f"node-{self.id}")
        router_rng = cluster.streams.stream(f"router-{self.id}-{self.lives}")
        router = NodeRouter(self.id, self.store, transport, clock=clock, rng=router_rng, seeds=cluster.addresses)
        admin = AdminService(
            self.store, router, clock=clock, settings=self.cluster.settings.manager, heartbeats=manager
        )
        registration = BrokerRegistration(
            node=self.id,
            identity=self.identity,
            wire_address=self.address,
            roles=ALL_ROLES if self.is_manager else ("broker",),
        )
        async with Broker(
            registration=registration,
            store=self.store,
            replicator=self.replicator,
            router=router,
            settings=self.cluster.settings,
            disk=self.disk,
            executor=executor,
            clock=clock,
            rng=rng,
            directory=DIRECTORY,
        ) as self.broker:
            dispatcher = RequestDispatcher(self.store, clock, open_access(self.store, clock))
            dispatcher.add(admin.handlers() | self.broker.handlers())
            if not cluster.is_managed:
                dispatcher.add({BrokerHeartbeatRequest: self._handle_heartbeat})
            cluster.transport.serve(self.address, self.id, dispatcher.handle, clock=clock)
            await self._stop.wait()

    async def _handle_heartbeat(self, _: Caller, request: BrokerHeartbeatRequest, __: memoryview) -> Answer:
        return await self._take_heartbeat(request), ()

    async def _take_heartbeat(self, request: BrokerHeartbeatRequest) -> HeartbeatReceived:
        view = await self.store.read(linearizable=True)
        known = view.brokers.get(request.node)
        is_known = known is not None and known.identity == request.identity
        if is_known and request.leads and not self.cluster.takes_reports:
            raise UnavailableError("not done: the test wants it so")
        if is_known and request.leads:
            reports = [
                LeaderReport(lead.topic_id, lead.partition_id, request.node, lead.epoch) for lead in request.leads
            ]
            await self.store.submit(ReportLeaders(now_ms=1, reports=tuple(reports)))
        self.cluster.clients_heard += [(beat.kind, beat.id) for beat in request.clients]
        return HeartbeatReceived(is_known=is_known)


class Cluster(SimulatedHarness[Node]):
    """Nodes of one cluster, and the calls that tests make."""

    def __init__(self, directory: Path, nodes: int = 3, *, seed: int = 1, is_managed: bool = False) -> None:
        self.directory = directory
        self.settings = SETTINGS
        self.is_managed = is_managed
        super().__init__(nodes, seed=seed)
        self.transport = SimulatedTransport(self.loop, self.network, self.streams.stream("transport"))
        self.client = self.transport.port()
        self.clients_heard: list[tuple[str, int]] = []
        self.known_index = Index(0)
        self.takes_reports = True
        """Whether the primary of a cluster that is not managed accepts reports of leaders."""
        self.addresses = {node.id: node.address for node in self.nodes.values()}
        self.voters = Configuration(voters=tuple(node.id for node in self.nodes.values() if node.is_manager))

    def make_node(self, node: NodeId) -> Node:
        return Node(self, node)

    @property
    def up(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_up]

    def start(self) -> None:
        for node in self.nodes.values():
            node.start(bootstrap=self.voters if node.is_manager else None)

    def start_all(self) -> None:
        """Restart every node that was killed."""
        for node in self.nodes.values():
            if not node.is_alive:
                node.start()

    async def form(self) -> None:
        """Form the cluster and wait until every node is registered."""
        if not self.is_managed:
            await self.submit(InitCluster(now_ms=1, cluster_id="c1"))
        await self.wait(lambda: len(self.up) == len(self.nodes) or None)
        await self.wait(lambda: len(self.view().brokers) == len(self.nodes) or None)

    def view(self) -> View:
        """Return the metadata as the node knows it that knows most."""
        return max((node.store.view() for node in self.up), key=lambda view: view.index)

    async def submit(self, command: Command[C]) -> C:
        """Submit at the primary until it is done; the command must be idempotent."""
        while True:
            primary = await self.wait(lambda: next((node for node in self.up if node.store.is_primary), None))
            try:
                result = await self.run_on(primary, primary.store.submit(command))
            except (UnavailableError, OutcomeUnknownError):
                await asyncio.sleep(0.05)
            else:
                self.known_index = primary.store.applied_index
                return result

    async def create_topic(self, topic: str = "logs", *assignments: Sequence[int], **fields: Any) -> TopicId:
        placed = tuple(tuple(map(NodeId, assignment)) for assignment in assignments or ((1, 2, 3),))
        command = CreateTopicCommand(
            now_ms=1,
            topic=topic,
            replicas=max(map(len, placed)),
            assignments=placed,
            request_id=f"make {topic}",
            **fields,
        )
        return (await self.submit(command)).topic_id

    async def begin_move(self, topic_id: TopicId, *, source: int | None, target: int) -> None:
        move = BeginMove(
            now_ms=1,
            topic_id=topic_id,
            partition_id=PartitionId(0),
            source=None if source is None else NodeId(source),
            target=NodeId(target),
        )
        await self.submit(move)

    def group_of(self, topic_id: TopicId, partition_id: int = 0) -> GroupId:
        return self.view().partitions[topic_id, PartitionId(partition_id)].group_id

    def leader(self, topic_id: TopicId, partition_id: int = 0) -> Node | None:
        """Return the node that leads a partition and knows it."""
        for node in self.up:
            assert node.broker is not None
            for info in node.broker.describe_replicas(topic_id):
                if info.partition_id == partition_id and info.role == "leader":
                    return node
        return None

    async def wait_leader(self, topic_id: TopicId, partition_id: int = 0) -> Node:
        return await self.wait(lambda: self.leader(topic_id, partition_id))

    async def ask(self, number: int, request: Request[R], payload: Sequence[bytes] = ()) -> tuple[R, memoryview]:
        """Ask a node as a client does, once."""
        return await self.client.call(self[number].address, request, payload, timeout_ms=CALL_TIMEOUT_MS)

    async def ask_leader(
        self, topic_id: TopicId, request: Request[R], payload: Sequence[bytes] = ()
    ) -> tuple[R, memoryview]:
        """Ask whoever leads a topic's only partition until it answers."""
        numbers = sorted(self.nodes)
        at = 0
        while True:
            try:
                return await self.ask(numbers[at % len(numbers)], request, payload)
            except NotLeaderError as error:
                at = at + 1 if error.leader is None else numbers.index(error.leader)
            except (UnavailableError, OutcomeUnknownError):
                at += 1
            await asyncio.sleep(0.02)

    async def produce(self, topic_id: TopicId, *values: bytes) -> Produced:
        """Produce a batch without a producer until it is acknowledged; may double it."""
        request = Produce(topic_id=topic_id, partition_id=PartitionId(0), known_index=self.known_index)
        response, _ = await self.ask_leader(topic_id, request, [bytes(build_batch(list(values), timestamp=1))])
        return response

    async def fetch(self, topic_id: TopicId) -> list[bytes | None]:
        """Return the values of everything that is committed."""
        values: list[bytes | None] = []
        while True:
            request = Fetch(
                topic_id=topic_id,
                partition_id=PartitionId(0),
                offset=Offset(len(values)),
                known_index=self.known_index,
            )
            fetched, payload = await self.ask_leader(topic_id, request)
            while payload:
                batch = Batch.decode(payload)
                values += batch.values()
                payload = payload[batch.header.batch_bytes :]
            if len(values) >= fetched.end_offset:
                return values

    async def wait_equal(self, topic_id: TopicId, *numbers: int) -> None:
        """Wait until the replicas on some nodes have the very same batches on disk, and no other node has any."""
        group = self.group_of(topic_id)

        def are_equal() -> bool:
            stored = [self[number].stored_batches(group) for number in numbers]
            others = [self[n].stored_batches(group) for n in self.nodes if n not in numbers]
            return all(stored) and all(item == stored[0] for item in stored) and not any(others)

        await self.wait(lambda: are_equal() or None)


def simulate(
    test: Callable[[Cluster], Coroutine[Any, Any, None]],
    *,
    nodes: int = 3,
    seed: int = 1,
    is_managed: bool = False,
    settings: Settings = SETTINGS,
) -> None:
    """Run `async def test(cluster)` over a formed cluster."""

    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster(Path(directory), nodes, seed=seed, is_managed=is_managed)
        cluster.settings = settings

        async def main() -> None:
            await cluster.form()
            await test(cluster)
            for node in cluster.nodes.values():
                if node.is_alive:
                    node.kill()

        cluster.run(main)


def open_access(store: MetadataStore, clock: Clock) -> AccessControl:
    """Return the access control of a node that needs no credentials."""
    audit = AuditLog(node=NodeId(0), clock=clock)
    return AccessControl(view=store.view, clock=clock, is_open=True, audit=audit)
