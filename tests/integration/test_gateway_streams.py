"""Responses whose bodies are streams, over real sockets: chunks, the pace of the client, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from http_echo import HOST, PATIENCE_S, EchoApplication, in_loop, serving, until

from quiver.config import GatewaySettings
from quiver.gateway.http import HttpRequest, HttpResponse, HttpResult
from quiver.security import ANONYMOUS
from quiver.wire.answer_memory import AnswerMemory
from quiver.wire.answer_room import AnswerRoom

PIECE = b"x" * 64 * 1024


class StreamApplication(EchoApplication):
    """Answer `/few` with three pieces, `/many` with pieces without end, `/broken` with one and an error."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0
        self.ended = 0

    def handle(self, request: HttpRequest) -> HttpResult:
        if request.path not in ("/few", "/many", "/broken"):
            return super().handle(request)
        return HttpResponse(status=200, content_type="text/plain", stream=self._pieces(request.path))

    async def _pieces(self, path: str) -> AsyncIterator[bytes]:
        try:
            if path == "/few":
                for piece in (b"one", b"", b"two", b"three"):
                    yield piece
                return
            yield b"begun"
            if path == "/broken":
                raise RuntimeError("a bug")
            while True:
                await asyncio.sleep(0)
                self.sent += len(PIECE)
                yield PIECE
        finally:
            self.ended += 1


GET = b"GET %b HTTP/1.1\r\n" + HOST + b"\r\n"
CHUNKS = b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"


@in_loop
async def test_stream_is_sent_in_chunks_and_the_connection_goes_on() -> None:
    async with serving(application=StreamApplication()) as served:
        client = await served.connect()
        await client.send(GET % b"/few" + GET % b"/after")
        async with asyncio.timeout(PATIENCE_S):
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert b"Transfer-Encoding: chunked" in head
            assert b"Content-Length" not in head
            assert await client.reader.readexactly(len(CHUNKS)) == CHUNKS
        assert await client.read() == (200, b"/after|")
        assert served.answered == [200, 200]


@in_loop
async def test_http_1_0_gets_the_pieces_alone_and_the_end_of_the_connection() -> None:
    async with serving(application=StreamApplication()) as served:
        client = await served.connect()
        await client.send(b"GET /few HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == b"onetwothree"


@in_loop
async def test_head_of_a_stream_has_no_body_and_begins_nothing() -> None:
    application = StreamApplication()
    async with serving(application=application) as served:
        client = await served.connect()
        await client.send(b"HEAD /many HTTP/1.1\r\n" + HOST + b"\r\n")
        assert (await client.read(is_head=True))[0] == 200
        assert application.sent == 0


@in_loop
async def test_client_that_does_not_read_stops_the_stream_until_it_does() -> None:
    application = StreamApplication()
    async with serving(application=application) as served:
        client = await served.connect()
        await client.send(GET % b"/many")
        await until(lambda: application.sent)
        while True:
            before = application.sent
            await asyncio.sleep(0.2)
            if application.sent == before:
                break
        async with asyncio.timeout(PATIENCE_S):
            await client.reader.readexactly(application.sent // 2)
        await until(lambda: application.sent > before)


@in_loop
async def test_client_that_leaves_ends_the_stream() -> None:
    application = StreamApplication()
    async with serving(application=application) as served:
        client = await served.connect()
        await client.send(GET % b"/many")
        await until(lambda: application.sent)
        client.writer.close()
        await until(lambda: application.ended)
        assert served.server.status().requests == 0


@in_loop
async def test_error_in_a_stream_is_no_end_that_looks_whole() -> None:
    application = StreamApplication()
    async with serving(application=application) as served:
        client = await served.connect()
        await client.send(GET % b"/broken")
        async with asyncio.timeout(PATIENCE_S):
            try:
                body = await client.reader.read()
            except ConnectionResetError:
                body = b""
        assert not body.endswith(b"0\r\n\r\n")
        assert application.ended == 1
        other = await served.connect()
        assert await other.get("/x") == (200, b"/x|")


@in_loop
async def test_server_ends_streams_when_it_closes() -> None:
    application = StreamApplication()
    async with serving(application=application) as served:
        client = await served.connect()
        await client.send(GET % b"/many")
        await until(lambda: application.sent)
        await served.server.close(grace_ms=10)
        await until(lambda: application.ended)


# -- streams that count in the memory of answers -----------------------------------------------------

MIB = 1024 * 1024


class RecordApplication(StreamApplication):
    """Answer as before, with the memory of records that counts until they are sent."""

    def __init__(self, memory: AnswerMemory) -> None:
        super().__init__()
        self._memory = memory

    def handle(self, request: HttpRequest) -> HttpResult:
        response = super().handle(request)
        if not isinstance(response, HttpResponse) or response.stream is None:
            return response
        room = AnswerRoom(self._memory, ANONYMOUS)
        room.count(MIB)
        return HttpResponse(status=200, stream=response.stream, room=room, stream_bytes=MIB)


def make_memory(limit_bytes: int = 128 * MIB) -> AnswerMemory:
    return AnswerMemory(limit_bytes=limit_bytes, connection_bytes_max=limit_bytes)


@in_loop
async def test_memory_of_a_stream_is_given_back_when_it_is_sent() -> None:
    memory = make_memory()
    async with serving(application=RecordApplication(memory), memory=memory) as served:
        client = await served.connect()
        await client.send(GET % b"/few")
        async with asyncio.timeout(PATIENCE_S):
            await client.reader.readuntil(CHUNKS)
        await until(lambda: memory.bytes == 0)
        await client.send(b"HEAD /few HTTP/1.1\r\n" + HOST + b"\r\n")
        assert (await client.read(is_head=True))[0] == 200
        assert memory.bytes == 0


@in_loop
async def test_memory_of_a_stream_is_given_back_when_its_client_leaves() -> None:
    memory = make_memory()
    application = RecordApplication(memory)
    async with serving(application=application, memory=memory) as served:
        client = await served.connect()
        await client.send(GET % b"/many")
        await until(lambda: application.sent)
        assert memory.bytes >= MIB
        client.writer.transport.abort()
        await until(lambda: memory.bytes == 0)


@in_loop
async def test_stream_that_takes_memory_must_be_read_in_one_send_timeout_however_it_is_read() -> None:
    """A client that reads a little now and then would keep the records in memory for hours."""
    memory = make_memory()
    application = RecordApplication(memory)
    async with serving(GatewaySettings(send_timeout_ms=1_000), application, memory) as served:
        client = await served.connect()
        await client.send(GET % b"/many")
        await until(lambda: application.sent)
        async with asyncio.timeout(PATIENCE_S):
            while served.server.status().connections:
                await client.reader.read(64 * 1024)
                await asyncio.sleep(0.02)
        assert served.server.status().timed_out == 1
        assert memory.bytes == 0


@in_loop
async def test_other_streams_may_be_read_as_slowly_as_their_client_likes() -> None:
    application = StreamApplication()
    async with serving(GatewaySettings(send_timeout_ms=1_000), application) as served:
        client = await served.connect()
        await client.send(GET % b"/many")
        await until(lambda: application.sent)
        for _ in range(75):
            await client.reader.read(MIB)
            await asyncio.sleep(0.02)
        assert served.server.status().connections == 1


@in_loop
async def test_what_clients_do_not_read_counts_and_they_are_closed_if_it_is_too_much() -> None:
    memory = make_memory(16 * MIB)
    async with serving(memory=memory) as served:
        clients = [await served.connect() for _ in range(6)]
        for client in clients:
            transport = client.writer.transport
            assert isinstance(transport, asyncio.Transport)
            transport.pause_reading()
            client.writer.write(b"GET /large HTTP/1.1\r\n" + HOST + b"\r\n")
        await until(lambda: memory.bytes > 12 * MIB)
        await until(lambda: memory.bytes <= 12 * MIB)
        assert 0 < served.server.status().connections < 6
        assert (await (await served.connect()).get("/x"))[0] == 200
    assert memory.bytes == 0
