"""An attacker on the wire: a raw socket that says whatever it likes, in frames or not."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from quiver.addresses import format_address, parse_address
from quiver.model import Buffer, GroupId, NodeId
from quiver.replication.codec import GroupMessage, PlainMessage, encode_envelope
from quiver.security.node_proof import load_node_secret
from quiver.wire.envelope import encode_request
from quiver.wire.frames import HEAD_BYTES_MAX, Frame, FrameKind, FrameReader, encode_frame
from quiver.wire.handshake import Hello, encode_hello, make_hello, make_requester_hello
from quiver.wire.proving import DiallingHandshake, NodeSecret
from quiver.wire.requests import Request

TIMEOUT_S = 30.0
"""How long an attacker waits for an answer before it says that there is none."""


class Attacker:
    """One connection to a node. Use as ``with``; nothing is sent by itself."""

    def __init__(
        self,
        address: str,
        *,
        receive_buffer_bytes: int | None = None,
        tls: ssl.SSLContext | None = None,
        source: str = "",
    ) -> None:
        """`source`: the address of this machine from which it comes."""
        self.socket = socket.socket()
        self.socket.settimeout(TIMEOUT_S)
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        if source:
            self.socket.bind((source, 0))
        host, port = parse_address(address)
        self.socket.connect((host, port))
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=host)
        self._reader = FrameReader(1 << 30)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    # -- sending ---------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def say_hello(self, hello: bytes | None = None) -> Hello:
        """Say hello, by default as a client, and return the node's own."""
        self.send(hello or encode_hello(make_requester_hello(name="attacker")))
        frame = self.next_frame()
        assert frame is not None, "the hello was not answered"
        assert frame.kind is FrameKind.HELLO, bytes(frame.head)
        return msgspec.msgpack.decode(frame.head, type=Hello)

    def pretend(self, node: int, *, cluster_id: str, identity: str = "forged") -> Hello:
        """Say hello as a node that sends Raft messages, with the secret of this machine's nodes: the worst case."""
        made = make_hello(cluster_id=cluster_id, node=NodeId(node), incarnation=1, identity=identity)
        handshake = DiallingHandshake(made, NodeSecret(load_node_secret(), lambda: False))
        self.send(handshake.opening)
        frame = self.next_frame()
        assert frame is not None, "the hello was not answered"
        answer = handshake.answer(frame, format_address(self.socket.getpeername()[:2]))
        assert answer is not None, "the node asked for no proof"
        return self.say_hello(answer)

    def forge(self, group: int, *messages: PlainMessage) -> None:
        """Send Raft messages of a group."""
        wrapped = [GroupMessage(GroupId(group), plain=message) for message in messages]
        self.send(frame_message(encode_envelope(1, wrapped, ())))

    @staticmethod
    def encode(requests: Sequence[Request[Any]], *, timeout_ms: int = 10_000) -> bytes:
        """Return requests as they are sent, numbered from 0."""
        frames = (encode_request(number, timeout_ms, request) for number, request in enumerate(requests))
        return b"".join(part for frame in frames for part in frame)

    def request(self, number: int, request: Request[Any], *, timeout_ms: int = 10_000) -> None:
        """Send a request."""
        self.send(b"".join(encode_request(number, timeout_ms, request)))

    # -- receiving -------------------------------------------------------------------------------

    def next_frame(self) -> Frame | None:
        """Wait for a frame; None if the node closed the connection."""
        while (frame := self._reader.next_frame()) is None:
            if not self._receive():
                return None
        return frame

    def wait_closed(self) -> None:
        """Wait until the node has closed the connection, whatever it says before."""
        while self._receive():
            while self._reader.next_frame() is not None:
                pass

    def _receive(self) -> bool:
        try:
            count = self.socket.recv_into(self._reader.writable())
        except ConnectionError:
            return False
        self._reader.received(count)
        return count > 0


def frame_message(parts: Sequence[Buffer]) -> bytes:
    """Return a message of a node as a frame."""
    head = bytes(parts[0])
    if len(head) > HEAD_BYTES_MAX:
        return b"".join(encode_frame(FrameKind.MESSAGE, b"", parts, check_payload=True))
    return b"".join(encode_frame(FrameKind.MESSAGE, head, parts[1:]))
