"""Memberships run on a thread of their own, and know the nodes that the client knows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quiver.client.membership_host import MembershipHost
from quiver.clock import SystemClock
from quiver.routing.metadata_cache import MetadataCache
from quiver.routing.router import Router, RouterOptions
from quiver.routing.transport import Transport
from quiver.testing.memory_cluster import MemoryCluster


def test_membership_finds_the_nodes_that_replaced_those_it_began_with() -> None:
    clock, rng = SystemClock(), random.Random(1)
    transport = MemoryCluster(clock=clock, rng=rng)

    @asynccontextmanager
    async def connections() -> AsyncIterator[Transport]:
        yield transport

    async def scenario() -> None:
        cache = MetadataCache(clock, ("old:9002",))
        host = MembershipHost(Router(transport, cache, clock=clock, rng=rng, options=RouterOptions()), connections)
        try:
            own = (await host.start()).cache
            own.prefer("old:9002")
            assert own.addresses() == ["old:9002"]
            cache.seeds = ("first:9002", "second:9002")
            assert own.addresses() == ["first:9002", "second:9002"]
            own.prefer("second:9002")
            assert own.addresses() == ["second:9002", "first:9002"]
        finally:
            await host.close()

    asyncio.run(scenario())
