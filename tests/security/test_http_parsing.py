"""Requests that two readers could understand differently: repeated keys, escaped slashes, absolute targets, headers."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.errors import RequestError
from quiver.gateway import contract
from quiver.gateway.codec import SCANNED_BYTES_MAX, ParameterDecoder, check_keys
from quiver.gateway.http.messages import RequestReader

PRODUCE = ParameterDecoder(contract.ProduceBody)
BATCH = ParameterDecoder(contract.ProduceBatchBody)
LONG = json.dumps(["x" * 100] * 100).encode()


def read(data: bytes, *, pieces: int = 0) -> RequestReader:
    reader = RequestReader(head_bytes_max=16 * 1024, body_bytes_max=1024, hold=lambda _: True)
    for at in range(0, len(data), pieces or len(data)):
        reader.feed(data[at : at + (pieces or len(data))])
    return reader


@pytest.mark.parametrize(
    "body",
    [
        b'{"topic": "a", "producer_id": 1, "message": "x", "topic": "b"}',
        b'{"topic": "a", "producer_id": 1, "message": "x", "\\u0074opic": "b"}',
        b'{"topic": "a", "producer_id": 1, "message": "x", "headers": {"k": "1", "k": "2"}}',
        b' \r\n{"topic": "a", "topic": "a", "producer_id": 1, "message": "x"}',
        b'{"topic": "a", "producer_id": 1, "message": "' + b"x" * 10_000 + b'", "producer_id": 2}',
    ],
)
def test_repeated_key_is_refused(body: bytes) -> None:
    for given_body in (body, bytearray(body)):
        with pytest.raises(RequestError, match="is given twice") as caught:
            PRODUCE.decode({}, b"", given_body)
        assert caught.value.code == "given_twice"
    with pytest.raises(RequestError, match="is given twice"):
        PRODUCE.decode({}, b"partition_id=0", body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"topic": "a", "producer_id": 1, "messages": %s, "topic": "b"}' % LONG,
        b'{"topic": "a", "producer_id": 1, "messages": %s, "messages": %s}' % (LONG, LONG),
        b'{"messages": ["a"], "topic": "a", "producer_id": 1, "messages": %s}' % LONG,
    ],
)
def test_repeated_key_of_a_large_batch_is_refused(body: bytes) -> None:
    assert len(body) > SCANNED_BYTES_MAX
    with pytest.raises(RequestError, match="is given twice"):
        BATCH.decode({}, b"", body)


def test_keys_that_differ_are_taken_whatever_the_values_say() -> None:
    body = b'{"topic": "a", "producer_id": 1, "message": "{\\"topic\\": 1, \\"topic\\": 2}"}'
    assert PRODUCE.decode({}, b"", body).topic == "a"
    assert BATCH.decode({}, b"", b'{"topic": "a", "producer_id": 1, "messages": %s}' % LONG).topic == "a"


NAMES = st.sampled_from(["a", "b", "c", "d"])
TREES = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(NAMES, inner), max_size=3).map(tuple),
    max_leaves=10,
)


def written(tree: object) -> str:
    """Write a tree as JSON; a tuple is an object by its pairs, which may repeat a name."""
    if isinstance(tree, tuple):
        return "{" + ", ".join(f'"{name}": {written(value)}' for name, value in tree) + "}"
    return "[" + ",".join(map(written, tree)) + "]" if isinstance(tree, list) else json.dumps(tree)


def repeats(tree: object) -> bool:
    if isinstance(tree, tuple):
        names = [name for name, _ in tree]
        return len(set(names)) < len(names) or any(repeats(value) for _, value in tree)
    return isinstance(tree, list) and any(map(repeats, tree))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(NAMES, TREES), max_size=4).map(tuple))
def test_repeated_keys_are_found_at_every_depth(tree: tuple[object, ...]) -> None:
    body = written(tree).encode()
    msgspec.json.decode(body)
    if repeats(tree):
        with pytest.raises(RequestError, match="given twice"):
            check_keys(body)
    else:
        check_keys(body)


@pytest.mark.parametrize(
    ("target", "path", "query", "host"),
    [
        (b"/topics/a%2fb", "/topics/a%2Fb", b"", b"a"),
        (b"/topics%2Fa", "/topics%2Fa", b"", b"a"),
        (b"http://h?x=1/healthz", "/", b"x=1/healthz", b"h"),
        (b"HTTPS://h:1/healthz?x", "/healthz", b"x", b"h:1"),
    ],
)
def test_target_has_one_meaning(target: bytes, path: str, query: bytes, host: bytes) -> None:
    reader = read(b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n")
    (request,) = reader.requests
    assert (request.path, request.query, request.headers[b"host"]) == (path, query, host)


def test_limit_of_the_headers_does_not_depend_on_how_they_are_cut() -> None:
    for size, is_refused in ((12_000, False), (16_300, False), (16_400, True)):
        data = b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * size + b"\r\n\r\n"
        for pieces in (0, 1, 100, 5_000):
            assert (read(data, pieces=pieces).refusal is not None) is is_refused, (size, pieces)
