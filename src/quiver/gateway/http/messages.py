"""Requests and responses as values, the bytes of a response, and the seam to whoever answers.

A response's head is the same for all responses of a status and type but for its date and length, so it is made once
and kept. Nothing here waits or touches a socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Protocol

import msgspec

JSON = "application/json"

KEPT_HEADERS = frozenset(
    (b"host", b"expect", b"transfer-encoding", b"content-length", b"accept", b"origin", b"sec-fetch-site")
)
"""What of a request's headers anybody looks at; the others are counted and forgotten."""


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One whole request; `path` is decoded, `query` is not."""

    method: str
    path: str
    query: bytes
    headers: dict[bytes, bytes]
    body: bytes
    is_persistent: bool = True
    """Whether the connection stays open behind the response."""


class HttpResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One whole response; `headers` are those beside what every response has."""

    status: int
    body: bytes = b""
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


Answer = HttpResponse | asyncio.Future[HttpResponse] | Coroutine[Any, Any, HttpResponse]
"""A response, or where one will be: a future that its maker fulfils, or a coroutine for the server to run."""


class Application(Protocol):
    """Say what requests mean."""

    def handle(self, request: HttpRequest) -> Answer:
        """Answer a request; what is awaited is cancelled if the client goes away."""
        ...

    def refuse(self, status: int, code: str, message: str) -> HttpResponse:
        """Return the response to what never became a request, or could not be answered."""
        ...


@lru_cache(maxsize=256)
def _head(status: int, content_type: str, is_persistent: bool) -> bytes:  # noqa: FBT001 - a key of the cache
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    if status != HTTPStatus.NO_CONTENT:
        lines.append(f"Content-Type: {content_type}")
    lines += ["X-Content-Type-Options: nosniff", "Cache-Control: no-store"]
    if not is_persistent:
        lines.append("Connection: close")
    return "".join(f"{line}\r\n" for line in lines).encode()


def encode_response(response: HttpResponse, *, date: bytes, is_persistent: bool, is_head: bool = False) -> bytes:
    """Return a response as bytes; to a HEAD request its head alone."""
    parts = [_head(response.status, response.content_type, is_persistent), date]
    parts += [f"{name}: {value}\r\n".encode("latin-1") for name, value in response.headers]
    parts.append(
        b"\r\n" if response.status == HTTPStatus.NO_CONTENT else b"Content-Length: %d\r\n\r\n" % len(response.body)
    )
    if not is_head:
        parts.append(response.body)
    return b"".join(parts)
