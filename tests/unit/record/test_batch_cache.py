"""The cache of decoded batches: a batch is decoded once while it is cached, and the cache stays within its bounds."""

from __future__ import annotations

import tracemalloc

import pytest

from quiver.errors import DecodeError, OverloadedError
from quiver.model import Index, Offset, PartitionId, Term, TopicId
from quiver.record import Batch, Compression, Record, build_batch, stamp
from quiver.record.decoded import (
    DecodedAllowance,
    DecodedBatchBudget,
    DecodedBatchCache,
    decode_batches_cached,
    decoded_bytes,
    record_bytes,
)

Key = tuple[TopicId, PartitionId]
Cache = DecodedBatchCache[tuple[Key, bytes]]

PARTITION: Key = (TopicId(1), PartitionId(0))
OTHER_PARTITION: Key = (TopicId(1), PartitionId(1))
LARGE = 1 << 20


def decode(cache: Cache, payload: bytes | bytearray, partition: Key = PARTITION) -> list[Batch]:
    return list(decode_batches_cached(memoryview(payload), cache, partition=partition))


def batch(first: int, *values: bytes) -> bytes:
    data = build_batch(list(values), timestamp=1)
    return bytes(stamp(data, term=Term(1), index=Index(first + 1), base_offset=Offset(first), append_timestamp=1))


FIRST = batch(0, b"a", b"b")
SECOND = batch(2, b"c", b"d", b"e")
SINGLE = batch(5, b"f")
SIZES = {data: decoded_bytes(Batch.decode(data)) for data in (FIRST, SECOND, SINGLE)}


def test_batches_of_a_payload_are_read_in_order() -> None:
    payload = FIRST + SECOND + SINGLE
    found = decode(Cache(bytes_max=LARGE), payload)
    assert [value for one in found for value in one.values()] == [b"a", b"b", b"c", b"d", b"e", b"f"]


def test_batch_is_decoded_once() -> None:
    cache = Cache(bytes_max=LARGE)
    (first,) = decode(cache, FIRST)
    (again,) = decode(cache, bytearray(FIRST))
    assert again is first


def test_equal_batches_of_other_partitions_are_others() -> None:
    cache = Cache(bytes_max=LARGE)
    (first,) = decode(cache, FIRST)
    (other,) = decode(cache, FIRST, OTHER_PARTITION)
    assert other is not first


def test_what_was_used_longest_ago_goes_first() -> None:
    cache = Cache(bytes_max=SIZES[FIRST] + SIZES[SECOND] - 1)
    (first,) = decode(cache, FIRST)
    (second,) = decode(cache, SECOND)
    (second_again,) = decode(cache, SECOND)
    (first_again,) = decode(cache, FIRST)
    assert second_again is second
    assert first_again is not first


def test_batch_larger_than_the_bound_is_read_all_the_same() -> None:
    cache = Cache(bytes_max=1)
    for _ in range(2):
        (found,) = decode(cache, SECOND)
        assert len(found) == 3


def test_damaged_batch_is_noticed() -> None:
    damaged = bytearray(FIRST)
    damaged[-1] ^= 1
    with pytest.raises(DecodeError):
        decode(Cache(bytes_max=LARGE), damaged)


def test_number_of_batches_is_bounded() -> None:
    cache: DecodedBatchCache[int] = DecodedBatchCache(bytes_max=LARGE, batches_max=2)
    for number, data in enumerate((FIRST, SECOND, SINGLE)):
        cache.add(number, Batch.decode(data))
    assert [key for key, _ in cache.items()] == [2, 1]
    assert cache.get(1) is not None
    assert [key for key, _ in cache.items()] == [1, 2]


def test_batch_added_again_replaces_the_first() -> None:
    cache: DecodedBatchCache[int] = DecodedBatchCache(bytes_max=SIZES[FIRST] + SIZES[SECOND])
    cache.add(0, Batch.decode(FIRST))
    again = cache.add(0, Batch.decode(FIRST))
    assert cache.get(0) is again
    cache.add(1, Batch.decode(SECOND))
    assert cache.get(0) is again, "the replaced copy no longer counts"


def test_compressed_batch_counts_with_its_decompressed_payload() -> None:
    value = bytes(10_000)
    plain, packed = (
        Batch.decode(bytes(build_batch([value], timestamp=1, compression=compression)))
        for compression in (Compression.NONE, Compression.ZSTD)
    )
    assert len(packed.data) < 1000
    assert decoded_bytes(packed) > len(value)
    assert decoded_bytes(plain) < 2 * len(value)


def test_caches_of_a_node_share_one_bound() -> None:
    budget = DecodedBatchBudget(SIZES[FIRST] + SIZES[SECOND])
    caches: list[DecodedBatchCache[int]] = [DecodedBatchCache(bytes_max=LARGE, budget=budget) for _ in range(3)]
    caches[0].add(0, Batch.decode(FIRST))
    caches[1].add(0, Batch.decode(SECOND))
    assert budget.cached_bytes == budget.bytes_max
    caches[2].add(0, Batch.decode(FIRST))
    assert [cache.get(0) is not None for cache in caches] == [False, True, True], "the oldest made room"
    caches[1].clear()
    assert budget.cached_bytes == SIZES[FIRST]
    caches[1].clear()


def test_reservation_evicts_cached_batches_and_is_refused_when_none_is_left() -> None:
    budget = DecodedBatchBudget(SIZES[FIRST])
    cache: DecodedBatchCache[int] = DecodedBatchCache(bytes_max=LARGE, budget=budget)
    cache.add(0, Batch.decode(FIRST))
    with budget.reserve(budget.bytes_max - 1):
        assert cache.get(0) is None
        cache.add(0, Batch.decode(FIRST))
        assert cache.get(0) is None, "what is in use comes first"
        with pytest.raises(OverloadedError, match=r"not done: .*gateway\.decoded_bytes_max") as refused:
            budget.reserve(2)
        assert refused.value.retry_after_ms
        with budget.reserve(1):
            assert budget.reserved_bytes == budget.bytes_max
    assert (budget.reserved_bytes, budget.cached_bytes, budget.refused) == (0, 0, 1)
    with budget.reserve(LARGE):
        pass  # alone, it is never refused


def test_allowance_ends_before_the_batch_that_has_no_room() -> None:
    first, second = Batch.decode(FIRST), Batch.decode(SECOND)
    allowance = DecodedAllowance(1)
    assert allowance.take(first), "a call makes progress"
    assert allowance.take(first), "what is decoded already is not decoded again"
    assert not allowance.take(second)
    both = DecodedAllowance(decoded_bytes(first) + decoded_bytes(second))
    assert both.take(first)
    assert both.take(second)


def test_allowance_names_the_memory_that_its_first_batch_needs() -> None:
    first, second = Batch.decode(FIRST), Batch.decode(SECOND)
    allowance = DecodedAllowance(1, first_bytes_max=decoded_bytes(first) - 1)
    assert not allowance.take(first)
    assert allowance.large_bytes == decoded_bytes(first)
    admitted = DecodedAllowance(1, first_bytes_max=allowance.large_bytes)
    assert admitted.take(first)
    assert not admitted.take(second)
    assert admitted.large_bytes == 0


def test_decoded_batch_keeps_its_columns_and_not_its_payload_as_well() -> None:
    value = bytes(1 << 22)
    batch = Batch.decode(build_batch([value], timestamp=1, compression=Compression.ZSTD))
    tracemalloc.start()
    try:
        assert [len(one or b"") for one in batch.values()] == [len(value)]
        kept, _ = tracemalloc.get_traced_memory()
        assert len(value) <= kept < 1.5 * len(value)
        assert len(batch.undecoded().values()) == 1
        assert tracemalloc.get_traced_memory()[0] < 1.5 * len(value), "a copy is decoded for itself"
    finally:
        tracemalloc.stop()
    assert len(batch.payload()) > len(value)


def test_reservation_grows_and_shrinks() -> None:
    budget = DecodedBatchBudget(100)
    with budget.reserve(10) as grown:
        grown.resize(500)
        assert budget.reserved_bytes == 500, "a request alone is never refused"
        grown.resize(60)
        with budget.reserve(40):
            with pytest.raises(OverloadedError):
                grown.resize(61)
            assert budget.reserved_bytes == 100, "as before"
    assert (budget.reserved_bytes, budget.refused) == (0, 1)


def test_bytes_of_a_record_are_those_of_its_value_key_and_headers() -> None:
    headers = (("name", b"1234"), ("null", None))
    assert record_bytes(Record(offset=Offset(0), timestamp=1, key=None, value=None)) == 0
    assert record_bytes(Record(offset=Offset(0), timestamp=1, key=b"12", value=b"123")) == 5
    assert record_bytes(Record(offset=Offset(0), timestamp=1, key=None, value=b"123", headers=headers)) == 15
