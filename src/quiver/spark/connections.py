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
from quiver.contexts import find_credentials, resolve
from quiver.security.secrets import PasswordSource, Secret, TokenSource


class Servers(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses, timeout, TLS files and credentials of a cluster; also the key of the connection cache.

    It is pickled to executors: `token` and `password` travel with it, their files are read on each machine.
    """

    addresses: tuple[str, ...]
    timeout_s: float = 60.0
    is_tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    token_file: str = ""
    token: Secret | None = None
    user: str = ""
    password_file: str = ""
    password: Secret | None = None


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
    user: str = "",
    password_file: str = "",
    password: str = "",
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
        user=user,
        password_file=password_file,
    )
    found = find_credentials(target, token=token, password=password)
    by_token = found if isinstance(found, TokenSource) else TokenSource()
    by_password = found if isinstance(found, PasswordSource) else PasswordSource("")
    return Servers(
        addresses=tuple(dict.fromkeys(target.addresses)),
        timeout_s=timeout_s,
        is_tls=target.is_tls,
        ca_file=target.ca_file,
        certificate_file=target.certificate_file,
        key_file=target.key_file,
        token_file=by_token.file,
        token=by_token.token,
        user=by_password.user,
        password_file=by_password.file,
        password=by_password.password,
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
        user=servers.user,
        password_file=servers.password_file,
        password=servers.password or "",
    )
