"""Patterns of topic names."""

from __future__ import annotations

from fnmatch import fnmatchcase

from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.groups.patterns import TopicPattern, compile_pattern


@given(st.text("ab.*?", max_size=8), st.text("ab.", max_size=8))
@settings(max_examples=500)
def test_patterns_match_as_in_a_shell(pattern: str, name: str) -> None:
    assert TopicPattern(pattern).matches(name) == fnmatchcase(name, pattern)


def test_other_characters_stand_for_themselves() -> None:
    assert TopicPattern("a[b]+(.").matches("a[b]+(.")
    assert not TopicPattern("a[b]").matches("ab")
    assert compile_pattern("x*") is compile_pattern("x*")


def test_no_pattern_takes_long() -> None:
    # A backtracking matcher would need more steps than there are seconds in the age of the universe.
    assert not TopicPattern("*a" * 100 + "b").matches("a" * 249)
    assert TopicPattern("*a" * 100).matches("a" * 249)
