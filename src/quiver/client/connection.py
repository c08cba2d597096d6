"""The ways in: `connect` for threads, `connect_async` for asyncio. What is real (time, chance, sockets) enters here."""

from __future__ import annotations

import random

from quiver.client.cluster import AsyncCluster
from quiver.client.options import ClusterOptions, to_ms
from quiver.client.sync import Cluster
from quiver.clock import SystemClock
from quiver.wire import RequestPool


def connect_async(*addresses: str, timeout: float = 30.0, client_name: str = "quiver-python") -> AsyncCluster:
    """Return a cluster to be used as ``async with``, or opened with `await cluster.open()`.

    Args:
        addresses: Some nodes of the cluster: `host:port` of the wire (default 9002) or of HTTP (default 8002),
            `http://host:port`, or several of them separated by commas. One is enough; more help while nodes are down.
        timeout: Total seconds of a call, all its tries together.
        client_name: What nodes see this program as.

    Example:
        async with quiver.connect_async("127.0.0.1:8002") as cluster:
            await cluster.create_topic("logs", exist_ok=True)
            producer = await cluster.producer("logs", name="web-1")
            print(await producer.send("hello"))
    """
    options = ClusterOptions(timeout_ms=to_ms(timeout, "timeout"), client_name=client_name)
    pool = RequestPool(name=client_name)
    return AsyncCluster(
        addresses,
        transport=pool,
        owned=pool,
        clock=SystemClock(),
        rng=random.Random(),  # noqa: S311 - spreads retries, guards no secret
        options=options,
    )


def connect(*addresses: str, timeout: float = 30.0, client_name: str = "quiver-python") -> Cluster:
    """Connect to a cluster and return it; use it as ``with``, or `close` it.

    Arguments as for `connect_async`. A thread of its own runs the connections; every method may be called from any
    thread. It does not survive a fork: connect again in the child.

    Raises:
        UnavailableError: no node answered.

    Example:
        with quiver.connect("127.0.0.1:8002") as cluster:
            cluster.create_topic("logs", exist_ok=True)
            producer = cluster.producer("logs", name="web-1")
            print(producer.send("hello").result())
    """
    return Cluster(connect_async(*addresses, timeout=timeout, client_name=client_name))
