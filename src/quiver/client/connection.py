"""Connects to a cluster: `connect` for threads, `connect_async` for asyncio.

The SDK gets its real clock, random numbers and sockets here; tests construct `AsyncCluster` with simulated ones.
"""

from __future__ import annotations

import random
from functools import partial

from quiver.client.cluster import AsyncCluster
from quiver.client.discovery import http_get
from quiver.client.options import ClusterOptions, to_ms
from quiver.client.sync import Cluster
from quiver.clock import SystemClock
from quiver.wire import RequestPool, TlsSettings
from quiver.wire.tls import make_client_context


def connect_async(
    *addresses: str,
    timeout: float = 30.0,
    client_name: str = "quiver-python",
    tls: bool = False,
    ca_file: str = "",
    certificate_file: str = "",
    key_file: str = "",
) -> AsyncCluster:
    """Return a cluster for use in ``async with``, or after `await cluster.open()`.

    Args:
        addresses: Some nodes of the cluster: `host:port` of the wire protocol (default 9002) or HTTP (default 8002),
            `http://host:port`, or several of them separated by commas. One is enough; more help while nodes are down.
        timeout: Total seconds of a call with all its attempts.
        client_name: Name of this program that nodes see.
        tls: Whether to use TLS; any of the files below turns it on.
        ca_file: PEM file of the authority that signed the nodes' certificates; default: the system's.
        certificate_file: PEM file of this client's certificate, if the cluster requires one.
        key_file: PEM file of the certificate's key, if it is not in `certificate_file`.

    Raises:
        RequestError: an address is malformed (`bad_address`).
        ConfigError: a TLS file cannot be used.

    Example:
        async with quiver.connect_async("127.0.0.1:8002") as cluster:
            await cluster.create_topic("logs", exist_ok=True)
            producer = await cluster.producer("logs", name="web-1")
            print(await producer.send("hello"))
    """
    options = ClusterOptions(timeout_ms=to_ms(timeout, "timeout"), client_name=client_name)
    encryption = TlsSettings(
        is_enabled=tls or bool(ca_file or certificate_file or key_file),
        ca_file=ca_file,
        certificate_file=certificate_file,
        key_file=key_file,
    )
    pool = RequestPool(name=client_name, tls=encryption)
    return AsyncCluster(
        addresses,
        transport=pool,
        owned=pool,
        clock=SystemClock(),
        rng=random.Random(),  # noqa: S311 - spreads retries, guards no secret
        options=options,
        http_get=partial(http_get, tls=make_client_context(encryption)),
    )


def connect(
    *addresses: str,
    timeout: float = 30.0,
    client_name: str = "quiver-python",
    tls: bool = False,
    ca_file: str = "",
    certificate_file: str = "",
    key_file: str = "",
) -> Cluster:
    """Connect to a cluster and return it; use it in ``with``, or `close` it.

    The arguments are those of `connect_async`. A background thread runs the connections; all methods may be called from
    any thread. The connection does not survive a fork: connect again in the child.

    Raises:
        UnavailableError: no node answered.
        RequestError: an address is malformed (`bad_address`).
        ConfigError: a TLS file cannot be used.

    Example:
        with quiver.connect("127.0.0.1:8002") as cluster:
            cluster.create_topic("logs", exist_ok=True)
            producer = cluster.producer("logs", name="web-1")
            print(producer.send("hello").result())
    """
    return Cluster(
        connect_async(
            *addresses,
            timeout=timeout,
            client_name=client_name,
            tls=tls,
            ca_file=ca_file,
            certificate_file=certificate_file,
            key_file=key_file,
        )
    )
