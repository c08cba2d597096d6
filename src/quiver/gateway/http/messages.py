"""HTTP requests and responses as values: parsing, encoding, and the `Application` seam. No waiting, no sockets.

llhttp (`httptools`) does the parsing, in its strict default: content length together with chunks, two lengths, folded
headers and bare LF are errors, so that no two programs on the path can disagree about where a request ends.
`RequestReader` adds the limits and the checks that llhttp leaves to its user. The first error ends the connection,
because the start of the next request is unknown after it.

Memory is taken for bytes that have arrived, never for bytes that were announced. A request may be refused when its
headers are complete: its body is then dropped as it arrives, and the refusal is its answer.

The headers of a response depend only on status, type, date and length, so their constant part is cached.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote_to_bytes

import httptools
import msgspec

from quiver.security.identity import ConnectionIdentity

JSON = "application/json"
NO_CONTENT = 204
"""As a number: comparing with a member of `HTTPStatus` calls a Python function for each response."""

REQUEST_ID = b"x-request-id"
KEPT_HEADERS = frozenset(
    (
        b"host",
        b"expect",
        b"transfer-encoding",
        b"content-length",
        b"accept",
        b"origin",
        b"sec-fetch-site",
        b"user-agent",
        b"referer",
        b"authorization",
        REQUEST_ID,
        b"traceparent",
    )
)
"""Request headers that are used; the others are counted and dropped."""


class ResponseRoom(Protocol):
    """The memory of a response that is sent in pieces."""

    def release(self) -> None:
        """Count it no more: it is sent, or its client is gone; idempotent."""
        ...


class HttpResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One response; `headers` are in addition to those of every response."""

    status: int
    body: bytes = b""
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()
    error_code: str = ""
    """The code of a failure, for metrics; it is in the body, too."""
    stream: AsyncIterator[bytes] | None = None
    """The body piece by piece, instead of `body`; the next piece is asked for once the client has read enough."""
    stream_bytes: int = 0
    """Bytes of the stream for quotas: about how many, and once it is sent, exactly."""
    room: ResponseRoom | None = None
    """What counts the memory of a stream until it is sent; the client must read it as soon as any other response."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the body, as far as they are known."""
        return len(self.body) or self.stream_bytes


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One whole request; `path` is decoded except for escaped slashes, `query` is not decoded."""

    method: str
    path: str
    query: bytes
    headers: dict[bytes, bytes]
    body: bytes | bytearray
    is_persistent: bool = True
    """Whether the connection stays open after the response."""
    answer: HttpResponse | None = None
    """The answer of a request that was refused by its headers; its body was dropped."""
    identity: ConnectionIdentity = msgspec.field(default_factory=ConnectionIdentity)
    """Who the connection speaks for: the user of the client's certificate, or nobody known; with its address."""
    is_http_10: bool = False
    """Whether it knows no chunks: a body whose length is not known ends with the connection."""


HttpResult = HttpResponse | asyncio.Future[HttpResponse] | Coroutine[Any, Any, HttpResponse]
"""A response, a future that its creator resolves, or a coroutine for the server to run."""


class HttpHead(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose headers are complete; its body may not have arrived."""

    method: str
    path: str
    query: bytes
    headers: dict[bytes, bytes]
    length: int
    """Bytes of the announced body; 0 without a body, -1 for a body in chunks."""
    identity: ConnectionIdentity
    """Who the connection speaks for, as in a request."""


class Application(Protocol):
    """Answer requests."""

    exempt_paths: frozenset[str]
    """Paths that are never refused for lack of room and never wait for a turn, such as health checks."""

    def admit(self, head: HttpHead) -> HttpResponse | None:
        """Refuse a request by its headers, or return None; asked for every request but those to exempt paths."""
        ...

    def handle(self, request: HttpRequest) -> HttpResult:
        """Answer a request; an awaited result is cancelled if the client disconnects."""
        ...

    def flow_of(self, request: HttpRequest) -> tuple[str, str]:
        """Return the principal and the topic of a request, for a fair order; cheap, and called under load alone."""
        ...

    def is_long_poll(self, request: HttpRequest) -> bool:
        """Return whether a request may wait for messages; cheap, and called under load alone."""
        ...

    def refuse(self, status: int, code: str, message: str) -> HttpResponse:
        """Return the response for bytes that are not a valid request, or for a request that cannot be answered."""
        ...


@lru_cache(maxsize=256)
def _head(status: int, content_type: str, is_persistent: bool) -> bytes:  # noqa: FBT001 - a key of the cache
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    if status != NO_CONTENT:
        lines.append(f"Content-Type: {content_type}")
    lines += ["X-Content-Type-Options: nosniff", "Cache-Control: no-store", "Cross-Origin-Resource-Policy: same-origin"]
    if not is_persistent:
        lines.append("Connection: close")
    return "".join(f"{line}\r\n" for line in lines).encode()


def encode_response(response: HttpResponse, *, date: bytes, is_persistent: bool, is_head: bool = False) -> bytes:
    """Return a response as bytes; without its body to a HEAD request."""
    parts = [_head(response.status, response.content_type, is_persistent), date]
    if response.headers:
        parts += [f"{name}: {value}\r\n".encode("latin-1") for name, value in response.headers]
    parts.append(b"\r\n" if response.status == NO_CONTENT else b"Content-Length: %d\r\n\r\n" % len(response.body))
    if not is_head:
        parts.append(response.body)
    return b"".join(parts)


def encode_stream_head(response: HttpResponse, *, date: bytes, is_persistent: bool, is_chunked: bool) -> bytes:
    """Return the head of a response whose body follows in pieces."""
    parts = [_head(response.status, response.content_type, is_persistent), date]
    parts += [f"{name}: {value}\r\n".encode("latin-1") for name, value in response.headers]
    if is_chunked:
        parts.append(b"Transfer-Encoding: chunked\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


def encode_chunk(piece: bytes) -> bytes:
    """Return a piece of a body in chunks; an empty one is the end."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


HEADERS_MAX = 100
"""Most headers of a request, trailers included."""
DROPPED_BYTES_MAX = 64 * 1024
"""A refused request's body up to this size is read and dropped; a larger one ends the connection instead."""
_CONTINUE = b"100-continue"
_VERSIONS = ("1.1", "1.0")
_ABSOLUTE = re.compile(rb"https?://(?P<host>[^/?#@]+)(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
"""A target in absolute form, as sent to proxies."""
_ESCAPED_SLASH = re.compile(rb"%2f", re.IGNORECASE)
"""It stays escaped: decoded, it would look like the end of a segment."""


class HttpRefusal(msgspec.Struct, frozen=True):
    """Why the server stops reading from a connection."""

    status: int
    code: str
    message: str
    answer: HttpResponse | None = None
    """The whole answer, if there is one already."""


class _Refused(Exception):  # noqa: N818 - leaves the parser's callbacks, never this module
    def __init__(self, status: int, code: str, message: str, answer: HttpResponse | None = None) -> None:
        super().__init__(message)
        self.refusal = HttpRefusal(status, code, message, answer)


class RequestReader:
    """Parse received bytes; `requests` collects whole requests, `refusal` says why there will be no more.

    `admit` is asked when the headers of a request are complete; a response refuses it. `hold` is called before bytes of
    a body are kept. The held bytes are in `held_bytes` until the request is whole; then they are the length of its
    body. `close` must be called at the end: reader and parser refer to each other, and a partial body would stay in
    memory until the next garbage collection.
    """

    def __init__(
        self,
        *,
        head_bytes_max: int,
        body_bytes_max: int,
        hold: Callable[[int], bool],
        admit: Callable[[HttpHead], HttpResponse | None] | None = None,
    ) -> None:
        self.requests: deque[HttpRequest] = deque()
        self.refusal: HttpRefusal | None = None
        self.identity = ConnectionIdentity()
        """Who the connection speaks for, which its requests carry."""
        self.is_receiving = False
        """Whether a request is partially received."""
        self.is_in_head = True
        """Whether the headers of the current request are incomplete."""
        self.begun = 0
        """Number of requests whose first byte has arrived."""
        self.awaits_continue = False
        """Whether the client waits for `100 Continue` before it sends the body."""
        self.held_bytes = 0
        self.received_bytes = 0
        """Bytes of the current request's body that have arrived."""
        self._head_bytes_max = head_bytes_max
        self._body_bytes_max = body_bytes_max
        self._hold = hold
        self.admit = admit
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._is_last = False
        self._is_http_10 = False
        self._target = b""
        self._path = ""
        self._query = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: bytes | bytearray = b""
        self._answer: HttpResponse | None = None
        self._head_bytes = 0
        self._header_count = 0
        self._unfinished_bytes = 0
        self._length = -1

    def feed(self, data: bytes | memoryview) -> None:
        """Parse the next bytes; after a refusal, or after the connection's last request, they are dropped."""
        if self.refusal is not None or self._is_last or self._parser is None:
            return
        count_before = self._header_count if self.is_receiving and self.is_in_head else -1
        try:
            self._parser.feed_data(data)
            if count_before == self._header_count and self.is_in_head and self.is_receiving:
                self._count_unfinished(len(data))
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

    def release(self) -> int:
        """Drop the partial body; return how many bytes of it were held."""
        self._body = b""
        held_bytes, self.held_bytes = self.held_bytes, 0
        return held_bytes

    def close(self) -> None:
        """Free everything at once; bytes that are fed later are dropped."""
        self.release()
        self._parser = None

    def _refuse_by(self, error: httptools.HttpParserCallbackError) -> None:
        cause = error.__context__
        if not isinstance(cause, _Refused):
            raise error
        self.refusal = cause.refusal

    # Callbacks of the parser, in this order.

    def on_message_begin(self) -> None:
        """Start a request."""
        self._target = b""
        self._headers = {}
        self._body = b""
        self._answer = None
        self._head_bytes = self._header_count = self._unfinished_bytes = 0
        self._length = -1
        self.received_bytes = 0
        self.begun += 1
        self.is_receiving = self.is_in_head = True

    def on_url(self, url: bytes) -> None:
        """Append to the request target."""
        self._target += url
        self._head_bytes += len(url)
        self._unfinished_bytes = 0
        if self._head_bytes > self._head_bytes_max:
            raise self._head_too_large()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; trailers are counted and ignored."""
        self._header_count += 1
        self._unfinished_bytes = 0
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self._head_bytes_max:
            raise self._head_too_large()
        if self._header_count > HEADERS_MAX:
            raise _Refused(431, "too_many_headers", f"more than {HEADERS_MAX} headers")
        name = name.lower()
        if name not in KEPT_HEADERS or not self.is_in_head:
            return
        if name in self._headers:
            if name in (b"host", b"transfer-encoding"):
                raise _Refused(400, "bad_http", f"two {name.decode()} headers")
            value = self._headers[name] + b", " + value
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        """Check the headers and ask for admission before any of the body is kept."""
        self.is_in_head = False
        parser, headers = self._parser, self._headers
        assert parser is not None
        version = parser.get_http_version()
        if version not in _VERSIONS:
            raise _Refused(400, "bad_http", "only HTTP/1.1 and HTTP/1.0 are supported")
        self._is_http_10 = version == "1.0"
        if version == "1.1" and b"host" not in headers:
            raise _Refused(400, "bad_http", "the Host header is missing")
        coding = headers.get(b"transfer-encoding")
        if coding is not None and (version != "1.1" or coding.lower() != b"chunked"):
            raise _Refused(400, "bad_http", "the only supported transfer coding is chunked, with HTTP/1.1")
        self._length = int(headers.get(b"content-length", b"-1"))
        if self._length > self._body_bytes_max:
            raise self._too_large()
        target = self._target
        if target.startswith(b"/") and b"%" not in target and b"#" not in target:
            path, _, self._query = target.partition(b"?")
            self._path = path.decode("latin-1")
        else:
            self._path, self._query = _split_target(target, headers)
        has_body = coding is not None or self._length > 0
        if parser.should_upgrade():
            self._is_last = True
            if has_body:
                raise _Refused(400, "bad_http", "a request with Upgrade must not have a body")
        self.awaits_continue = has_body and headers.get(b"expect", b"").lower() == _CONTINUE
        if self.admit is not None:
            self._ask_admission(self.admit, -1 if coding is not None else max(0, self._length))

    def on_body(self, body: bytes) -> None:
        """Append to the body; it is one object, however small its pieces are."""
        self.awaits_continue = False
        self.received_bytes += len(body)
        if self.received_bytes > self._body_bytes_max:
            raise self._too_large()
        if self._answer is not None:
            return
        if not self._hold(len(body)):
            raise _Refused(503, "overloaded", "not done: too many request bytes are in memory; retry later")
        self.held_bytes += len(body)
        if not self._body:
            self._body = body
        elif isinstance(self._body, bytearray):
            self._body += body
        else:
            self._body = bytearray(self._body) + body

    def on_message_complete(self) -> None:
        """Complete the request."""
        parser = self._parser
        assert parser is not None
        self.is_receiving = self.awaits_continue = False
        is_persistent = parser.should_keep_alive() and not self._is_last
        self._is_last = not is_persistent
        body, self._body = self._body, b""
        self.held_bytes = 0
        self.requests.append(
            HttpRequest(
                method=parser.get_method().decode(),
                path=self._path,
                query=self._query,
                headers=self._headers,
                body=body,
                is_persistent=is_persistent,
                answer=self._answer,
                identity=self.identity,
                is_http_10=self._is_http_10,
            )
        )

    def _ask_admission(self, admit: Callable[[HttpHead], HttpResponse | None], length: int) -> None:
        assert self._parser is not None
        method = self._parser.get_method().decode()
        answer = admit(
            HttpHead(
                method=method,
                path=self._path,
                query=self._query,
                headers=self._headers,
                length=length,
                identity=self.identity,
            )
        )
        if answer is None:
            return
        if self.awaits_continue or not 0 <= length <= DROPPED_BYTES_MAX:
            raise _Refused(answer.status, "", "", answer)
        self._answer = answer

    def _count_unfinished(self, size_bytes: int) -> None:
        """Count bytes of a header that is not whole; llhttp buffers it, however long it gets."""
        self._unfinished_bytes += size_bytes
        if self._unfinished_bytes > self._head_bytes_max:
            raise self._head_too_large()

    def _head_too_large(self) -> _Refused:
        return _Refused(431, "head_too_large", f"the request's headers exceed {self._head_bytes_max} bytes")

    def _too_large(self) -> _Refused:
        return _Refused(413, "too_large", f"not done: the request's body exceeds {self._body_bytes_max} bytes")


def _split_target(target: bytes, headers: dict[bytes, bytes]) -> tuple[str, bytes]:
    """Return the decoded path and the raw query of a request's target; the host of an absolute one replaces `Host`."""
    if not target.startswith(b"/") and (absolute := _ABSOLUTE.match(target)):
        headers[b"host"], target = absolute["host"], absolute["rest"]
        if not target.startswith(b"/"):
            target = b"/" + target
    path, _, query = target.partition(b"#")[0].partition(b"?")
    if b"%" not in path:
        return path.decode("latin-1"), query
    try:
        return "%2F".join(unquote_to_bytes(part).decode() for part in _ESCAPED_SLASH.split(path)), query
    except UnicodeDecodeError:
        raise _Refused(400, "bad_http", "the path is not UTF-8") from None
