"""Templates: which words of messages are constant and which vary, learned from a set of masked messages.

Messages with the same number of words are split by the column with the fewest different words, as long as those are so
few that they tell kinds of messages apart; columns that are left with many different words are variable. The result
depends on the set of messages, not on their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from quiver.spark.logs.tokens import MARKS, MASK

WILDCARD: Final = "<*>"
"""What a template shows in the place of a variable part."""
WORDS_FEW: Final = 4
"""A column with at most so many different words tells kinds of messages apart."""

Words = tuple[str, ...]


class Template(msgspec.Struct, frozen=True):
    """A kind of message: its words, with `MASK` in the place of what varies."""

    words: Words

    @property
    def text(self) -> str:
        """Return the template as it is shown."""
        return " ".join(self.words).replace(MASK, WILDCARD)

    @property
    def id(self) -> str:
        """Return the id: equal templates have equal ids, in every run and on every machine."""
        return template_id(self.text)


def template_id(text: str) -> str:
    """Return the id of a template's text: 16 hexadecimal digits."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def derive(messages: Iterable[Words]) -> dict[Words, Template]:
    """Return the template of each masked message."""
    by_length: dict[int, list[Words]] = {}
    for message in messages:
        by_length.setdefault(len(message), []).append(message)
    found: dict[Words, Template] = {}
    for group in by_length.values():
        for part in _split(sorted(set(group))):
            template = Template(generalize(part))
            found.update(dict.fromkeys(part, template))
    return found


def _split(group: list[Words]) -> list[list[Words]]:
    pending, done = [group], []
    while pending:
        part = pending.pop()
        column = _best_column(part)
        if column is None:
            done.append(part)
            continue
        by_word: dict[str, list[Words]] = {}
        for words in part:
            by_word.setdefault(words[column], []).append(words)
        pending += by_word.values()
    return done


def _best_column(part: Sequence[Words]) -> int | None:
    """Return the column to split by; None if all columns that differ are variable."""
    best: tuple[int, int] | None = None
    for column in range(len(part[0])):
        distinct = {words[column] for words in part}
        if 1 < len(distinct) <= WORDS_FEW and not any(MASK in word for word in distinct):
            best = min(best or (len(distinct), column), (len(distinct), column))
    return best[1] if best else None


def generalize(part: Sequence[Words]) -> Words:
    """Return the words that messages have in common, with `MASK` where they differ."""
    return tuple(_common(sorted({words[column] for words in part})) for column in range(len(part[0])))


def _common(words: Sequence[str]) -> str:
    """Return what is common to words: a prefix and a suffix that end at a mark."""
    first, last = words[0], words[-1]
    if first == last:
        return first
    shortest = min(map(len, words))
    prefix = _shared(words, shortest)
    suffix = _shared([word[::-1] for word in words], shortest - prefix)
    while prefix and not (first[prefix - 1] in MARKS or first[prefix - 1] == ":"):
        prefix -= 1
    while suffix and not (first[-suffix] in MARKS or first[-suffix] in ":."):
        suffix -= 1
    return first[:prefix] + MASK + (first[len(first) - suffix :] if suffix else "")


def _shared(words: Sequence[str], limit: int) -> int:
    """Return how many characters at the beginning are equal and not masked."""
    for place in range(limit):
        if words[0][place] == MASK or any(word[place] != words[0][place] for word in words):
            return place
    return limit


class Matcher:
    """Finds the template of a message that was not learned from."""

    def __init__(self, templates: Iterable[Template]) -> None:
        self._by_length: dict[int, list[Template]] = {}
        for template in sorted(set(templates), key=lambda own: (sum(MASK in word for word in own.words), own.words)):
            self._by_length.setdefault(len(template.words), []).append(template)

    def match(self, words: Words) -> Template | None:
        """Return the most specific template that fits, None without one."""
        for template in self._by_length.get(len(words), ()):
            if all(map(fits, template.words, words)):
                return template
        return None


def fits(pattern: str, word: str) -> bool:
    """Tell whether a word is an instance of a word of a template."""
    if pattern in (word, MASK):
        return True
    head, mark, tail = pattern.partition(MASK)
    return (
        bool(mark)
        and MASK not in tail
        and len(word) >= len(head) + len(tail)
        and word.startswith(head)
        and word.endswith(tail)
    )


def parameters_of(template: Template, words: Words) -> list[tuple[int, int, int, int]]:
    """Return where the parameters of a message are, in order.

    Each is `(0, run, 0, 0)`, the variable chunk with that number, or `(1, word, head, tail)`, a word without as many
    bytes at its beginning and end.
    """
    found, run = [], 0
    for index, (pattern, word) in enumerate(zip(template.words, words, strict=True)):
        runs = word.count(MASK)
        if pattern == word:
            found += [(0, run + own, 0, 0) for own in range(runs)]
        else:
            head, _, tail = pattern.partition(MASK)
            found.append((1, index, len(head.encode()), len(tail.encode())))
        run += runs
    return found


def count_templates(known: Mapping[Words, Template]) -> int:
    """Return how many templates there are."""
    return len(set(known.values()))
