"""Some of a batch's records as plain rows, their sizes, and the payload that carries them to workers of a queue."""

from __future__ import annotations

import pytest

from quiver.errors import DecodeError
from quiver.model import Offset
from quiver.record import Batch, build_batch
from quiver.wire.queue_messages import QueueRecord, decode_queue_records, encode_queue_records


def batch(**columns: object) -> Batch:
    return Batch.decode(build_batch([b"a", None, b"ccc"], timestamp=7, **columns))  # type: ignore[arg-type]


HEADERS = [[("h", b"x")], [], [("h", None)]]


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"keys": [b"k", None, b""]},
        {"headers": HEADERS},
        {"keys": [b"k", None, b""], "headers": HEADERS, "timestamps": [7, 8, 9]},
    ],
)
def test_rows_are_the_records(columns: dict[str, object]) -> None:
    whole = batch(**columns)
    for first, end in ((0, 3), (1, 2), (2, 3)):
        rows = whole.rows(Offset(first), Offset(end))
        found = decode_queue_records(encode_queue_records(rows))
        assert found == [
            QueueRecord(one.timestamp, one.value, one.key, one.headers)
            for one in whole.records(Offset(first), Offset(end))
        ]


def test_lengths_are_those_of_values_and_a_part_of_all_else() -> None:
    assert list(batch().record_lengths(Offset(0), Offset(3))) == [1, 0, 3]
    keyed = batch(keys=[b"k" * 300, None, b""])
    assert sum(keyed.record_lengths(Offset(0), Offset(3))) > 300
    assert batch(headers=HEADERS).has_headers
    assert not keyed.has_headers


def test_time_is_found_in_the_order_of_offsets() -> None:
    timed = batch(timestamps=[7, 5, 9])
    assert [timed.find_timestamp(wanted) for wanted in (0, 7, 8, 9, 10)] == [0, 0, 2, 2, None]
    assert [batch().find_timestamp(wanted) for wanted in (7, 8)] == [0, None]


def test_payload_of_something_else_is_refused() -> None:
    with pytest.raises(DecodeError, match="received records"):
        decode_queue_records(b"\x81\x01\x02")
