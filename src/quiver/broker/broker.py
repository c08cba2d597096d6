"""A node's broker, composed: it holds replicas as the metadata says, handles requests, and sends heartbeats.

Use as ``async with``. Inside, it opens and closes replicas to match the metadata. At the end it first transfers
leadership to in-sync replicas where there are any, then closes every replica. If one part crashes, the broker ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from quiver.broker.client_removals import ClientRemovals
from quiver.broker.consumer_lags import find_lags
from quiver.broker.dead_letters import DeadLetterMover
from quiver.broker.explanation import ReplicaExplainer
from quiver.broker.heartbeats import BrokerRegistration, ClientKind, HeartbeatSender
from quiver.broker.leader_balancer import LeaderBalancer
from quiver.broker.membership import MembershipReconciler
from quiver.broker.metrics import (
    collect,
    describe_decoded,
    describe_disk,
    describe_replication,
    describe_topics,
    describe_totals,
)
from quiver.broker.replica_manager import ReplicaManager
from quiver.broker.replica_table import HostedReplica, ReplicaState, ReplicaTable
from quiver.broker.requests import BrokerRequests
from quiver.broker.retention import RetentionUpdater
from quiver.clock import Clock, Rng
from quiver.config import Settings
from quiver.errors import StorageError
from quiver.faults import supervise
from quiver.manager.node_router import NodeRouter
from quiver.metadata import MetadataStore
from quiver.metrics import MetricFamily, counter
from quiver.model import NodeId, Term, TopicId
from quiver.partition import Meters, Replica
from quiver.raft import Role
from quiver.record.decoded import DecodedBatchBudget
from quiver.replication import Member, Replicator
from quiver.storage import Disk, Executor, GroupFolders
from quiver.tracing import Tracing
from quiver.wire.admin_messages import PROBLEMS_MAX, LagInfo, ProblemInfo, ReplicaInfo
from quiver.wire.messages import LeaderInfo
from quiver.wire.requests import Request
from quiver.wire.serving import RequestHandler


class BrokerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a broker."""

    is_ready: bool
    replicas: Mapping[ReplicaState, int]
    led: int
    unusable: tuple[ReplicaProblem, ...]
    """The replicas that do not serve, whatever their state."""
    stops: int = 0
    """How often an error has stopped a replica since the node started."""


class ReplicaProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that does not serve, and the reason."""

    topic_id: TopicId
    partition_id: int
    group: int
    problem: str


class Broker:
    """The broker of one node."""

    def __init__(
        self,
        *,
        registration: BrokerRegistration,
        store: MetadataStore,
        replicator: Replicator,
        router: NodeRouter,
        settings: Settings,
        disk: Disk,
        executor: Executor,
        clock: Clock,
        rng: Rng,
        directory: str,
        decoded: DecodedBatchBudget | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        node = self._node = registration.node
        self._store, self._clock, self._rng = store, clock, rng
        self._settings, self._replicator = settings, replicator
        silence_ms_max = 2 * settings.replication.election_timeout_ms
        self._table = ReplicaTable(node, store.view, clock=clock, silence_ms_max=silence_ms_max)
        self._space, self._meters = replicator.space, Meters()
        self._decoded = decoded or DecodedBatchBudget(settings.gateway.decoded_bytes_max)
        self._retention = RetentionUpdater(self._table, store, router)
        self._removals = ClientRemovals(self._table, store)
        self._replica_manager = ReplicaManager(
            node,
            identity=registration.identity,
            table=self._table,
            folders=GroupFolders(disk, directory),
            store=store,
            replicator=replicator,
            router=router,
            executor=executor,
            clock=clock,
            rng=rng,
            settings=settings,
            space=self._space,
            meters=self._meters,
            decoded=self._decoded,
            on_open=self._handle_open,
        )
        self._heartbeats = HeartbeatSender(
            registration,
            router=router,
            clock=clock,
            rng=rng,
            interval_ms=settings.manager.heartbeat_interval_ms,
            delay_ms=settings.broker.report_delay_ms,
            client_report_ms=settings.manager.client_report_ms,
            leads=self._leads,
            is_full=lambda: self._space.is_full,
            emptied_ms=self._replica_manager.emptied_ms,
            on_failure=replicator.fail,
        )
        self._membership = self._make_membership(router)
        self._balancer = self._make_balancer()
        self._dead_letters = DeadLetterMover(self._table, store, router, clock)
        self._requests = BrokerRequests(
            self._table,
            store.view,
            self._heartbeats.clients,
            clock=clock,
            long_polls_max=settings.broker.long_polls_max,
            explainer=ReplicaExplainer(node, clock=clock, space=self._space, settings=settings.log),
            on_question=self._replica_manager.open_for_question,
            tracing=tracing,
        )
        self._tasks = asyncio.TaskGroup()
        self._running: list[asyncio.Task[None]] = []

    def _make_membership(self, router: NodeRouter) -> MembershipReconciler:
        return MembershipReconciler(
            self._node,
            table=self._table,
            store=self._store,
            router=router,
            clock=self._clock,
            request_report=self._heartbeats.send_soon,
            full_nodes=lambda: self._heartbeats.full_nodes,
        )

    def _make_balancer(self) -> LeaderBalancer:
        return LeaderBalancer(
            self._node,
            table=self._table,
            store=self._store,
            clock=self._clock,
            settings=self._settings.broker,
            is_full=lambda: self._space.is_full,
            full_nodes=lambda: self._heartbeats.full_nodes,
        )

    # -- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start watching the metadata and sending heartbeats."""
        await self._tasks.__aenter__()
        for part in (
            self._space,
            self._retention,
            self._removals,
            self._replica_manager,
            self._heartbeats,
            self._membership,
            self._balancer,
            self._dead_letters,
        ):
            self._running.append(self._tasks.create_task(supervise(type(part).__name__, part.run, self._rng)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Transfer leadership, then close every replica; after an error, only cancel the tasks."""
        try:
            if kind is None:
                await self._balancer.transfer_all()
            self._cancel_tasks()
            if kind is None:
                await asyncio.wait(self._running)
                await self._close_replicas()
        except (Exception, asyncio.CancelledError) as failure:
            # A cancellation may be the group's own, because a task failed: it must see it.
            self._cancel_tasks()
            await self._tasks.__aexit__(type(failure), failure, failure.__traceback__)
            raise
        await self._tasks.__aexit__(kind, error, trace)

    def _cancel_tasks(self) -> None:
        for task in self._running:
            task.cancel()

    async def _close_replicas(self) -> None:
        """Save each replica's state, so that the next start has nothing to replay, and close it."""
        closings = asyncio.Semaphore(self._settings.broker.openings_max)

        async def close(hosted: HostedReplica, replica: Replica) -> None:
            async with closings:
                hosted.close()
                await replica.close()
                await self._replicator.close_member(hosted.group)
                await replica.member.close()

        async with asyncio.TaskGroup() as tasks:
            for hosted, replica in self._table.open_replicas():
                tasks.create_task(close(hosted, replica))

    async def wait_ready(self) -> None:
        """Wait until every replica on this node's disk is open, or is known to be unwanted or unusable."""
        await self._replica_manager.wait_ready()

    async def wait_registered(self) -> None:
        """Wait until this node is registered with the primary."""
        await self._heartbeats.wait_registered()

    def describe_start(self) -> str:
        """Return in a sentence that this node is starting, and what keeps it from being registered, if it is known."""
        problem = self._heartbeats.problem
        return "this node is starting" + (f"; the primary got no heartbeat: {problem}" if problem else "")

    # -- work ------------------------------------------------------------------------------------

    def handlers(self) -> dict[type[Request[Any]], RequestHandler]:
        """Return the handlers of the requests that this broker serves, for `dispatch`."""
        return self._requests.handlers()

    def record_client(self, kind: ClientKind, id_: int) -> None:
        """Record that a client is alive whose request did not pass through this broker's handlers."""
        self._heartbeats.clients.record(kind, id_)

    def status(self) -> BrokerStatus:
        """Return a snapshot."""
        counts = dict.fromkeys(ReplicaState, 0)
        for hosted in self._table:
            counts[hosted.state] += 1
        return BrokerStatus(
            is_ready=self._replica_manager.is_ready,
            replicas=counts,
            led=len(self._table.led()),
            stops=self._replica_manager.stops,
            unusable=tuple(
                ReplicaProblem(
                    topic_id=hosted.key[0], partition_id=hosted.key[1], group=hosted.group, problem=hosted.problem
                )
                for hosted in self._table
                if hosted.problem
            ),
        )

    def describe_replicas(self, topic_id: TopicId | None = None) -> tuple[ReplicaInfo, ...]:
        """Return the replicas on this node, all or one topic's, as `DescribeNode` shows them."""
        hosted = [hosted for hosted in self._table if topic_id in (None, hosted.key[0])]
        return tuple(self._table.describe(item) for item in sorted(hosted, key=lambda item: item.key))

    def describe_problems(self) -> tuple[ProblemInfo, ...]:
        """Return the replicas on this node that do not serve, as `DescribeNode` shows them."""
        topics = self._store.view().topics
        troubled = sorted((hosted for hosted in self._table if hosted.problem), key=lambda hosted: hosted.key)
        return tuple(
            ProblemInfo(
                state=hosted.state,
                problem=hosted.problem,
                group=hosted.group,
                topic=topics[hosted.key[0]].name if hosted.key[0] in topics else f"#{hosted.key[0]}",
                partition_id=hosted.key[1],
            )
            for hosted in troubled[:PROBLEMS_MAX]
        )

    async def describe_lags(self) -> tuple[LagInfo, ...]:
        """Return the greatest consumer lags in the partitions that this node leads, greatest first; in small steps."""
        return await find_lags(self._store.view(), self._table)

    async def metrics(self) -> list[MetricFamily]:
        """Return the metrics of the replicas, their traffic and latencies, and the disk; gives up the loop at times."""
        totals = await collect(self._table, now_ms=self._clock.monotonic_ms(), wall_ms=self._clock.wall_ms())
        return [
            *describe_totals(totals),
            counter(
                "quiver_partition_stops_total",
                "Times that an error stopped a replica on this node; it is reopened after a pause.",
                self._replica_manager.stops,
            ),
            *describe_replication(self._replicator, self._meters),
            *describe_topics(self._meters, self._store.view(), topics_max=self._settings.broker.metric_topics_max),
            *self._requests.metrics(),
            *describe_disk(self._space, self._settings.log),
            *describe_decoded(self._decoded),
        ]

    # -- replicas --------------------------------------------------------------------------------

    def handle_fault(self, member: Member, error: Exception) -> None:
        """Stop the replica of a member that an unexpected error has stopped; it is reopened later."""
        self._replica_manager.handle_fault(member, error)

    def _handle_open(self, hosted: HostedReplica, replica: Replica) -> None:
        def handle_role(role: Role, _: Term, leader: NodeId | None) -> None:
            if leader is not None:
                self._table.note_leader(hosted.key)
            self._table.note_role(hosted, is_leader=role is Role.LEADER)
            if role is Role.LEADER:
                self._balancer.note_leader(hosted.key)
                self._membership.enqueue(hosted.key)
                self._heartbeats.send_soon()
            else:
                self._balancer.note_follower(hosted.key)

        replica.on_role = handle_role
        self._retention.begin(hosted, replica)
        replica.set_clients(self._removals.find_clients)
        self._tasks.create_task(self._maintain(hosted, replica))
        if replica.member.is_leader:
            handle_role(Role.LEADER, replica.member.term, self._node)

    async def _maintain(self, hosted: HostedReplica, replica: Replica) -> None:
        """Run a replica's background work; an unexpected error stops this replica and not the node."""
        try:
            await replica.run(self._clock)
        except StorageError:
            raise
        except Exception as error:
            if not self._replicator.contain(hosted.group, error):
                raise

    def _leads(self) -> Iterator[LeaderInfo]:
        for hosted, replica in self._table.led():
            yield LeaderInfo(hosted.key[0], hosted.key[1], replica.member.term)
