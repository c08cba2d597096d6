"""A node that answers requests on a real socket, as the tests of requests use it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager

from quiver.clock import SystemClock
from quiver.model import NodeId
from quiver.wire import Handler, PeerNetwork, RequestPool, RequestServer, TlsSettings, WireSettings, format_address

CLUSTER = "test"
IDENTITY = "disk-1"


class Host:
    """A network, its server, and where both are reached."""

    def __init__(self, network: PeerNetwork, server: RequestServer) -> None:
        self.network = network
        self.server = server

    @property
    def address(self) -> str:
        return format_address(self.network.address)


@asynccontextmanager
async def serve(
    handler: Handler,
    *,
    settings: WireSettings | None = None,
    identity_of: Callable[[NodeId], str | None] = lambda node: None,
    tls: TlsSettings | None = None,
) -> AsyncIterator[Host]:
    """Run node 1 of the cluster with this handler."""
    settings = settings or WireSettings()
    async with RequestServer(settings=settings, clock=SystemClock()) as server:
        network = PeerNetwork(
            node=NodeId(1),
            cluster_id=CLUSTER,
            incarnation=1,
            identity=IDENTITY,
            listen=("127.0.0.1", 0),
            peers={},
            settings=settings,
            clock=SystemClock(),
            rng=random.Random(1),
            identity_of=identity_of,
            server=server,
            tls=tls,
        )
        async with network:
            network.start(lambda node, message: None, lambda node: None)
            server.start(handler)
            await network.wait_accepting()
            yield Host(network, server)


def client(settings: WireSettings | None = None, *, tls: TlsSettings | None = None) -> RequestPool:
    return RequestPool(name="test client", settings=settings, tls=tls)


def node(number: int, *, identity: str = "", tls: TlsSettings | None = None) -> RequestPool:
    return RequestPool(name="test node", cluster_id=CLUSTER, node=NodeId(number), identity=identity, tls=tls)


def run(test: Coroutine[object, object, None]) -> None:
    """Run a test, which must not hang."""

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test

    asyncio.run(bounded())


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event, being seen from outside
            await asyncio.sleep(0.002)


async def error_of(call: Awaitable[object]) -> Exception:
    """Return the error that a call ends with."""
    try:
        await call
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        return error
    raise AssertionError("the call succeeded")
