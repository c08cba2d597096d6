"""Connections that begin TLS and do not go on: bounded in number, and no way to keep others out."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import resource
import select
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import cast

import pytest
import trustme

from quiver import tls_acceptor
from quiver.clock import SystemClock
from quiver.tasks import TaskScope, new_event_loop
from quiver.testing import LocalCluster
from quiver.tls_acceptor import TlsAcceptor

STARTS = [b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"]
"""What silent connections send: nothing, and beginnings of a client's first message."""
LOOPS = [asyncio.new_event_loop, new_event_loop]


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Served:
    """An acceptor whose connections echo, and clients of it."""

    def __init__(self, acceptor: TlsAcceptor, context: ssl.SSLContext) -> None:
        self.acceptor = acceptor
        self.address: tuple[str, int] = acceptor.sockets[0].getsockname()
        self.context = context

    def connect(self, start: bytes) -> socket.socket:
        """Return a connection that says no more than this; the kernel accepts it at once."""
        connection = socket.create_connection(self.address)
        connection.sendall(start)
        return connection

    async def ask(self) -> bytes:
        reader, writer = await asyncio.open_connection(*self.address, ssl=self.context, server_hostname="127.0.0.1")
        writer.write(b"hello")
        answer = await reader.readexactly(5)
        writer.close()
        return answer

    async def wait_pending(self, count: int) -> None:
        while self.acceptor.pending != count:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(*, timeout_s: float = 60) -> AsyncIterator[Served]:
    authority = trustme.CA()
    own, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(own)
    authority.configure_trust(theirs)
    async with TaskScope() as tasks:
        acceptor = TlsAcceptor(Echo, own, tasks=tasks, clock=SystemClock(), timeout_s=timeout_s)
        await acceptor.bind("127.0.0.1", 0)
        await acceptor.start_serving()
        try:
            yield Served(acceptor, theirs)
        finally:
            acceptor.close()


@contextmanager
def closing(connections: list[socket.socket]) -> Iterator[None]:
    try:
        yield
    finally:
        for connection in connections:
            connection.close()


def run(make_loop: Callable[[], asyncio.AbstractEventLoop], test: Callable[[], object]) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(test())  # type: ignore[arg-type]  # every test here is a coroutine function


@pytest.mark.parametrize("make_loop", LOOPS)
@pytest.mark.parametrize("start", STARTS)
def test_silent_handshakes_are_bounded_and_keep_nobody_out(
    make_loop: Callable[[], asyncio.AbstractEventLoop], start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_acceptor, "HANDSHAKES_MAX", 4)
    monkeypatch.setattr(tls_acceptor, "YIELD_AFTER_S", 0.01)

    async def test() -> None:
        async with serving() as served:
            with closing([served.connect(start) for _ in range(40)]):
                assert await served.ask() == b"hello"
                await served.wait_pending(3)
                assert served.acceptor.evicted == 37

    run(make_loop, test)


@pytest.mark.parametrize("make_loop", LOOPS)
def test_burst_of_clients_waits_and_is_served(
    make_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_acceptor, "HANDSHAKES_MAX", 2)
    monkeypatch.setattr(tls_acceptor, "YIELD_AFTER_S", 600.0)

    async def test() -> None:
        async with serving() as served:
            assert await asyncio.gather(*(served.ask() for _ in range(30))) == [b"hello"] * 30
            await served.wait_pending(0)
            assert served.acceptor.evicted == 0

    run(make_loop, test)


@pytest.mark.parametrize("make_loop", LOOPS)
def test_handshakes_that_fail_or_take_too_long_end(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def test() -> None:
        async with serving(timeout_s=0.1) as served:
            connections = [served.connect(start) for start in (*STARTS, b"GET / HTTP/1.1\r\n\r\n")]
            with closing(connections):
                for connection in connections:
                    await asyncio.to_thread(_read_all, connection)
                await served.wait_pending(0)
                assert served.acceptor.evicted == 0

    run(make_loop, test)


@pytest.mark.parametrize("make_loop", LOOPS)
def test_closing_ends_what_is_under_way(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def test() -> None:
        async with serving() as served:
            silent = [served.connect(start) for start in STARTS]
            with closing(silent):
                await served.wait_pending(len(STARTS))
                served.acceptor.close()
                await served.wait_pending(0)
                for connection in silent:
                    await asyncio.to_thread(_read_all, connection)

    run(make_loop, test)


@pytest.mark.parametrize("make_loop", LOOPS)
def test_connection_waits_until_there_is_a_descriptor(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tls_acceptor, "RETRY_S", 0.02)

    async def test() -> None:
        async with serving() as served:
            with closing([served.connect(b"")]):
                limits = resource.getrlimit(resource.RLIMIT_NOFILE)
                free = socket.socket()
                lowest = free.fileno()
                free.close()
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
                try:
                    while "no connection accepted" not in caplog.text:  # noqa: ASYNC110 - a log tells nobody
                        await asyncio.sleep(0.005)
                    assert served.acceptor.pending == 0
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                await served.wait_pending(1)

    with caplog.at_level(logging.WARNING):
        run(make_loop, test)


def test_both_ports_of_a_node_serve_others_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_acceptor, "HANDSHAKES_MAX", 8)
    monkeypatch.setattr(tls_acceptor, "YIELD_AFTER_S", 0.05)
    authority, ca, node = trustme.CA(), tmp_path / "ca.pem", tmp_path / "node.pem"
    authority.cert_pem.write_to_path(str(ca))
    authority.issue_cert("127.0.0.1", "node-1").private_key_and_cert_chain_pem.write_to_path(str(node))
    settings = {"tls.is_enabled": "true", "tls.ca_file": str(ca), "tls.certificate_file": str(node)}
    with LocalCluster(nodes=1, settings=settings) as cluster:
        http_address = cluster.urls[0].removeprefix("https://")
        context = ssl.create_default_context(cafile=str(ca))

        def ask() -> bytes:
            connection = http.client.HTTPSConnection(http_address, timeout=60, context=context)
            connection.request("GET", "/metadata")
            answer = connection.getresponse().read()
            connection.close()
            return answer

        wire_address = _wire_address(ask())
        silent = [_silent(address) for address in (http_address, wire_address) for _ in range(60)]
        with closing(silent):
            assert ask()
            host, port = wire_address.rsplit(":", 1)
            with (
                socket.create_connection((host, int(port)), timeout=60) as plain,
                context.wrap_socket(plain, server_hostname=host) as secured,
            ):
                assert secured.version() == "TLSv1.3"
            while len(select.select(silent, [], [])[0]) < 2 * (60 - 8):  # readable: closed by the node
                pass


def _read_all(connection: socket.socket) -> None:
    """Return when the other side has closed."""
    with suppress(ConnectionError):
        while connection.recv(4096):
            pass


def _silent(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)))


def _wire_address(metadata: bytes) -> str:
    address = json.loads(metadata)["nodes"][0]["wire_address"]
    assert isinstance(address, str)
    return address
