"""The model: what was learned from lines, as a value that merges.

A model is a set of *forms*: one example for each different line once numbers, addresses and paths are masked, with its
count. Layouts and templates are computed from that set and from nothing else. Models merge by the union of their sets,
so merging is associative and commutative, and neither the order of lines nor their partitioning has an influence.

When the set grows past `FORMS_MAX`, each template keeps the forms with the smallest hashes. When a template of an
earlier model is no longer computed, because it was merged with others or split, `successors` says what became of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final

import msgspec
import numpy as np
import zstandard

from quiver.errors import RequestError
from quiver.spark.logs.columns import Batch, Column, fill, pa, pc, strings_of
from quiver.spark.logs.formats import layout_of_format
from quiver.spark.logs.headers import HEAD_CHARACTERS_MAX, Layout, learn_layouts
from quiver.spark.logs.messages import Columns, read_message
from quiver.spark.logs.parser import Parser, decode, masked_messages
from quiver.spark.logs.templates import Template, derive
from quiver.spark.logs.tokens import mask

VERSION: Final = 1
"""Version of the stored form."""
FORMS_MAX: Final = 20_000
"""So many forms are kept."""
HEADS_MAX: Final = 4_000
"""So many lines of a source vote on its layouts."""
FORMS_OF_TEMPLATE: Final = 64
"""So many forms of one template are kept when there are too many."""
EXAMPLE_CHARACTERS_MAX: Final = 4096


class Form(msgspec.Struct, frozen=True, array_like=True):
    """A line as it looks when what varies is masked."""

    source: str
    line: str
    """The smallest of the lines of this form: which one it is does not depend on their order."""
    last: str
    """The largest of them. Two examples show which digits vary, as day and month do."""
    count: int


class _Stored(msgspec.Struct, array_like=True):
    version: int
    formats: tuple[str, ...]
    forms: list[Form]
    successors: dict[str, tuple[str, ...]]
    layouts: dict[str, tuple[Layout, ...]]
    templates: list[Columns]
    words: list[tuple[Columns, int]]


class Learned(msgspec.Struct, frozen=True):
    """What is computed from the forms."""

    layouts: Mapping[str, Sequence[Layout]]
    """By source; the empty source stands for all that are not named."""
    templates: Mapping[Columns, Template]
    """The template of each masked message."""


class Model:
    """What was learned from lines. Immutable.

    Example:
        model = learn(pa.array(lines))
        rows = model.parse(pa.array(lines))
    """

    def __init__(
        self,
        forms: Mapping[tuple[str, bytes], Form] | None = None,
        *,
        formats: Sequence[str] = (),
        successors: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self._forms = dict(forms or {})
        self.formats = tuple(sorted(set(formats)))
        self._recorded = dict(successors or {})
        self._before: tuple[Model, ...] = ()

    def __eq__(self, other: object) -> bool:
        """Compare what was learned; the recorded successors do not count."""
        return isinstance(other, Model) and (self._forms, self.formats) == (other._forms, other.formats)

    def __hash__(self) -> int:
        return hash((len(self._forms), self.formats))

    @property
    def form_count(self) -> int:
        """Return how many forms the model has."""
        return len(self._forms)

    @cached_property
    def learned(self) -> Learned:
        """Return the layouts and templates."""
        return _learn(self._forms.values(), self.formats)

    @property
    def templates(self) -> dict[str, str]:
        """Return the templates, by id."""
        return {template.id: template.text for template in set(self.learned.templates.values())}

    @property
    def layouts(self) -> Mapping[str, Sequence[Layout]]:
        """Return the layouts, by source."""
        return self.learned.layouts

    @cached_property
    def successors(self) -> Mapping[str, tuple[str, ...]]:
        """Return what became of templates that are no longer computed: the ids that their lines have now.

        One id means that the template was merged, several that it was split. Templates of models that nothing was
        parsed with were never seen, and are not recorded.
        """
        found = _record(self, self._recorded, self._before)
        self._before = ()
        return found

    def resolve(self, template_id: str) -> tuple[str, ...]:
        """Return the ids that the lines of an earlier template have now; the id itself if it is a template."""
        known = self.templates
        found, pending, seen = set(), [template_id], set()
        while pending:
            own = pending.pop()
            if own in seen:
                continue
            seen.add(own)
            if own in known or own not in self.successors:
                found.add(own)
            else:
                pending += self.successors[own]
        return tuple(sorted(found))

    def merge(self, other: Model) -> Model:
        """Return a model of the lines of both."""
        if not other._forms and not other.formats:
            return self
        if not self._forms and not self.formats:
            return other
        forms = dict(self._forms)
        for key, form in other._forms.items():
            known = forms.get(key)
            forms[key] = _join(known, form) if known else form
        formats = (*self.formats, *other.formats)
        recorded = {own: self._recorded.get(own, ()) + other._recorded.get(own, ()) for own in _keys_of(self, other)}
        merged = Model(_bounded(forms, formats), formats=formats, successors=recorded)
        merged._before = tuple(before for model in (self, other) for before in model._seen())
        return merged

    def _seen(self) -> tuple[Model, ...]:
        """Return the models whose templates may have been seen: this one, or those that it was merged from."""
        return (self,) if "learned" in self.__dict__ else self._before

    def parser(self) -> Parser:
        """Return a parser, which keeps what it computes for the next batch."""
        learned = self.learned
        every = learned.layouts.get("", ())
        return Parser(
            lambda source: learned.layouts.get(source, every),
            dict(learned.templates),
        )

    @cached_property
    def _parser(self) -> Parser:
        return self.parser()

    def parse(self, lines: Column, *, sources: Column | None = None, timestamps: Column | None = None) -> Batch:
        """Parse lines into rows with the columns of `SCHEMA`: see `Parser.parse`."""
        return self._parser.parse(lines, sources=sources, timestamps=timestamps).rows

    def to_bytes(self) -> bytes:
        """Return the stored form, which `from_bytes` reads without learning once more."""
        learned = self.learned
        templates = sorted({template.columns for template in learned.templates.values()})
        numbers = {words: number for number, words in enumerate(templates)}
        stored = _Stored(
            VERSION,
            self.formats,
            [form for _, form in sorted(self._forms.items())],
            dict(self.successors),
            {source: tuple(own) for source, own in learned.layouts.items()},
            templates,
            sorted((words, numbers[template.columns]) for words, template in learned.templates.items()),
        )
        return zstandard.compress(msgspec.msgpack.encode(stored))

    @classmethod
    def from_bytes(cls, data: bytes) -> Model:
        """Read a stored model.

        Raises:
            RequestError: the bytes are not a model, or one of a later version.
        """
        try:
            plain = zstandard.decompress(data)
            version = msgspec.msgpack.decode(plain)[0]
            if version != VERSION:
                raise RequestError(
                    f"the model has version {version}, this release reads version {VERSION}: upgrade, or learn again",
                    code="model_version",
                )
            stored = msgspec.msgpack.decode(plain, type=_Stored)
        except (zstandard.ZstdError, msgspec.MsgspecError, TypeError, IndexError, KeyError) as error:
            raise RequestError(f"these bytes are not a stored model: {error}", code="model_corrupt") from None
        keys = _keys(pa.array([form.line for form in stored.forms], pa.string())).to_pylist()
        forms = {(form.source, key): form for form, key in zip(stored.forms, keys, strict=True)}
        model = cls(forms, formats=stored.formats, successors=stored.successors)
        templates = [Template(tuple(words)) for words in stored.templates]
        model.__dict__["learned"] = Learned(stored.layouts, {tuple(own): templates[at] for own, at in stored.words})
        return model


def learn(
    lines: Column, *, sources: Column | None = None, formats: Sequence[str] = (), counts: Sequence[int] = ()
) -> Model:
    """Learn from lines, as strings or bytes.

    Args:
        lines: the lines; null is an empty line.
        sources: what each line comes from, such as its file; lines of one source vote on their format together.
        formats: formats that the user gives, which override what is learned: see `layout_of_format`.
        counts: how many times each line occurred, 1 without it.
    """
    if isinstance(lines, pa.ChunkedArray):
        lines = lines.combine_chunks()
    for own in formats:
        layout_of_format(own)
    text, _ = decode(lines)
    text = pc.utf8_slice_codeunits(text, 0, EXAMPLE_CHARACTERS_MAX)
    names = pa.array([""] * len(text)) if sources is None else fill(sources.cast(pa.string()), "")
    keys = _keys(text)
    table = pa.table({"source": names, "key": keys, "line": text, "count": counts or np.ones(len(text), np.int64)})
    grouped = table.group_by(["source", "key"]).aggregate([("line", "min"), ("line", "max"), ("count", "sum")])
    forms = {
        (row["source"], row["key"]): Form(row["source"], row["line_min"], row["line_max"], row["count_sum"])
        for row in grouped.to_pylist()
    }
    return Model(_bounded(forms, formats), formats=formats)


def _keys(text: Column) -> Column:
    return mask(text).forms


def _join(one: Form, other: Form) -> Form:
    return Form(one.source, min(one.line, other.line), max(one.last, other.last), one.count + other.count)


def _learn(forms: Iterable[Form], formats: Sequence[str]) -> Learned:
    given = tuple(layout_of_format(own) for own in formats)
    by_source: dict[str, list[Form]] = {}
    for form in forms:
        for source in {form.source, ""}:
            by_source.setdefault(source, []).append(form)
    layouts, templates = {}, set()
    for source, own in sorted(by_source.items()):
        heads = {line[:HEAD_CHARACTERS_MAX] for form in own for line in (form.line, form.last)}
        voting = sorted(heads, key=_digest)[:HEADS_MAX] if len(heads) > HEADS_MAX else heads
        layouts[source] = (*given, *learn_layouts(sorted(voting)))
        templates |= _columns([form.line for form in own if form.source == source], layouts[source])
    return Learned(layouts, derive(templates))


def _columns(lines: Sequence[str], layouts: Sequence[Layout]) -> set[Columns]:
    """Return the columns of the messages of lines."""
    return {read_message(own).columns for own in masked_messages(pa.array(lines, pa.string()), layouts)}


def _bounded(forms: dict[tuple[str, bytes], Form], formats: Sequence[str]) -> dict[tuple[str, bytes], Form]:
    """Return at most `FORMS_MAX` forms: of each template those with the smallest hashes."""
    if len(forms) <= FORMS_MAX:
        return forms
    parser = Model(forms, formats=formats).parser()
    keys = sorted(forms, key=_hash)
    lines = pa.array([forms[key].line for key in keys], pa.string())
    rows = parser.parse(lines, sources=pa.array([key[0] for key in keys])).rows
    ids: list[str] = strings_of(rows.column("template_id"))
    kept: dict[tuple[str, bytes], Form] = {}
    counts: dict[str, int] = {}
    for key, own in zip(keys, ids, strict=True):
        counts[own] = counts.get(own, 0) + 1
        if counts[own] <= FORMS_OF_TEMPLATE and len(kept) < FORMS_MAX:
            kept[key] = forms[key]
    return kept


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _hash(key: tuple[str, bytes]) -> bytes:
    return hashlib.blake2b(key[0].encode() + b"\0" + key[1], digest_size=8).digest()


def _keys_of(one: Model, other: Model) -> set[str]:
    return {*one._recorded, *other._recorded}


def _record(
    merged: Model, recorded: Mapping[str, tuple[str, ...]], before: Sequence[Model]
) -> Mapping[str, tuple[str, ...]]:
    """Return the successors of all templates that earlier models had and the merged one does not compute."""
    found: dict[str, set[str]] = {old: set(new) for old, new in recorded.items()}
    current = merged.templates
    for model in before:
        for old, new in model.successors.items():
            found.setdefault(old, set()).update(new)
        if model.templates.keys() <= current.keys():
            continue
        for old, now in zip(_ids(model, model), _ids(model, merged), strict=True):
            if old not in current:
                found.setdefault(old, set()).add(now)
    return {old: tuple(sorted(new)) for old, new in found.items() if old not in current}


def _ids(model: Model, reading: Model) -> list[str]:
    """Return the ids that a model gives to the forms of another, by their sources and without them."""
    keys = sorted(model._forms)
    lines = pa.array([model._forms[key].line for key in keys], pa.string())
    named = reading.parse(lines, sources=pa.array([key[0] for key in keys], pa.string()))
    plain = reading.parse(lines)
    return strings_of(named.column("template_id")) + strings_of(plain.column("template_id"))
