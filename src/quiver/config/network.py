"""The settings of connections: the wire between nodes and from SDK clients, TLS, and the HTTP gateway."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quiver.addresses import parse_address
from quiver.errors import ConfigError, RequestError

KIB = 1024
MIB = 1024 * KIB


class WireSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Connections between nodes, and from clients to nodes."""

    frame_bytes_max: Annotated[
        int,
        Meta(
            ge=64 * KIB,
            le=1024 * MIB,
            description="Largest frame in bytes that is sent or received; it must fit the largest batch (64 MiB) and "
            "its envelope. The same on every node.",
        ),
    ] = 72 * MIB
    peer_buffer_bytes_max: Annotated[
        int,
        Meta(
            ge=64 * KIB,
            le=4096 * MIB,
            description="Bytes queued for one node; further messages to it are dropped and sent again later. At least "
            "frame_bytes_max; raise it if links are fast but bursty, at the cost of memory.",
        ),
    ] = 144 * MIB
    connections_max: Annotated[
        int,
        Meta(ge=1, le=100_000, description="Maximum number of incoming connections from nodes after the handshake."),
    ] = 1024
    handshakes_max: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="Maximum number of incoming connections that have not completed the handshake; bounds what "
            "unauthenticated peers can hold open. Beyond it the one that has waited longest is closed.",
        ),
    ] = 64
    handshake_timeout_ms: Annotated[
        int, Meta(ge=10, le=60_000, description="Milliseconds for the handshake of a new connection, on both sides.")
    ] = 3_000
    connect_timeout_ms: Annotated[
        int,
        Meta(
            ge=10, le=60_000, description="Milliseconds to establish a connection to a node; raise it on slow networks."
        ),
    ] = 2_000
    reconnect_delay_ms_min: Annotated[
        int,
        Meta(
            ge=1,
            le=60_000,
            description="Backoff in milliseconds before the first attempt to reconnect to a node; doubles with each "
            "attempt.",
        ),
    ] = 50
    reconnect_delay_ms_max: Annotated[
        int,
        Meta(
            ge=1, le=60_000, description="Longest backoff in milliseconds between two attempts to reconnect to a node."
        ),
    ] = 1_000
    unanswered_timeout_ms: Annotated[
        int,
        Meta(
            ge=100,
            le=600_000,
            description="Milliseconds without a TCP acknowledgement of the other machine after which a connection is "
            "closed (Linux; elsewhere the system's default applies).",
        ),
    ] = 5_000
    client_connections_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Maximum number of incoming connections from clients; each costs a file descriptor and memory. "
            "Beyond it the one that has been idle longest is closed, or, if none is idle, the new one is refused.",
        ),
    ] = 4_096
    connection_requests_max: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="Requests in flight on one connection; the sender waits beyond it, and the receiver stops "
            "reading.",
        ),
    ] = 512
    connection_bytes_max: Annotated[
        int,
        Meta(
            ge=64 * KIB,
            le=4096 * MIB,
            description="Bytes of requests in flight and unsent responses of one connection; the sender waits beyond "
            "it, and the receiver stops reading.",
        ),
    ] = 64 * MIB
    requests_max: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000_000,
            description="Client requests in flight on the node; further ones are rejected as overloaded. Raise it for "
            "more concurrent clients, at the cost of memory.",
        ),
    ] = 16_384
    requests_bytes_max: Annotated[
        int,
        Meta(
            ge=64 * KIB,
            le=1024 * 1024 * MIB,
            description="Bytes of client requests in flight and unsent responses on the node, over HTTP the records of "
            "its answers; further requests are rejected as overloaded, and answers over HTTP wait.",
        ),
    ] = 128 * MIB
    address_connections_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Incoming connections from one address; beyond it the one that has been idle longest is "
            "closed, or, if none is idle, the new one is refused.",
        ),
    ] = 2_048
    frame_timeout_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=3_600_000,
            description="Milliseconds for a frame that has begun to arrive completely; then its connection is closed. "
            "Raise it for clients on slow links that send large batches.",
        ),
    ] = 60_000
    send_timeout_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=3_600_000,
            description="Milliseconds in which a client must read at least a mebibyte of the responses that wait for "
            "it, or all of them; then its connection is closed.",
        ),
    ] = 20_000
    silence_timeout_ms: Annotated[
        int,
        Meta(
            ge=100,
            le=24 * 3_600_000,
            description="Milliseconds without a request, and with none in flight, after which a node closes an "
            "incoming connection for requests. More than idle_timeout_ms of the clients, so that they close it first.",
        ),
    ] = 180_000
    idle_timeout_ms: Annotated[
        int,
        Meta(
            ge=100,
            le=24 * 3_600_000,
            description="Milliseconds without a request after which a client closes its own connection.",
        ),
    ] = 60_000

    def __post_init__(self) -> None:
        if self.peer_buffer_bytes_max < self.frame_bytes_max:
            raise ConfigError(
                f"wire.peer_buffer_bytes_max ({self.peer_buffer_bytes_max}) must be at least "
                f"wire.frame_bytes_max ({self.frame_bytes_max})"
            )
        if self.reconnect_delay_ms_max < self.reconnect_delay_ms_min:
            raise ConfigError(
                f"wire.reconnect_delay_ms_max ({self.reconnect_delay_ms_max}) must be at least "
                f"wire.reconnect_delay_ms_min ({self.reconnect_delay_ms_min})"
            )


class TlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Encryption of the wire: between nodes, and from clients to nodes."""

    is_enabled: Annotated[
        bool,
        Meta(
            description="Whether wire connections require TLS 1.3; connections without it are rejected. Set it on all "
            "nodes and clients together."
        ),
    ] = False
    certificate_file: Annotated[
        str,
        Meta(
            description="PEM file with the certificate and its intermediate certificates. A node needs one that names "
            "its host and `node-<id>`."
        ),
    ] = ""
    key_file: Annotated[
        str, Meta(description="PEM file with the unencrypted private key; empty if the key is in certificate_file.")
    ] = ""
    ca_file: Annotated[
        str, Meta(description="PEM file with the trusted certificate authorities; empty for those of the system.")
    ] = ""
    client_certificates: Annotated[
        Literal["none", "nodes", "all"],
        Meta(
            description="Which connecting sides must present a certificate: `nodes` requires one that names "
            "`node-<id>` from nodes, `all` requires one from clients as well, `none` requires none: "
            "anyone who can reach the port can then impersonate a node."
        ),
    ] = "nodes"

    def __post_init__(self) -> None:
        if self.key_file and not self.certificate_file:
            raise ConfigError("tls.key_file is set without tls.certificate_file: set both, or neither")


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits and timeouts for HTTP clients."""

    connections_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Connections at once; beyond it the connection that has been idle longest is closed, or, if "
            "none is idle, the new one is answered with 503, except for health checks and metrics. With TLS, an "
            "idle one takes about 50 kB.",
        ),
    ] = 8_192
    requests_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Requests in progress at once; further ones are answered with 503, except for health checks "
            "and metrics.",
        ),
    ] = 8_192
    head_bytes_max: Annotated[
        int,
        Meta(ge=KIB, le=MIB, description="Bytes of a request's target and headers; larger ones are answered with 431."),
    ] = 16 * KIB
    body_bytes_max: Annotated[
        int, Meta(ge=KIB, le=64 * MIB, description="Bytes of a request's body; larger ones are answered with 413.")
    ] = 16 * MIB
    bodies_bytes_max: Annotated[
        int,
        Meta(
            ge=KIB,
            le=64 * 1024 * MIB,
            description="Bytes that have arrived of all request bodies in progress; requests beyond it are answered "
            "with 503. At least "
            "body_bytes_max; raise it for many large requests, at the cost of memory.",
        ),
    ] = 128 * MIB
    decoded_bytes_max: Annotated[
        int,
        Meta(
            ge=MIB,
            le=64 * 1024 * MIB,
            description="Memory in bytes for batches that the node has decoded for HTTP consumers, cached or in use, "
            "of all partitions. Cached ones are evicted first; requests that find all of it in use wait, and get "
            "503 (not done) at their timeout. Raise it for many HTTP consumers at different positions.",
        ),
    ] = 128 * MIB
    idle_timeout_ms: Annotated[
        int, Meta(ge=10, le=3_600_000, description="Milliseconds without a request after which a connection is closed.")
    ] = 75_000
    receive_timeout_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=3_600_000,
            description="Milliseconds for a request to arrive completely; slower ones are answered with 408.",
        ),
    ] = 20_000
    body_progress_timeout_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=3_600_000,
            description="Milliseconds for the next 64 KiB of a request's body, or its end, to arrive; slower ones are "
            "answered with 408. Raise it for clients on slow links.",
        ),
    ] = 5_000
    send_timeout_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=3_600_000,
            description="Milliseconds for a client to read its response before the connection is closed.",
        ),
    ] = 20_000
    request_timeout_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=600_000,
            description="Milliseconds to process a request, not counting the wait of a long poll; slower ones are "
            "answered with 503 (not done) or 504 (unknown).",
        ),
    ] = 10_000
    wait_ms_max: Annotated[
        int,
        Meta(
            ge=0,
            le=600_000,
            description="Longest wait of a long poll in milliseconds; longer requested waits are reduced to it.",
        ),
    ] = 30_000
    shutdown_grace_ms: Annotated[
        int, Meta(ge=0, le=600_000, description="Milliseconds for requests in progress to finish when the node stops.")
    ] = 5_000
    access_log: Annotated[
        bool,
        Meta(
            description="Whether every request is logged; useful to debug clients, at the cost of CPU and log volume."
        ),
    ] = False
    allowed_hosts: Annotated[
        str,
        Meta(
            description="Names, comma-separated, that clients may give in the Host header beside the node's own: "
            "loopback names, node.advertise, the machine's name and, unless node.http is a loopback address, any IP "
            "address. Other requests are answered with 421, so that no web page can reach the node by a name of its "
            "own. Add the name of a proxy or load balancer; `*` allows every name."
        ),
    ] = ""
    admin_listen: Annotated[
        str,
        Meta(
            description="Address, as host:port, on which /metrics, /docs and /openapi.json are served, and the health "
            "checks as well; empty serves them with everything else on node.http. Set it to keep them from clients."
        ),
    ] = ""
    tls: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="Whether HTTP is served over TLS with the certificate of [tls]; `auto` follows tls.is_enabled."
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.bodies_bytes_max < self.body_bytes_max:
            raise ConfigError(
                f"gateway.bodies_bytes_max ({self.bodies_bytes_max}) must be at least "
                f"gateway.body_bytes_max ({self.body_bytes_max})"
            )
        if self.admin_listen:
            try:
                parse_address(self.admin_listen)
            except RequestError as error:
                raise ConfigError(f"gateway.admin_listen: {error}") from None

    @property
    def host_names(self) -> tuple[str, ...]:
        """Return the names in `allowed_hosts` one by one."""
        return tuple(name.strip() for name in self.allowed_hosts.split(",") if name.strip())

    def serves_https(self, tls: TlsSettings) -> bool:
        """Return whether HTTP is served over TLS, given the section [tls]."""
        return self.tls == "on" or (self.tls == "auto" and tls.is_enabled)
