"""Strangers, liars and broken peers on real sockets: each is refused with a logged reason, and service goes on."""

from __future__ import annotations

import asyncio
import logging
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from quiver.clock import SystemClock
from quiver.model import NodeId
from quiver.record.checksum import crc32c
from quiver.wire import FrameKind, FrameReader, HandshakeRefusal, PeerNetwork, WireSettings, encode_frame
from quiver.wire.handshake import Hello, decode_refusal, encode_hello, encode_refusal, make_hello, refuse
from quiver.wire.handshake import RefusalCode as Code

SETTINGS = WireSettings(
    frame_bytes_max=1024 * 1024,
    peer_buffer_bytes_max=1024 * 1024,
    handshakes_max=3,
    connections_max=2,
    handshake_timeout_ms=150,
    reconnect_delay_ms_min=5,
    reconnect_delay_ms_max=20,
)
HELLO = make_hello(cluster_id="test", node=NodeId(2), incarnation=1)
MESSAGE = b"".join(encode_frame(FrameKind.MESSAGE, b"", (b"x",), check_payload=True))


def hello(**fields: object) -> bytes:
    return encode_hello(msgspec.structs.replace(HELLO, **fields))


def flip_last_bit(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


def unknown_kind() -> bytes:
    checked = struct.pack("<BBH", 99, 0, 0)
    return struct.pack("<II", 4 + len(checked), crc32c(checked)) + checked


class Node:
    """A network and what it delivered."""

    def __init__(self, peers: dict[NodeId, tuple[str, int]] | None = None) -> None:
        self.messages: list[tuple[NodeId, bytes]] = []
        self.lost: list[NodeId] = []
        self.network = PeerNetwork(
            node=NodeId(1),
            cluster_id="test",
            incarnation=5,
            listen=("127.0.0.1", 0),
            peers=peers or {},
            settings=SETTINGS,
            clock=SystemClock(),
            rng=random.Random(1),
        )

    async def start(self) -> None:
        self.network.start(lambda node, message: self.messages.append((node, bytes(message))), self.lost.append)
        await asyncio.sleep(0.01)

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.network.address)

    async def check_service(self) -> None:
        """Hold it to going on as if nothing had happened."""
        before = len(self.messages)
        reader, writer = await self.dial()
        writer.write(hello(node=77) + MESSAGE)
        await reader.readexactly(12)
        await wait_until(lambda: len(self.messages) == before + 1)
        assert self.messages[-1] == (NodeId(77), b"x")
        writer.close()
        await wait_until(lambda: not any(peer.node == 77 for peer in self.network.status().peers))


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(bounded())


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event, being seen from outside
            await asyncio.sleep(0.002)


async def read_refusal(reader: asyncio.StreamReader) -> HandshakeRefusal:
    """Read to the end of a connection, which must be a refusal."""
    received = await reader.read()
    frames = FrameReader(4096)
    frames.writable()[: len(received)] = received
    frames.received(len(received))
    found = None
    while (frame := frames.next_frame()) is not None:
        found = frame
    assert found is not None, "the connection ended without a refusal"
    return decode_refusal(found)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, object]]]:
    return [
        (record.getMessage(), record.__dict__["facts"])
        for record in caplog.records
        if record.name.startswith("quiver.wire") and record.levelno == logging.WARNING
    ]


@pytest.mark.parametrize(
    ("sent", "code", "sentence"),
    [
        (b"GET / HTTP/1.1\r\nHost: quiver\r\n\r\n", "bad_frame", "must be 12 to 4096"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "bad_frame", "must be 12 to 4096"),
        (bytes(100), "bad_frame", "frame of 4 bytes"),
        (struct.pack("<I", 4093), "bad_frame", "frame of 4097 bytes, must be 12 to 4096"),
        (struct.pack("<I", 2**32 - 1), "bad_frame", "must be 12 to 4096"),
        (flip_last_bit(hello()), "bad_frame", "checksum"),
        (unknown_kind(), "bad_frame", "unknown kind 99"),
        (b"".join(encode_frame(FrameKind.HELLO, b"\x80")), "bad_frame", "missing required field"),
        (MESSAGE, "hello_expected", "not a message"),
        (MESSAGE + hello(), "hello_expected", "not a message"),
        (encode_refusal(refuse(Code.BAD_FRAME, "")), "hello_expected", "not a refusal"),
        (
            hello(version_min=0, version_max=0),
            "bad_version",
            "versions 0 to 0 are supported there, 1 to 1 here",
        ),
        (
            hello(version_min=2, version_max=3),
            "bad_version",
            "versions 2 to 3 are supported there, 1 to 1 here",
        ),
        (hello(cluster_id="other"), "other_cluster", "not this cluster's"),
        (hello(node=1), "own_node", "node 1"),
        (b"", "hello_late", "no hello within 150 ms"),
        (hello()[:-1], "hello_late", "no hello within 150 ms"),
    ],
    ids=[
        "http",
        "tls",
        "zeros",
        "hello too long",
        "greatest length",
        "checksum",
        "unknown kind",
        "empty hello",
        "message",
        "message then hello",
        "refusal",
        "old version",
        "later version",
        "other cluster",
        "own node",
        "silence",
        "unfinished hello",
    ],
)
def test_stranger_is_refused(caplog: pytest.LogCaptureFixture, sent: bytes, code: str, sentence: str) -> None:
    async def test() -> None:
        node = Node()
        async with node.network:
            await node.start()
            reader, writer = await node.dial()
            writer.write(sent)
            refusal = await read_refusal(reader)
            assert (refusal.code, sentence in refusal.sentence) == (code, True), refusal
            writer.close()
            [(event, about)] = warnings_in(caplog)
            assert event == "connection refused"
            assert (about["code"], about["sentence"], about["peer"]) == (code, refusal.sentence, None)
            assert str(about["address"]).startswith("127.0.0.1:")
            assert (node.messages, node.lost, node.network.status().refused) == ([], [], 1)
            assert node.network.status().handshakes == 0
            await node.check_service()

    run(test)


@pytest.mark.parametrize(
    ("sent", "code", "sentence"),
    [
        (hello(), "unexpected_frame", "a hello after the handshake"),
        (encode_refusal(refuse(Code.BAD_FRAME, "")), "unexpected_frame", "a refusal after the handshake"),
        (struct.pack("<I", 7), "bad_frame", "frame of 11 bytes"),
        (struct.pack("<I", 1024 * 1024 - 3), "bad_frame", "frame of 1048577 bytes, must be 12 to 1048576"),
        (unknown_kind(), "bad_frame", "unknown kind 99"),
        (flip_last_bit(MESSAGE), "bad_frame", "checksum"),
        (b"garbage, and more of it than a header has", "bad_frame", "must be 12 to 1048576"),
    ],
    ids=["hello", "refusal", "short length", "too long", "unknown kind", "checksum", "garbage"],
)
def test_node_that_breaks_the_rules_is_refused(
    caplog: pytest.LogCaptureFixture, sent: bytes, code: str, sentence: str
) -> None:
    async def test() -> None:
        node = Node()
        async with node.network:
            await node.start()
            reader, writer = await node.dial()
            # What comes before the bad frame is good, what comes after it is not looked at.
            writer.write(hello() + MESSAGE + sent + MESSAGE)
            refusal = await read_refusal(reader)
            assert (refusal.code, sentence in refusal.sentence) == (code, True), refusal
            writer.close()
            assert [(event, about["peer"], about["code"]) for event, about in warnings_in(caplog)] == [
                ("connection refused", 2, code)
            ]
            assert (node.messages, node.lost) == ([(NodeId(2), b"x")], [NodeId(2)])
            await node.check_service()

    run(test)


def test_strangers_who_say_nothing_are_bounded_and_sent_away_in_time(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        node = Node()
        async with node.network:
            await node.start()
            silent = [await node.dial() for _ in range(SETTINGS.handshakes_max)]
            await wait_until(lambda: node.network.status().handshakes == SETTINGS.handshakes_max)
            await node.check_service()  # whoever says hello goes first
            codes = []
            for reader, writer in silent:
                codes.append((await read_refusal(reader)).code)
                writer.close()
            assert codes == ["too_many_connections", "hello_late", "hello_late"]
            assert node.network.status().refused == SETTINGS.handshakes_max
            # One address, one line: whoever can reach the port cannot fill the log.
            assert len(warnings_in(caplog)) == 1
            await node.check_service()

    run(test)


def test_nodes_beyond_the_bound_are_refused_but_known_ones_may_come_back() -> None:
    async def test() -> None:
        node = Node()
        async with node.network:
            await node.start()
            writers = []
            for number in (2, 3, 3):
                reader, writer = await node.dial()
                writer.write(hello(node=number))
                await reader.readexactly(12)
                writers.append(writer)
            reader, writer = await node.dial()
            writer.write(hello(node=4))
            assert await read_refusal(reader) == HandshakeRefusal("too_many_connections", "2 other nodes are connected")
            for each in (*writers, writer):
                each.close()
            await wait_until(lambda: node.network.status().peers == ())

    run(test)


def test_stranger_who_leaves_without_a_word_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        node = Node()
        async with node.network:
            await node.start()
            _, writer = await node.dial()
            await wait_until(lambda: node.network.status().handshakes == 1)
            writer.close()
            await wait_until(lambda: node.network.status().handshakes == 0)
            assert (warnings_in(caplog), node.lost) == ([], [])

    run(test)


def test_stranger_who_connects_as_the_network_closes_is_sent_away() -> None:
    async def test() -> None:
        node = Node()
        async with node.network:
            await node.start()
            dialled = asyncio.create_task(node.dial())
            await asyncio.sleep(0)
            await node.network.close()
            try:
                reader, writer = await dialled
                assert await reader.read() == b""
                writer.close()
            except ConnectionError:
                pass

    run(test)


# The other side: what a node does that was not answered as it should be.


@asynccontextmanager
async def answering(answer: bytes, *, then_wait: bool) -> AsyncIterator[tuple[tuple[str, int], list[bytes]]]:
    """Serve connections that answer any hello with these bytes; give the address, and what came."""
    heard: list[bytes] = []
    served: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(asyncio.current_task())
        with suppress(ConnectionError):
            heard.append(await reader.read(4096))
            writer.write(answer)
            if then_wait:
                heard.append(await reader.read())
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname(), heard
    server.close()
    await asyncio.sleep(0.01)
    await asyncio.gather(*(task for task in served if task is not None))


@pytest.mark.parametrize(
    ("answer", "error", "told"),
    [
        (hello(cluster_id="other"), "refused by this side: other_cluster", "other_cluster"),
        (hello(node=3), "refused by this side: other_node: node 2 was expected here, not node 3", "other_node"),
        (hello(node=1), "refused by this side: own_node", "own_node"),
        (hello(version_min=9, version_max=9), "refused by this side: bad_version", "bad_version"),
        (MESSAGE, "refused by this side: hello_expected", "hello_expected"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "refused by this side: bad_frame", "bad_frame"),
        (b"", "refused by this side: hello_late: no hello within 150 ms", "hello_late"),
        (b"".join(encode_frame(FrameKind.REFUSAL, b"\xc1")), "refused by this side: bad_frame", "bad_frame"),
        (encode_refusal(HandshakeRefusal("later_code", "why")), "refused by the peer: later_code: why", None),
    ],
    ids=[
        "other cluster",
        "other node",
        "own node",
        "version",
        "message",
        "http",
        "silence",
        "damaged refusal",
        "refusal",
    ],
)
def test_wrong_answer_is_no_connection(
    caplog: pytest.LogCaptureFixture, answer: bytes, error: str, told: str | None
) -> None:
    async def test() -> None:
        async with answering(answer, then_wait=True) as (address, heard):
            node = Node({NodeId(2): address})
            async with node.network:
                await node.start()
                node.network.send(NodeId(2), (b"never sent",))
                await wait_until(lambda: node.network.status().peers[0].last_error.startswith(error))
                # It retries, so what it says may be spread over connections.
                await wait_until(lambda: told is None or told.encode() in b"".join(heard))
        status = node.network.status().peers[0]
        assert (status.is_connected, status.messages_dropped, node.lost) == (False, 1, [])
        assert status.last_error in [about["error"] for _, about in warnings_in(caplog)]
        assert msgspec.msgpack.decode(heard[0][12:], type=Hello).node == 1
        assert b"never sent" not in b"".join(heard)

    run(test)


def test_peer_that_hangs_up_on_a_hello_is_tried_again() -> None:
    async def test() -> None:
        async with answering(b"", then_wait=False) as (address, heard):
            node = Node({NodeId(2): address})
            async with node.network:
                await node.start()
                await wait_until(lambda: len(heard) >= 3)
                assert node.network.status().peers[0].last_error == "closed by the other side"
        assert node.lost == []

    run(test)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (hello() + MESSAGE, "refused by this side: unexpected_frame: unexpected message frame to the dialling side"),
        (hello() + encode_refusal(HandshakeRefusal("bad_frame", "why")), "refused by the peer: bad_frame: why"),
        (hello() + b"garbage, quite some of it", "refused by this side: bad_frame"),
    ],
    ids=["message", "refusal", "garbage"],
)
def test_peer_that_goes_on_wrongly_is_lost(answer: bytes, error: str) -> None:
    async def test() -> None:
        async with answering(answer, then_wait=True) as (address, _):
            node = Node({NodeId(2): address})
            async with node.network:
                await node.start()
                await wait_until(lambda: node.lost != [])
                assert node.network.status().peers[0].last_error.startswith(error)
        assert node.messages == []

    run(test)
