"""One connection to each cluster for each process: Spark reuses its Python workers, and so their connections.

A worker is forked before it ever runs our code; should a connection have been made before a fork all the same, the
child makes its own. Connections are never closed but by the end of the process: they have no state that matters.
"""

from __future__ import annotations

import os
from functools import cache

import msgspec

import quiver
from quiver.client.sync import Cluster


class Servers(msgspec.Struct, frozen=True, kw_only=True):
    """How the cluster is reached: what a cached connection is found by."""

    addresses: tuple[str, ...]
    timeout_s: float = 60.0
    is_tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""


def connection(servers: Servers) -> Cluster:
    """Return this process's connection to a cluster."""
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
    )
