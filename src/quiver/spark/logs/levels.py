"""Levels: the words that lines use for their severity."""

from __future__ import annotations

from typing import Final

WORDS: Final = (
    "TRACE", "FINEST", "FINER", "FINE", "VERBOSE", "DEBUG", "CONFIG", "INFO", "INFORMATION", "INFORMATIONAL", "NOTICE",
    "WARN", "WARNING", "ERROR", "ERR", "SEVERE", "FAILURE", "FAIL", "CRITICAL", "CRIT", "ALERT", "EMERG", "EMERGENCY",
    "FATAL", "PANIC", "AUDIT", "SUCCESS",
)  # fmt: skip
"""Words that are a level when they stand where levels stand."""
LETTERS: Final = {"V": "VERBOSE", "D": "DEBUG", "I": "INFO", "W": "WARN", "E": "ERROR", "F": "FATAL"}
"""Levels of one letter, as Android and glog write them."""
_LONGEST_FIRST: Final = "|".join(sorted(WORDS, key=len, reverse=True))
WORD: Final = rf"(?i:{_LONGEST_FIRST})"
LETTER: Final = "[VDIWEF]"
STARTING: Final = rf"^\W?(?P<level>(?i:{_LONGEST_FIRST}))\W?[:\]]"
"""A level at the beginning of a message."""


def level_of(word: str) -> str | None:
    """Return a level as the table writes it: in capitals, letters spelled out; None without one."""
    word = word.strip().upper()
    return LETTERS.get(word, word) or None
