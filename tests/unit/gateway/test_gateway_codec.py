"""Parameters from path, query and body: what is lenient, what is not, and which class of failure it is."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.errors import OutOfRangeError, RequestError
from quiver.gateway import contract
from quiver.gateway.codec import CACHED_QUERIES_MAX, QUERY_FIELDS_MAX, ParameterDecoder
from quiver.gateway.http_route import HttpRoute
from quiver.gateway.routes import ROUTES

PRODUCE = ParameterDecoder(contract.ProduceBody)
BODY = b'{"topic": "t", "producer_id": 5, "message": "x"}'


def produce(body: bytes = b"", query: bytes = b"") -> contract.ProduceBody:
    return PRODUCE.decode({}, query, body)


@pytest.mark.parametrize(
    ("body", "query"),
    [
        (BODY, b""),
        (b'{"topic": "t", "producer_id": "5", "message": "x", "key": null}', b""),
        (b"", b"topic=t&producer_id=5&message=x"),
        (b'{"topic": "t"}', b"producer_id=5&&message=%78"),
        (b'{"producer_id": "5", "message": "x"}', b"topic=t"),
    ],
)
def test_parameters_are_the_same_wherever_they_are(body: bytes, query: bytes) -> None:
    assert produce(body, query) == contract.ProduceBody(topic="t", producer_id=5, message="x")


@pytest.mark.parametrize(
    ("body", "query"),
    [
        (b'{"topic": "t", "producer_id": 5, "message": "x", "kye": "k"}', b""),
        (BODY, b"kye=k"),
        (b"", b"topic=t&producer_id=5&message=x&kye=k"),
    ],
)
def test_parameter_that_is_not_known_is_refused_by_name(body: bytes, query: bytes) -> None:
    with pytest.raises(RequestError, match=r"unknown parameter 'kye'; known are: topic, .*\bkey\b") as caught:
        produce(body, query)
    assert caught.value.code == "unknown_field"
    assert ParameterDecoder(contract.Parameters).decode({}, b"kye=k", b"{}") == contract.Parameters()


def test_query_is_decoded() -> None:
    assert produce(query=b"topic=t&producer_id=5&message=a+b%26%C3%A9%2B").message == "a b&é+"


def test_query_that_comes_again_says_the_same_and_few_are_remembered() -> None:
    decoder = ParameterDecoder(contract.ProduceBody)
    for number in (*range(CACHED_QUERIES_MAX + 10), 3, 3):
        query = b"topic=t&producer_id=%d&message=x" % number
        assert decoder.decode({}, query, b"").producer_id == number
        with pytest.raises(RequestError, match="twice"):
            decoder.decode({}, query, b'{"topic": "t"}')
    long = b"topic=t&producer_id=1&message=" + b"x" * 300
    assert decoder.decode({}, long, b"") == decoder.decode({}, long, b"")
    assert len(decoder._cache) <= CACHED_QUERIES_MAX
    assert long not in decoder._cache


def test_text_that_looks_like_something_else_stays_text() -> None:
    given = produce(query=b"topic=7&producer_id=5&message=null&key=true")
    assert (given.topic, given.message, given.key) == ("7", "null", "true")


@pytest.mark.parametrize(
    ("body", "query", "complaint"),
    [
        (b"{", b"", "not JSON"),
        (b"[]", b"", "object"),
        (b"[" * 100_000, b"a=b", "object"),
        (b'{"topic": "\xff"}', b"", "not JSON"),
        (b'{"topic": "t", "producer_id": 5, "message": "\\ud800"}', b"", "not JSON"),
        (b'{"topic": "t"}', b"", "producer_id"),
        (b'{"topic": "t", "producer_id": "five"}', b"", "producer_id"),
        (b'{"topic": "t", "producer_id": true}', b"", "producer_id"),
        (b'{"topic": "t", "producer_id": 5.5}', b"", "producer_id"),
        (b'{"topic": "t", "producer_id": 5, "message": 7}', b"", "message"),
        (BODY, b"topic=t", "given twice"),
        (b"", b"topic=t&topic=t", "given twice"),
        (b"", b"topic=%ff", "UTF-8"),
        (b"", b"&".join([b"a=b"] * (QUERY_FIELDS_MAX + 1)), "parameters"),
    ],
)
def test_what_cannot_be_read_is_malformed(body: bytes, query: bytes, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as raised:
        produce(body, query)
    assert not isinstance(raised.value, OutOfRangeError)


@pytest.mark.parametrize("number", [b"-1", b"9007199254740993", b'"-1"', b"9" * 40, b'"' + b"9" * 40 + b'"', b"1e999"])
def test_number_outside_its_bounds_is_out_of_range(number: bytes) -> None:
    with pytest.raises(OutOfRangeError, match="producer_id"):
        produce(b'{"topic": "t", "message": "x", "producer_id": ' + number + b"}")


@pytest.mark.parametrize("query", [b"max=0", b"max=10001", b"wait_ms=-1"])
def test_count_outside_its_bounds_is_out_of_range(query: bytes) -> None:
    with pytest.raises(OutOfRangeError):
        ParameterDecoder(contract.ConsumeBatchQuery).decode({}, b"topic=t&consumer_id=1&" + query, b"")


def test_word_that_is_none_of_the_choices_is_out_of_range() -> None:
    with pytest.raises(OutOfRangeError, match="from"):
        ParameterDecoder(contract.RegisterConsumerBody).decode({}, b"topic=t&from=now", b"")


def test_path_is_a_parameter_like_any_other() -> None:
    assert ParameterDecoder(contract.BrokerQuery).decode({"id": "7"}, b"", b"").id == 7
    with pytest.raises(RequestError, match="given twice"):
        ParameterDecoder(contract.BrokerQuery).decode({"id": "7"}, b"id=8", b"")


@settings(deadline=None)
@given(st.sampled_from(ROUTES), st.binary(max_size=60), st.binary(max_size=60))
def test_nothing_that_can_be_sent_raises_anything_else(route: HttpRoute, query: bytes, body: bytes) -> None:
    with suppress(RequestError):
        ParameterDecoder(route.parameters).decode({}, query, body)
