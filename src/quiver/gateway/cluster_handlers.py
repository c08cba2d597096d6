"""Handlers of the routes about the cluster and this node, and of the HTML pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from quiver.client.explanation import explain_partition
from quiver.clock import Clock
from quiver.errors import QuiverError, UnavailableError
from quiver.gateway import contract
from quiver.gateway.changes import submit_change
from quiver.gateway.http import HttpResponse, HttpStatus
from quiver.gateway.http_route import HTML, PROMETHEUS
from quiver.gateway.metrics import Metrics
from quiver.gateway.openapi import CONTENT_SECURITY_POLICY, make_document, render_docs
from quiver.gateway.sync_probe import SyncProbe
from quiver.metrics import render
from quiver.model import NodeId
from quiver.routing.retry import Deadline
from quiver.routing.router import Router, gather_outcomes
from quiver.tasks import map_in_steps
from quiver.wire.admin_messages import (
    AddManager,
    ClientInfo,
    DescribeNode,
    ListClients,
    ListManagers,
    NodeDescribed,
    RemoveManager,
    UpgradeCluster,
    manager_role,
)
from quiver.wire.messages import DrainBroker, GetMetadata, MetadataFound, NodeInfo, RemoveBroker

GATEWAY_PRODUCER_PREFIX = "_gateway/"
"""Prefix of the names of gateways' own producers; reserved."""
MANAGER_TIMEOUT_MS = 2_000
"""Time for a manager to report its applied index."""
_ALIVE = frozenset(("alive", "draining", "drained"))
"""States of a broker whose heartbeats arrive."""
_PAGE_HEADERS = (
    ("Content-Security-Policy", CONTENT_SECURITY_POLICY),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
)


class ClusterHandlers:
    """Handle the calls on the cluster and on this node."""

    def __init__(
        self,
        router: Router,
        clock: Clock,
        metrics: Metrics,
        *,
        own_address: Callable[[], str],
        http_status: Callable[[], HttpStatus],
        timeout_ms: int,
    ) -> None:
        self._router = router
        self._clock = clock
        self._metrics = metrics
        self._own_address = own_address
        self._http_status = http_status
        self._timeout_ms = timeout_ms
        self._sync_probe = SyncProbe(router, clock)
        self._openapi = HttpResponse(status=200, body=msgspec.json.encode(make_document()))
        self._docs = _page(render_docs())

    # -- this node -------------------------------------------------------------------------------

    async def status(self, _: contract.Parameters) -> contract.NodeStatusAnswer:
        """Describe this node."""
        node = await self._describe()
        return contract.NodeStatusAnswer(
            node=node.node,
            roles=list(node.roles),
            version=node.version,
            message=_describe_role(node),
            uptime_ms=max(0, self._clock.wall_ms() - node.started_ms),
            is_ready=node.is_ready,
            problems=[
                contract.ReplicaProblemItem(
                    state=found.state, problem=found.problem, topic=found.topic or None, partition=found.partition_id
                )
                for found in node.problems
            ],
        )

    async def metrics(self, given: contract.MetricsQuery) -> HttpResponse:
        """Return this node's metrics, or those of another node, which may have no gateway."""
        if given.node is None:
            node = await self._describe(with_metrics=True)
            page = self._metrics.render(self._http_status(), node.metrics)
        else:
            request = DescribeNode(with_metrics=True)
            node, _ = await self._router.ask_node(NodeId(given.node), request, deadline=self._deadline())
            page = render(node.metrics)
        return HttpResponse(status=200, body=page.encode(), content_type=PROMETHEUS)

    def healthz(self, _: contract.Parameters) -> contract.Answer:
        """Return success: the process responds."""
        return contract.Answer()

    async def readyz(self, given: contract.ReadyQuery) -> contract.Answer:
        """Return success if the node serves, and its replicas are in sync if that is asked for; else 503."""
        node = await self._describe()
        if not node.is_ready:
            raise UnavailableError(f"not ready: {node.unready}", code="not_ready")
        if self._clock.wall_ms() - node.started_ms < given.in_sync_within_ms:
            behind = await self._sync_probe.count_behind(self._own_address())
            if behind:
                raise UnavailableError(f"not ready: {behind} replicas are not in sync yet", code="not_ready")
        return contract.Answer()

    def openapi(self, _: contract.Parameters) -> HttpResponse:
        """Return the OpenAPI document."""
        return self._openapi

    def docs(self, _: contract.Parameters) -> HttpResponse:
        """Return the HTML reference of the HTTP API."""
        return self._docs

    def welcome(self, _: contract.Parameters) -> contract.BannerAnswer:
        """Return the service banner."""
        return contract.BannerAnswer(message="Quiver is running. GET /docs lists all calls.")

    # -- the cluster -----------------------------------------------------------------------------

    async def health(self, _: contract.Parameters) -> contract.HealthAnswer:
        """Report the last heartbeat of brokers and clients."""
        deadline = self._deadline()
        found = await self._find(deadline)
        request = ListClients()
        listed = (await self._router.ask(request, deadline=deadline))[0]
        return contract.HealthAnswer(
            brokers=[
                contract.BrokerHealthItem(
                    broker_id=node.node, last_heartbeat_ms=node.last_seen_ms, is_alive=node.state in _ALIVE
                )
                for node in _brokers(found)
            ],
            producers=await map_in_steps(_client_item, _shown(listed.clients, "producer")),
            consumers=await map_in_steps(_client_item, _shown(listed.clients, "consumer")),
        )

    async def list_brokers(self, _: contract.Parameters) -> contract.BrokersAnswer:
        """List the brokers."""
        found = await self._find(self._deadline(), topics=None)
        partitions = [partition for topic in found.topics for partition in topic.partitions]
        held = Counter(node for one in partitions for node in (*one.replicas, *one.learners))
        led = Counter(one.leader for one in partitions)
        brokers = [_broker_item(node, partitions=held[node.node], leads=led[node.node]) for node in _brokers(found)]
        return contract.BrokersAnswer(brokers=brokers)

    async def drain_broker(self, given: contract.BrokerQuery, on_behalf_of: str) -> contract.Answer:
        """Start moving all partitions off a broker."""
        return await self._change(DrainBroker(broker=NodeId(given.id), on_behalf_of=on_behalf_of))

    async def remove_broker(self, given: contract.BrokerQuery, on_behalf_of: str) -> contract.Answer:
        """Remove a broker from the cluster."""
        return await self._change(RemoveBroker(broker=NodeId(given.id), on_behalf_of=on_behalf_of))

    async def upgrade(self, given: contract.UpgradeBody, on_behalf_of: str) -> contract.UpgradeAnswer:
        """Raise the cluster's feature level."""
        request = UpgradeCluster(level=given.level, is_dry_run=given.dry_run, on_behalf_of=on_behalf_of)
        done, _ = await self._router.ask(request, deadline=self._deadline())
        self._router.cache.record_index(done.index)
        return contract.UpgradeAnswer(
            level=done.level,
            level_before=done.level_before,
            nodes=[
                contract.NodeProgramItem(node=item.node, version=item.program, level_max=item.level_max)
                for item in done.nodes
            ],
            refusal=done.refusal,
        )

    async def list_managers(self, _: contract.Parameters) -> contract.ManagersAnswer:
        """Describe the metadata group; the applied index of an unreachable manager is null."""
        found = (await self._router.ask(ListManagers(), deadline=self._deadline()))[0]
        deadline = self._router.deadline(MANAGER_TIMEOUT_MS)
        described = await gather_outcomes(
            self._router.ask_at(one.wire_address, DescribeNode(), deadline=deadline) for one in found.managers
        )
        return contract.ManagersAnswer(
            primary=found.primary,
            replicas=[one.node for one in found.managers if one.is_voter and one.node != found.primary],
            managers=[
                contract.ManagerItem(
                    node=one.node,
                    http_address=one.http_address,
                    role=manager_role(one, found.primary),
                    applied_index=None if isinstance(state, QuiverError) else state.applied_index,
                )
                for one, state in zip(found.managers, described, strict=True)
            ],
        )

    async def add_manager(self, given: contract.ManagerQuery, on_behalf_of: str) -> contract.Answer:
        """Make a node a manager."""
        return await self._change(AddManager(node=NodeId(given.id), on_behalf_of=on_behalf_of))

    async def remove_manager(self, given: contract.ManagerQuery, on_behalf_of: str) -> contract.Answer:
        """Remove a node from the managers."""
        return await self._change(RemoveManager(node=NodeId(given.id), on_behalf_of=on_behalf_of))

    async def get_metadata(self, _: contract.Parameters) -> contract.MetadataAnswer:
        """List all nodes."""
        # Clients find the nodes by it: never refused for the lack of a primary.
        request = GetMetadata(topics=(), is_stale_ok=True)
        found = (await self._router.ask(request, deadline=self._deadline()))[0]
        return contract.MetadataAnswer(
            cluster_id=found.cluster_id, primary=found.primary, nodes=[_node_item(node) for node in found.nodes]
        )

    async def explain(self, given: contract.ExplainQuery) -> contract.ExplanationAnswer:
        """Explain a partition."""
        found = await explain_partition(self._router, given.topic, given.partition_id, given.offset)
        return contract.ExplanationAnswer(explanation=found)

    # -- requests --------------------------------------------------------------------------------

    async def _change(self, request: DrainBroker | RemoveBroker | AddManager | RemoveManager) -> contract.Answer:
        await submit_change(self._router, request, deadline=self._deadline())
        return contract.Answer()

    async def _find(self, deadline: Deadline, *, topics: tuple[str, ...] | None = ()) -> MetadataFound:
        request = GetMetadata(topics=topics)
        return (await self._router.ask(request, deadline=deadline))[0]

    async def _describe(self, *, with_metrics: bool = False) -> NodeDescribed:
        request = DescribeNode(with_metrics=with_metrics)
        return await self._router.ask_at(self._own_address(), request, deadline=self._deadline())

    def _deadline(self) -> Deadline:
        return self._router.deadline(self._timeout_ms)


def _page(html: str) -> HttpResponse:
    return HttpResponse(status=200, body=html.encode(), content_type=HTML, headers=_PAGE_HEADERS)


def _brokers(found: MetadataFound) -> list[NodeInfo]:
    return [node for node in found.nodes if not node.roles or "broker" in node.roles]


def _describe_role(node: NodeDescribed) -> str:
    if "manager" in node.roles:
        return f"manager running ({'primary' if node.primary == node.node else 'replica'})"
    return "broker running" if "broker" in node.roles else "gateway running"


def _shown(clients: Iterable[ClientInfo], kind: str) -> list[ClientInfo]:
    """Return the clients of a kind without the producers of gateways."""
    return [one for one in clients if one.kind == kind and not one.name.startswith(GATEWAY_PRODUCER_PREFIX)]


def _client_item(client: ClientInfo) -> contract.ClientHealthItem:
    return contract.ClientHealthItem(
        id=client.id,
        name=client.name,
        topics=list(client.topics),
        last_heartbeat_ms=client.last_seen_ms,
        is_alive=client.is_alive,
    )


def _node_item(node: NodeInfo) -> contract.NodeItem:
    return contract.NodeItem(
        node=node.node,
        wire_address=node.wire_address,
        http_address=node.http_address,
        roles=list(node.roles),
        state=node.state,
    )


def _broker_item(node: NodeInfo, *, partitions: int, leads: int) -> contract.BrokerItem:
    return contract.BrokerItem(
        broker_id=node.node,
        wire_address=node.wire_address,
        http_address=node.http_address,
        rack=node.rack,
        state=node.state,
        is_draining=node.is_draining,
        last_heartbeat_ms=node.last_seen_ms,
        partitions=partitions,
        leads=leads,
    )
