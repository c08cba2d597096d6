"""Framed TCP between nodes and from clients to nodes: frames, handshake, connections, messages, requests.

`PeerNetwork` carries Raft's messages between nodes; `RequestServer`, on the same port, answers requests (`messages`)
with a `Handler`; `RequestPool` sends them. Encoding and decoding is pure code (`frames`, `handshake`, `envelope`);
`docs/protocol/wire.md` describes it byte by byte. Nothing here interprets messages or requests.
"""

from quiver.addresses import Address, format_address, parse_address
from quiver.config import TlsSettings, WireSettings
from quiver.wire.frames import Frame, FrameKind, FrameReader, encode_frame
from quiver.wire.handshake import HandshakeRefusal, Hello, RefusalCode, RequesterHello
from quiver.wire.peers import ConnectionStatus, NetworkStatus, PeerNetwork
from quiver.wire.pool import PoolStatus, RequestPool
from quiver.wire.serving import Caller, Handler, RequestServer, ServerStatus

__all__ = [
    "Address",
    "Caller",
    "ConnectionStatus",
    "Frame",
    "FrameKind",
    "FrameReader",
    "Handler",
    "HandshakeRefusal",
    "Hello",
    "NetworkStatus",
    "PeerNetwork",
    "PoolStatus",
    "RefusalCode",
    "RequestPool",
    "RequestServer",
    "RequesterHello",
    "ServerStatus",
    "TlsSettings",
    "WireSettings",
    "encode_frame",
    "format_address",
    "parse_address",
]
