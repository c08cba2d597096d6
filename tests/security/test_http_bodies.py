"""Attacks on the gateway by bodies: uploads that are aborted, cut into crumbs, announced and never sent."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_echo import HOST, Client, Served, in_loop, serving, until

from quiver.config import GatewaySettings
from quiver.gateway.http.messages import RequestReader

MIB = 1024 * 1024
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.fixture
def without_collections() -> Iterator[None]:
    """Run without the garbage collector, which must not be what frees the memory of an attack."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def upload_and_abort(served: Served, data: bytes) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, served.server.address)
        head = b"POST /x HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % (len(data) + 1)
        await loop.sock_sendall(client, head)
        await loop.sock_sendall(client, data)
        await until(lambda: served.server.status().body_bytes == len(data))
    await until(lambda: served.server.status().connections == 0)


@pytest.mark.usefixtures("without_collections")
@in_loop
async def test_aborted_uploads_are_freed_at_once() -> None:
    async with serving() as served:
        data = bytes(8 * MIB)
        await upload_and_abort(served, data)
        before = resident_bytes()
        for _ in range(10):
            await upload_and_abort(served, data)
        assert resident_bytes() - before < 3 * len(data), "ten aborted uploads of 8 MiB left more than three behind"
        assert served.server.status().body_bytes == 0


@pytest.mark.usefixtures("without_collections")
@in_loop
async def test_refused_upload_is_freed_while_its_connection_lingers() -> None:
    async with serving(GatewaySettings(body_bytes_max=9 * MIB)) as served:
        client = await served.connect()
        await client.send(b"POST /x HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n900000\r\n")
        await client.send(bytes(9 * MIB) + b"\r\n1\r\nx\r\n")
        assert (await client.read())[0] == 413
        assert served.server.status().body_bytes == 0


def test_body_of_tiny_chunks_takes_about_its_own_size() -> None:
    size = MIB
    reader = RequestReader(head_bytes_max=10_000, body_bytes_max=4 * size, hold=lambda _: True)
    reader.feed(b"POST /x HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n")
    crumbs = b"2\r\nab\r\n" * 1024
    gc.collect()
    before = len(gc.get_objects()), resident_bytes()
    for _ in range(size // 2048):
        reader.feed(crumbs)
    assert reader.held_bytes == size
    assert resident_bytes() - before[1] < 6 * size, "half a million crumbs of two bytes are kept as one body"
    assert len(gc.get_objects()) - before[0] < 1000


async def announce(served: Served, length: int) -> Client:
    client = await served.connect()
    await client.send(b"POST /x HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % length)
    return client


@in_loop
async def test_announced_bodies_that_never_come_stop_nobody() -> None:
    async with serving() as served:
        absent = [await announce(served, 16 * MIB) for _ in range(8)]
        await until(lambda: len(served.server.receiving) == len(absent))
        assert served.server.status().body_bytes == 0
        other = await announce(served, 3)
        await other.send(b"abc")
        assert await other.read() == (200, b"/x|abc")


@in_loop
async def test_stalled_bodies_make_room_for_others() -> None:
    settings = GatewaySettings(body_bytes_max=MIB, bodies_bytes_max=2 * MIB, body_progress_timeout_ms=60_000)
    async with serving(settings) as served:
        stalled = [await announce(served, MIB) for _ in range(2)]
        for client in stalled:
            await client.send(bytes(MIB - 1))
        await until(lambda: served.server.status().body_bytes == 2 * (MIB - 1))
        await until(lambda: len(served.server.progressing.older_than(1_000)) == 2)
        other = await announce(served, MIB)
        await other.send(bytes(MIB))
        assert (await other.read())[0] == 200
        assert served.server.status().timed_out == 1, "one was enough"
        assert served.server.status().body_bytes == MIB - 1
        for client in stalled:
            client.writer.transport.abort()


@in_loop
async def test_bodies_behind_a_long_poll_take_no_room() -> None:
    settings = GatewaySettings(body_bytes_max=MIB, bodies_bytes_max=2 * MIB, body_progress_timeout_ms=500)
    async with serving(settings) as served:
        polling = await served.connect()
        await polling.send(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
        post = b"POST /x HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % MIB + bytes(MIB)
        sending = asyncio.ensure_future(polling.send(8 * post))
        await until(lambda: served.server.status().body_bytes > 0)
        late = await announce(served, 10)
        assert await late.read() == (408, b"too_slow"), "more time has passed than a body may stand still"
        other = await announce(served, MIB)
        await other.send(bytes(MIB))
        assert (await other.read())[0] == 200
        served.application.released.set()
        assert await polling.read() == (200, b"waited")
        for _ in range(8):
            status, body = await polling.read()
            assert (status, len(body)) == (200, len("/x|") + MIB), "what was not read was not late, either"
        await sending
        assert served.server.status().body_bytes == 0


@in_loop
async def test_body_without_progress_is_refused() -> None:
    async with serving(GatewaySettings(body_progress_timeout_ms=50)) as served:
        client = await announce(served, 10)
        await client.send(b"abc")
        assert await client.read() == (408, b"too_slow")
        assert served.server.status().body_bytes == 0


@in_loop
async def test_body_that_arrives_in_a_trickle_is_refused() -> None:
    async with serving(GatewaySettings(body_progress_timeout_ms=200)) as served:
        client = await announce(served, MIB)

        async def trickle() -> None:
            while True:
                await client.send(b"x")
                await asyncio.sleep(0.01)

        trickling = asyncio.ensure_future(trickle())
        assert await client.read() == (408, b"too_slow")
        trickling.cancel()
