"""Limits that follow from how many files a process may open: half of them for logs, the other half for connections."""

from __future__ import annotations

import msgspec

from quiver.config.settings import Settings

RESERVED = 128
"""Descriptors that are no connections and no logs: the reserve, the database, the event loop, logs of the program."""
PER_REPLICA = 2
"""Descriptors of a replica in use: its active segment, and another file that is read or made. An idle one has none."""
UNLIMITED = 1 << 20
"""What counts as the limit where the system has none."""


def fit_to_descriptors(settings: Settings, limit: int) -> Settings:
    """Return settings whose limits of connections and replicas fit the limit of open files; 0 or less: no limit."""
    limit = limit if limit > 0 else UNLIMITED
    for_logs = limit // 2
    for_connections = max(8, limit - for_logs - RESERVED)
    wire, gateway, manager = settings.wire, settings.gateway, settings.manager
    return msgspec.structs.replace(
        settings,
        wire=msgspec.structs.replace(
            wire,
            client_connections_max=min(wire.client_connections_max, max(4, for_connections // 3)),
            connections_max=min(wire.connections_max, max(4, for_connections // 8)),
            handshakes_max=min(wire.handshakes_max, max(4, for_connections // 8)),
        ),
        gateway=msgspec.structs.replace(
            gateway, connections_max=min(gateway.connections_max, max(4, for_connections // 3))
        ),
        manager=msgspec.structs.replace(
            manager,
            replicas_per_broker_max=manager.replicas_per_broker_max or max(8, (for_logs - RESERVED) // PER_REPLICA),
        ),
    )
