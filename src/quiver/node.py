"""One node, composed of its parts. The composition root.

A node opens its copy of the metadata (as a voter if it is a manager, else as a learner), watches it to know its peers,
and runs its roles: `Manager` manages the cluster, `Broker` holds replicas, `Gateway` serves HTTP. Requests arrive in
`dispatch`, which passes each to its handler. `Environment` provides everything outside the process, so that the same
node runs on real sockets and disks and in the simulation.

Life: ``async with Node(settings, environment)``; `wait_ready`; `wait_failed` returns when the node must end. Leaving
the block transfers leadership and closes everything; after a disk failure it only closes.

Faults: the owner of the event loop installs `handle_escaped` as its exception handler. See `quiver.faults`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec

from quiver import __version__
from quiver.access import AccessControl, AccessRequests, AuditLog, Authenticator, SharedCatchUp
from quiver.access.first_admin import create_first_admin
from quiver.access.provider import IdentityProvider
from quiver.addresses import format_address, parse_address
from quiver.broker import Broker, BrokerRegistration
from quiver.config import SecurityMode, Settings, list_shared
from quiver.dispatch import FlowWeights, RequestDispatcher
from quiver.environment import Environment, NodeNetwork
from quiver.errors import QuiverError, RequestError, StorageError
from quiver.faults import judge, supervise
from quiver.features import PROOFS_LEVEL
from quiver.gateway import Gateway, GatewayServices
from quiver.gateway.access import HttpAccess
from quiver.logs import facts
from quiver.manager import AdminService, Manager, NodeRouter
from quiver.metadata import METADATA_GROUP, BrokerState, MetadataStore, Table
from quiver.metadata.recovery import LOST_PREFIX
from quiver.metadata.rows import ALL_ROLES
from quiver.metrics import MetricFamily
from quiver.model import Index, NodeId
from quiver.node_metrics import (
    describe_certificate,
    describe_lags,
    describe_limits,
    describe_manager,
    describe_metadata,
    describe_node,
    describe_quotas,
)
from quiver.process import read_certificate_end
from quiver.raft import Configuration
from quiver.record.decoded import DecodedBatchBudget
from quiver.replication import Member, Replicator
from quiver.security.bootstrap import load_authority
from quiver.security.certificates import Authority
from quiver.storage import (
    ROOM_RETRY_S,
    DiskSpace,
    Lane,
    NodeIdentity,
    claim_directory,
    is_out_of_space,
    save_identity,
)
from quiver.storage.data_directory import metadata_log, replicas
from quiver.storage.rotated_file import RotatedFile
from quiver.tasks import TaskScope
from quiver.tracing import open_tracing
from quiver.wire import Caller
from quiver.wire.admin_messages import DescribeNode, LagInfo, NodeDescribed, ProblemInfo
from quiver.wire.serving import Answer

logger = logging.getLogger(__name__)

AUDIT_NAME = "audit.log"
"""The audit file in the data directory of a secure node, unless `audit.file` names another."""
GRACE_MS = 3_000
"""Time for requests in flight to finish when the node stops."""
FIND_PRIMARY_MS = 1_000
"""Time between two looks whether the primary's address is known."""
TRANSFER_TIMEOUT_MS = 1_000
"""Time for the primary to transfer its leadership of the metadata when it stops."""


class Node:
    """One node of a cluster. Use as ``async with``."""

    def __init__(self, settings: Settings, environment: Environment) -> None:
        self.setting_sources: dict[str, str] = {}  # what set a setting, for people
        self.id = NodeId(settings.node.id)
        self._settings = settings
        self._environment = environment
        self._started_ms = environment.clock.wall_ms()
        self._lost: frozenset[NodeId] = frozenset()
        self._managers = {NodeId(node): address for node, address in settings.node.managers.items()}
        self._stack = AsyncExitStack()
        self._failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._is_ready = asyncio.Event()
        self._decoded = DecodedBatchBudget(settings.gateway.decoded_bytes_max)
        self._network: NodeNetwork
        self._store: MetadataStore
        self._member: Member
        self._manager: Manager | None = None
        self._router: NodeRouter
        self._broker: Broker
        self._gateway: Gateway | None = None
        self._dispatcher: RequestDispatcher
        self._audit: AuditLog
        self._access: AccessControl
        self._authenticator: Authenticator
        self._provider: IdentityProvider | None = None
        self._tracing = open_tracing() if settings.tracing.is_enabled else None

    # -- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Open everything and start serving; after a failure, the opened parts are closed again."""
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Transfer leadership, finish the requests in flight, and close everything."""
        await self._stack.__aexit__(kind, error, trace)

    async def _open(self, stack: AsyncExitStack) -> None:
        environment = self._environment
        identity = await self._claim()
        self._lost = frozenset(identity.lost)
        self._store = await MetadataStore.open(
            environment.database,
            executor=environment.executor,
            clock=environment.clock,
            rng=environment.rng,
            on_failure=self._fail,
            has_log=identity.is_member,
            settings=self._settings.metadata,
            level_max=environment.level_max,
        )
        stack.push_async_callback(self._store.close)
        self._quotas = self._settings.quotas.make(self._store.quota_table)
        self._open_access()
        self._network = await stack.enter_async_context(
            environment.open_network(
                identity,
                peers=self._other_managers(),
                identity_of=self._identity_of,
                accepts_unproven=self._accepts_unproven,
            )
        )
        replicator = await stack.enter_async_context(self._make_replicator())
        self._member = await self._open_metadata(replicator, identity)
        stack.push_async_callback(self._store.transfer_primary, timeout_ms=TRANSFER_TIMEOUT_MS)
        tasks = await stack.enter_async_context(TaskScope())
        tasks.start(supervise("follow_peers", self._follow_peers, environment.rng))
        tasks.start(supervise("metadata_compaction", self._store.run_compaction, environment.rng))
        tasks.start(self._record_level(identity))
        tasks.start(self._watch_failure(replicator))
        tasks.start(self._audit.run())
        if self._provider is not None:
            tasks.start(supervise("identity_provider", self._provider.run, environment.rng))
        if environment.mode is SecurityMode.SECURE and "manager" in self._settings.node.role_names:
            tasks.start(create_first_admin(self._store, environment.clock, self._settings.security.admin_file))
        self._gateway = await self._open_gateway(stack)
        await self._open_roles(stack, replicator, identity)
        self._network.serve(self._dispatcher.handle)
        stack.push_async_callback(self._network.stop_serving, GRACE_MS)
        if self._gateway is not None:
            await self._gateway.serve()
            stack.push_async_callback(self._gateway.close)
        tasks.start(supervise("find_primary", self._find_primary, environment.rng))
        tasks.start(self._become_ready())
        if self._environment.mode is SecurityMode.INSECURE:
            logger.warning(
                "node is insecure: whoever reaches a port may do everything",
                extra=facts(node=self.id, mode=self._environment.mode),
            )
        logger.info("node started", extra=facts(node=self.id, wire=self.wire_address, roles=self._settings.node.roles))

    def _open_access(self) -> None:
        environment = self._environment
        self._audit = AuditLog(node=self.id, clock=environment.clock, write=self._make_audit_writer())
        is_open = environment.mode is not SecurityMode.SECURE
        self._access = AccessControl(view=self._store.view, clock=environment.clock, is_open=is_open, audit=self._audit)
        if self._settings.oidc.issuer:
            self._provider = IdentityProvider(self._settings.oidc, environment.clock)
        self._authenticator = Authenticator(
            view=self._store.view,
            clock=environment.clock,
            audit=self._audit,
            is_open=is_open,
            provider=self._provider,
            catch_up=SharedCatchUp(lambda: self._router.catch_up(), environment.clock),  # noqa: PLW0108 - opened later
        )
        self._dispatcher = RequestDispatcher(self._store, environment.clock, self._access, self._quotas)
        environment.turns.weigh(FlowWeights(self._store, self._quotas))
        self._dispatcher.add(self._authenticator.handlers() | AccessRequests(self._access).handlers())

    def _make_audit_writer(self) -> Callable[[bytes], Awaitable[None]] | None:
        """Return what appends to the audit file; None if there is none."""
        settings, executor = self._settings.audit, self._environment.executor
        path = settings.file
        if not path and self._environment.mode is SecurityMode.SECURE:
            path = os.path.join(self._settings.node.data, AUDIT_NAME)
        if not path:
            return None
        file = RotatedFile(path, bytes_max=settings.file_bytes_max, files_max=settings.files_max)
        return lambda lines: executor.submit(partial(file.append, lines))

    async def _claim(self) -> NodeIdentity:
        data, environment = self._settings.node.data, self._environment
        claim = partial(
            claim_directory,
            environment.disk,
            data,
            node=self.id,
            cluster=self._settings.node.cluster,
            fresh=environment.fresh_identity,
            level_max=environment.level_max,
        )
        identity = await environment.executor.submit(claim, Lane.RECOVERY)
        if identity.is_member and not environment.disk.exists(metadata_log(data)):
            # Without its log the node has forgotten its votes; with the same id it could vote twice in one term.
            raise StorageError(
                f"{metadata_log(data)} is missing, and with it the votes of this node: it must not run as node "
                f"{self.id} again; start it with a new --id and an empty --data"
            )
        return identity

    def _make_replicator(self) -> Replicator:
        environment = self._environment
        return Replicator(
            self.id,
            incarnation=environment.incarnation,
            network=self._network,
            disk=environment.disk,
            executor=environment.executor,
            clock=environment.clock,
            rng=environment.rng,
            settings=self._settings.replication,
            log_settings=self._settings.log,
            on_fault=self._handle_fault,
            knows=self._knows,
            keys=environment.keys,
            space=DiskSpace(
                environment.disk,
                self._settings.node.data,
                executor=environment.executor,
                settings=self._settings.log,
            ),
        )

    async def _open_metadata(self, replicator: Replicator, identity: NodeIdentity) -> Member:
        """Join the metadata's group: as one of its first voters, or in the role that the primary assigns."""
        data = self._settings.node.data
        bootstrap = None
        if self.id in self._managers and not identity.is_member:
            bootstrap = Configuration(voters=tuple(sorted(self._managers)))
        member = await replicator.open_member(
            METADATA_GROUP, metadata_log(data), self._store.machine, bootstrap=bootstrap
        )
        if not identity.is_member:
            await self._save_identity(msgspec.structs.replace(identity, is_member=True))
        self._store.attach(member)
        return member

    async def _save_identity(self, identity: NodeIdentity) -> None:
        save = partial(save_identity, self._environment.disk, self._settings.node.data, identity)
        await self._environment.executor.submit(save)

    async def _record_level(self, identity: NodeIdentity) -> None:
        """Record each higher feature level in the data directory, so that an older program refuses to start on it."""
        level = identity.level
        while True:
            await self._store.wait_level(level + 1)
            if self._store.is_closed:
                return
            level = self._store.feature_level
            seen = msgspec.structs.replace(identity, is_member=True, level=level, program=__version__)
            try:
                await self._save_identity(seen)
            except OSError as error:
                if is_out_of_space(error):
                    level = identity.level
                    await asyncio.sleep(ROOM_RETRY_S)
                    continue
                self._fail(StorageError(f"cannot record feature level {level} in the data directory: {error}"))
                return
            logger.info("feature level recorded", extra=facts(node=self.id, level=level))

    async def _open_roles(self, stack: AsyncExitStack, replicator: Replicator, identity: NodeIdentity) -> None:
        settings, environment = self._settings, self._environment
        roles = settings.node.role_names
        if "manager" in roles:
            self._manager = Manager(
                self._store, clock=environment.clock, settings=settings.manager, cluster_id=settings.node.cluster
            )
            await stack.enter_async_context(self._manager)
        self._router = router = NodeRouter(
            self.id,
            self._store,
            self._network.transport,
            clock=environment.clock,
            rng=environment.rng,
            seeds=self._managers,
        )
        admin = AdminService(
            self._store,
            router,
            clock=environment.clock,
            settings=settings.manager,
            heartbeats=self._manager,
            authority=self._load_authority(),
            encryption=settings.encryption,
            make_token=environment.make_token,
        )
        registration = BrokerRegistration(
            node=self.id,
            identity=identity.identity,
            wire_address=self.wire_address,
            http_address=self.http_address,
            roles=tuple(role for role in ALL_ROLES if role in roles),
            rack=settings.node.rack,
            level_max=environment.level_max,
            program=__version__,
        )
        await environment.executor.submit(partial(environment.disk.make_directory, replicas(settings.node.data)))
        self._broker = Broker(
            registration=registration,
            store=self._store,
            replicator=replicator,
            router=router,
            settings=settings,
            disk=environment.disk,
            executor=environment.executor,
            clock=environment.clock,
            rng=environment.rng,
            directory=replicas(settings.node.data),
            decoded=self._decoded,
            tracing=self._tracing,
        )
        await stack.enter_async_context(self._broker)
        self._dispatcher.add(admin.handlers() | self._broker.handlers() | {DescribeNode: self._handle_describe})

    def _load_authority(self) -> Authority | None:
        """Return the authority that signs certificates of new nodes; None without its key."""
        key_file = self._settings.security.ca_key_file
        if self._environment.mode is not SecurityMode.SECURE or not key_file or not os.path.exists(key_file):
            return None
        return load_authority(self._settings.tls.ca_file, key_file)

    async def _open_gateway(self, stack: AsyncExitStack) -> Gateway | None:
        """Bind the HTTP address, which the node registers with, without serving yet."""
        node, environment = self._settings.node, self._environment
        if "gateway" not in node.role_names:
            return None
        services = GatewayServices(
            node=self.id,
            wire_address=lambda: self.wire_address,
            handler=self._dispatcher.handle,
            transport=self._network.transport,
            view=self._store.view,
            access=HttpAccess(self._access, self._authenticator),
            on_client_seen=lambda kind, id_: self._broker.record_client(kind, id_),  # noqa: PLW0108 - the broker is made later
            decoded=self._decoded,
            quotas=self._quotas,
            turns=environment.turns,
            answers=environment.answers,
            tracing=self._tracing,
        )
        gateway = Gateway(
            services,
            listen=node.http,
            settings=self._settings.gateway,
            clock=environment.clock,
            rng=environment.rng,
            advertise=node.advertise,
            tls=environment.make_http_context(),
        )
        return await stack.enter_async_context(gateway)

    async def _become_ready(self) -> None:
        await self._broker.wait_registered()
        await self._broker.wait_ready()
        self._is_ready.set()
        if self._gateway is not None and self._environment.mode is SecurityMode.SECURE:
            self._audit.publish = self._gateway.audit_topic.publish
        logger.info("node ready", extra=facts(node=self.id))

    # -- status ----------------------------------------------------------------------------------

    @property
    def wire_address(self) -> str:
        """Return the address at which nodes and the SDK reach this node."""
        return self._network.wire_address

    @property
    def http_address(self) -> str:
        """Return the address at which HTTP clients reach this node; empty if it is no gateway."""
        if self._gateway is None:
            return ""
        host, port = parse_address(self._gateway.address)
        return format_address((self._settings.node.advertise or host, port))

    async def wait_ready(self) -> None:
        """Wait until the node is registered with the primary and all its replicas are open."""
        await self._is_ready.wait()

    async def wait_failed(self) -> Exception:
        """Wait until this node must end; return why.

        A `StorageError`: its disk or its database failed. Any other error escaped the node's own code.
        """
        return await asyncio.shield(self._failure)

    @property
    def failure(self) -> Exception | None:
        """Return why this node must end, if it must."""
        return self._failure.result() if self._failure.done() else None

    async def _handle_describe(self, _: Caller, request: DescribeNode, __: memoryview) -> Answer:
        lags = await self._broker.describe_lags() if request.with_lags or request.with_metrics else ()
        described = self.describe(request, lags)
        if request.with_metrics:
            metrics = tuple(await self._collect_metrics(described, lags))
            described = msgspec.structs.replace(described, metrics=metrics, now_ms=self._environment.clock.wall_ms())
        if request.with_history and self._gateway is not None:
            described = msgspec.structs.replace(described, history=self._gateway.history())
        return described, ()

    async def _collect_metrics(self, described: NodeDescribed, lags: tuple[LagInfo, ...]) -> list[MetricFamily]:
        status, history = self._store.status(), self._member.history
        is_saved = status.applied_index <= history.saved_index
        now_ms = self._environment.clock.wall_ms()
        tls = self._settings.tls
        expiry = read_certificate_end(tls.certificate_file) if tls.certificate_file else None
        return [
            *self._audit.metrics(),
            *(() if self._provider is None else self._provider.metrics()),
            *describe_node(described, now_ms=now_ms, feature_level=self._store.view().feature_level),
            *describe_limits(self._settings),
            describe_quotas(self._quotas.refusals),
            *describe_metadata(status, node=self.id, snapshot_age_ms=0 if is_saved else now_ms - history.saved_ms),
            *(describe_manager(self._manager.status()) if self._manager is not None else ()),
            *await self._broker.metrics(),
            describe_lags(lags),
            *self._network.metrics(),
            *self._environment.metrics(),
            *describe_certificate(expiry),
        ]

    def describe(self, request: DescribeNode, lags: tuple[LagInfo, ...]) -> NodeDescribed:
        """Return this node's status, without metrics and history."""
        status, view = self._store.status(), self._store.view()
        topic = None if request.topic is None else view.topic(request.topic)
        is_shown = request.with_replicas and (request.topic is None or topic is not None)
        return NodeDescribed(
            node=self.id,
            version=__version__,
            pid=os.getpid(),
            roles=tuple(sorted(self._settings.node.role_names)),
            started_ms=self._started_ms,
            is_ready=not (unready := self._unready_reason()),
            unready=unready,
            primary=status.primary,
            applied_index=view.index,
            stored_index=status.stored_index,
            commit_index=status.commit_index,
            digest=view.digest() if request.with_digest else "",
            lags=lags if request.with_lags else (),
            holds=len(view.holds),
            settings=list_shared(self._settings) if request.with_settings else {},
            setting_sources=self.setting_sources if request.with_settings else {},
            level_max=self._store.level_max,
            database_outage=status.outage or "",
            security_mode=self._environment.mode.value,
            provider_problem="" if self._provider is None else self._provider.problem,
            certificate_problem=self._environment.certificate_problem,
            replicas=self._broker.describe_replicas(None if topic is None else topic.topic_id) if is_shown else (),
            problems=(*self._describe_metadata_problem(), *self._broker.describe_problems()),
            partition_stops=self._broker.status().stops,
        )

    def _describe_metadata_problem(self) -> tuple[ProblemInfo, ...]:
        problem = self._member.needs_upgrade
        return (ProblemInfo(state="needs_upgrade", problem=problem, group=METADATA_GROUP),) if problem else ()

    def _unready_reason(self) -> str:
        """Return why this node should get no requests; empty if it should."""
        if not self._is_ready.is_set():
            return self._broker.describe_start()
        alone_ms = self._member.leader_silence_ms()
        if alone_ms > self._settings.metadata.staleness_ms_max:
            return f"this node has had no primary for {alone_ms} ms: it is cut off, or most managers are down"
        return ""

    # -- peers -----------------------------------------------------------------------------------

    def _other_managers(self) -> dict[NodeId, str]:
        return {node: at for node, at in self._managers.items() if node != self.id and node not in self._lost}

    def _identity_of(self, node: NodeId) -> str | None:
        if node in self._lost:
            return LOST_PREFIX  # nobody's identity
        broker = self._store.view().brokers.get(node)
        if broker is not None and broker.state is BrokerState.REMOVED:
            return LOST_PREFIX  # its certificate is still valid, and must be worth nothing
        return None if broker is None else broker.identity

    def _accepts_unproven(self) -> bool:
        """Accept nodes that cannot prove themselves while the cluster may still have programs that know no proofs.

        A node that has no metadata yet does not: whoever reached it first could pose as its cluster.
        """
        view = self._store.view()
        return bool(view.cluster_id) and view.feature_level < PROOFS_LEVEL

    def _knows(self, node: NodeId) -> bool:
        """Return whether a node is a manager by this node's settings, or registered and not removed."""
        if node in self._lost:
            return False
        broker = self._store.view().brokers.get(node)
        return node in self._managers if broker is None else broker.state is not BrokerState.REMOVED

    async def _follow_peers(self) -> None:
        """Keep the network's peers equal to the nodes in the metadata."""
        known: set[NodeId] = set()
        async for changed in self._store.watch(Index(0)):
            if not changed.is_reset and not any(change.table is Table.BROKERS for change in changed.changes):
                continue
            brokers = self._store.view().brokers
            nodes = {node: row for node, row in brokers.items() if row.state is not BrokerState.REMOVED}
            for node in known - nodes.keys():
                if node not in self._managers:
                    self._network.remove_peer(node)
            for node, broker in nodes.items():
                if node != self.id and node not in self._lost:
                    self._follow_peer(node, broker.wire_address)
            known = set(nodes)

    async def _find_primary(self) -> None:
        """While the primary is a node that this node's metadata does not have, find out where it is.

        It may be newer than the metadata and the seeds, once the managers were replaced. Without its address this node
        can neither acknowledge the metadata's entries, so that it gets no more, nor ask for them.
        """
        while True:
            await asyncio.sleep(FIND_PRIMARY_MS / 1000)
            primary = self._store.primary
            if primary is None or primary in (self.id, *self._lost, *self._store.view().brokers):
                continue
            try:
                await self._router.find_primary()
            except QuiverError as error:
                logger.debug("primary not found yet", extra=facts(node=self.id, primary=primary, reason=error.message))
            address = self._router.find_address(primary)
            if address is not None:
                self._follow_peer(primary, address)

    def _follow_peer(self, node: NodeId, address: str) -> None:
        """Connect to a node. A bad address in the metadata makes that node unreachable; it never ends this one."""
        try:
            self._network.add_peer(node, parse_address(address))
        except RequestError as error:
            logger.warning("peer has a bad address", extra=facts(peer=node, address=address, error=error.message))

    # -- ending ----------------------------------------------------------------------------------

    def handle_escaped(self, context: Mapping[str, Any]) -> None:
        """Decide about an error that reached the event loop: end the node, or only log it."""
        error = judge(context)
        if error is not None:
            self._fail(error)

    def _handle_fault(self, member: Member, error: Exception) -> None:
        """Stop the partition whose code an error escaped; the metadata's group is the node's own code."""
        if member.group == METADATA_GROUP:
            logger.critical("metadata member failed, node stops", exc_info=error, extra=facts(node=self.id))
            self._fail(error)
        else:
            self._broker.handle_fault(member, error)

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_result(error)

    async def _watch_failure(self, replicator: Replicator) -> None:
        self._fail(await replicator.wait_failed())
