"""HTTP over TLS with certificates made for the test."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from quiver.clock import SystemClock
from quiver.config import GatewaySettings, TlsSettings
from quiver.errors import ConfigError
from quiver.gateway.http import HttpHead, HttpRequest, HttpResponse, HttpResult, HttpServer
from quiver.tasks import new_event_loop
from quiver.wire.tls import make_http_context


class Hello:
    """Answer every request alike, and large enough that TLS sends it in pieces."""

    exempt_paths: frozenset[str] = frozenset()

    def handle(self, request: HttpRequest) -> HttpResult:
        return HttpResponse(status=200, body=b"x" * 300_000)

    def admit(self, head: HttpHead) -> HttpResponse | None:
        return None

    def is_long_poll(self, request: HttpRequest) -> bool:
        return False

    def flow_of(self, request: HttpRequest) -> tuple[str, str]:
        return "", request.path

    def refuse(self, status: int, code: str, message: str) -> HttpResponse:
        return HttpResponse(status=status, body=code.encode())


class Echo(Hello):
    """Answer with the body of the request."""

    def handle(self, request: HttpRequest) -> HttpResult:
        return HttpResponse(status=200, body=bytes(request.body))


def issue(directory: Path) -> tuple[TlsSettings, ssl.SSLContext]:
    authority = trustme.CA()
    path = directory / "node.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(path))
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return TlsSettings(is_enabled=True, certificate_file=str(path)), client


def make_server(settings: TlsSettings, application: Hello) -> HttpServer:
    return HttpServer(
        application,
        host="127.0.0.1",
        port=0,
        settings=GatewaySettings(),
        clock=SystemClock(),
        tls=make_http_context(settings, GatewaySettings()),
        on_answered=lambda *_: None,
    )


async def fetch(settings: TlsSettings, client: ssl.SSLContext | None, request: bytes) -> bytes:
    server = make_server(settings, Hello())
    async with server, asyncio.timeout(20):
        await server.serve()
        reader, writer = await asyncio.open_connection(*server.address, ssl=client)
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()


REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


def test_requests_are_answered_over_tls(tmp_path: Path) -> None:
    settings, client = issue(tmp_path)
    received = asyncio.run(fetch(settings, client, REQUEST))
    assert received.count(b"HTTP/1.1 200 OK") == 2
    assert received.endswith(b"x" * 300_000)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, new_event_loop])
def test_bodies_that_arrive_in_turns_over_tls_are_not_mixed(
    tmp_path: Path, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    settings, client = issue(tmp_path)
    bodies = [bytes([letter]) * 200_000 for letter in b"abcd"]

    async def send_in_turns() -> list[bytes]:
        server = make_server(settings, Echo())
        async with server, asyncio.timeout(20):
            await server.serve()
            streams = [await asyncio.open_connection(*server.address, ssl=client) for _ in bodies]
            for _, writer in streams:
                writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 200000\r\n\r\n")
            for first in range(0, 200_000, 50_000):
                for body, (_, writer) in zip(bodies, streams, strict=True):
                    writer.write(body[first : first + 50_000])
                    await writer.drain()
            return [await reader.read() for reader, _ in streams]

    with asyncio.Runner(loop_factory=make_loop) as runner:
        answers = runner.run(send_in_turns())
    assert [answer.partition(b"\r\n\r\n")[2] for answer in answers] == bodies


def test_refusal_is_read_over_tls(tmp_path: Path) -> None:
    settings, client = issue(tmp_path)
    assert b"400 Bad Request" in asyncio.run(fetch(settings, client, b"nonsense\r\n\r\n"))


def test_certificate_of_nobody_known_is_not_believed(tmp_path: Path) -> None:
    settings, _ = issue(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        asyncio.run(fetch(settings, ssl.create_default_context(), REQUEST))


def test_plain_http_is_not_spoken_where_tls_is(tmp_path: Path) -> None:
    settings, _ = issue(tmp_path)
    assert b"200 OK" not in asyncio.run(fetch(settings, None, REQUEST))


@pytest.mark.parametrize(
    ("wish", "is_enabled", "is_made"),
    [("auto", True, True), ("auto", False, False), ("on", False, True), ("off", True, False)],
)
def test_setting_says_whether_http_is_encrypted(tmp_path: Path, wish: str, is_enabled: bool, is_made: bool) -> None:
    issued, _ = issue(tmp_path)
    settings = TlsSettings(is_enabled=is_enabled, certificate_file=issued.certificate_file)
    made = make_http_context(settings, GatewaySettings(tls=wish))  # type: ignore[arg-type]
    assert (made is not None) == is_made


@pytest.mark.parametrize("certificate_file", ["", "/nothing/here.pem"])
def test_certificate_that_cannot_be_used_is_a_mistake_in_the_settings(certificate_file: str) -> None:
    with pytest.raises(ConfigError, match="tls"):
        make_http_context(TlsSettings(is_enabled=True, certificate_file=certificate_file), GatewaySettings())
