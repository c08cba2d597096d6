"""One cached cluster connection per process and address; Spark reuses Python workers, so tasks share connections.

The cache key includes the process id: a forked child never uses its parent's sockets. Connections are closed only by
process exit; they hold no state that must be flushed.
"""

from __future__ import annotations

import os
from functools import cache

import msgspec

import quiver
from quiver.client.sync import Cluster
from quiver.contexts import find_token, resolve
from quiver.security.secrets import Secret


class Servers(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses, timeout, TLS files and token of a cluster; also the key of the connection cache.

    It is pickled to executors: `token` travels with it, `token_file` is read on each machine.
    """

    addresses: tuple[str, ...]
    timeout_s: float = 60.0
    is_tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    token_file: str = ""
    token: Secret | None = None


def find_servers(
    servers: str,
    *,
    context: str = "",
    tls: bool = False,
    ca_file: str = "",
    certificate_file: str = "",
    key_file: str = "",
    token_file: str = "",
    token: str = "",
    timeout_s: float = 60.0,
) -> Servers:
    """Return the cluster that options, the driver's environment or its contexts name; see `quiver.contexts`."""
    target = resolve(
        servers or None,
        context=context,
        tls=tls,
        ca_file=ca_file,
        certificate_file=certificate_file,
        key_file=key_file,
        token_file=token_file,
    )
    token_source = find_token(target, token)
    return Servers(
        addresses=tuple(dict.fromkeys(target.addresses)),
        timeout_s=timeout_s,
        is_tls=target.is_tls,
        ca_file=target.ca_file,
        certificate_file=target.certificate_file,
        key_file=target.key_file,
        token_file="" if token_source is None else token_source.file,
        token=None if token_source is None else token_source.token,
    )


def connection(servers: Servers) -> Cluster:
    """Return this process's connection to a cluster; connect on first use."""
    return _connect(servers, os.getpid())


@cache
def _connect(servers: Servers, _process: int) -> Cluster:
    return quiver.connect(
        *servers.addresses,
        timeout=servers.timeout_s,
        client_name="quiver-spark",
        tls=servers.is_tls,
        ca_file=servers.ca_file,
        certificate_file=servers.certificate_file,
        key_file=servers.key_file,
        token_file=servers.token_file,
        token=servers.token or "",
    )
