"""Answers in pieces: together they are what encoding the whole answer gives, and none is large."""

from __future__ import annotations

import asyncio
import tracemalloc
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.gateway import record_answers
from quiver.gateway.codec import record_fields
from quiver.gateway.contract import BatchConsumedAnswer, ConsumedAnswer, MessageItem
from quiver.gateway.http import HttpResponse
from quiver.gateway.record_answers import PIECE_BYTES, Item, is_text, line_pieces, respond_with_list, respond_with_one
from quiver.model import Offset
from quiver.record import Record
from quiver.security import ANONYMOUS
from quiver.wire.answer_memory import AnswerMemory
from quiver.wire.answer_room import AnswerRoom

MIB = 1024 * 1024
TEXTS = st.text(max_size=40).map(str.encode)
VALUES = st.none() | TEXTS | st.binary(max_size=40)
HEADERS = st.lists(st.tuples(st.text(max_size=10), VALUES), max_size=4).map(tuple)
RECORDS = st.builds(
    Record, offset=st.integers(0, 9).map(Offset), timestamp=st.just(1), key=VALUES, value=VALUES, headers=HEADERS
)


def make_room() -> AnswerRoom:
    return AnswerRoom(AnswerMemory(limit_bytes=MIB, connection_bytes_max=MIB), ANONYMOUS)


def read(response: HttpResponse) -> list[bytes]:
    async def gather() -> list[bytes]:
        assert response.stream is not None
        return [piece async for piece in response.stream]

    return asyncio.run(gather())


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> object:
    """Cut everything into pieces of six bytes, so that small examples have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_answers, "PIECE_BYTES", 6)
        patch.setattr(record_answers, "SMALL_BYTES", 8)
        yield


@given(RECORDS)
def test_pieces_of_a_record_are_those_of_the_whole(record: Record) -> None:
    item = Item(partial(ConsumedAnswer, partition_id=3), record)
    whole = msgspec.json.encode(ConsumedAnswer(partition_id=3, **record_fields(record)))
    assert b"".join(read(respond_with_one(item, make_room(), 1))) == whole


@given(st.lists(RECORDS, max_size=5))
def test_pieces_of_a_list_are_those_of_the_whole(records: list[Record]) -> None:
    items = [Item(partial(MessageItem, partition_id=3), record) for record in records]
    whole = [MessageItem(partition_id=3, **record_fields(record)) for record in records]
    response = respond_with_list(lambda messages: BatchConsumedAnswer(messages=messages), items, make_room(), 1)
    assert b"".join(read(response)) == msgspec.json.encode(BatchConsumedAnswer(messages=whole))
    assert b"".join(line_pieces(items)) == b"".join(msgspec.json.encode(one) + b"\n" for one in whole)


@given(st.binary(max_size=30) | TEXTS)
def test_text_is_found_across_pieces(value: bytes) -> None:
    try:
        value.decode()
    except UnicodeDecodeError:
        assert not is_text(value)
    else:
        assert is_text(value)


@pytest.mark.parametrize("value", [bytes(8 * MIB), "\N{GRINNING FACE}".encode() + b"a" * 8 * MIB, b"\xff" * 8 * MIB])
def test_large_answer_never_exists_as_a_whole(value: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_answers, "PIECE_BYTES", PIECE_BYTES)
        record = Record(offset=Offset(1), timestamp=1, key=value, value=value, headers=(("h", value),))
        response = respond_with_one(Item(partial(ConsumedAnswer, partition_id=3), record), make_room(), 1)

        async def measure() -> tuple[int, int]:
            assert response.stream is not None
            sizes = [len(piece) async for piece in response.stream]
            return sum(sizes), max(sizes)

        tracemalloc.start()
        try:
            total, largest = asyncio.run(measure())
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert total > 24 * MIB
        assert largest < 7 * PIECE_BYTES
        assert peak < 2 * MIB
