"""A mapping in buckets: a copy shares them, and only the buckets that change afterwards are copied.

A copy of a dict costs as much as the dict is large. Tables of clients have hundreds of thousands of rows, and change
with each registration, so each view would cost a copy of all of them. A copy of a `BucketTable` costs its list of
buckets, and a change one bucket.

The original must not change once it was copied: views keep it. Iteration is in the order of the buckets' numbers, and
in the order of the keys within a bucket; it sorts one bucket at a time, so that a reader may pause anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, MutableMapping, ValuesView
from itertools import chain
from typing import Any, TypeVar
from zlib import crc32

ID_BITS = 9
"""Ids that share a bucket differ in this many bits only: 512 ids, which are copied in a few microseconds."""
NAME_MASK = 511
"""Buckets of names."""

K = TypeVar("K")
V = TypeVar("V")


def by_id(key: int) -> int:
    """Return the bucket of an id: iteration is in the order of the ids."""
    return key >> ID_BITS


def by_kind_and_id(key: tuple[str, int]) -> tuple[str, int]:
    """Return the bucket of a kind and an id: iteration is in the order of the keys."""
    return key[0], key[1] >> ID_BITS


def by_name(key: str) -> int:
    """Return the bucket of a name, the same in every process; iteration is in no useful order."""
    return crc32(key.encode("utf-8", "surrogatepass")) & NAME_MASK


class BucketTable(MutableMapping[K, V]):
    """A mapping whose copies share what stays the same."""

    __slots__ = ("_bucket_of", "_buckets", "_count", "_own")

    def __init__(self, bucket_of: Callable[[K], Any]) -> None:
        self._bucket_of = bucket_of
        self._buckets: dict[Any, dict[K, V]] = {}
        """By number; never empty ones, since ids are not reused."""
        self._own: set[Any] = set()
        """The buckets that no other table has."""
        self._count = 0

    def copy(self) -> BucketTable[K, V]:
        """Return an equal table that may change; this one must not change any more."""
        copied = BucketTable[K, V](self._bucket_of)
        copied._buckets, copied._count = self._buckets.copy(), self._count
        return copied

    def unordered(self) -> Iterator[K]:
        """Return an iterator over the keys in the order of their history: the fastest, for sums and minima only."""
        return chain.from_iterable(self._buckets.values())

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[K]:
        for number in sorted(self._buckets):
            yield from sorted(self._buckets[number])  # type: ignore[type-var] # keys can be ordered

    def __contains__(self, key: object) -> bool:
        bucket = self._buckets.get(self._bucket_of(key))  # type: ignore[arg-type] # a key, as of every reader
        return bucket is not None and key in bucket

    def __getitem__(self, key: K) -> V:
        bucket = self._buckets.get(self._bucket_of(key))
        if bucket is None:
            raise KeyError(key)
        return bucket[key]

    def get(self, key: K, default: Any = None) -> Any:
        """Return the value of a key, or the default."""
        bucket = self._buckets.get(self._bucket_of(key))
        return default if bucket is None else bucket.get(key, default)

    def __setitem__(self, key: K, value: V) -> None:
        bucket = self._take(self._bucket_of(key))
        self._count += key not in bucket
        bucket[key] = value

    def __delitem__(self, key: K) -> None:
        if key not in self:
            raise KeyError(key)
        number = self._bucket_of(key)
        bucket = self._take(number)
        del bucket[key]
        self._count -= 1
        if not bucket:
            del self._buckets[number]
            self._own.discard(number)

    def items(self) -> ItemsView[K, V]:
        """Return the keys with their values, in the order of iteration."""
        return _Items(self)

    def values(self) -> ValuesView[V]:
        """Return the values, in the order of iteration."""
        return _Values(self)

    def _take(self, number: Any) -> dict[K, V]:
        """Return a bucket to change."""
        if number not in self._own:
            self._own.add(number)
            self._buckets[number] = self._buckets.get(number, {}).copy()
        return self._buckets[number]

    def _pairs(self) -> Iterator[tuple[K, V]]:
        for number in sorted(self._buckets):
            bucket = self._buckets[number]
            for key in sorted(bucket):  # type: ignore[type-var] # keys can be ordered
                yield key, bucket[key]


class _Items(ItemsView[K, V]):
    _mapping: BucketTable[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return self._mapping._pairs()


class _Values(ValuesView[V]):
    _mapping: BucketTable[Any, V]

    def __iter__(self) -> Iterator[V]:
        return (value for _, value in self._mapping._pairs())
