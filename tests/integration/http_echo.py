"""An HTTP server with an application that echoes, over real sockets, and a client that reads responses strictly."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import ParamSpec

from quiver.clock import SystemClock
from quiver.config import GatewaySettings
from quiver.gateway.http import HttpHead, HttpRequest, HttpResponse, HttpResult, HttpServer
from quiver.wire.answer_memory import AnswerMemory

HOST = b"Host: a\r\n"
PATIENCE_S = 20
"""How long a test waits for what must happen; nothing is said about speed."""


P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class EchoApplication:
    """Answer with what was asked; `/wait` when it is let go, `/fail` never well."""

    exempt_paths = frozenset(("/healthz",))

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.begun: list[str] = []
        self.cancelled: list[str] = []

    def handle(self, request: HttpRequest) -> HttpResult:
        self.begun.append(request.path)
        match request.path:
            case "/wait":
                return self._wait(request)
            case "/fail":
                raise RuntimeError("a bug")
            case "/fail_later":
                return self._fail_later()
            case "/large":
                return HttpResponse(status=200, body=b"x" * (8 * 1024 * 1024))
            case "/nothing":
                return HttpResponse(status=204)
            case _:
                return HttpResponse(status=200, body=request.path.encode() + b"|" + request.body)

    async def _wait(self, request: HttpRequest) -> HttpResponse:
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.path)
            raise
        return HttpResponse(status=200, body=b"waited")

    async def _fail_later(self) -> HttpResponse:
        await asyncio.sleep(0)
        raise RuntimeError("a bug")

    def admit(self, head: HttpHead) -> HttpResponse | None:
        return None

    def is_long_poll(self, request: HttpRequest) -> bool:
        return False

    def flow_of(self, request: HttpRequest) -> tuple[str, str]:
        return "", request.path

    def refuse(self, status: int, code: str, message: str) -> HttpResponse:
        return HttpResponse(status=status, body=code.encode())


class Served:
    """A server, its application, and what it said it has answered."""

    def __init__(self, server: HttpServer, application: EchoApplication, answered: list[int]) -> None:
        self.server = server
        self.application = application
        self.answered = answered
        self.clients: list[Client] = []

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection(*self.server.address))
        self.clients.append(client)
        return client


class Client:
    """One connection that reads responses as a strict client does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def get(self, path: str, *headers: bytes) -> tuple[int, bytes]:
        lines = b"".join(header + b"\r\n" for header in headers)
        await self.send(b"GET " + path.encode() + b" HTTP/1.1\r\n" + HOST + lines + b"\r\n")
        return await self.read()

    async def read(self, *, is_head: bool = False) -> tuple[int, bytes]:
        head, body = await self.read_all(is_head=is_head)
        return int(head.split(b" ")[1]), body

    async def read_all(self, *, is_head: bool = False) -> tuple[bytes, bytes]:
        async with asyncio.timeout(PATIENCE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = [line for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")]
            body = await self.reader.readexactly(int(length[0].split()[1])) if length and not is_head else b""
        return head, body

    async def is_closed(self) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True


@asynccontextmanager
async def serving(
    settings: GatewaySettings | None = None,
    application: EchoApplication | None = None,
    memory: AnswerMemory | None = None,
) -> AsyncIterator[Served]:
    application, answered = application or EchoApplication(), list[int]()
    server = HttpServer(
        application,
        host="127.0.0.1",
        port=0,
        settings=settings or GatewaySettings(),
        clock=SystemClock(),
        on_answered=lambda _, response, __: answered.append(response.status if response else 0),
        memory=memory,
    )
    served = Served(server, application, answered)
    async with server:
        await server.serve()
        try:
            yield served
        finally:
            for client in served.clients:
                client.writer.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for says nothing by itself
            await asyncio.sleep(0.005)
