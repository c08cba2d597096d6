"""What all connections of a node's network share: who the node is, its bounds, and whom to report to.

`connections` holds every open connection, so that they can all be ended; the connections themselves keep it true.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quiver.clock import Clock, Rng
from quiver.config import TlsSettings, WireSettings
from quiver.model import NodeId
from quiver.wire.handshake import Hello, IdentityOf
from quiver.wire.serving import RequestServer

if TYPE_CHECKING:
    from quiver.wire.connection import Connection


@dataclass(slots=True)
class Heard:
    """What is known of another node from what it sent, across its connections."""

    incarnation: int
    messages_in: int = 0
    bytes_in: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Passed to links, listener and connections instead of eight arguments each."""

    hello: Hello
    settings: WireSettings
    clock: Clock
    rng: Rng
    connections: set[Connection]
    identity_of: IdentityOf
    tls: TlsSettings
    client_context: ssl.SSLContext | None
    """How peers are dialled; None: without TLS."""
    server: RequestServer | None
    """Who answers requests; None on a node that takes none."""
    on_greeted: Callable[[Hello], Heard]
    """A handshake is done, in either direction; returns where to count."""
    on_message: Callable[[NodeId, memoryview], None]
    on_lost: Callable[[NodeId], None]
    """A connection whose handshake was done has ended, in either direction."""
