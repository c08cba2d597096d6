"""Connects to a cluster: `connect` for threads, `connect_async` for asyncio.

The SDK gets its real clock, random numbers and sockets here; tests construct `AsyncCluster` with simulated ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial

from quiver.client.arguments import checked
from quiver.client.cluster import AsyncCluster
from quiver.client.diagnosis import diagnose
from quiver.client.discovery import http_get
from quiver.client.options import ClusterOptions, to_ms
from quiver.client.sync import Cluster
from quiver.clock import SystemClock
from quiver.contexts import ClusterTarget, find_credentials, resolve
from quiver.errors import RequestError
from quiver.security.secrets import CredentialSource, Secret
from quiver.tracing import Tracing, open_tracing
from quiver.wire import RequestPool, TlsSettings


@checked
def connect_async(
    *addresses: str | Iterable[str],
    context: str = "",
    timeout: float = 30.0,
    client_name: str = "quiver-python",
    tls: bool = False,
    ca_file: str = "",
    certificate_file: str = "",
    key_file: str = "",
    token: str | Secret = "",
    token_file: str = "",
    user: str = "",
    password: str | Secret = "",
    password_file: str = "",
    tracing: bool = False,
) -> AsyncCluster:
    """Return a cluster for use in ``async with``, or after `await cluster.open()`.

    Args:
        addresses: Some nodes of the cluster, one by one, in a list, or separated by commas: `host:port` of the wire
            protocol (default 9002) or HTTP (default 8002), `http://host:port`, `https://host:port`. One is enough; more
            help while nodes are down. Default: `QUIVER_URL`, else the context in use, else this machine.
        context: Name of a cluster that `quiver context add` stored; default: `QUIVER_CONTEXT`, else the one in use.
        timeout: Total seconds of a call with all its attempts.
        client_name: Name of this program that nodes see.
        tls: Whether to use TLS; `https://` and any of the files below turn it on. It is never turned off silently.
        ca_file: PEM file of the authority that signed the nodes' certificates; default: the system's.
        certificate_file: PEM file of this client's certificate, if the cluster requires one.
        key_file: PEM file of the certificate's key, if it is not in `certificate_file`.
        token: Token by which the cluster recognizes this client. Better a file: a text ends up in programs and shells.
        token_file: File that holds the token, readable by its owner alone; it is read again for each new connection, so
            that a rotated token is used. Default: `QUIVER_TOKEN_FILE`, else that of the context. A token is sent only
            with TLS, or to this machine.
        user: User that this client is, instead of a token; it proves the password by SCRAM-SHA-256, over the wire
            protocol only: give `host:9002`, not `https://`. Default: `QUIVER_USER`, else that of the context.
        password: Password of the user. It is never sent. Better a file.
        password_file: File that holds the password in one line, readable by its owner alone; read again for each new
            connection. Default: `QUIVER_PASSWORD_FILE`, else that of the context.
        tracing: Whether to make OpenTelemetry spans, with this process's tracer provider; needs `quivermq[otel]`.

    Raises:
        RequestError: an address is malformed, contradicts the TLS arguments, or is an HTTP address with a password
            (`bad_address`); or the user, password and token do not go together (`bad_credentials`).
        NotAllowedError: a token or password would cross the network plainly (`plain_text_token`, `…_password`).
        NotFoundError: there is no context of that name (`unknown_context`).
        ConfigError: a TLS file, the file of the token or password or the file of contexts cannot be used.

    Example:
        async with quiver.connect_async("127.0.0.1:8002") as cluster:
            await cluster.create_topic("logs", exist_ok=True)
            producer = await cluster.producer("logs", name="web-1")
            print(await producer.send("hello"))
    """
    options = ClusterOptions(timeout_ms=to_ms(timeout, "timeout"), client_name=client_name)
    if token and (user or password_file):
        raise RequestError("not done: a token and a user are both given: give one of them", code="bad_credentials")
    given = [part for one in addresses for part in ((one,) if isinstance(one, str) else one)]
    target = resolve(
        given if addresses else None,
        context=context,
        tls=tls,
        ca_file=ca_file,
        certificate_file=certificate_file,
        key_file=key_file,
        token_file=token_file,
        user=user,
        password_file=password_file,
    )
    credentials = find_credentials(target, token=token, password=password)
    return _make_cluster(target, credentials, options, open_tracing() if tracing else None)


def _make_cluster(
    target: ClusterTarget, credentials: CredentialSource | None, options: ClusterOptions, tracing: Tracing | None
) -> AsyncCluster:
    encryption = TlsSettings(
        is_enabled=target.is_tls,
        ca_file=target.ca_file,
        certificate_file=target.certificate_file,
        key_file=target.key_file,
    )
    make_pool = partial(RequestPool, name=options.client_name, tls=encryption, credentials=credentials)
    pool = make_pool()
    return AsyncCluster(
        target.addresses,
        transport=pool,
        owned=pool,
        clock=SystemClock(),
        rng=random.Random(),  # noqa: S311 - spreads retries, guards no secret
        options=options,
        http_get=partial(http_get, tls=pool.tls_context, credentials=credentials),
        diagnose=partial(diagnose, tls=pool.tls_context),
        make_transport=make_pool,
        tracing=tracing,
    )


@checked
def connect(
    *addresses: str | Iterable[str],
    context: str = "",
    timeout: float = 30.0,
    client_name: str = "quiver-python",
    tls: bool = False,
    ca_file: str = "",
    certificate_file: str = "",
    key_file: str = "",
    token: str | Secret = "",
    token_file: str = "",
    user: str = "",
    password: str | Secret = "",
    password_file: str = "",
    tracing: bool = False,
) -> Cluster:
    """Connect to a cluster and return it; use it in ``with``, or `close` it.

    The arguments are those of `connect_async`. A background thread runs the connections; all methods may be called from
    any thread. The connection does not survive a fork: connect again in the child.

    Raises:
        NotAllowedError: the cluster does not accept the token or password, or wants one (`unauthenticated`).
        UnavailableError: no node answered; the message says what is wrong with each address (`not_reached`).
        RequestError, NotAllowedError, NotFoundError, ConfigError: as `connect_async` raises them.

    Example:
        with quiver.connect("127.0.0.1:8002") as cluster:
            cluster.create_topic("logs", exist_ok=True)
            producer = cluster.producer("logs", name="web-1")
            print(producer.send("hello").result())
    """
    return Cluster(
        connect_async(
            *addresses,
            context=context,
            timeout=timeout,
            client_name=client_name,
            tls=tls,
            ca_file=ca_file,
            certificate_file=certificate_file,
            key_file=key_file,
            token=token,
            token_file=token_file,
            user=user,
            password=password,
            password_file=password_file,
            tracing=tracing,
        )
    )
