"""One node: everything it does, put together, and nothing else. The composition root.

A node opens its copy of the metadata (as a voter if it is a manager, else as a learner), follows it to know its peers,
and runs its roles on top: `Manager` decides, `Broker` holds replicas, `Gateway` speaks HTTP. Requests come in through
`dispatch`, which passes each to its handler. What lies outside of the process is in `Environment`, so that the
same node runs on real sockets and disks and under simulation.

Life: ``async with Node(settings, environment)``; `wait_ready`; `wait_failed` returns when it must end. Leaving the
block hands leadership over and closes everything; a node whose disk failed is closed without that.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Self

import msgspec

from quiver import __version__
from quiver.addresses import format_address, parse_address
from quiver.broker import Broker, BrokerRegistration
from quiver.config import Settings
from quiver.dispatch import RequestDispatcher
from quiver.environment import Environment, NodeNetwork
from quiver.errors import StorageError
from quiver.gateway import Gateway, GatewayServices
from quiver.logs import facts
from quiver.manager import AdminService, Manager, NodeRouter
from quiver.metadata import METADATA_GROUP, MetadataStore, Table
from quiver.metadata.rows import ALL_ROLES
from quiver.model import Index, NodeId
from quiver.raft import Configuration
from quiver.replication import Member, Replicator
from quiver.storage import NodeIdentity, claim_directory, save_identity
from quiver.storage.data_directory import metadata_log, replicas
from quiver.tasks import TaskScope
from quiver.wire import Caller
from quiver.wire.admin_messages import DescribeNode, NodeDescribed
from quiver.wire.serving import Answer
from quiver.wire.tls import make_http_context

logger = logging.getLogger(__name__)

GRACE_MS = 3_000
"""How long requests under way may take when the node stops."""
HAND_OVER_MS = 1_000
"""How long the metadata's next leader may take to be found when the primary stops."""


class Node:
    """One node of a cluster. Use as ``async with``."""

    def __init__(self, settings: Settings, environment: Environment) -> None:
        self.id = NodeId(settings.node.id)
        self._settings = settings
        self._world = environment
        self._started_ms = environment.clock.wall_ms()
        self._managers = {NodeId(node): address for node, address in settings.node.managers.items()}
        self._stack = AsyncExitStack()
        self._failure: asyncio.Future[StorageError] = asyncio.get_running_loop().create_future()
        self._is_ready = asyncio.Event()
        self._network: NodeNetwork
        self._store: MetadataStore
        self._member: Member
        self._broker: Broker
        self._gateway: Gateway | None = None
        self._dispatcher: RequestDispatcher

    # -- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Open everything and begin to serve; what was begun is closed again if that fails."""
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hand leadership over, answer what was accepted, and close everything."""
        await self._stack.__aexit__(kind, error, trace)

    async def _open(self, stack: AsyncExitStack) -> None:
        world = self._world
        identity = await self._claim()
        self._store = await MetadataStore.open(
            world.database,
            executor=world.executor,
            clock=world.clock,
            on_failure=self._fail,
            settings=self._settings.metadata,
        )
        stack.push_async_callback(self._store.close)
        self._dispatcher = RequestDispatcher(self._store, world.clock)
        self._network = await stack.enter_async_context(
            world.open_network(identity, peers=self._other_managers(), identity_of=self._identity_of)
        )
        replicator = await stack.enter_async_context(self._make_replicator())
        self._member = await self._open_metadata(replicator, identity)
        stack.push_async_callback(self._store.transfer_primary, timeout_ms=HAND_OVER_MS)
        tasks = await stack.enter_async_context(TaskScope())
        tasks.start(self._follow_peers())
        tasks.start(self._watch_failure(replicator))
        tasks.start(self._store.run_compaction())
        self._gateway = await self._open_gateway(stack)
        await self._open_roles(stack, replicator, identity)
        self._network.serve(self._dispatcher.handle)
        stack.push_async_callback(self._network.stop_serving, GRACE_MS)
        if self._gateway is not None:
            await self._gateway.serve()
            stack.push_async_callback(self._gateway.close)
        tasks.start(self._become_ready())
        logger.info("node started", extra=facts(node=self.id, wire=self.wire_address, roles=self._settings.node.roles))

    async def _claim(self) -> NodeIdentity:
        data, world = self._settings.node.data, self._world
        claim = partial(
            claim_directory,
            world.disk,
            data,
            node=self.id,
            cluster=self._settings.node.cluster,
            fresh=world.fresh_identity,
        )
        identity = await world.executor.submit(claim)
        if identity.is_member and not world.disk.exists(metadata_log(data)):
            raise StorageError(
                f"{metadata_log(data)} is gone: what this node has promised is forgotten, so it must not come back as "
                f"node {self.id}; start it with a new --id and an empty --data"
            )
        return identity

    def _make_replicator(self) -> Replicator:
        world = self._world
        return Replicator(
            self.id,
            incarnation=world.incarnation,
            network=self._network,
            disk=world.disk,
            executor=world.executor,
            clock=world.clock,
            rng=world.rng,
            settings=self._settings.replication,
            log_settings=self._settings.log,
        )

    async def _open_metadata(self, replicator: Replicator, identity: NodeIdentity) -> Member:
        """Take part in the metadata's group: as one of its first voters, or as what the primary makes of this node."""
        data = self._settings.node.data
        bootstrap = None
        if self.id in self._managers and not identity.is_member:
            bootstrap = Configuration(voters=tuple(sorted(self._managers)))
        member = await replicator.open_member(
            METADATA_GROUP, metadata_log(data), self._store.machine, bootstrap=bootstrap
        )
        if not identity.is_member:
            joined = msgspec.structs.replace(identity, is_member=True)
            await self._world.executor.submit(partial(save_identity, self._world.disk, data, joined))
        self._store.attach(member)
        return member

    async def _open_roles(self, stack: AsyncExitStack, replicator: Replicator, identity: NodeIdentity) -> None:
        settings, world = self._settings, self._world
        roles = settings.node.role_names
        manager = None
        if "manager" in roles:
            manager = Manager(
                self._store, clock=world.clock, settings=settings.manager, cluster_id=settings.node.cluster
            )
            await stack.enter_async_context(manager)
        router = NodeRouter(
            self.id,
            self._store,
            self._network.transport,
            clock=world.clock,
            rng=world.rng,
            seeds=self._managers,
        )
        admin = AdminService(self._store, router, clock=world.clock, settings=settings.manager, heartbeats=manager)
        registration = BrokerRegistration(
            node=self.id,
            identity=identity.identity,
            wire_address=self.wire_address,
            http_address=self.http_address,
            roles=tuple(role for role in ALL_ROLES if role in roles),
            rack=settings.node.rack,
        )
        await world.executor.submit(partial(world.disk.make_directory, replicas(settings.node.data)))
        self._broker = Broker(
            registration=registration,
            store=self._store,
            replicator=replicator,
            router=router,
            settings=settings,
            disk=world.disk,
            executor=world.executor,
            clock=world.clock,
            rng=world.rng,
            directory=replicas(settings.node.data),
        )
        await stack.enter_async_context(self._broker)
        self._dispatcher.add(admin.handlers() | self._broker.handlers() | {DescribeNode: self._handle_describe})

    async def _open_gateway(self, stack: AsyncExitStack) -> Gateway | None:
        """Take the HTTP address, which this node is to be known by, without serving yet."""
        node, world = self._settings.node, self._world
        if "gateway" not in node.role_names:
            return None
        services = GatewayServices(
            node=self.id,
            wire_address=lambda: self.wire_address,
            handler=self._dispatcher.handle,
            transport=self._network.transport,
            view=self._store.view,
            hear=lambda kind, id_: self._broker.hear(kind, id_),  # noqa: PLW0108 - there is none yet
        )
        gateway = Gateway(
            services,
            listen=node.http,
            settings=self._settings.gateway,
            clock=world.clock,
            rng=world.rng,
            tls=make_http_context(self._settings.tls, self._settings.gateway),
        )
        return await stack.enter_async_context(gateway)

    async def _become_ready(self) -> None:
        await self._broker.wait_registered()
        await self._broker.wait_ready()
        self._is_ready.set()
        logger.info("node ready", extra=facts(node=self.id))

    # -- questions -------------------------------------------------------------------------------

    @property
    def wire_address(self) -> str:
        """Return where nodes and the SDK reach this node."""
        return self._network.wire_address

    @property
    def http_address(self) -> str:
        """Return where HTTP clients reach this node; empty if it is no gateway."""
        if self._gateway is None:
            return ""
        host, port = parse_address(self._gateway.address)
        return format_address((self._settings.node.advertise or host, port))

    async def wait_ready(self) -> None:
        """Return once the primary knows this node and all its replicas are open."""
        await self._is_ready.wait()

    async def wait_failed(self) -> StorageError:
        """Wait until this node must end: its disk or its database can no longer be trusted."""
        return await asyncio.shield(self._failure)

    async def _handle_describe(self, _: Caller, request: DescribeNode, __: memoryview) -> Answer:
        return self.describe(request), ()

    def describe(self, request: DescribeNode) -> NodeDescribed:
        """Return this node's status."""
        status = self._store.status()
        view = self._store.view()
        topic = None if request.topic is None else view.topic(request.topic)
        is_shown = request.with_replicas and (request.topic is None or topic is not None)
        return NodeDescribed(
            node=self.id,
            version=__version__,
            pid=os.getpid(),
            roles=tuple(sorted(self._settings.node.role_names)),
            started_ms=self._started_ms,
            is_ready=self._is_ready.is_set(),
            primary=status.primary,
            applied_index=view.index,
            stored_index=status.stored_index,
            commit_index=status.commit_index,
            digest=view.digest() if request.with_digest else "",
            lags=self._broker.describe_lags() if request.with_lags else (),
            holds=len(view.holds),
            replicas=self._broker.describe_replicas(None if topic is None else topic.topic_id) if is_shown else (),
        )

    # -- peers -----------------------------------------------------------------------------------

    def _other_managers(self) -> dict[NodeId, str]:
        return {node: address for node, address in self._managers.items() if node != self.id}

    def _identity_of(self, node: NodeId) -> str | None:
        broker = self._store.view().brokers.get(node)
        return None if broker is None else broker.identity

    async def _follow_peers(self) -> None:
        """Reach every node that the metadata knows, where it says that the node is."""
        known: set[NodeId] = set()
        async for changed in self._store.watch(Index(0)):
            if not changed.is_reset and not any(change.table is Table.BROKERS for change in changed.changes):
                continue
            nodes = self._store.view().brokers
            for node in known - nodes.keys():
                if node not in self._managers:
                    self._network.remove_peer(node)
            for node, broker in nodes.items():
                if node != self.id:
                    self._network.add_peer(node, parse_address(broker.wire_address))
            known = set(nodes)

    # -- ending ----------------------------------------------------------------------------------

    def _fail(self, error: StorageError) -> None:
        if not self._failure.done():
            self._failure.set_result(error)

    async def _watch_failure(self, replicator: Replicator) -> None:
        self._fail(await replicator.wait_failed())
