"""The metrics of a node's connections and requests, from the status of its wire network, server and pool. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quiver.metrics import MetricFamily, counter, gauge, labelled
from quiver.wire.peers import ConnectionStatus, NetworkStatus
from quiver.wire.pool import PoolStatus
from quiver.wire.serving import ServerStatus


def describe_server(server: ServerStatus) -> Iterable[MetricFamily]:
    """Return the metrics of the request server."""
    return (
        labelled(
            "quiver_wire_connections",
            "gauge",
            "Incoming wire connections by kind of peer.",
            [
                ((("kind", "client"),), server.client_connections),
                ((("kind", "node"),), server.node_connections),
            ],
        ),
        gauge("quiver_wire_requests", "Wire requests in flight.", server.requests),
        gauge(
            "quiver_wire_requests_bytes",
            "Bytes of clients' requests in flight and of unsent responses.",
            server.requests_bytes,
        ),
        gauge("quiver_requests_queued", "Requests of clients that wait for their turn, HTTP and wire.", server.queued),
        gauge("quiver_connections_throttled", "Connections that are not read after a refusal.", server.throttled),
        gauge("quiver_wire_answers_waiting", "Wire requests that wait for memory for their answer.", server.waiting),
        counter("quiver_wire_requests_total", "Wire requests that a handler began.", server.requests_begun),
        counter(
            "quiver_wire_requests_refused_total",
            "Wire requests refused before a handler saw them.",
            server.requests_refused,
        ),
        counter(
            "quiver_wire_handler_failures_total", "Requests that ended with a defect of Quiver.", server.handlers_failed
        ),
        labelled(
            "quiver_wire_errors_total",
            "counter",
            "Wire requests answered with an error, by its code.",
            [((("code", code),), count) for code, count in sorted(server.errors.items())],
        ),
    )


def describe_pool(pool: PoolStatus) -> Iterable[MetricFamily]:
    """Return the metrics of the connections on which this node sends requests."""
    return (
        gauge("quiver_pool_connections", "Connections on which this node sends requests.", pool.connections),
        gauge("quiver_pool_dialling", "Connections that this node is dialling.", pool.dialling),
        gauge("quiver_pool_requests", "Requests of this node without an answer.", pool.requests),
    )


def describe_network(network: NetworkStatus) -> Iterable[MetricFamily]:
    """Return the metrics of the links to other nodes, labelled by peer."""
    return (
        gauge("quiver_wire_handshakes", "Incoming connections whose handshake is not done.", network.handshakes),
        counter("quiver_wire_connections_refused_total", "Incoming connections refused.", network.refused),
        counter(
            "quiver_wire_connections_evicted_total",
            "Incoming connections closed because they were silent, slow, or idle while others needed them.",
            network.evicted,
        ),
        counter(
            "quiver_peer_unknown_messages_total",
            "Messages dropped because their target is not a peer.",
            network.messages_to_unknown,
        ),
        _by_peer(network, "quiver_peer_connected", "gauge", "Whether the link to a peer is up.", _is_connected),
        _by_peer(network, "quiver_peer_sent_messages_total", "counter", "Messages sent.", lambda one: one.messages_out),
        _by_peer(network, "quiver_peer_sent_bytes_total", "counter", "Bytes sent.", lambda one: one.bytes_out),
        _by_peer(
            network, "quiver_peer_received_messages_total", "counter", "Messages received.", lambda one: one.messages_in
        ),
        _by_peer(network, "quiver_peer_received_bytes_total", "counter", "Bytes received.", lambda one: one.bytes_in),
        _by_peer(
            network,
            "quiver_peer_dropped_messages_total",
            "counter",
            "Messages dropped because a peer was unreachable or slow.",
            lambda one: one.messages_dropped,
        ),
        _by_peer(
            network, "quiver_peer_backlog_bytes", "gauge", "Bytes queued for a peer.", lambda one: one.backlog_bytes
        ),
        _by_peer(
            network, "quiver_peer_reconnects_total", "counter", "Reconnects to a peer.", lambda one: one.reconnects
        ),
    )


def _by_peer(
    network: NetworkStatus, name: str, kind: str, sentence: str, value: Callable[[ConnectionStatus], int]
) -> MetricFamily:
    values = [((("peer", str(peer.node)),), value(peer)) for peer in network.peers]
    return labelled(name, "gauge" if kind == "gauge" else "counter", sentence, values)


def _is_connected(peer: ConnectionStatus) -> int:
    return int(peer.is_connected)
