"""Bytes into requests: what is taken, what is refused, and that cutting the bytes anywhere changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.gateway.http.messages import HEADERS_MAX, HttpHead, HttpRequest, HttpResponse, RequestReader

HOST = b"Host: a\r\n"
HEAD_BYTES_MAX = 1000
BODY_BYTES_MAX = 100


def reader(*, admits: bool = True) -> RequestReader:
    return RequestReader(head_bytes_max=HEAD_BYTES_MAX, body_bytes_max=BODY_BYTES_MAX, hold=lambda _: admits)


def read(*chunks: bytes) -> RequestReader:
    made = reader()
    for chunk in chunks:
        made.feed(chunk)
    return made


def post(*headers: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"POST /topics HTTP/" + version + b"\r\n" + HOST + lines + b"\r\n" + body


GOOD: dict[str, tuple[bytes, list[tuple[str, str, bytes, bytes]]]] = {
    "get": (b"GET /topics?a=b HTTP/1.1\r\n" + HOST + b"\r\n", [("GET", "/topics", b"a=b", b"")]),
    "get with a body": (
        b"GET /size HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n{}",
        [("GET", "/size", b"", b"{}")],
    ),
    "length": (post(b"Content-Length: 3", body=b"abc"), [("POST", "/topics", b"", b"abc")]),
    "length zero": (post(b"Content-Length: 0"), [("POST", "/topics", b"", b"")]),
    "chunks": (
        post(b"Transfer-Encoding: Chunked", body=b"3\r\nabc\r\n1;x=y\r\nd\r\n0\r\nHost: evil\r\n\r\n"),
        [("POST", "/topics", b"", b"abcd")],
    ),
    "http/1.0 without a host": (b"GET / HTTP/1.0\r\n\r\n", [("GET", "/", b"", b"")]),
    "blank lines before it": (b"\r\n\r\nGET / HTTP/1.1\r\n" + HOST + b"\r\n", [("GET", "/", b"", b"")]),
    "escaped path": (
        b"GET /topics/caf%C3%A9%2Fx HTTP/1.1\r\n" + HOST + b"\r\n",
        [("GET", "/topics/café%2Fx", b"", b"")],
    ),
    "absolute target": (b"GET http://h:1/a?b=c#d HTTP/1.1\r\n" + HOST + b"\r\n", [("GET", "/a", b"b=c", b"")]),
    "absolute target without a path": (b"GET http://h HTTP/1.1\r\n" + HOST + b"\r\n", [("GET", "/", b"", b"")]),
    "absolute target with a query and no path": (
        b"GET http://h?x=1/healthz HTTP/1.1\r\n" + HOST + b"\r\n",
        [("GET", "/", b"x=1/healthz", b"")],
    ),
    "asterisk": (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", [("OPTIONS", "*", b"", b"")]),
    "several at once": (
        b"GET /1 HTTP/1.1\r\n" + HOST + b"\r\n" + post(b"Content-Length: 1", body=b"x") + b"GET /3 HTTP/1.1\r\n"
        b"" + HOST + b"\r\n",
        [("GET", "/1", b"", b""), ("POST", "/topics", b"", b"x"), ("GET", "/3", b"", b"")],
    ),
}

BAD: dict[str, tuple[bytes, int, str]] = {
    "length and chunks": (post(b"Content-Length: 3", b"Transfer-Encoding: chunked"), 400, "bad_http"),
    "chunks and length": (post(b"Transfer-Encoding: chunked", b"Content-Length: 3"), 400, "bad_http"),
    "two lengths": (post(b"Content-Length: 3", b"Content-Length: 4"), 400, "bad_http"),
    "the same length twice": (post(b"Content-Length: 3", b"Content-Length: 3", body=b"abc"), 400, "bad_http"),
    "list of lengths": (post(b"Content-Length: 3, 3", body=b"abc"), 400, "bad_http"),
    "signed length": (post(b"Content-Length: +3", body=b"abc"), 400, "bad_http"),
    "negative length": (post(b"Content-Length: -3", body=b"abc"), 400, "bad_http"),
    "endless length": (post(b"Content-Length: " + b"9" * 40), 400, "bad_http"),
    "no length in its header": (post(b"Content-Length:"), 400, "bad_http"),
    "folded header": (post(b"X-A: b", b" c"), 400, "bad_http"),
    "header before its line": (b"GET / HTTP/1.1\r\n X: y\r\n\r\n", 400, "bad_http"),
    "bare LF": (b"GET / HTTP/1.1\nHost: a\n\n", 400, "bad_http"),
    "bare LF behind a header": (b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", 400, "bad_http"),
    "bare CR": (b"GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n", 400, "bad_http"),
    "space before the colon": (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400, "bad_http"),
    "no name": (b"GET / HTTP/1.1\r\n: a\r\n\r\n", 400, "bad_http"),
    "null in a header": (b"GET / HTTP/1.1\r\nHost: a\x00b\r\n\r\n", 400, "bad_http"),
    "unknown coding": (post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"), 400, "bad_http"),
    "identity coding": (post(b"Transfer-Encoding: identity"), 400, "bad_http"),
    "two codings": (post(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"), 400, "bad_http"),
    "coding in two headers": (
        post(b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
        400,
        "bad_http",
    ),
    "disguised coding": (post(b"Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"), 400, "bad_http"),
    "chunks in http/1.0": (post(b"Transfer-Encoding: chunked", body=b"0\r\n\r\n", version=b"1.0"), 400, "bad_http"),
    "odd size of a chunk": (post(b"Transfer-Encoding: chunked", body=b"0x3\r\nabc\r\n0\r\n\r\n"), 400, "bad_http"),
    "chunk longer than it says": (post(b"Transfer-Encoding: chunked", body=b"3\r\nabcd\r\n0\r\n\r\n"), 400, "bad_http"),
    "endless chunk": (post(b"Transfer-Encoding: chunked", body=b"f" * 17 + b"\r\n"), 400, "bad_http"),
    "chunks with bare LF": (post(b"Transfer-Encoding: chunked", body=b"3\nabc\n0\n\n"), 400, "bad_http"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400, "bad_http"),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "bad_http"),
    "unknown method": (b"FOO / HTTP/1.1\r\n" + HOST + b"\r\n", 400, "bad_http"),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "bad_http"),
    "http/0.9": (b"GET /\r\n\r\n", 400, "bad_http"),
    "raw utf-8 in the target": ("GET /é HTTP/1.1\r\n\r\n".encode(), 400, "bad_http"),
    "path that is not utf-8": (b"GET /%ff HTTP/1.1\r\n" + HOST + b"\r\n", 400, "bad_http"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "bad_http"),
    "upgrade with a body": (
        post(b"Connection: Upgrade", b"Upgrade: h2c", b"Content-Length: 3", body=b"abc"),
        400,
        "bad_http",
    ),
    "long header": (post(b"X: " + b"y" * HEAD_BYTES_MAX), 431, "head_too_large"),
    "long target": (b"GET /" + b"y" * HEAD_BYTES_MAX + b" HTTP/1.1\r\n", 431, "head_too_large"),
    "many headers": (post(*[b"X: y"] * HEADERS_MAX), 431, "too_many_headers"),
    "long length": (post(b"Content-Length: 101"), 413, "too_large"),
    "long chunks": (
        post(b"Transfer-Encoding: chunked", body=b"32\r\n" + b"x" * 50 + b"\r\n33\r\n" + b"x" * 51 + b"\r\n"),
        413,
        "too_large",
    ),
}


def shown(request: HttpRequest) -> tuple[str, str, bytes, bytes]:
    return request.method, request.path, request.query, bytes(request.body)


@pytest.mark.parametrize("name", GOOD)
def test_request_is_read_whole(name: str) -> None:
    data, expected = GOOD[name]
    made = read(data)
    assert made.refusal is None
    assert [shown(request) for request in made.requests] == expected
    assert not made.is_receiving
    assert made.held_bytes == 0


@pytest.mark.parametrize("name", BAD)
def test_request_is_refused(name: str) -> None:
    data, status, code = BAD[name]
    made = read(data)
    assert made.refusal is not None
    assert (made.refusal.status, made.refusal.code) == (status, code)
    assert not made.requests


@settings(deadline=None)
@given(st.sampled_from(sorted(GOOD) + sorted(BAD)), st.data())
def test_cutting_the_bytes_anywhere_changes_nothing(name: str, draw: st.DataObject) -> None:
    data = (GOOD.get(name) or BAD[name])[0]
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=6)))
    cut = read(*(data[first:end] for first, end in zip([0, *cuts], [*cuts, len(data)], strict=True)))
    whole = read(data)
    assert [shown(request) for request in cut.requests] == [shown(request) for request in whole.requests]
    assert (cut.refusal and cut.refusal.status) == (whole.refusal and whole.refusal.status)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=10))
def test_no_bytes_raise(chunks: list[bytes]) -> None:
    made = read(*chunks)
    assert made.refusal is None or made.refusal.status in (400, 413, 431)


def test_head_without_an_end_is_refused_although_no_header_of_it_is_whole() -> None:
    made = read(b"GET / HTTP/1.1\r\nX: ")
    for _ in range(HEAD_BYTES_MAX // 100 + 1):
        made.feed(b"y" * 100)
    assert made.refusal is not None
    assert made.refusal.status == 431


def test_what_came_before_a_bad_request_is_kept() -> None:
    made = read(b"GET /1 HTTP/1.1\r\n" + HOST + b"\r\nnonsense\r\n\r\n")
    assert [request.path for request in made.requests] == ["/1"]
    assert made.refusal is not None


def test_nothing_is_read_behind_a_refusal() -> None:
    made = read(b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    assert not made.requests


def test_nothing_is_read_behind_the_last_request() -> None:
    made = read(b"GET /1 HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\nGET /2 HTTP/1.1\r\n" + HOST + b"\r\n")
    assert [(request.path, request.is_persistent) for request in made.requests] == [("/1", False)]
    assert made.refusal is None


def test_offer_to_change_the_protocol_is_answered_as_if_it_had_not_been_made() -> None:
    made = read(b"GET / HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
    assert [(request.path, request.is_persistent) for request in made.requests] == [("/", False)]


def test_client_that_waits_for_leave_to_send_is_seen() -> None:
    made = read(post(b"Content-Length: 3", b"Expect: 100-Continue"))
    assert made.awaits_continue
    made.feed(b"abc")
    assert not made.awaits_continue
    assert len(made.requests) == 1


def test_body_is_refused_if_there_is_no_room_for_it() -> None:
    made = reader(admits=False)
    made.feed(post(b"Content-Length: 3"))
    assert made.refusal is None
    made.feed(b"a")
    assert made.refusal is not None
    assert made.refusal.status == 503


def test_room_is_held_for_bytes_that_have_arrived_alone() -> None:
    made = read(post(b"Content-Length: 30", body=b"abc"))
    assert made.held_bytes == 3
    chunked = read(post(b"Transfer-Encoding: chunked", body=b"3\r\nabc\r\n5\r\nd"))
    assert chunked.held_bytes == 4
    assert chunked.release() == 4
    assert chunked.held_bytes == 0


def admitting(answer: HttpResponse | None) -> tuple[RequestReader, list[HttpHead]]:
    asked: list[HttpHead] = []

    def admit(head: HttpHead) -> HttpResponse | None:
        asked.append(head)
        return answer

    made = RequestReader(
        head_bytes_max=HEAD_BYTES_MAX, body_bytes_max=1_000_000, hold=lambda _: answer is None, admit=admit
    )
    return made, asked


def test_admission_is_asked_for_when_the_headers_are_complete() -> None:
    made, asked = admitting(None)
    made.feed(post(b"Content-Length: 3"))
    assert [(head.method, head.path, head.length) for head in asked] == [("POST", "/topics", 3)]
    made.feed(b"abc")
    assert [(request.body, request.answer) for request in made.requests] == [(b"abc", None)]


def test_refused_request_is_answered_in_order_and_its_body_is_dropped() -> None:
    answer = HttpResponse(status=503)
    made, _ = admitting(answer)
    made.feed(post(b"Content-Length: 3", body=b"abc"))
    assert [(request.body, request.answer) for request in made.requests] == [(b"", answer)]
    assert made.refusal is None


@pytest.mark.parametrize(
    "headers",
    [(b"Content-Length: 3", b"Expect: 100-continue"), (b"Content-Length: 900000",), (b"Transfer-Encoding: chunked",)],
)
def test_refused_request_ends_the_connection_if_its_body_is_not_worth_reading(headers: tuple[bytes, ...]) -> None:
    answer = HttpResponse(status=503)
    made, _ = admitting(answer)
    made.feed(post(*headers))
    assert made.refusal is not None
    assert made.refusal.answer is answer


def test_limit_of_the_headers_is_the_same_in_pieces_and_whole() -> None:
    name, value = b"X", b"y" * (HEAD_BYTES_MAX - len(b"/topicsHosta") - 1)
    for extra, is_refused in ((b"", False), (b"y", True)):
        head = post(name + b": " + value + extra)
        whole, pieces = read(head), read(*(head[at : at + 7] for at in range(0, len(head), 7)))
        assert (whole.refusal is not None) is (pieces.refusal is not None) is is_refused


def test_headers_that_nobody_looks_at_are_not_kept() -> None:
    made = read(b"GET / HTTP/1.1\r\n" + HOST + b"Accept: a\r\nAccept: b\r\nCookie: secret\r\n\r\n")
    assert made.requests[0].headers == {b"host": b"a", b"accept": b"a, b"}
