"""The outgoing side to one peer: dials, sends a hello and messages, and dials again when the connection breaks.

It owns the one outgoing connection to its peer and its send queue. It never blocks a sender: a message that does not
fit is dropped and counted, because Raft repeats what matters and a late message is worth less than a new one.

A link is always in one of three states: *connecting* (messages are queued), *connected* (messages are sent), *waiting*
for the next attempt (messages are dropped: they would be stale by then).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from quiver.addresses import Address, format_address
from quiver.backoff import Backoff
from quiver.errors import RequestError
from quiver.logs import facts
from quiver.model import Buffer, NodeId
from quiver.tasks import timeout
from quiver.wire.connection import Connection, NetworkContext
from quiver.wire.frames import HEAD_BYTES_MAX, HEADER_BYTES, Frame, FrameKind, encode_frame
from quiver.wire.handshake import (
    HandshakeRefusal,
    Hello,
    RefusalCode,
    check_peer_claims,
    decode_refusal,
    read_hello,
    refuse,
)
from quiver.wire.outbox import Outbox
from quiver.wire.proving import DiallingHandshake
from quiver.wire.tls import node_name

logger = logging.getLogger(__name__)

REASONS_MAX = 8
"""Maximum number of logged reasons that a link remembers."""


class Link:
    """Send messages to one peer, over a connection that is re-established whenever it breaks."""

    def __init__(self, peer: NodeId, address: Address, context: NetworkContext) -> None:
        self.peer = peer
        self.address = address
        self.context = context
        self.messages_out = 0
        self.bytes_out = 0
        self.messages_dropped = 0
        self.connects = 0
        self.last_error = ""
        self._reported: list[str] = []
        """The newest reasons for which there is no connection that were logged since the last one."""
        self._outbox = Outbox()
        # The last connection that was dialled, and the same once its handshake is done, until it is lost.
        self._dialled: OutgoingConnection | None = None
        self._connection: OutgoingConnection | None = None
        self._incarnation: int | None = None
        self._is_waiting = False
        self._backoff = Backoff(
            context.rng,
            first_ms=context.settings.reconnect_delay_ms_min,
            max_ms=context.settings.reconnect_delay_ms_max,
        )
        self._redial = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        """Whether messages are sent now."""
        return self._connection is not None

    @property
    def backlog_bytes(self) -> int:
        """Return how many bytes are queued for the socket."""
        held_bytes = self._outbox.bytes
        return held_bytes if self._connection is None else held_bytes + self._connection.backlog_bytes

    # Sending.

    def send(self, parts: Sequence[Buffer]) -> None:
        """Queue one message; it is dropped if the peer is not reachable or the queue is full.

        Raises:
            RequestError: the message is larger than any frame may be.
        """
        settings = self.context.settings
        size_bytes = HEADER_BYTES + sum(map(len, parts))
        if size_bytes > settings.frame_bytes_max:
            raise RequestError(
                f"not sent: the message to node {self.peer} has {size_bytes} bytes, at most {settings.frame_bytes_max} "
                "can be sent"
            )
        if self._is_waiting or self._outbox.bytes + size_bytes > settings.peer_buffer_bytes_max:
            self.messages_dropped += 1
            return
        if len(parts[0]) <= HEAD_BYTES_MAX:
            # The frame's checksum covers its head; batches and snapshots after it carry their own, checked on arrival.
            frame = encode_frame(FrameKind.MESSAGE, bytes(parts[0]), parts[1:])
        else:
            frame = encode_frame(FrameKind.MESSAGE, b"", parts, check_payload=True)
        self._outbox.push(frame)
        self.messages_out += 1
        self.bytes_out += size_bytes
        self.flush()  # immediately: the driver sends one message per node and turn

    def flush(self) -> None:
        """Write as much as the socket accepts now."""
        if self._connection is not None:
            self._connection.write_from(self._outbox)

    # Connecting.

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        while True:
            started_at_ms = self.context.clock.monotonic_ms()
            await self._connect()
            if self._connection is not None:
                await self._connection.wait_closed()
            lasted_ms = self.context.clock.monotonic_ms() - started_at_ms
            # A connection that breaks as soon as it is made must not be dialled again at full speed.
            if lasted_ms >= self.context.settings.reconnect_delay_ms_max:
                self._backoff.reset()
            await self._wait_to_retry()

    def redial_now(self, incarnation: int) -> None:
        """Dial immediately if waiting, since the peer is alive; drop a connection to its previous incarnation."""
        self._redial.set()
        if self._connection is not None and self._incarnation != incarnation:
            self._connection.abort("the peer has restarted")

    def close(self) -> None:
        """Send what the socket accepts now, then close permanently, without calling `on_lost`."""
        self.flush()
        self._connection = None
        if self._dialled is not None:
            self._dialled.close("closed by this side")
        self._start_waiting()

    async def _connect(self) -> None:
        """Dial once; afterwards the handshake is done, or the failure is logged."""
        settings = self.context.settings
        self._is_waiting = False
        self._dialled = connection = OutgoingConnection(self)
        loop = asyncio.get_running_loop()
        try:
            async with timeout(settings.connect_timeout_ms / 1000):
                # A peer's certificate names the node, whatever its host.
                name = node_name(self.peer) if self.context.client_context else None
                await loop.create_connection(
                    lambda: connection, *self.address, ssl=self.context.client_context, server_hostname=name
                )
            if not await connection.greeted:
                self._note_failure(connection.end_reason)
        except (OSError, UnicodeError, OverflowError) as error:
            self._note_failure(str(error) or f"not connected within {settings.connect_timeout_ms} ms")
        finally:
            if self._connection is None:
                connection.abort("connecting failed")
                self._start_waiting()

    async def _wait_to_retry(self) -> None:
        self._redial.clear()
        with suppress(TimeoutError):
            async with timeout(self._backoff.next_ms() / 1000):
                await self._redial.wait()

    def _start_waiting(self) -> None:
        self._is_waiting = True
        self.messages_dropped += self._outbox.clear()

    # Called by its connection.

    def handle_greeted(self, connection: OutgoingConnection, hello: Hello) -> None:
        """Start sending: the peer accepted the handshake."""
        self._connection, self._incarnation = connection, hello.incarnation
        self.connects += 1
        self._reported.clear()
        logger.info("peer connected", extra=facts(peer=self.peer, address=self._address_name))
        self.context.on_greeted(hello)
        self.flush()

    def handle_closed(self, connection: OutgoingConnection) -> None:
        """Drop what was queued for a broken connection, and report the loss."""
        if self._connection is not connection:
            return
        self._connection = None
        self._start_waiting()
        self._note_failure(connection.end_reason)
        self.context.on_lost(self.peer)

    def _note_failure(self, error: str) -> None:
        """Log each new reason once, not each attempt."""
        self.last_error = error
        if error not in self._reported:
            self._reported = [*self._reported[1 - REASONS_MAX :], error]
            about = facts(peer=self.peer, address=self._address_name, error=error, next_step="redial with backoff")
            logger.warning("peer not connected", extra=about)

    @property
    def _address_name(self) -> str:
        return format_address(self.address)


class OutgoingConnection(Connection):
    """The dialling side: sends a hello, waits for the answer, then only sends."""

    def __init__(self, link: Link) -> None:
        super().__init__(link.context.settings, link.context.connections)
        self._link = link
        self._handshake = DiallingHandshake(link.context.hello, link.context.node_secret)
        self.greeted: asyncio.Future[bool] = self._loop.create_future()
        """Resolved when the handshake is done; true if the peer accepted it."""

    def handle_opened(self) -> None:
        """Send the hello."""
        self.write(self._handshake.opening)

    def handle_frame(self, frame: Frame) -> None:
        """Process the answer; after it only a refusal is valid."""
        if frame.kind is FrameKind.REFUSAL:
            refusal = decode_refusal(frame)
            self.close(f"refused by the peer: {refusal.code}: {refusal.sentence}")
        elif self.greeted.done():
            sentence = f"unexpected {frame.kind.name.lower()} frame to the dialling side"
            self.refuse(refuse(RefusalCode.UNEXPECTED_FRAME, sentence))
        elif (answer := self._handshake.answer(frame, self.endpoint("peername"))) is not None:
            self.write(answer)
        else:
            self._handle_answer(self._check_answer(frame))

    def handle_closed(self) -> None:
        """Report to the link."""
        self._settle(is_accepted=False)
        self._link.handle_closed(self)

    def handle_writable(self) -> None:
        """Continue sending."""
        self._link.flush()

    def _check_answer(self, frame: Frame) -> Hello | HandshakeRefusal:
        context = self._link.context
        hello = read_hello(frame, context.hello)
        if isinstance(hello, Hello):  # who has not proved itself is told nothing about this node
            hello = self._handshake.check(hello) or hello
        return check_peer_claims(hello, context.hello, self._link.peer, context.identity_of)

    def _handle_answer(self, answer: Hello | HandshakeRefusal) -> None:
        if isinstance(answer, HandshakeRefusal):
            self.refuse(answer)
            return
        self.finish_handshake()
        self._settle(is_accepted=True)
        self._link.handle_greeted(self, answer)

    def _settle(self, *, is_accepted: bool) -> None:
        if not self.greeted.done():
            self.greeted.set_result(is_accepted)
