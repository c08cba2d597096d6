"""Templates: which words of messages are constant and which vary, learned from a set of masked messages.

Messages with the same number of columns are cut apart by the most frequent word that some of them do not have, until
those that are left together have most of their words in common: they are of one kind, or of a few that differ in single
words. A column in which such messages differ is variable if it has many different words, if one of them was masked, or
if its words are values elsewhere after the same word; otherwise its words tell kinds of messages apart.

The result depends on the set of messages, not on their order and not on how often each occurs.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from quiver.spark.logs.messages import Columns, Message
from quiver.spark.logs.tokens import MARKS, MASK

WILDCARD: Final = "<*>"
"""What a template shows in the place of a variable part."""
COHERENCE: Final = 0.5
"""Messages of one kind have at least this share of their words in common."""
WORDS_FEW: Final = 3
"""A column with at most so many different words tells kinds of messages apart."""
FIRST_WORDS_FEW: Final = 16
"""The same for the first column, which rarely varies."""
CAPITALS_FEW: Final = 12
"""The same for words in capitals, which are mostly names of states."""
LITERALS: Final = frozenset(("true", "false", "null", "none", "nil", "yes", "no", "on", "off"))
"""Words that are values in most languages."""
NAMING: Final = frozenset(("user", "username", "host", "hostname"))
"""Words that a name follows."""
OPENING: Final = {"'": "'", '"': '"', "(": ")", "[": "]", "{": "}", "<": ">"}
"""What encloses a value, with what closes it."""
CLOSED_BY: Final = {closing: opening for opening, closing in OPENING.items() if closing != opening}
_IDENTIFIER: Final = re.compile(r"[A-Za-z$]*[a-z][A-Z][A-Za-z$]*")
_INSTANCE: Final = re.compile(rf"[\w.$-]+(?:\({MASK}\)|\[{MASK}\])[,;:.]?")
"""A name with a number, as of a program and its process."""
_DOTTED: Final = re.compile(r"[A-Za-z_$][\w$-]*(?:\.[\w$-]+){2,}")


class Template(msgspec.Struct, frozen=True):
    """A kind of message: its columns, with `MASK` in the place of what varies."""

    columns: Columns

    @property
    def text(self) -> str:
        """Return the template as it is shown."""
        return " ".join(self.columns).replace(MASK, WILDCARD)

    @property
    def id(self) -> str:
        """Return the id: equal templates have equal ids, in every run and on every machine."""
        return template_id(self.text)


def template_id(text: str) -> str:
    """Return the id of a template's text: 16 hexadecimal digits."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


Values = dict[str, set[str]]
"""The words that vary, by the word before them."""


def derive(messages: Iterable[Columns]) -> dict[Columns, Template]:
    """Return the template of each masked message."""
    by_length: dict[int, list[Columns]] = {}
    for message in sorted(set(messages)):
        by_length.setdefault(len(message), []).append(message)
    groups = list(by_length.values())
    values = _values_of([part for group in groups for part in _split(group, {})])
    found: dict[Columns, Template] = {}
    for group in groups:
        for template, part in _absorb(_split(group, values)):
            found.update(dict.fromkeys(part, template))
    return found


def _values_of(parts: Iterable[list[Columns]]) -> Values:
    """Return the words of the columns that vary, by the word before them."""
    found: Values = {}
    for part in parts:
        general = generalize(part)
        for place in range(1, len(general)):
            before = general[place - 1]
            words = {own[place] for own in part}
            if len(words) > 1 and MASK not in before:
                found.setdefault(before, set()).update(words)
    return found


def _split(group: list[Columns], values: Values) -> list[list[Columns]]:
    pending, done = [group], []
    while pending:
        part = pending.pop()
        parts = _cut(part, values)
        if len(parts) == 1:
            done.append(part)
        else:
            pending += parts
    return done


def _cut(part: list[Columns], values: Values) -> list[list[Columns]]:
    """Return a part as one piece if its messages are of one kind, else as several."""
    if len(part) == 1:
        return [part]
    columns = [Counter(column) for column in zip(*part, strict=True)]
    differing = [place for place, words in enumerate(columns) if len(words) > 1]
    named = sum(_has_name(columns[place]) for place in differing)
    same = named + sum(len(words) == 1 and MASK not in words for words in columns)
    if same < COHERENCE * (same + len(differing) - named):
        return _cut_by_frequent_word(part, columns)
    few = [(len(columns[place]), place) for place in differing if _tells_apart(columns, place, values)]
    return _cut_by_column(part, min(few)[1]) if few else [part]


def _tells_apart(columns: list[Counter[str]], place: int, values: Values) -> bool:
    """Tell whether the words of a column are kinds of messages rather than values."""
    words = columns[place]
    if len(words) > max(FIRST_WORDS_FEW, CAPITALS_FEW):
        return False
    if _is_masked_once(words):
        return False
    if place and len(columns[place - 1]) == 1:
        (before,) = columns[place - 1]
        if words.keys() <= values.get(before, set()) or before.lower() in NAMING:
            return False
    if _are_values(sorted(words)) or (place and all(_INSTANCE.fullmatch(word) for word in words)):
        return False
    if _assigned(columns, place) and (_assignments(columns) > 1 or all(MASK in word for word in words)):
        return False
    if place == 0 and _common(sorted(words)) == MASK:
        return len(words) <= FIRST_WORDS_FEW
    return len(words) <= (CAPITALS_FEW if all(word.lstrip(MARKS)[:1].isupper() for word in words) else WORDS_FEW)


def _has_name(words: Iterable[str]) -> bool:
    """Tell whether what differs is a value whose name is the same, as in `size=1` and `size=2`."""
    if any("=" not in word for word in words):
        return False
    head, _, _ = _common(sorted(words)).partition(MASK)
    return head.endswith("=") and head[0].isalpha()


def _is_masked_once(words: Iterable[str]) -> bool:
    """Tell whether one of different words was masked where another has something else: then it varies."""
    return any(MASK in word and word != other and fits(word, other) for word in words for other in words)


def _are_values(words: Sequence[str]) -> bool:
    """Tell whether different words are values by their looks.

    They are if all are enclosed in quotes or brackets, are literals such as `true` and `null`, identifiers such as
    `fileReader`, or dotted names that differ in more than their last part.
    """
    head, _, tail = _common(words).partition(MASK)
    if head and OPENING.get(head[-1]) == tail[:1]:
        return True
    bare = [word[len(head) : len(word) - len(tail)].strip(MARKS + ":.") for word in words]
    if all(word.lower() in LITERALS for word in bare) or all(map(_IDENTIFIER.fullmatch, bare)):
        return True
    return all(_DOTTED.fullmatch(word) for word in bare) and len({word.rpartition(".")[0] for word in bare}) > 1


def _assignments(columns: Sequence[Counter[str]]) -> int:
    """Return after how many equals signs messages differ.

    Messages that differ after one may be of two kinds; those that differ after several have values there.
    """
    return sum(
        _assigned(columns, place)
        for place, words in enumerate(columns)
        if 1 < len(words) <= CAPITALS_FEW and not _is_masked_once(words)
    )


def _assigned(columns: Sequence[Counter[str]], place: int) -> int:
    """Return how many equals signs a column has before and in what differs in it; 0 if none is directly before it."""
    words = sorted(columns[place])
    head, _, tail = _common(words).partition(MASK)
    follows = place > 0 and not head and all(word.endswith("=") for word in columns[place - 1])
    if not (follows or head.rstrip("\"'").endswith("=")):
        return 0
    return 1 + max(word.count("=", len(head), len(word) - len(tail)) for word in words)


def _cut_by_frequent_word(part: list[Columns], columns: list[Counter[str]]) -> list[list[Columns]]:
    """Separate the messages with the most frequent word that some of them do not have."""
    choices = [
        (-count, place, word)
        for place, words in enumerate(columns)
        for word, count in words.items()
        if count < len(part) and word != MASK
    ]
    if not choices:
        return [part]
    _, place, word = min(choices)
    return [[own for own in part if own[place] == word], [own for own in part if own[place] != word]]


def _cut_by_column(part: list[Columns], place: int) -> list[list[Columns]]:
    by_word: dict[str, list[Columns]] = {}
    for words in part:
        by_word.setdefault(words[place], []).append(words)
    return list(by_word.values())


def _absorb(parts: list[list[Columns]]) -> list[tuple[Template, list[Columns]]]:
    """Add parts whose messages all fit the template of another part to that part."""
    ranked = sorted(((generalize(part), part) for part in parts), key=lambda own: (-own[0].count(MASK), own[0]))
    kept: list[tuple[Columns, list[Columns]]] = []
    for general, part in ranked:
        for known, members in kept:
            if any(MASK in column for column in known) and all(map(fits, known, general)) and _is_specific(known):
                members += part
                break
        else:
            kept.append((general, list(part)))
    return [(Template(general), part) for general, part in kept]


def _is_specific(known: Columns) -> bool:
    """Tell whether a template has enough words of its own to absorb another."""
    own = sum(MASK not in column for column in known)
    return own >= COHERENCE * len(known)


def generalize(part: Sequence[Columns]) -> Columns:
    """Return the words that messages have in common, with `MASK` where they differ."""
    return tuple(_common(sorted({words[column] for words in part})) for column in range(len(part[0])))


def _common(words: Sequence[str]) -> str:
    """Return what is common to words: a prefix and a suffix that end at a mark."""
    first, last = words[0], words[-1]
    if first == last:
        return first
    shortest = min(map(len, words))
    prefix = _shared(words, shortest)
    while prefix and not (first[prefix - 1] in MARKS or first[prefix - 1] == ":"):
        prefix -= 1
    suffix = _shared([word[::-1] for word in words], shortest - prefix)
    while suffix and not _may_close(first[:prefix], first[-suffix]):
        suffix -= 1
    return first[:prefix] + MASK + (first[len(first) - suffix :] if suffix else "")


def _may_close(head: str, character: str) -> bool:
    """Tell whether a common suffix may begin with a character: a mark, but no bracket that opens in what varies."""
    if character in CLOSED_BY:
        return CLOSED_BY[character] in head
    return character in MARKS or character in ":."


def _shared(words: Sequence[str], limit: int) -> int:
    """Return how many characters at the beginning are equal and not masked."""
    for place in range(limit):
        if words[0][place] == MASK or any(word[place] != words[0][place] for word in words):
            return place
    return limit


class Matcher:
    """Finds the template of a message that was not learned from."""

    def __init__(self, templates: Iterable[Template]) -> None:
        self._by_start: dict[tuple[int, str], list[tuple[int, Columns, Template]]] = {}
        for template in set(templates):
            columns = template.columns
            varying = sum(MASK in column for column in columns)
            if varying:
                start = "" if not columns or MASK in columns[0] else columns[0]
                self._by_start.setdefault((len(columns), start), []).append((varying, columns, template))
        for own in self._by_start.values():
            own.sort(key=lambda one: one[:2])

    def match(self, columns: Columns) -> Template | None:
        """Return the most specific template that fits, None without one."""
        found = []
        for start in {columns[0] if columns else "", ""}:
            for varying, known, template in self._by_start.get((len(columns), start), ()):
                if all(map(fits, known, columns)):
                    found.append((varying, known, template))
                    break
        return min(found, key=lambda one: one[:2])[2] if found else None


def fits(pattern: str, word: str) -> bool:
    """Tell whether a word is an instance of a column of a template."""
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


def parameters_of(template: Template, message: Message) -> list[tuple[int, int]]:
    """Return where the parameters of a message are in its masked text, in order."""
    found: list[tuple[int, int]] = []
    for pattern, column, (first, last) in zip(template.columns, message.columns, message.spans, strict=True):
        if MASK not in pattern:
            continue
        if pattern == column and len(column.encode()) == last - first:
            data = column.encode()
            found += [(first + at, first + at + 1) for at, byte in enumerate(data) if byte == ord(MASK)]
        else:
            # A column that was drawn together from several words has more masks than its pattern shows: all from the
            # first to the last is one parameter.
            head, tail = pattern.partition(MASK)[0], pattern.rpartition(MASK)[2]
            found.append((first + len(head.encode()), last - len(tail.encode())))
    return found
