"""The HTTP server over real sockets: order, bounds, deadlines, and how it stops."""

from __future__ import annotations

import asyncio

import pytest
from http_echo import HOST, PATIENCE_S, EchoApplication, in_loop, serving, until

from quiver.clock import SystemClock
from quiver.config import GatewaySettings
from quiver.errors import ConfigError
from quiver.gateway.http import HttpServer


@in_loop
async def test_connection_serves_many_requests() -> None:
    async with serving() as served:
        client = await served.connect()
        for number in range(3):
            assert await client.get(f"/{number}") == (200, f"/{number}|".encode())
        assert served.answered == [200, 200, 200]


@in_loop
async def test_pipelined_requests_are_answered_in_order_one_at_a_time() -> None:
    async with serving() as served:
        client = await served.connect()
        paths = ["/wait", *(f"/{number}" for number in range(100))]
        await client.send(b"".join(b"GET " + path.encode() + b" HTTP/1.1\r\n" + HOST + b"\r\n" for path in paths))
        await until(lambda: served.application.begun)
        await asyncio.sleep(0.05)
        assert served.application.begun == ["/wait"]
        served.application.released.set()
        bodies = [(await client.read())[1] for _ in paths]
        assert bodies == [b"waited", *(f"/{number}|".encode() for number in range(100))]


@in_loop
async def test_body_that_comes_byte_by_byte_is_read() -> None:
    async with serving() as served:
        client = await served.connect()
        for byte in b"POST /x HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\n\r\nabc":
            await client.send(bytes((byte,)))
        assert await client.read() == (200, b"/x|abc")


@in_loop
async def test_chunked_body_is_read() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(b"POST /x HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await client.send(b"2\r\nde\r\n0\r\n\r\n")
        assert await client.read() == (200, b"/x|abcde")


@in_loop
async def test_client_that_asks_for_leave_gets_it() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(b"POST /x HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert (await client.read())[0] == 100
        await client.send(b"abc")
        assert await client.read() == (200, b"/x|abc")


@in_loop
async def test_client_that_asks_for_leave_to_send_too_much_is_refused() -> None:
    async with serving(GatewaySettings(body_bytes_max=1024)) as served:
        client = await served.connect()
        await client.send(b"POST /x HTTP/1.1\r\n" + HOST + b"Content-Length: 2000\r\nExpect: 100-continue\r\n\r\n")
        assert await client.read() == (413, b"too_large")
        assert await client.is_closed()


@in_loop
async def test_refused_client_reads_why_although_it_goes_on_sending() -> None:
    async with serving(GatewaySettings(body_bytes_max=1024)) as served:
        client = await served.connect()
        await client.send(b"POST /x HTTP/1.1\r\n" + HOST + b"Content-Length: 4000000\r\n\r\n")
        await client.send(b"x" * 4_000_000)
        assert await client.read() == (413, b"too_large")


@in_loop
async def test_head_gets_the_head_alone() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(b"HEAD /x HTTP/1.1\r\n" + HOST + b"\r\n")
        head, _ = await client.read_all(is_head=True)
        assert b"Content-Length: 3\r\n" in head
        assert await client.get("/y") == (200, b"/y|")


@in_loop
async def test_nothing_has_neither_length_nor_type() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(b"GET /nothing HTTP/1.1\r\n" + HOST + b"\r\n")
        head, body = await client.read_all()
        assert head.startswith(b"HTTP/1.1 204 No Content\r\n")
        assert b"Content-" not in head.replace(b"X-Content-Type-Options", b"")
        assert body == b""
        assert await client.get("/y") == (200, b"/y|")


@in_loop
async def test_connection_ends_when_the_client_asks_for_it() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(b"GET /x HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")
        head, _ = await client.read_all()
        assert b"Connection: close\r\n" in head
        assert await client.is_closed()


@in_loop
async def test_http_1_0_ends_with_its_answer() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(b"GET /x HTTP/1.0\r\n\r\n")
        assert (await client.read())[0] == 200
        assert await client.is_closed()


@in_loop
async def test_bad_request_is_answered_behind_the_good_ones_before_it() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(b"GET /x HTTP/1.1\r\n" + HOST + b"\r\nnonsense\r\n\r\n")
        assert await client.read() == (200, b"/x|")
        assert await client.read() == (400, b"bad_http")
        assert await client.is_closed()


@in_loop
async def test_work_for_a_client_that_has_gone_is_cancelled() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(b"GET /wait HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\n12345")
        await until(lambda: served.application.begun)
        client.writer.transport.abort()
        await until(lambda: served.application.cancelled)
        await until(lambda: served.server.status().connections == 0)
        assert served.answered == [0]
        assert served.server.status().body_bytes == 0
        assert served.server.status().requests == 0


@pytest.mark.parametrize("path", ["/fail", "/fail_later"])
@in_loop
async def test_bug_in_a_handler_is_answered_and_harms_nobody_else(path: str) -> None:
    async with serving() as served:
        client, other = await served.connect(), await served.connect()
        await other.send(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
        assert await client.get(path) == (500, b"internal_error")
        assert await client.get("/x") == (200, b"/x|")
        served.application.released.set()
        assert await other.read() == (200, b"waited")


@in_loop
async def test_idle_connection_is_closed() -> None:
    async with serving(GatewaySettings(idle_timeout_ms=50)) as served:
        client = await served.connect()
        assert (await client.get("/x"))[0] == 200
        assert await client.is_closed()


@in_loop
async def test_request_that_takes_too_long_to_arrive_is_refused() -> None:
    async with serving(GatewaySettings(receive_timeout_ms=50)) as served:
        client = await served.connect()
        await client.send(b"GET /x HTTP/1.1\r\nHo")
        assert await client.read() == (408, b"too_slow")
        assert await client.is_closed()
        assert served.server.status().timed_out == 1


@in_loop
async def test_time_to_arrive_counts_from_the_first_byte_however_often_more_come() -> None:
    async with serving(GatewaySettings(receive_timeout_ms=200)) as served:
        client = await served.connect()
        await client.send(b"GET /x HTTP/1.1\r\n")

        async def trickle() -> None:
            while True:
                await client.send(b"X: y\r\n")
                await asyncio.sleep(0.02)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(trickle(), PATIENCE_S)


@in_loop
async def test_long_poll_is_not_held_to_the_time_to_arrive() -> None:
    async with serving(GatewaySettings(receive_timeout_ms=500, idle_timeout_ms=500)) as served:
        client = await served.connect()
        await client.send(b"POST /wait HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n{")
        await client.send(b"}")
        await asyncio.sleep(1.2)
        served.application.released.set()
        assert await client.read() == (200, b"waited")


@in_loop
async def test_client_that_does_not_read_is_cut_off() -> None:
    async with serving(GatewaySettings(send_timeout_ms=50)) as served:
        client = await served.connect()
        transport = client.writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        for _ in range(4):
            client.writer.write(b"GET /large HTTP/1.1\r\n" + HOST + b"\r\n")
        await until(lambda: served.server.status().timed_out)
        await until(lambda: served.server.status().connections == 0)
        assert len(served.application.begun) < 4, "nothing was begun whose answer nobody reads"


@in_loop
async def test_one_connection_too_many_takes_the_place_of_the_longest_idle() -> None:
    async with serving(GatewaySettings(connections_max=2)) as served:
        first, second = await served.connect(), await served.connect()
        assert (await first.get("/1"))[0] == 200
        assert (await second.get("/2"))[0] == 200
        third = await served.connect()
        assert (await third.get("/3"))[0] == 200
        assert await first.is_closed()
        assert (await second.get("/2"))[0] == 200


@in_loop
async def test_one_connection_too_many_is_refused_if_all_others_are_busy() -> None:
    async with serving(GatewaySettings(connections_max=1)) as served:
        busy = await served.connect()
        await busy.send(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
        await until(lambda: served.application.begun)
        other = await served.connect()
        assert await other.get("/x") == (503, b"overloaded")
        assert await other.is_closed()
        served.application.released.set()
        assert (await busy.read())[0] == 200


@in_loop
async def test_one_request_too_many_is_refused_at_once() -> None:
    async with serving(GatewaySettings(requests_max=1)) as served:
        busy, other = await served.connect(), await served.connect()
        await busy.send(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
        await until(lambda: served.application.begun)
        assert await other.get("/x") == (503, b"overloaded")
        served.application.released.set()
        assert (await busy.read())[0] == 200
        assert await other.get("/x") == (200, b"/x|")


@in_loop
async def test_bodies_are_bounded_together() -> None:
    async with serving(GatewaySettings(body_bytes_max=1024, bodies_bytes_max=1500)) as served:
        busy, other = await served.connect(), await served.connect()
        await busy.send(b"POST /wait HTTP/1.1\r\n" + HOST + b"Content-Length: 1000\r\n\r\n" + b"x" * 1000)
        await until(lambda: served.application.begun)
        await other.send(b"POST /x HTTP/1.1\r\n" + HOST + b"Content-Length: 1000\r\n\r\n" + b"x" * 1000)
        assert await other.read() == (503, b"overloaded")
        served.application.released.set()
        assert (await busy.read())[0] == 200
        assert served.server.status().body_bytes == 0


@in_loop
async def test_many_idle_connections_leave_the_others_alone() -> None:
    async with serving() as served:
        for _ in range(300):
            await served.connect()
        slow = [await served.connect() for _ in range(50)]
        for client in slow:
            await client.send(b"POST /x HTTP/1.1\r\nHost")
        client = await served.connect()
        for _ in range(20):
            assert (await client.get("/x"))[0] == 200
        assert served.server.status().connections == 351


@in_loop
async def test_close_answers_what_has_come_and_ends_idle_connections() -> None:
    async with serving() as served:
        busy, idle, within = await served.connect(), await served.connect(), await served.connect()
        assert (await idle.get("/x"))[0] == 200
        await busy.send(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\nGET /last HTTP/1.1\r\n" + HOST + b"\r\n")
        await within.send(b"POST /x HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\n\r\nab")
        await until(lambda: "/wait" in served.application.begun)
        closing = asyncio.ensure_future(served.server.close(grace_ms=PATIENCE_S * 1000))
        assert await idle.is_closed()
        await within.send(b"c")
        assert await within.read() == (200, b"/x|abc")
        with pytest.raises(OSError, match=r"."):
            await served.connect()
        served.application.released.set()
        assert await busy.read() == (200, b"waited")
        head, body = await busy.read_all()
        assert body == b"/last|"
        assert b"Connection: close\r\n" in head
        await closing


@in_loop
async def test_close_cuts_off_what_takes_longer_than_its_grace() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
        await until(lambda: served.application.begun)
        await served.server.close(grace_ms=20)
        assert await client.is_closed()
        await until(lambda: served.application.cancelled)


@in_loop
async def test_address_that_is_taken_is_a_mistake_in_the_settings() -> None:
    async with serving() as served:
        host, port = served.server.address
        second = HttpServer(
            EchoApplication(),
            host=host,
            port=port,
            settings=GatewaySettings(),
            clock=SystemClock(),
            on_answered=lambda *_: None,
        )
        with pytest.raises(ConfigError, match="cannot listen"):
            async with second:
                pass
