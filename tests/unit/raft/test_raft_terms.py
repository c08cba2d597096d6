from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import InvariantBroken
from quiver.model import Index, Term
from quiver.raft.log import TermMap


def term_map(terms: list[int], *, base: tuple[int, int] = (0, 0)) -> TermMap:
    mapping = TermMap((), base_index=Index(base[0]), base_term=Term(base[1]), last_index=Index(base[0]))
    for term in terms:
        mapping.append(Term(term), count=1)
    return mapping


def listed(mapping: TermMap) -> list[int | None]:
    return [mapping.term_at(Index(index)) for index in range(mapping.base_index, mapping.last_index + 1)]


growing = st.lists(st.integers(1, 5), max_size=12).map(sorted)


def test_new_log_is_empty_with_base_zero() -> None:
    mapping = term_map([])
    assert (mapping.base_index, mapping.first_index, mapping.last_index, mapping.last_term) == (0, 1, 0, 0)
    assert mapping.term_at(Index(0)) == 0
    assert mapping.term_at(Index(1)) is None


def test_runs_rebuild_the_map() -> None:
    mapping = term_map([1, 1, 3, 3, 3, 4], base=(10, 1))
    rebuilt = TermMap(mapping.runs()[1:], base_index=Index(10), base_term=Term(1), last_index=Index(16))
    assert listed(rebuilt) == listed(mapping)
    assert mapping.runs() == ((10, 1), (13, 3), (16, 4))


@given(growing, st.integers(0, 14))
def test_term_at_agrees_with_a_plain_list(terms: list[int], index: int) -> None:
    expected = ([0, *terms])[index] if index <= len(terms) else None
    assert term_map(terms).term_at(Index(index)) == expected


@given(growing.filter(bool), st.data())
def test_truncate_keeps_what_is_below(terms: list[int], data: st.DataObject) -> None:
    first_index = data.draw(st.integers(1, len(terms)))
    mapping = term_map(terms)
    mapping.truncate(Index(first_index))
    assert listed(mapping) == [0, *terms[: first_index - 1]]
    mapping.append(Term(9), count=2)
    assert listed(mapping) == [0, *terms[: first_index - 1], 9, 9]


@given(growing.filter(bool), st.data())
def test_compact_keeps_the_term_before_the_start(terms: list[int], data: st.DataObject) -> None:
    first_index = data.draw(st.integers(1, len(terms) + 1))
    mapping = term_map(terms)
    mapping.compact(Index(first_index))
    assert mapping.first_index == first_index
    assert listed(mapping) == [0, *terms][first_index - 1 :]
    assert mapping.term_at(Index(first_index - 2)) is None


@given(growing, st.integers(0, 14), st.integers(0, 6), st.integers(0, 5))
def test_highest_at_most_agrees_with_a_search(terms: list[int], index: int, term: int, compacted: int) -> None:
    mapping = term_map(terms)
    mapping.compact(Index(min(compacted, len(terms)) + 1))
    known = [(i, mapping.term_at(Index(i))) for i in range(mapping.base_index, mapping.last_index + 1)]
    fitting = [(i, t) for i, t in known if i <= index and t is not None and t <= term]
    assert mapping.highest_at_most(Index(index), Term(term)) == (fitting[-1] if fitting else known[0])


def test_reset_starts_over_after_a_snapshot() -> None:
    mapping = term_map([1, 2, 3])
    mapping.reset(Index(20), Term(5))
    assert (mapping.first_index, mapping.last_index, mapping.last_term) == (21, 20, 5)


def test_terms_never_go_back() -> None:
    with pytest.raises(InvariantBroken, match="never go back"):
        term_map([2]).append(Term(1), count=1)


def test_nothing_is_cut_below_the_start() -> None:
    with pytest.raises(InvariantBroken, match="never truncated before its start"):
        term_map([1, 1], base=(5, 1)).truncate(Index(5))


def test_nothing_is_compacted_beyond_the_end() -> None:
    with pytest.raises(InvariantBroken, match="within its range"):
        term_map([1, 1]).compact(Index(4))
