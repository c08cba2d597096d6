"""Requesters that break the rules, and hosts that do: each is told so, or ended, and what is said of a call is true."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest
from wire_hosts import CLUSTER, Host, client, error_of, run, serve, wait_until

from quiver.errors import OutcomeUnknownError, QuiverError, UnavailableError
from quiver.model import Buffer, NodeId, Offset, PartitionId, TopicId
from quiver.wire import Caller, Frame, FrameKind, FrameReader, WireSettings, encode_frame
from quiver.wire.envelope import decode_response, encode_cancel, encode_request, encode_response, restore_error
from quiver.wire.handshake import decode_refusal, encode_hello, make_hello, make_requester_hello
from quiver.wire.messages import AnyRequest, FindOffset, OffsetFound, Produce, Produced
from quiver.wire.requests import Response

KIB = 1024
FIND = FindOffset(topic_id=TopicId(1), partition_id=PartitionId(0), at=5)
PRODUCE = Produce(topic_id=TopicId(1), partition_id=PartitionId(0))
HELLO = encode_hello(make_requester_hello(name="raw"))


async def answer(caller: Caller, request: AnyRequest, payload: memoryview) -> tuple[Response, Sequence[Buffer]]:
    if isinstance(request, FindOffset):
        return OffsetFound(offset=Offset(5)), ()
    await asyncio.sleep(60)
    raise AssertionError("not cancelled")


class Raw:
    """A connection that sends whatever it is told, and reads frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._frames = FrameReader(64 * KIB)

    async def next_frame(self) -> Frame | None:
        """Return the next frame, or None at the end of the connection."""
        while (frame := self._frames.next_frame()) is None:
            received = await self._reader.read(4096)
            if not received:
                return None
            self._frames.writable()[: len(received)] = received
            self._frames.received(len(received))
        return frame


@asynccontextmanager
async def dial(host: Host) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection(*host.network.address)
    raw = Raw(reader, writer)
    writer.write(HELLO)
    greeting = await raw.next_frame()
    assert greeting is not None
    assert greeting.kind is FrameKind.HELLO
    try:
        yield raw
    finally:
        writer.close()


def join(*frames: list[Buffer]) -> bytes:
    return b"".join(b"".join(frame) for frame in frames)


def ask_raw(*items: object) -> bytes:
    return b"".join(encode_frame(FrameKind.REQUEST, msgspec.msgpack.encode(items)))


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (ask_raw(1, 5000, {"type": "novel"}), "unknown_request"),
        (ask_raw(1, 5000, {"type": "find_offset"}), "decode_failed"),
        (ask_raw(1, 0, FIND), "timed_out"),
    ],
)
def test_request_that_cannot_be_done_is_answered_and_the_connection_goes_on(sent: bytes, code: str) -> None:
    async def test() -> None:
        async with serve(answer) as host, dial(host) as raw:
            raw.writer.write(sent + join(encode_request(2, 5000, FIND)))
            answers = {}
            for _ in range(2):
                frame = await raw.next_frame()
                assert frame is not None
                answered = decode_response(frame)
                answers[answered.correlation_id] = answered
            assert answers[2].failure is None
            assert answers[1].failure is not None
            error = restore_error(answers[1].failure)
            assert (error.code, error.outcome) == (code, "not_done")
            assert host.server.status().requests_refused == 1

    run(test())


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (join(encode_frame(FrameKind.REQUEST, b"\xc1")), "bad_frame"),
        (join(encode_frame(FrameKind.CANCEL, b"\x90")), "bad_frame"),
        (join(encode_request(1, 5000, PRODUCE), encode_request(1, 5000, PRODUCE)), "bad_frame"),
        (join(encode_response(1, FIND, OffsetFound(offset=Offset(1)))), "unexpected_frame"),
        (join(encode_frame(FrameKind.MESSAGE, b"", [b"x"], check_payload=True)), "unexpected_frame"),
        (HELLO, "unexpected_frame"),
    ],
    ids=["request", "cancel", "same correlation id", "response", "message", "second hello"],
)
def test_requester_that_breaks_the_rules_is_refused(sent: bytes, code: str) -> None:
    async def test() -> None:
        async with serve(answer) as host, dial(host) as raw:
            raw.writer.write(sent)
            frame = await raw.next_frame()
            assert frame is not None
            assert decode_refusal(frame).code == code
            assert await raw.next_frame() is None
            await wait_until(lambda: host.server.status().requests == 0)

    run(test())


def test_what_is_not_under_way_can_be_cancelled_without_harm() -> None:
    async def test() -> None:
        async with serve(answer) as host, dial(host) as raw:
            raw.writer.write(join(encode_cancel(1), encode_request(1, 5000, FIND)))
            frame = await raw.next_frame()
            assert frame is not None
            assert decode_response(frame).failure is None

    run(test())


def test_request_that_is_cancelled_before_it_began_is_not_done() -> None:
    async def test() -> None:
        async with serve(answer) as host, dial(host) as raw:
            # Both arrive in one read, so that no task has run yet.
            raw.writer.write(join(encode_request(1, 5000, PRODUCE), encode_cancel(1)))
            frame = await raw.next_frame()
            assert frame is not None
            failure = decode_response(frame).failure
            assert failure is not None
            assert (failure.code, failure.outcome) == ("cancelled", "not_done")

    run(test())


def test_requests_are_refused_where_none_are_taken() -> None:
    async def test() -> None:
        async with serve(answer) as host:
            await host.server.close()
            reader, writer = await asyncio.open_connection(*host.network.address)
            writer.write(HELLO)
            frame = await Raw(reader, writer).next_frame()
            assert frame is not None
            assert decode_refusal(frame).code == "not_serving"
            writer.close()

    run(test())


@pytest.mark.parametrize(
    ("identity", "kind"), [("disk-2", FrameKind.HELLO), ("disk-9", FrameKind.REFUSAL), ("", FrameKind.REFUSAL)]
)
def test_peer_is_let_in_only_with_the_disk_that_it_is_known_by(identity: str, kind: FrameKind) -> None:
    async def test() -> None:
        async with serve(answer, identity_of=lambda node: "disk-2") as host:
            reader, writer = await asyncio.open_connection(*host.network.address)
            hello = make_hello(cluster_id=CLUSTER, node=NodeId(2), incarnation=1, identity=identity)
            writer.write(encode_hello(hello))
            frame = await Raw(reader, writer).next_frame()
            assert frame is not None
            assert frame.kind is kind
            if kind is FrameKind.REFUSAL:
                assert decode_refusal(frame).code == "other_identity"
            writer.close()

    run(test())


# Hosts on plain sockets.


class RawHost:
    """A host that greets and then does what the test does."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * KIB)
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted: socket.socket | None = None

    async def greet(self, cluster_id: str = CLUSTER) -> socket.socket:
        loop = asyncio.get_running_loop()
        self.accepted, _ = await loop.sock_accept(self._listener)
        self.accepted.setblocking(False)
        await loop.sock_recv(self.accepted, 4096)
        hello = make_hello(cluster_id=cluster_id, node=NodeId(1), incarnation=1)
        await loop.sock_sendall(self.accepted, encode_hello(hello))
        return self.accepted

    def close(self) -> None:
        self._listener.close()
        if self.accepted is not None:
            self.accepted.close()


@asynccontextmanager
async def raw_host() -> AsyncIterator[RawHost]:
    host = RawHost()
    try:
        yield host
    finally:
        host.close()


def test_what_has_not_left_whole_when_the_connection_breaks_was_not_done() -> None:
    async def test() -> None:
        async with raw_host() as host, client() as pool, asyncio.TaskGroup() as group:
            small = group.create_task(error_of(pool.call(host.address, PRODUCE, timeout_ms=10_000)))
            connection = await host.greet()
            await asyncio.get_running_loop().sock_recv(connection, 4096)
            # More than the sockets take while nobody reads; those behind it wait in the queue.
            large, behind = (
                group.create_task(error_of(pool.call(host.address, PRODUCE, [payload], timeout_ms=10_000)))
                for payload in (bytes(32 * KIB * KIB), b"x")
            )
            await asyncio.sleep(0.05)
            host.close()
            errors = [await call for call in (small, large, behind)]
            assert [type(error) for error in errors] == [OutcomeUnknownError, UnavailableError, UnavailableError]
            assert {error.code for error in errors if isinstance(error, QuiverError)} == {"connection_lost"}

    run(test())


def test_request_whose_time_is_over_before_it_left_is_never_sent() -> None:
    async def test() -> None:
        async with raw_host() as host, client() as pool, asyncio.TaskGroup() as group:
            large = group.create_task(
                error_of(pool.call(host.address, PRODUCE, [bytes(32 * KIB * KIB)], timeout_ms=20_000))
            )
            connection = await host.greet()
            await wait_until(lambda: pool.status().requests == 1)
            late = await error_of(pool.call(host.address, PRODUCE, [b"late" * 100], timeout_ms=50))
            assert isinstance(late, UnavailableError)
            assert late.code == "timed_out"
            received = bytearray()
            while len(received) < 32 * KIB * KIB:
                received += await asyncio.get_running_loop().sock_recv(connection, 1 << 20)
            fast = group.create_task(error_of(pool.call(host.address, PRODUCE, [b"next"], timeout_ms=300)))
            await fast
            received += await asyncio.get_running_loop().sock_recv(connection, 1 << 20)
            assert b"next" in received
            assert b"late" not in received
            host.close()
            assert isinstance(await large, OutcomeUnknownError)

    run(test())


@pytest.mark.parametrize(
    "sent",
    [
        join(encode_frame(FrameKind.RESPONSE, b"\xc1")),
        join(encode_frame(FrameKind.MESSAGE, b"", [b"x"], check_payload=True)),
        b"garbage, and more of it than a header has",
    ],
)
def test_host_that_breaks_the_rules_is_left(sent: bytes) -> None:
    async def test() -> None:
        async with raw_host() as host, client() as pool, asyncio.TaskGroup() as group:
            call = group.create_task(error_of(pool.call(host.address, PRODUCE, timeout_ms=10_000)))
            connection = await host.greet()
            await asyncio.get_running_loop().sock_recv(connection, 4096)
            await asyncio.get_running_loop().sock_sendall(connection, sent)
            assert isinstance(await call, OutcomeUnknownError)

    run(test())


def test_response_that_cannot_be_read_leaves_the_outcome_of_a_write_unknown() -> None:
    async def test() -> None:
        async with raw_host() as host, client() as pool, asyncio.TaskGroup() as group:
            call = group.create_task(error_of(pool.call(host.address, PRODUCE, timeout_ms=10_000)))
            connection = await host.greet()
            await asyncio.get_running_loop().sock_recv(connection, 4096)
            novel = join(encode_response(1, FIND, OffsetFound(offset=Offset(1))))
            stray = join(encode_response(99, PRODUCE, Produced(base_offset=Offset(1))))
            await asyncio.get_running_loop().sock_sendall(connection, stray + novel)
            error = await call
            assert isinstance(error, OutcomeUnknownError)
            assert error.code == "decode_failed"

    run(test())


def test_host_that_never_greets_is_given_up() -> None:
    async def test() -> None:
        async with raw_host() as host, client(WireSettings(handshake_timeout_ms=50)) as pool:
            error = await error_of(pool.call(host.address, PRODUCE, timeout_ms=10_000))
            assert isinstance(error, UnavailableError)
            assert error.code == "not_reached"

    run(test())


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_host_that_does_not_answer_what_is_over_is_left(is_cancelled: bool) -> None:
    async def test() -> None:
        settings = WireSettings(unanswered_timeout_ms=100)
        async with raw_host() as host, client(settings) as pool, asyncio.TaskGroup() as group:
            waiting = group.create_task(error_of(pool.call(host.address, PRODUCE, timeout_ms=60_000)))
            connection = await host.greet()
            await asyncio.get_running_loop().sock_recv(connection, 4096)
            timeout_ms = 60_000 if is_cancelled else 200
            over = group.create_task(error_of(pool.call(host.address, PRODUCE, timeout_ms=timeout_ms)))
            await asyncio.get_running_loop().sock_recv(connection, 4096)
            if is_cancelled:
                over.cancel()
            else:
                assert isinstance(await over, OutcomeUnknownError)
            error = await waiting
            assert isinstance(error, OutcomeUnknownError)
            assert "does not answer" in error.message

    run(test())


def test_host_that_takes_nothing_more_is_left_before_the_queue_grows() -> None:
    async def test() -> None:
        async with raw_host() as host, client(WireSettings(connection_requests_max=4)) as pool:
            first = asyncio.ensure_future(
                error_of(pool.call(host.address, PRODUCE, [bytes(32 * KIB * KIB)], timeout_ms=60_000))
            )
            await host.greet()
            # Whoever comes now could still be sent before the one that waited for the connection.
            await wait_until(lambda: pool.status().requests == 1)
            for _ in range(20):
                if first.done():
                    break
                late = await error_of(pool.call(host.address, PRODUCE, timeout_ms=10))
                assert isinstance(late, UnavailableError)
            error = await first
            assert isinstance(error, UnavailableError)
            assert "accepts no requests" in error.message

    run(test())
