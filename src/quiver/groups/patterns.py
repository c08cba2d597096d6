"""Patterns of topic names: `*` stands for any text, `?` for one character, everything else for itself. Pure.

Matching takes time proportional to the lengths of pattern and name at worst, whatever the pattern: it runs on the
primary, and clients choose it. (A regular expression could take for ever.)
"""

from __future__ import annotations

import re
from functools import lru_cache

PATTERNS_CACHED = 1_000


class TopicPattern:
    """A compiled pattern."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        parts = pattern.split("*")
        self._is_exact = len(parts) == 1
        # Each part has a fixed length, so that the leftmost match of one is never in the way of the next.
        expressions = [
            re.compile("".join("." if c == "?" else re.escape(c) for c in part), re.DOTALL) for part in parts
        ]
        self._head, self._middle, self._tail = expressions[0], expressions[1:-1], expressions[-1]
        self._tail_length = len(parts[-1])

    def matches(self, name: str) -> bool:
        """Return whether the whole name matches."""
        if self._is_exact:
            return self._head.fullmatch(name) is not None
        found = self._head.match(name)
        end = len(name) - self._tail_length
        for part in self._middle:
            if found is None:
                return False
            found = part.search(name, found.end(), max(end, 0))
        return found is not None and found.end() <= end and self._tail.match(name, end) is not None


@lru_cache(PATTERNS_CACHED)
def compile_pattern(pattern: str) -> TopicPattern:
    """Return the compiled form of a pattern."""
    return TopicPattern(pattern)
