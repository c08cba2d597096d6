"""A node's gateway, composed: the HTTP server, the handlers of its routes, and the router that they use.

Use as ``async with``, which binds the address; `serve` starts accepting. At the end it accepts no more, answers the
accepted requests, and delivers the records that its own producers have queued.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Self

import msgspec

from quiver.addresses import format_address, parse_address
from quiver.clock import Clock, Rng
from quiver.config import GatewaySettings, WireSettings
from quiver.gateway.access import HttpAccess
from quiver.gateway.access_handlers import AccessHandlers
from quiver.gateway.application import RoutedApplication, RouteHandler
from quiver.gateway.audit_topic import AuditTopic
from quiver.gateway.cluster_handlers import ClusterHandlers
from quiver.gateway.console.assets import TO_CONSOLE, ConsoleAssets
from quiver.gateway.console.feed import ConsoleFeed
from quiver.gateway.console.handlers import ConsoleHandlers
from quiver.gateway.console.recorder import ConsoleRecorder
from quiver.gateway.console.shared_answers import SharedAnswers
from quiver.gateway.consume_handlers import ConsumeHandlers
from quiver.gateway.group_handlers import GroupHandlers
from quiver.gateway.hosts import HostNames
from quiver.gateway.http import HttpRequest, HttpResponse, HttpServer, HttpStatus
from quiver.gateway.http_route import HttpRoute
from quiver.gateway.metrics import Metrics
from quiver.gateway.origins import NodeOrigins
from quiver.gateway.produce_handlers import OnClientSeen, ProduceHandlers
from quiver.gateway.queue_handlers import QueueHandlers
from quiver.gateway.registrations import Registrations, catch_up
from quiver.gateway.routes import ROUTES
from quiver.gateway.topic_handlers import TopicHandlers
from quiver.gateway.topic_producers import TopicProducers
from quiver.gateway.traced_application import TracedApplication
from quiver.logs import facts
from quiver.metadata import View
from quiver.model import NodeId
from quiver.record.decoded import DecodedBatchBudget
from quiver.routing.loopback import LoopbackTransport
from quiver.routing.metadata_cache import MetadataCache
from quiver.routing.router import Router, RouterOptions
from quiver.routing.transport import Transport
from quiver.security.quotas import Quotas
from quiver.tasks import TaskScope
from quiver.tracing import Tracing
from quiver.turns import Turns
from quiver.wire import Handler
from quiver.wire.admin_messages import DescribeNode, HistorySample, NodeDescribed
from quiver.wire.answer_memory import AnswerMemory, make_answer_memory

logger = logging.getLogger(__name__)

GUARD_PAUSE_S = 5.0
"""Time until a loop of the console begins again after a defect ended it."""


class GatewayServices(msgspec.Struct, frozen=True, kw_only=True):
    """The services that a gateway uses of its own node."""

    node: NodeId
    wire_address: Callable[[], str]
    """The node's wire address, as other nodes know it."""
    handler: Handler
    """Handles requests to this node."""
    transport: Transport
    """Sends requests to other nodes."""
    view: Callable[[], View]
    """This node's copy of the metadata."""
    on_client_seen: OnClientSeen
    """Called with each client that sends a request, to record that it is alive."""
    access: HttpAccess
    """Decides who may do what."""
    decoded: DecodedBatchBudget
    """The memory for decoded batches, shared with the node's replicas."""
    quotas: Quotas | None = None
    """What principals and topics may use, shared with the wire; None: everything."""
    turns: Turns | None = None
    """Orders requests when there are too many, shared with the wire; None: those of the gateway alone."""
    answers: AnswerMemory = msgspec.field(default_factory=partial(make_answer_memory, WireSettings()))
    """The memory of answers, shared with the wire."""
    tracing: Tracing | None = None
    """Makes spans of produce calls; None: there are none."""


class Gateway:
    """The HTTP gateway of one node."""

    def __init__(
        self,
        services: GatewayServices,
        *,
        listen: str,
        settings: GatewaySettings,
        clock: Clock,
        rng: Rng,
        advertise: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare to listen on `listen`; `advertise` is the host name that the node publishes, if it has one."""
        self._services = services
        self._settings = settings
        self._metrics = Metrics()
        self._clock = clock
        transport = LoopbackTransport(
            services.transport,
            node=services.node,
            address=services.wire_address,
            handler=services.handler,
            clock=clock,
        )
        options = RouterOptions(timeout_ms=settings.request_timeout_ms)
        cache = MetadataCache(clock, (services.wire_address(),))
        self._router = Router(transport, cache, clock=clock, rng=rng, options=options)
        self.audit_topic = AuditTopic(self._router, clock)
        self._topic_producers = TopicProducers(self._router, services.node, timeout_ms=settings.request_timeout_ms)
        self._origins = NodeOrigins(services.view, is_tls=tls is not None)
        self._recorder = ConsoleRecorder(view=services.view, describe=self._describe, clock=clock)
        self._feed = ConsoleFeed(self._router, services.view, self._recorder, clock=clock, node=services.node)
        self._tasks = TaskScope()
        handlers = self._handlers(rng)
        host = parse_address(listen)[0]
        hosts = HostNames(listen_host=host, names=(advertise, socket.gethostname(), *settings.host_names))
        make_application: Callable[..., RoutedApplication] = RoutedApplication
        if services.tracing is not None:
            make_application = partial(TracedApplication, tracing=services.tracing)
        self.application = make_application(
            handlers,
            hosts=hosts,
            access=services.access,
            catch_up=self._catch_up,
            clock=clock,
            quotas=services.quotas,
            routes=self._routes(),
            browser_page=TO_CONSOLE,
            origins=self._origins,
        )
        self._server = self._make_server(self.application, listen, tls)
        self._admin_server: HttpServer | None = None
        if settings.admin_listen:
            routes = [route for route in ROUTES if route.is_administrative or route.is_probe]
            names = (advertise, socket.gethostname(), *settings.host_names)
            admin_hosts = HostNames(listen_host=parse_address(settings.admin_listen)[0], names=names)
            administrative = RoutedApplication(
                handlers,
                hosts=admin_hosts,
                access=services.access,
                catch_up=self._catch_up,
                clock=clock,
                routes=routes,
            )
            self._admin_server = self._make_server(administrative, settings.admin_listen, tls)

    async def _catch_up(self) -> None:
        await catch_up(self._router, deadline=self._router.deadline(self._settings.request_timeout_ms))

    async def _describe(self) -> NodeDescribed:
        request, deadline = DescribeNode(with_metrics=True), self._router.deadline(self._settings.request_timeout_ms)
        return await self._router.ask_at(self._services.wire_address(), request, deadline=deadline)

    def _routes(self) -> list[HttpRoute]:
        """Return the routes of the main listener."""
        return [route for route in ROUTES if not (route.is_administrative and self._settings.admin_listen)]

    def _make_server(self, application: RoutedApplication, listen: str, tls: ssl.SSLContext | None) -> HttpServer:
        host, port = parse_address(listen)

        def count(request: HttpRequest, response: HttpResponse | None, seconds: float) -> None:
            route = request.path if request.path in application.paths else application.route_of(request)
            status = 0 if response is None else response.status
            self._metrics.count_request(route, method=request.method, status=status, seconds=seconds)
            if response is None:
                return
            if response.error_code:
                self._metrics.errors.add(response.error_code)
            if application.has_quotas:
                application.charge(request, response)

        return HttpServer(
            application,
            host=host,
            port=port,
            settings=self._settings,
            clock=self._clock,
            tls=tls,
            on_answered=count,
            turns=self._services.turns,
            memory=self._services.answers,
            principal_of=application.principal_of,
        )

    async def __aenter__(self) -> Self:
        """Bind the addresses."""
        await self._server.__aenter__()
        if self._admin_server is not None:
            try:
                await self._admin_server.__aenter__()
            except BaseException as error:
                await self._server.__aexit__(type(error), error, None)
                raise
        await self._tasks.__aenter__()
        return self

    async def serve(self) -> None:
        """Start accepting connections, once the node can handle requests."""
        await self._server.serve()
        if self._admin_server is not None:
            await self._admin_server.serve()
        self._tasks.start(_run_guarded("console_recorder", self._recorder.run))
        self._tasks.start(_run_guarded("console_feed", self._feed.run))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close as `close` does, unless it was called; after an error, close immediately."""
        self._feed.close()
        try:
            await self._tasks.__aexit__(kind, error, trace)
            await self._server.__aexit__(kind, error, trace)
            if self._admin_server is not None:
                await self._admin_server.__aexit__(kind, error, trace)
        finally:
            await self._consumers.close()
            await self._queues.close()
            await self._topic_producers.close()

    async def close(self) -> None:
        """Accept no more, answer the accepted requests, deliver the records of the gateway's producers; idempotent.

        A stopping node calls it first, while its other parts still run.
        """
        self._feed.close()
        self._tasks.cancel()
        await self._server.close(grace_ms=self._settings.shutdown_grace_ms)
        if self._admin_server is not None:
            await self._admin_server.close(grace_ms=0)
        await self._consumers.close()
        await self._queues.close()
        await self._topic_producers.close()

    @property
    def address(self) -> str:
        """Return the address that it listens on, as host:port."""
        return format_address(self._server.address)

    @property
    def admin_address(self) -> str:
        """Return the address of the administrative listener, as host:port; empty if there is none."""
        return "" if self._admin_server is None else format_address(self._admin_server.address)

    def history(self) -> tuple[HistorySample, ...]:
        """Return what this node did in the last minutes, oldest first."""
        return self._recorder.history()

    def status(self) -> HttpStatus:
        """Return a snapshot."""
        return self._server.status()

    def _handlers(self, rng: Rng) -> dict[str, RouteHandler]:
        settings, services, router = self._settings, self._services, self._router
        timeout_ms = settings.request_timeout_ms
        registrations = Registrations(services.view, router)
        topics = TopicHandlers(router, rng, timeout_ms=timeout_ms)
        cluster = ClusterHandlers(
            router,
            self._clock,
            self._metrics,
            own_address=services.wire_address,
            http_status=self.status,
            timeout_ms=timeout_ms,
        )
        producers = ProduceHandlers(
            router,
            registrations,
            self._topic_producers,
            self._metrics,
            clock=self._clock,
            on_client_seen=services.on_client_seen,
            timeout_ms=timeout_ms,
        )
        consumers = self._consumers = ConsumeHandlers(
            router,
            registrations,
            self._metrics,
            clock=self._clock,
            rng=rng,
            on_client_seen=services.on_client_seen,
            settings=settings,
            decoded=services.decoded,
            answers=services.answers,
        )
        handlers: dict[str, RouteHandler] = {
            "list_topics": topics.list_topics,
            "create_topic": topics.create_topic,
            "describe_topic": topics.describe_topic,
            "delete_topic": topics.delete_topic,
            "list_partitions": topics.list_partitions,
            "register_producer": producers.register,
            "produce": producers.produce,
            "produce_batch": producers.produce_batch,
            "register_consumer": consumers.register,
            "consume": consumers.consume,
            "consume_batch": consumers.consume_batch,
            "get_size": consumers.get_size,
            "welcome": cluster.welcome,
            "status": cluster.status,
            "health": cluster.health,
            "list_brokers": cluster.list_brokers,
            "drain_broker": cluster.drain_broker,
            "remove_broker": cluster.remove_broker,
            "upgrade_cluster": cluster.upgrade,
            "add_manager": cluster.add_manager,
            "remove_manager": cluster.remove_manager,
            "list_managers": cluster.list_managers,
            "get_metadata": cluster.get_metadata,
            "explain": cluster.explain,
            "metrics": cluster.metrics,
            "openapi": cluster.openapi,
            "docs": cluster.docs,
            "healthz": cluster.healthz,
            "livez": cluster.healthz,
            "readyz": cluster.readyz,
        }
        return SharedAnswers(self._clock).share(handlers | self._console_handlers() | self._other_handlers())

    def _other_handlers(self) -> dict[str, RouteHandler]:
        self._queues = QueueHandlers(
            self._router, self._metrics, settings=self._settings, answers=self._services.answers
        )
        access = AccessHandlers(self._router, timeout_ms=self._settings.request_timeout_ms)
        groups = GroupHandlers(self._router, timeout_ms=self._settings.request_timeout_ms)
        return self._queues.handlers() | groups.handlers() | access.handlers()

    def _console_handlers(self) -> dict[str, RouteHandler]:
        console = ConsoleHandlers(
            self._router,
            self._services.view,
            node=self._services.node,
            clock=self._clock,
            assets=ConsoleAssets(self._origins.sources),
            feed=self._feed,
            recorder=self._recorder,
            decoded=self._services.decoded,
            answers=self._services.answers,
            timeout_ms=self._settings.request_timeout_ms,
        )
        return console.handlers()


async def _run_guarded(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run a loop that only consoles need; whatever ends it, the node goes on, and it begins again after a pause."""
    while True:
        try:
            await run()
        except Exception:  # a defect of the console must not end a node that serves clients
            logger.exception("console loop failed, starts again", extra=facts(loop=name))
        await asyncio.sleep(GUARD_PAUSE_S)
