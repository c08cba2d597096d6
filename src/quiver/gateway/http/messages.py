"""HTTP requests and responses as values: parsing, encoding, and the `Application` seam. No waiting, no sockets.

llhttp (`httptools`) does the parsing, in its strict default: content length together with chunks, two lengths, folded
headers and bare LF are errors, so that no two programs on the path can disagree about where a request ends.
`RequestReader` adds the limits and the checks that llhttp leaves to its user. The first error ends the connection,
because the start of the next request is unknown after it.

The headers of a response depend only on status, type, date and length, so their constant part is cached.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote_to_bytes

import httptools
import msgspec

JSON = "application/json"

KEPT_HEADERS = frozenset(
    (b"host", b"expect", b"transfer-encoding", b"content-length", b"accept", b"origin", b"sec-fetch-site")
)
"""Request headers that are used; the others are counted and dropped."""


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One whole request; `path` is decoded, `query` is not."""

    method: str
    path: str
    query: bytes
    headers: dict[bytes, bytes]
    body: bytes
    is_persistent: bool = True
    """Whether the connection stays open after the response."""


class HttpResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One whole response; `headers` are in addition to those of every response."""

    status: int
    body: bytes = b""
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()
    error_code: str = ""
    """The code of a failure, for metrics; it is in the body, too."""


HttpResult = HttpResponse | asyncio.Future[HttpResponse] | Coroutine[Any, Any, HttpResponse]
"""A response, a future that its creator resolves, or a coroutine for the server to run."""


class Application(Protocol):
    """Answer requests."""

    def handle(self, request: HttpRequest) -> HttpResult:
        """Answer a request; an awaited result is cancelled if the client disconnects."""
        ...

    def refuse(self, status: int, code: str, message: str) -> HttpResponse:
        """Return the response for bytes that are not a valid request, or for a request that cannot be answered."""
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
    """Return a response as bytes; without its body to a HEAD request."""
    parts = [_head(response.status, response.content_type, is_persistent), date]
    parts += [f"{name}: {value}\r\n".encode("latin-1") for name, value in response.headers]
    parts.append(
        b"\r\n" if response.status == HTTPStatus.NO_CONTENT else b"Content-Length: %d\r\n\r\n" % len(response.body)
    )
    if not is_head:
        parts.append(response.body)
    return b"".join(parts)


HEADERS_MAX = 100
"""Most headers of a request, trailers included."""
_CONTINUE = b"100-continue"
_VERSIONS = ("1.1", "1.0")


class HttpRefusal(msgspec.Struct, frozen=True):
    """Why the server stops reading from a connection."""

    status: int
    code: str
    message: str


class _Refused(Exception):  # noqa: N818 - leaves the parser's callbacks, never this module
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.refusal = HttpRefusal(status, code, message)


class RequestReader:
    """Parse received bytes; `requests` collects whole requests, `refusal` says why there will be no more.

    `admit` is called before bytes of a body are buffered. The admitted bytes are in `held_bytes` until the request is
    whole; then they are the length of its body.
    """

    def __init__(self, *, head_bytes_max: int, body_bytes_max: int, admit: Callable[[int], bool]) -> None:
        self.requests: deque[HttpRequest] = deque()
        self.refusal: HttpRefusal | None = None
        self.is_receiving = False
        """Whether a request is partially received."""
        self.begun = 0
        """Number of requests whose first byte has arrived."""
        self.awaits_continue = False
        """Whether the client waits for `100 Continue` before it sends the body."""
        self.held_bytes = 0
        self._head_bytes_max = head_bytes_max
        self._body_bytes_max = body_bytes_max
        self._admit = admit
        self._parser = httptools.HttpRequestParser(self)
        self._is_in_head = True
        self._is_last = False
        self._begin()

    def feed(self, data: bytes) -> None:
        """Parse the next bytes; after a refusal, or after the connection's last request, they are dropped."""
        if self.refusal is not None or self._is_last:
            return
        was_in_head = self.is_receiving and self._is_in_head
        try:
            self._parser.feed_data(data)
            # llhttp buffers a header until it is whole, so an endless header is counted by its received bytes.
            if was_in_head and self._is_in_head and self.is_receiving:
                self._count_head(len(data))
        except httptools.HttpParserUpgrade:
            self._is_last = True  # the bytes that follow are of an unsupported protocol
        except httptools.HttpParserCallbackError as error:
            self._refuse_by(error)
        except httptools.HttpParserError as error:
            # Bytes after a request with `Connection: close` are ignored; that request is still answered.
            if not self._is_last:
                self.refusal = HttpRefusal(400, "bad_http", f"invalid HTTP/1.1: {error}")
        except _Refused as refused:
            self.refusal = refused.refusal

    def _refuse_by(self, error: httptools.HttpParserCallbackError) -> None:
        cause = error.__context__
        if not isinstance(cause, _Refused):
            raise error
        self.refusal = cause.refusal

    def _begin(self) -> None:
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._head_bytes = 0
        self._header_count = 0
        self._length = -1
        self._received_bytes = 0

    # Callbacks of the parser, in this order.

    def on_message_begin(self) -> None:
        """Start a request."""
        self._begin()
        self.begun += 1
        self.is_receiving = self._is_in_head = True

    def on_url(self, url: bytes) -> None:
        """Append to the request target."""
        self._count_head(len(url))
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; trailers are counted and ignored."""
        self._header_count += 1
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self._head_bytes_max:
            self._count_head(0)
        if self._header_count > HEADERS_MAX:
            raise _Refused(431, "too_many_headers", f"more than {HEADERS_MAX} headers")
        name = name.lower()
        if name not in KEPT_HEADERS or not self._is_in_head:
            return
        if name in self._headers:
            if name in (b"host", b"transfer-encoding"):
                raise _Refused(400, "bad_http", f"two {name.decode()} headers")
            value = self._headers[name] + b", " + value
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        """Check the headers before any of the body is buffered."""
        self._is_in_head = False
        version, headers = self._parser.get_http_version(), self._headers
        if version not in _VERSIONS:
            raise _Refused(400, "bad_http", "only HTTP/1.1 and HTTP/1.0 are supported")
        if version == "1.1" and b"host" not in headers:
            raise _Refused(400, "bad_http", "the Host header is missing")
        coding = headers.get(b"transfer-encoding")
        if coding is not None and (version != "1.1" or coding.lower() != b"chunked"):
            raise _Refused(400, "bad_http", "the only supported transfer coding is chunked, with HTTP/1.1")
        self._length = int(headers.get(b"content-length", b"-1"))
        if self._length > self._body_bytes_max:
            raise self._too_large()
        has_body = coding is not None or self._length > 0
        if self._parser.should_upgrade():
            self._is_last = True
            if has_body:
                raise _Refused(400, "bad_http", "a request with Upgrade must not have a body")
        if self._length > 0:
            self._hold(self._length)
        self.awaits_continue = has_body and headers.get(b"expect", b"").lower() == _CONTINUE

    def on_body(self, body: bytes) -> None:
        """Append to the body."""
        self.awaits_continue = False
        self._received_bytes += len(body)
        if self._length < 0:
            if self._received_bytes > self._body_bytes_max:
                raise self._too_large()
            self._hold(len(body))
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Complete the request."""
        self.is_receiving = self.awaits_continue = False
        is_persistent = self._parser.should_keep_alive() and not self._is_last
        self._is_last = not is_persistent
        path, query = _split_target(self._target)
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self.held_bytes = 0
        self.requests.append(
            HttpRequest(
                method=self._parser.get_method().decode(),
                path=path,
                query=query,
                headers=self._headers,
                body=body,
                is_persistent=is_persistent,
            )
        )

    def _hold(self, size_bytes: int) -> None:
        if not self._admit(size_bytes):
            raise _Refused(503, "overloaded", "not done: too many request bytes are in memory; retry later")
        self.held_bytes += size_bytes

    def _count_head(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > self._head_bytes_max:
            raise _Refused(431, "head_too_large", f"the request's headers exceed {self._head_bytes_max} bytes")

    def _too_large(self) -> _Refused:
        return _Refused(413, "too_large", f"not done: the request's body exceeds {self._body_bytes_max} bytes")


def _split_target(target: bytes) -> tuple[str, bytes]:
    """Return the decoded path and the raw query of a request's target."""
    if not target.startswith(b"/"):
        target = _path_of_absolute(target)
    path, _, query = target.partition(b"#")[0].partition(b"?")
    if b"%" not in path:
        return path.decode("latin-1"), query
    try:
        return unquote_to_bytes(path).decode(), query
    except UnicodeDecodeError:
        raise _Refused(400, "bad_http", "the path is not UTF-8") from None


def _path_of_absolute(target: bytes) -> bytes:
    """Return path and query of a target in absolute form (`http://host/path`), as sent to proxies."""
    _, scheme, rest = target.partition(b"://")
    return b"/" + rest.partition(b"/")[2] if scheme else target
