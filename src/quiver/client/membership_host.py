"""Where group memberships run: on a thread and event loop of the SDK's own, with connections of their own.

An application may block its event loop, or its client's thread, for as long as a record takes; a member that is silent
for its session timeout loses its partitions. A `MembershipHost` therefore runs all memberships of one cluster object on
one further thread, which is started with the first of them. Without `make_transport`, as in simulations, memberships
run on the loop that uses them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias, TypeVar

from quiver.client.thread import LoopThread
from quiver.clock import Clock
from quiver.routing.metadata_cache import MetadataCache
from quiver.routing.router import Router
from quiver.routing.transport import Transport
from quiver.tasks import TaskSet

T = TypeVar("T")
MakeTransport: TypeAlias = Callable[[], AbstractAsyncContextManager[Transport]]


class MembershipHost:
    """Run the memberships of one cluster object."""

    def __init__(self, router: Router, make_transport: MakeTransport | None) -> None:
        self._client_router = router
        self._make_transport = make_transport
        self._own: _OwnThread | None = None
        self.process_name = "" if make_transport is None else f"{socket.gethostname()}/{os.getpid()}"[:300]
        """Shows people which process a member is; empty in simulations, where it must not depend on the machine."""

    async def start(self) -> Router:
        """Return the router of memberships, on the loop that runs them; starts the thread if there is none yet."""
        if self._make_transport is None:
            return self._client_router
        if self._own is None:
            self._own = _OwnThread(self._client_router, self._make_transport)
        await self.run(self._own.opened())
        return self._own.router

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine that runs on the loop of the memberships."""
        return await work if self._own is None else await asyncio.wrap_future(self._own.thread.submit(work))

    def begin(self, work: Coroutine[Any, Any, None], name: str, on_crash: Callable[[BaseException], object]) -> Stop:
        """Run a coroutine on the loop of the memberships until it ends or is stopped."""
        tasks = TaskSet(on_crash)

        async def begin() -> None:
            tasks.start(work, name)

        if self._own is None:
            tasks.start(work, name)
        else:
            self._own.thread.submit(begin())
        return lambda: self.run(tasks.close())

    async def close(self) -> None:
        """End the thread, if there is one; idempotent."""
        own, self._own = self._own, None
        if own is not None:
            await asyncio.wrap_future(own.thread.submit(own.close()))
            own.thread.close()


Stop: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class _MembershipCache(MetadataCache):
    """Knows the addresses that the client knows just now: a membership may outlive all nodes that it began with."""

    def __init__(self, client: MetadataCache, clock: Clock) -> None:
        super().__init__(clock)
        self._client = client

    def addresses(self) -> list[str]:
        known = self._client.addresses()  # on another thread; what it reads is replaced there, never changed
        return list(dict.fromkeys((self._preferred, *known))) if self._preferred in known else known


class _OwnThread:
    """The thread, and the connections that belong to a task of its loop."""

    def __init__(self, router: Router, make_transport: MakeTransport) -> None:
        self.thread = LoopThread("quiver-groups")
        self.router = router  # until its own is open
        self._client_router, self._make_transport = router, make_transport
        self._is_open, self._ending = asyncio.Event(), asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    async def opened(self) -> None:
        """Open the connections once, in a task that also closes them."""
        if self._owner is None:
            self._owner = asyncio.get_running_loop().create_task(self._own_transport(), name="own-transport")
        opening = asyncio.ensure_future(self._is_open.wait())
        await asyncio.wait((opening, self._owner), return_when=asyncio.FIRST_COMPLETED)
        opening.cancel()
        if self._owner.done():
            self._owner.result()

    async def _own_transport(self) -> None:
        client = self._client_router
        async with self._make_transport() as transport:
            cache = _MembershipCache(client.cache, client.clock)
            self.router = Router(transport, cache, clock=client.clock, rng=client.rng, options=client.options)
            self._is_open.set()
            await self._ending.wait()

    async def close(self) -> None:
        self._ending.set()
        if self._owner is not None:
            await self._owner
