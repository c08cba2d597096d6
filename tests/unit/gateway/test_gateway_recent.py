"""Batches that were read lately: the same ones, decoded once, within bounds."""

from __future__ import annotations

import pytest

from quiver.errors import DecodeError
from quiver.gateway.recent import DecodedBatchCache
from quiver.model import Index, Offset, PartitionId, Term, TopicId
from quiver.record import build_batch, stamp

TOPIC, PARTITION = TopicId(1), PartitionId(0)


def batch(first: int, *values: bytes) -> bytes:
    data = build_batch(list(values), timestamp=1)
    return bytes(stamp(data, term=Term(1), index=Index(first + 1), base_offset=Offset(first), append_timestamp=1))


FIRST = batch(0, b"a", b"b")
SECOND = batch(2, b"c", b"d", b"e")
SINGLE = batch(5, b"f")


def test_batches_of_a_payload_are_read_in_order() -> None:
    payload = memoryview(FIRST + SECOND + SINGLE)
    found = list(DecodedBatchCache().decode(TOPIC, PARTITION, payload))
    assert [value for one in found for value in one.values()] == [b"a", b"b", b"c", b"d", b"e", b"f"]


def test_batch_is_decoded_once() -> None:
    recent = DecodedBatchCache()
    (first,) = recent.decode(TOPIC, PARTITION, memoryview(FIRST))
    (again,) = recent.decode(TOPIC, PARTITION, memoryview(bytearray(FIRST)))
    assert again is first


def test_equal_batches_of_other_partitions_are_others() -> None:
    recent = DecodedBatchCache()
    (first,) = recent.decode(TOPIC, PARTITION, memoryview(FIRST))
    (other,) = recent.decode(TOPIC, PartitionId(1), memoryview(FIRST))
    assert other is not first


def test_what_was_used_longest_ago_goes_first() -> None:
    recent = DecodedBatchCache(bytes_max=len(FIRST) + len(SECOND) - 1)
    (first,) = recent.decode(TOPIC, PARTITION, memoryview(FIRST))
    (second,) = recent.decode(TOPIC, PARTITION, memoryview(SECOND))
    (second_again,) = recent.decode(TOPIC, PARTITION, memoryview(SECOND))
    (first_again,) = recent.decode(TOPIC, PARTITION, memoryview(FIRST))
    assert second_again is second
    assert first_again is not first


def test_batch_larger_than_the_bound_is_read_all_the_same() -> None:
    recent = DecodedBatchCache(bytes_max=1)
    for _ in range(2):
        (found,) = recent.decode(TOPIC, PARTITION, memoryview(SECOND))
        assert len(found) == 3


def test_damaged_batch_is_noticed() -> None:
    damaged = bytearray(FIRST)
    damaged[-1] ^= 1
    with pytest.raises(DecodeError):
        list(DecodedBatchCache().decode(TOPIC, PARTITION, memoryview(damaged)))
