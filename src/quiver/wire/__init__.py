"""Framed TCP between nodes: frames, handshake, connections, and the network that Raft's messages travel on.

`PeerNetwork` is the way in. What a frame and a handshake are is pure code (`frames`, `handshake`), so that other
users of the protocol build on the same; `docs/protocol/wire.md` describes it byte by byte. Nothing here knows what
a message means.
"""

from quiver.config import WireSettings
from quiver.wire.context import Address
from quiver.wire.frames import Frame, FrameReader, Kind, encode_frame
from quiver.wire.handshake import Hello, Refusal, RefusalCode
from quiver.wire.peers import PeerNetwork
from quiver.wire.status import NetworkStatus, PeerStatus

__all__ = [
    "Address",
    "Frame",
    "FrameReader",
    "Hello",
    "Kind",
    "NetworkStatus",
    "PeerNetwork",
    "PeerStatus",
    "Refusal",
    "RefusalCode",
    "WireSettings",
    "encode_frame",
]
