"""Tables in buckets: they behave as dicts, and what was copied stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.metadata.bucket_table import ID_BITS, BucketTable, by_id, by_kind_and_id, by_name

KEYS = st.integers(0, 5 << ID_BITS)
PUTS = st.tuples(st.just("put"), KEYS)
DROPS = st.tuples(st.just("drop"), KEYS)
COPIES = st.tuples(st.just("copy"), st.just(0))


@given(st.lists(PUTS | DROPS | COPIES, max_size=60))
def test_table_is_a_dict_whose_copies_stay(steps: list[tuple[str, int]]) -> None:
    table, expected = BucketTable[int, int](by_id), dict[int, int]()
    kept: list[tuple[BucketTable[int, int], dict[int, int]]] = []
    for number, (step, key) in enumerate(steps):
        if step == "copy":
            kept.append((table, expected))
            table, expected = table.copy(), expected.copy()
        elif step == "put":
            table[key] = expected[key] = number
        else:
            assert table.pop(key, None) == expected.pop(key, None)
    for found, right in (*kept, (table, expected)):
        assert (len(found), dict(found)) == (len(right), right)
        assert list(found) == sorted(found.unordered()) == sorted(right)
        assert list(found.items()) == sorted(right.items())
        assert list(found.values()) == [right[key] for key in sorted(right)]


@given(st.lists(PUTS, min_size=1))
def test_table_without_keys_has_no_buckets_left(steps: list[tuple[str, int]]) -> None:
    table = BucketTable[int, None](by_id)
    for _, key in steps:
        table[key] = None
    table = table.copy()
    for key in table:
        del table[key]
    assert not table
    assert not table._buckets


def test_missing_key_is_named() -> None:
    table = BucketTable[int, int](by_id)
    table[1] = 7
    for key in (2, 1 << 20):
        assert key not in table
        assert table.get(key) is None
        with pytest.raises(KeyError, match=str(key)):
            table[key]
        with pytest.raises(KeyError, match=str(key)):
            del table[key]


def test_tables_are_in_the_order_of_ids_and_of_kinds() -> None:
    by_kind = BucketTable[tuple[str, int], None](by_kind_and_id)
    for key in (("b", 1), ("a", 9 << ID_BITS), ("b", 0), ("a", 3)):
        by_kind[key] = None
    assert list(by_kind) == [("a", 3), ("a", 9 << ID_BITS), ("b", 0), ("b", 1)]


@given(st.dictionaries(st.text(), st.integers()))
def test_table_of_names_finds_every_name(names: dict[str, int]) -> None:
    table = BucketTable[str, int](by_name)
    table.update(names)
    assert table == names
