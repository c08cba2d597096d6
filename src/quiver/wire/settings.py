"""How nodes talk to each other: the bounds and waits of `quiver.wire`, each with its default and its reason."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from quiver.config import KIB, MIB
from quiver.errors import ConfigError
from quiver.wire.frames import FRAME_BYTES_LIMIT


class WireSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Connections between nodes."""

    frame_bytes_max: Annotated[
        int,
        Meta(
            ge=64 * KIB,
            le=FRAME_BYTES_LIMIT,
            description="Greatest frame that is sent or received; must hold the largest batch (64 MiB) and what "
            "goes with it.",
        ),
    ] = 72 * MIB
    peer_buffer_bytes_max: Annotated[
        int,
        Meta(
            ge=64 * KIB,
            le=4096 * MIB,
            description="Bytes waiting to be sent to one node at which further messages to it are dropped; at "
            "least frame_bytes_max.",
        ),
    ] = 144 * MIB
    connections_max: Annotated[
        int, Meta(ge=1, le=100_000, description="Incoming connections with a finished handshake, at most.")
    ] = 1024
    handshakes_max: Annotated[
        int, Meta(ge=1, le=100_000, description="Incoming connections that have not said who they are yet, at most.")
    ] = 64
    handshake_timeout_ms: Annotated[
        int, Meta(ge=10, le=60_000, description="Time for both sides of a new connection to say who they are.")
    ] = 3_000
    connect_timeout_ms: Annotated[
        int, Meta(ge=10, le=60_000, description="Time for a connection to a node to be made.")
    ] = 2_000
    reconnect_delay_ms_min: Annotated[
        int, Meta(ge=1, le=60_000, description="Wait before the first new attempt to reach a node; then doubled.")
    ] = 50
    reconnect_delay_ms_max: Annotated[
        int, Meta(ge=1, le=60_000, description="Longest wait between two attempts to reach a node.")
    ] = 1_000
    unanswered_timeout_ms: Annotated[
        int,
        Meta(
            ge=100,
            le=600_000,
            description="Time without any sign of life from the other machine's TCP after which a connection is given "
            "up (Linux; elsewhere the system's own).",
        ),
    ] = 5_000

    def __post_init__(self) -> None:
        if self.peer_buffer_bytes_max < self.frame_bytes_max:
            raise ConfigError("wire.peer_buffer_bytes_max must be at least wire.frame_bytes_max")
        if self.reconnect_delay_ms_max < self.reconnect_delay_ms_min:
            raise ConfigError("wire.reconnect_delay_ms_max must be at least wire.reconnect_delay_ms_min")
