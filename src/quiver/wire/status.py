"""Immutable status snapshots of networks, pools and servers, for the CLI and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from quiver.model import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionStatus:
    """The connections with one peer, or with another node that has connected; counts are since process start."""

    node: NodeId
    address: str
    """The address that is dialled; empty for a node that is not a peer."""
    is_connected: bool
    """Whether the outgoing connection is up."""
    is_heard: bool
    """Whether it has a connection to this node."""
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
    """One node's network."""

    node: NodeId
    address: str
    peers: tuple[ConnectionStatus, ...]
    handshakes: int
    """Incoming connections whose handshake is not done."""
    refused: int
    """Incoming connections that were refused."""
    messages_to_unknown: int
    """Messages dropped because their target is not a peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """The connections on which this program sends requests."""

    connections: int
    dialling: int
    requests: int
    """Queued or sent, and not answered yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """A node's request server; counts are since process start."""

    client_connections: int
    node_connections: int
    requests: int
    """In flight now."""
    requests_bytes: int
    """Bytes of clients' requests in flight and of unsent responses to them."""
    requests_begun: int
    requests_refused: int
    """Refused before a handler saw them."""
    handlers_failed: int
    """Ended by an exception outside `quiver.errors`: bugs."""
