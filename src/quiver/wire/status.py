"""What a network tells about itself: immutable snapshots that command line, dashboard and metrics render."""

from __future__ import annotations

from dataclasses import dataclass

from quiver.model import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionStatus:
    """One peer, or a node that is none but has connected; counts are since this process started."""

    node: NodeId
    address: str
    """Where it is dialled; empty for a node that is not a peer."""
    is_connected: bool
    """Messages to it leave."""
    is_heard: bool
    """It has a connection to this node."""
    incarnation: int | None
    messages_out: int
    bytes_out: int
    messages_in: int
    bytes_in: int
    messages_dropped: int
    backlog_bytes: int
    reconnects: int
    last_error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkStatus:
    """One node's way to the others."""

    node: NodeId
    address: str
    peers: tuple[ConnectionStatus, ...]
    handshakes: int
    """Incoming connections that have not said who they are yet."""
    refused: int
    """Incoming connections that were refused."""
    messages_to_unknown: int
    """Messages dropped because their receiver is not a peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """The connections on which this program sends requests."""

    connections: int
    dialling: int
    requests: int
    """Sent, or about to be, and not answered yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """What a node does for those who send it requests; counts are since this process started."""

    client_connections: int
    node_connections: int
    requests: int
    """Under way now."""
    requests_bytes: int
    """Of clients' requests under way and of responses to them that are not sent yet."""
    requests_begun: int
    requests_refused: int
    """Answered with an error before a handler saw them."""
    handlers_failed: int
    """Ended by an exception that is none of `quiver.errors`: bugs."""
