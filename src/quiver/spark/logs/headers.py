"""Headers: what stands before the message of a line, learned by a vote over example lines.

Lines with the same notation of time vote together, so two formats in one topic do not disturb each other. From the time
stamp on, fields are tried at the place where the examples stand: a level, a bracket, a tag that ends with a colon, a
separator. A field is taken if nearly all examples have it there; words between are taken only if a field follows that
can be told from a message. Examples that do not agree vote once more without the others, and what is left over has its
time cut off and nothing else.

A layout is one regular expression, valid for Python's `re` and for RE2 alike, with the named groups of its time stamp
and `level`, `source`, `host`, `thread`, `message`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from quiver.spark.logs import levels
from quiver.spark.logs.timestamps import AMBIGUOUS, NOTATION, find_stamp

HEAD_CHARACTERS_MAX: Final = 512
"""Headers end within so many characters."""
PREFIX_WORDS_MAX: Final = 6
"""So many words may precede the time stamp."""
AGREEMENT: Final = 0.9
"""Share of the examples that must have a field at a place."""
LAYOUTS_MAX: Final = 4
"""Layouts with one notation of time."""
EXAMPLES_FEW: Final = 3
"""Fewer examples agree by chance: at most one word may then stand between two fields."""
WORDS_BETWEEN_MAX: Final = 3
"""So many words may stand between two fields that are recognised."""
FIELDS_MAX: Final = 10

_BRACKETED: Final = r"[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*"
_NAME: Final = r"[A-Za-z_/$@.-][^\s:\[\]|]*"


class Field(msgspec.Struct, frozen=True):
    """A part of a header: how it is recognised, how many examples must have it, and whether it ends the header."""

    name: str
    pattern: str
    agreement: float = AGREEMENT
    distinct_share_max: float = 1.0
    is_last: bool = False


FIELDS: Final = (
    Field("level", rf"[\[(<]?(?P<level>{levels.WORD})(?:[\])>:,|]+\s*|\s+|$)"),
    Field("level", rf"(?P<level>{levels.LETTER})(?:\s+|/)", 0.98),
    Field("place", rf"\[(?P<thread>{_BRACKETED}):(?P<source>[\w$.]+)@\d+\](?:\s+|:\s*|$)", 0.95),
    Field("place", r"(?P<source>[\w./-]+):\d+\]\s+", 0.95),
    Field("bracket", rf"\[{_BRACKETED}\](?:\s+|:\s*|$)", 0.95),
    Field("bracket", r"\([^()]*\)(?:\s+|:\s*|$)", 0.98),
    Field("separator", r"(?:-+|\||:+|>+)(?:\s+|$)", 0.95),
    Field("tag", rf"(?P<source>{_NAME})(?:\[(?P<thread>[^\[\]\s]+)\])?(?: \([^()]*\))?:(?:\s+|$)", is_last=True),
    Field("dotted tag", r"(?P<source>[A-Za-z_$][\w$-]*(?:\.[\w$-]+)+):(?:\s+|$)", is_last=True),
    Field(
        "long tag",
        rf"(?:(?P<source>{_NAME}(?: [^\s:\[\]|]+){{0,3}}?)\s?\[(?P<thread>[^\[\]\s]+)\](?: \([^()]*\))?"
        rf"|(?P<tag>{_NAME}(?: v?\d[\w.-]*)?)):(?:\s+|$)",
        is_last=True,
    ),
    Field("phrase", r"(?P<source>\w[^\s:=]*(?: [^\s:=]+){0,2}?) - ", 0.95, 0.2, is_last=True),
    Field("column", r"(?P<source>[A-Za-z_][\w.$/-]*)(?:\s{2,}|\t)", 0.95, 0.2),
    Field("dotted", r"(?P<source>[A-Za-z_$][\w$-]*(?:\.[\w$-]+)+)\s+", 0.98, 0.2),
)
"""What can be recognised after a time stamp, in the order in which it is tried."""
WITHOUT_WORDS: Final = ("phrase", "column", "dotted", "tag", "dotted tag")
"""Fields that count only directly after another one: elsewhere words of messages look like them."""
BRANCHING: Final = ("level", "place", "bracket", "dotted tag")
BRANCH: Final = 0.3
"""If no field is agreed upon, the examples with one of these are a format of their own, if they are so many."""
_FIELD_SEARCHES: Final = tuple((one, re.compile(one.pattern)) for one in FIELDS)
_WORD: Final = r"\S+\s+"
_GAP: Final = re.compile(r"[\]),;|:\s-]*")


class Layout(msgspec.Struct, frozen=True):
    """How the lines of one format are put together."""

    pattern: str
    notation: str
    """Name of the notation of the time stamp; empty without one."""
    votes: int = 0


def learn_layouts(heads: Sequence[str]) -> tuple[Layout, ...]:
    """Return the layouts of example lines, the most specific first.

    The result depends on the set of examples, not on their order.
    """
    by_notation: dict[str, list[str]] = {}
    for head in sorted(set(heads)):
        stamp = _stamp_of(head)
        by_notation.setdefault(stamp, []).append(head)
    for notation, other in AMBIGUOUS.items():
        if other in by_notation and notation in by_notation:
            by_notation[other] += by_notation.pop(notation)
    found: list[Layout] = []
    for notation, own in sorted(by_notation.items(), key=lambda item: (item[0] == "", -len(item[1]), item[0])):
        found += _vote(notation, own)
    return tuple(found)


def _stamp_of(head: str) -> str:
    """Return the notation of a line's first time stamp, empty without one among its first words."""
    stamp = find_stamp(head)
    if stamp is None or len(head[: stamp.start].split()) > PREFIX_WORDS_MAX:
        return ""
    return stamp.notation


def _vote(notation: str, heads: list[str]) -> list[Layout]:
    found: list[Layout] = []
    left = heads
    while left and len(found) < LAYOUTS_MAX:
        layout = _Ballot(notation, left).layout()
        if layout is None:
            break
        search = re.compile(layout.pattern, re.DOTALL)
        remaining = [head for head in left if not search.match(head)]
        if len(remaining) == len(left):
            break
        found.append(layout)
        left = remaining
    if notation and left:
        pattern = rf"^.{{0,160}}?{NOTATION[notation].pattern}[\]),;|:\s-]*(?P<message>.*)$"
        found.append(Layout(pattern, notation, len(left)))
    return found


class _Ballot:
    """One vote: the examples that agree so far, where each of them stands, and the pattern up to there."""

    def __init__(self, notation: str, heads: list[str]) -> None:
        self._notation = notation
        self._named: set[str] = set()
        self._pattern = "^"
        self._fields = 0
        self._heads = [(head, 0) for head in heads]
        self._words_max = WORDS_BETWEEN_MAX if len(heads) >= EXAMPLES_FEW else 1

    def layout(self) -> Layout | None:
        """Return the layout of most examples; None if they have nothing in common."""
        if self._notation and not self._take_stamp():
            return None
        self._take_fields()
        if not self._fields:
            if not self._notation:
                return None
            self._take_flag()
        self._pattern += r"(?P<message>.*)$"
        return Layout(self._pattern, self._notation, len(self._heads))

    def _take_stamp(self) -> bool:
        """Take the words before the stamp, the stamp, and further stamps that follow it closely."""
        stamps = [(head, find_stamp(head)) for head, _ in self._heads]
        places = Counter(len(head[: stamp.start].split(" ")) - 1 for head, stamp in stamps if stamp)
        if not places:
            return False
        words = min(places, key=lambda place: (-places[place], place))
        self._heads = [
            (head, stamp.end) for head, stamp in stamps if stamp and len(head[: stamp.start].split(" ")) - 1 == words
        ]
        self._pattern += self._prefix(words) + NOTATION[self._notation].pattern
        self._named |= set(re.compile(NOTATION[self._notation].pattern).groupindex)
        self._take_more_stamps()
        self._advance_gap()
        return True

    def _prefix(self, words: int) -> str:
        """Return the pattern of what precedes the stamp; name the parts that are alike in all examples."""
        if self._notation == "glog" and not words:
            self._named.add("level")
            return rf"(?P<level>{levels.LETTER})"
        parts = []
        for place in range(words):
            texts = [head.split(" ")[place] for head, _ in self._heads]
            kind = _kind_of(texts)
            if kind and kind not in self._named:
                self._named.add(kind)
                parts.append(rf"(?P<{kind}>\S*) ")
            else:
                parts.append(r"\S* ")
        return "".join(parts) + r"[^\s0-9]{0,3}" if not self._is_attached(words) else "".join(parts) + r"\S*?"

    def _is_attached(self, words: int) -> bool:
        """Tell whether the stamp is the end of a longer word, as in the name of a rotated file."""
        long = 0
        for head, _ in self._heads:
            stamp = find_stamp(head)
            assert stamp is not None
            long += len(head[: stamp.start].split(" ")[words]) > 3
        return long * 2 > len(self._heads)

    def _take_more_stamps(self) -> None:
        """Take a second stamp that nearly all examples have within the next words."""
        for _ in range(2):
            nexts = [(head, at, find_stamp(head, at, end=at + 80)) for head, at in self._heads]
            kinds = Counter(
                (stamp.notation, len(head[at : stamp.start].split(" ")))
                for head, at, stamp in nexts
                if stamp and stamp.notation != "clock" and len(head[at : stamp.start].split()) <= WORDS_BETWEEN_MAX
            )
            if not kinds:
                return
            (notation, words), votes = min(kinds.items(), key=lambda item: (-item[1], item[0]))
            if votes < AGREEMENT * len(nexts):
                return
            if not self._join_stamp(notation, words, nexts):
                return

    def _join_stamp(self, notation: str, words: int, nexts: Sequence[tuple[str, int, object]]) -> bool:
        """Add a second stamp to the pattern; return whether the examples have it where the pattern looks for it."""
        between = r"[^\s0-9]{0,3}" if words == 1 else r"\S*" + r" \S*" * (words - 2) + r" [^\s0-9]{0,3}"
        own, stamp = self._pattern, NOTATION[notation].pattern
        is_epoch = NOTATION[self._notation].is_epoch
        if is_epoch:  # the stamp whose zone is known stays the line's time
            stamp = re.sub(r"\(\?P<\w+>", "(?:", stamp)
        else:
            own = re.sub(r"\(\?P<[YymdbHMSfzpe]>", "(?:", own)
        search = re.compile(own + between + stamp)
        matches = [(head, match.end()) for head, _, _ in nexts if (match := search.match(head))]
        if len(matches) < AGREEMENT * len(nexts):
            return False
        self._pattern, self._heads = search.pattern, matches
        self._notation = self._notation if is_epoch else notation
        return True

    def _advance_gap(self) -> None:
        """Step over the punctuation after the stamp."""
        self._pattern += _GAP.pattern
        self._heads = [(head, _end_of(_GAP, head, at)) for head, at in self._heads]

    def _take_fields(self) -> None:
        if self._take_delimited():
            return
        skipped: list[tuple[str, int]] = []
        heads, words = self._heads, 0
        while self._fields < FIELDS_MAX:
            taken = self._try_fields(heads, words)
            if taken is None:
                if words == self._words_max or not self._notation:
                    return
                skipped = [(head, _end_of(_WORD_SEARCH, head, at)) for head, at in heads]
                if sum(after > at for (_, after), (_, at) in zip(skipped, heads, strict=True)) < AGREEMENT * len(heads):
                    return
                heads, words = [one for one, (_, at) in zip(skipped, heads, strict=True) if one[1] > at], words + 1
                continue
            heads, words = taken, 0
            if self._is_finished:
                return

    _is_finished = False

    def _try_fields(self, heads: list[tuple[str, int]], words: int) -> list[tuple[str, int]] | None:
        """Take the first field that nearly all examples have, else one that tells two formats apart."""
        branches = []
        for order, (field, search) in enumerate(_FIELD_SEARCHES):
            if not self._may_follow(field, words):
                continue
            matches = [(head, match) for head, at in heads if (match := search.match(head, at))]
            if len({match.group() for _, match in matches}) > max(2, field.distinct_share_max * len(heads)):
                continue
            if matches and len(matches) >= field.agreement * len(heads):
                self._join(field, words, matches)
                return self._heads
            if field.name in BRANCHING and not words and len(matches) >= max(5, BRANCH * len(heads)):
                branches.append((-len(matches), order, field, matches))
        if not branches:
            return None
        _, _, field, matches = min(branches, key=lambda own: own[:2])
        self._join(field, words, matches)
        return self._heads

    def _may_follow(self, field: Field, words: int) -> bool:
        """Tell whether a field may stand here, after so many words that are no field."""
        if not self._notation and field.name not in ("level", "bracket"):
            return False
        if (field.name == "level" and "level" in self._named) or (words and field.name in WITHOUT_WORDS):
            return False
        if field.name == "long tag" and not words:
            return False  # the first word before a tag with blanks is the host
        return not ("source" in self._named and "(?P<source>" in field.pattern)

    def _join(self, field: Field, words: int, matches: list[tuple[str, re.Match[str]]]) -> None:
        """Add the words that were skipped and a field to the pattern."""
        kept = {head for head, _ in matches}
        starts = dict(self._heads)
        before = [head[starts[head] :].split()[:words] for head in kept]
        for place in range(words):
            kind = _kind_of([own[place] for own in before])
            if kind == "source" and "(?P<source>" in field.pattern:
                kind = "host"
            if kind and kind not in self._named:
                self._named.add(kind)
                self._pattern += rf"(?P<{kind}>\S+)\s+"
            else:
                self._pattern += _WORD
        self._pattern += self._renamed(field)
        self._heads = [(head, match.end()) for head, match in matches]
        self._fields += 1
        self._is_finished = field.is_last and field.name != "phrase"

    def _renamed(self, field: Field) -> str:
        """Return the pattern of a field; a bracket is a thread, names that are taken lose their group."""
        pattern = field.pattern
        if field.name == "bracket" and "thread" not in self._named:
            pattern = pattern.replace(rf"\[{_BRACKETED}\]", rf"\[(?P<thread>{_BRACKETED})\]", 1)
        for name in re.findall(r"\?P<(\w+)>", pattern):
            if name in self._named:
                pattern = pattern.replace(f"(?P<{name}>", "(?:")
            self._named.add(name)
        return pattern

    def _take_flag(self) -> None:
        """Take a number that follows the stamp and is the same in nearly all lines."""
        flags = Counter(match.group() for head, at in self._heads if (match := _FLAG.match(head, at)))
        if flags and len(flags) <= 2 and flags.total() >= 0.98 * len(self._heads):
            self._pattern += _FLAG.pattern

    def _take_delimited(self) -> bool:
        """Take fields that one character delimits, as `|` or a tab does, if all examples have them."""
        for mark in "|\t;":
            after = sum(head[at - 1 : at] == mark for head, at in self._heads)
            count = min(head[at:].count(mark) for head, at in self._heads)
            if after < 0.98 * len(self._heads) or not count:
                continue
            escaped = re.escape(mark)
            for place in range(min(count, 6)):
                texts = [head[at:].split(mark)[place].strip() for head, at in self._heads]
                kind = _kind_of(texts)
                name = kind if kind and kind not in self._named else ""
                self._named.add(name)
                self._pattern += rf"(?P<{name}>[^{escaped}]*){escaped}" if name else rf"[^{escaped}]*{escaped}"
            self._fields += 1
            return True
        return False


_FLAG: Final = re.compile(r"\d+\s+")
_WORD_SEARCH: Final = re.compile(_WORD)
_NUMBER: Final = re.compile(r"\d+\Z")
_HOST: Final = re.compile(r"[A-Za-z0-9][\w.:/@-]*\Z")
_LEVEL: Final = re.compile(rf"[\[(<]?{levels.WORD}[\])>:,]?\Z")


def _kind_of(texts: Sequence[str]) -> str:
    """Return what words that stand at one place of a header are: a level, a thread, a source, a host, or nothing."""
    count = len(texts)
    if sum(bool(_LEVEL.match(text)) for text in texts) >= AGREEMENT * count:
        return "level"
    if sum(bool(_NUMBER.match(text)) for text in texts) >= AGREEMENT * count:
        return "thread"
    if sum(bool(_HOST.match(text)) for text in texts) < AGREEMENT * count:
        return ""
    with_digits = sum(any(character.isdigit() for character in text) for text in texts)
    return "host" if with_digits * 2 > count or len(set(texts)) == 1 else "source"


def _end_of(search: re.Pattern[str], text: str, at: int) -> int:
    match = search.match(text, at)
    return match.end() if match else at
