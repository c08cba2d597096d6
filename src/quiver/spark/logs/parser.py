"""Parse batches of lines into columns with what a model has learned.

The lines of a batch are masked as one piece of text. Lines with the same masked form are equal but for their runs, so
Python looks once at each *different* form: where its parts are, what its template is, where its parameters are. What it
found is kept for the next batches, and the columns are cut from the text by arithmetic. A line that no layout fits is
its own message, and a message that no template fits is its own template: no line is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from quiver.spark.logs import fields
from quiver.spark.logs.columns import Batch, Column, Indices, fill, pa, pc, ragged, slices, text_of
from quiver.spark.logs.headers import Layout
from quiver.spark.logs.headings import PARTS, PLAIN, Heading, Reader
from quiver.spark.logs.messages import Columns, read_message
from quiver.spark.logs.stamps import Stamps, read_any
from quiver.spark.logs.templates import Matcher, Template, parameters_of
from quiver.spark.logs.tokens import MASK, Masked, mask

SCHEMA: Final = pa.schema(
    [
        pa.field("time", pa.timestamp("us", "UTC")),
        pa.field("level", pa.string()),
        pa.field("source", pa.string()),
        pa.field("host", pa.string()),
        pa.field("thread_or_pid", pa.string()),
        pa.field("template_id", pa.string(), nullable=False),
        pa.field("template", pa.string(), nullable=False),
        pa.field("parameters", pa.list_(pa.string()), nullable=False),
        pa.field("message", pa.string(), nullable=False),
        pa.field("line", pa.string(), nullable=False),
        pa.field("raw", pa.binary()),
    ]
)
"""The columns of parsed lines. `raw` has the bytes of a line that is not valid UTF-8, and is null for all others."""
FORMS_KEPT_MAX: Final = 200_000
"""So many forms are kept from batch to batch."""
LINES_AT_ONCE: Final = 8192
"""So many lines are masked at once: what they need then stays in the processor's cache."""

EXAMPLES_MAX: Final = 4
"""So many lines of a new form are looked at: digits that no date has may hide the format of one of them."""

Place = tuple[int, int]
"""A place in the lines of one form: the index of an anchor, and so many bytes after it. See `Masked`."""
NOWHERE: Final[Place] = (0, -1)


class Parsed(msgspec.Struct):
    """Parsed lines, and which of them have a message that no template of the model fits."""

    rows: Batch
    is_new: Column


class _Form(msgspec.Struct):
    """What is kept of a masked form."""

    heading: Heading
    template: int
    is_new: bool
    shape: int
    """Number of the shape of its time stamp, -1 without one."""
    places: tuple[int, ...]
    """Where the message, the time and the parts of the header start and end: anchor and offset of each."""
    parameters: tuple[int, ...]
    """Where the parameters start and end: anchor and offset of each."""


class Parser:
    """Parses batches; keeps what it computed for the next one. Not safe for use by several threads at once.

    Args:
        layouts: returns the layouts of a source.
        known: the template of each masked message that was learned from.
    """

    def __init__(self, layouts: Callable[[str], Sequence[Layout]], known: dict[Columns, Template]) -> None:
        self._layouts = layouts
        self._templates = known
        self._matcher = Matcher(known.values())
        self._stamps = Stamps()
        self._forget()

    def _forget(self) -> None:
        self._forms: dict[tuple[Layout, ...], dict[bytes, _Form]] = {}
        self._readers: dict[tuple[Layout, ...], Reader] = {}
        self._ids: list[str] = []
        self._texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._columns: tuple[Column, Column] = (pa.array([], pa.string()), pa.array([], pa.string()))

    def parse(self, lines: Column, *, sources: Column | None = None, timestamps: Column | None = None) -> Parsed:
        """Parse lines: one row for each, in their order.

        Args:
            lines: the lines, as strings or bytes; null is an empty line.
            sources: what each line comes from, such as its file; lines of one source share their format.
            timestamps: the records' own timestamps, for times without a year. Without them the present is taken.
        """
        if isinstance(lines, pa.ChunkedArray):
            lines = lines.combine_chunks()
        if sum(map(len, self._forms.values())) > FORMS_KEPT_MAX:
            self._forget()
        text, raw = decode(lines)
        near = _near(timestamps, len(lines))
        parts: list[Parsed] = []
        orders: list[Indices] = []
        for layouts, rows in self._by_layouts(sources, len(text)):
            is_all = len(rows) == len(text)
            own = text if is_all else text.take(pa.array(rows))
            for first in range(0, len(rows), LINES_AT_ONCE):
                chosen = rows[first : first + LINES_AT_ONCE]
                parts.append(self._parse(own.slice(first, LINES_AT_ONCE), near[chosen], layouts))
                orders.append(chosen)
        return _put_together(parts, orders, raw)

    def _by_layouts(self, sources: Column | None, count: int) -> list[tuple[tuple[Layout, ...], Indices]]:
        """Return the rows of lines that have the same layouts."""
        if sources is None:
            return [(tuple(self._layouts("")), np.arange(count))]
        encoded = pc.dictionary_encode(fill(sources.cast(pa.string()), ""))
        layouts = [tuple(self._layouts(name)) for name in encoded.dictionary.to_pylist()]
        each = sorted(set(layouts), key=layouts.index)
        codes = np.array([each.index(own) for own in layouts] or [0])[np.asarray(encoded.indices)]
        return [(own, np.flatnonzero(codes == code)) for code, own in enumerate(each)]

    def _parse(self, text: Column, near: Any, layouts: tuple[Layout, ...]) -> Parsed:
        masked = mask(text)
        codes = pc.dictionary_encode(masked.forms)
        known = self._forms.setdefault(layouts, {})
        each = np.asarray(codes.indices)
        forms = []
        for code, form in enumerate(codes.dictionary.to_pylist()):
            found = known.get(form)
            if found is None:
                rows = np.flatnonzero(each == code)[:EXAMPLES_MAX]
                found = known[form] = self._look_at(form, text, masked, rows, layouts)
            forms.append(found)
        is_new = pa.array([own.is_new for own in forms], pa.bool_()).take(pa.array(each))
        parsed = Parsed(self._cut(text, forms, each, masked, near), is_new)
        return self._with_fields(parsed, text, forms, each, near)

    def _look_at(self, form: bytes, text: Column, masked: Masked, rows: Indices, layouts: tuple[Layout, ...]) -> _Form:
        """Find the parts, the template and the parameters of a form, with one of its lines as the example."""
        reader = self._readers.get(layouts)
        if reader is None:
            reader = self._readers[layouts] = Reader(layouts)
        examples = [(int(row), text[int(row)].as_py().encode()) for row in rows]
        headings = [(row, line, reader.read(line)) for row, line in examples]
        row, line, heading = next((own for own in headings if own[2].time is not None), headings[0])
        places = _Places(line, masked, row)
        template, spans = self._template_of(places.masked_from(heading.message, form))
        header = [heading.time, *(getattr(heading, name) for name in PARTS)]
        return _Form(
            heading,
            self._number_of(template[0]),
            template[1],
            -1 if heading.time is None else self._stamps.number_of(heading.notation, line[slice(*heading.time)]),
            tuple(number for span in ((heading.message, 0), *header) for number in places.of(span)),
            tuple(number for span in places.unmasked(heading.message, spans) for number in places.of(span)),
        )

    def _template_of(self, masked: str) -> tuple[tuple[Template, bool], list[tuple[int, int]]]:
        message = read_message(masked)
        known = self._templates.get(message.columns) or self._matcher.match(message.columns)
        template = known or Template(message.columns)
        return (template, known is None), parameters_of(template, message)

    def _number_of(self, template: Template) -> int:
        text = template.text
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self._ids)
            self._ids.append(template.id)
            self._texts.append(text)
        return number

    def _template_columns(self) -> tuple[Column, Column]:
        if len(self._columns[0]) < len(self._ids):
            self._columns = (pa.array(self._ids, pa.string()), pa.array(self._texts, pa.string()))
        return self._columns

    def _cut(self, text: Column, forms: Sequence[_Form], each: Indices, masked: Masked, near: Any) -> Batch:
        """Cut the columns of lines from their text, as their forms say."""
        every = np.arange(len(each))
        places = np.array([own.places for own in forms], np.int64).reshape(-1, 4 * (len(PARTS) + 2))[each].T
        starts = masked.place(every, places[0], places[1])
        order = pa.array(np.array([own.template for own in forms], np.int64)[each] if forms else [], pa.int64())
        ids, texts = self._template_columns()
        shapes = np.array([own.shape for own in forms], np.int64)[each] if forms else np.zeros(0, np.int64)
        stamp_start, stamp_end = (masked.place(every, places[at], places[at + 1]) for at in (4, 6))
        columns = [
            self._stamps.read(masked.text, stamp_start, stamp_end, shapes, near),
            pa.array([own.heading.level for own in forms], pa.string()).take(pa.array(each)),
        ]
        for at in range(8, len(places), 4):
            present = places[at + 1] >= 0
            if not present.any():
                columns.append(pa.nulls(len(each), pa.string()))
                continue
            start, end = (masked.place(every, places[to], np.maximum(places[to + 1], 0)) for to in (at, at + 2))
            columns.append(slices(masked.text, start, end, pa.string(), present))
        whole, bounds = text_of(text)
        message_starts = bounds[:-1] + (starts - masked.anchors[masked.firsts])
        columns += [
            ids.take(order),
            texts.take(order),
            _parameters([own.parameters for own in forms], each, masked),
            slices(whole, message_starts, bounds[1:], pa.string()),
            text,
            pa.nulls(len(each), pa.binary()),
        ]
        batch: Batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
        return batch

    def _with_fields(self, parsed: Parsed, text: Column, forms: Sequence[_Form], each: Indices, near: Any) -> Parsed:
        """Replace the rows of lines that name their fields by what the fields say."""
        for kind, read in fields.READERS.items():
            of_kind = np.array([own.heading.names_fields == kind for own in forms], np.bool_)
            if not of_kind.any():
                continue
            rows = np.flatnonzero(of_kind[each])
            own = text.take(pa.array(rows))
            named = read(own)
            message = pc.coalesce(named["message"], own)
            inner = self._parse(message, near[rows], PLAIN)
            columns = dict(zip(SCHEMA.names, inner.rows.columns, strict=True)) | {
                "time": read_any(named["time"], near[rows]),
                "level": pc.coalesce(_levels(named["level"]), inner.rows.column("level")),
                "source": named["source"],
                "host": named["host"],
                "thread_or_pid": named["thread"],
                "line": own,
            }
            replaced = Parsed(
                pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA), inner.is_new
            )
            others = np.flatnonzero(~of_kind[each])
            kept = Parsed(parsed.rows.take(pa.array(others)), parsed.is_new.take(pa.array(others)))
            parsed = _put_together([kept, replaced], [others, rows], None)
        return parsed


class _Places:
    """Places in one line, as anchors and offsets that hold for all lines of its form."""

    def __init__(self, line: bytes, masked: Masked, row: int) -> None:
        first = int(masked.firsts[row])
        last = int(masked.firsts[row + 1]) if row + 1 < len(masked.firsts) else len(masked.anchors)
        own = masked.anchors[first:last] - masked.anchors[first]
        self._line = line
        self._runs = [(int(start), int(end)) for start, end in own[1:].reshape(-1, 2)]

    def of(self, span: tuple[int, int] | None) -> tuple[int, int, int, int]:
        """Return the places of the bounds of a span."""
        if span is None:
            return (*NOWHERE, *NOWHERE)
        return (*self._place(span[0]), *self._place(span[1]))

    def _place(self, at: int) -> Place:
        found = (0, at)
        for run, (start, end) in enumerate(self._runs):
            if start > at:
                break
            found = (2 * run + 2, at - end) if at >= end else (2 * run + 1, at - start)
        return found

    def masked_from(self, start: int, form: bytes) -> str:
        """Return the masked form from a byte of the line on."""
        hidden, inside = 0, ""
        for left, right in self._runs:
            if right <= start:
                hidden += right - left - 1
            elif left < start:
                hidden += start - left
                inside = MASK
        return inside + form[start - hidden + (1 if inside else 0) :].decode(errors="replace")

    def unmasked(self, start: int, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return spans of the masked message as spans of the line."""
        runs = [(max(left, start), right) for left, right in self._runs if right > start]
        return [(_unmasked(runs, start, left), _unmasked(runs, start, right)) for left, right in spans]


def _unmasked(runs: Sequence[tuple[int, int]], start: int, at: int) -> int:
    """Return the byte of a line that a byte of its masked message stands for."""
    place = start + at
    for left, right in runs:
        if left >= place:
            break
        place += right - left - 1
    return place


def masked_messages(lines: Column, layouts: Sequence[Layout]) -> list[str]:
    """Return the masked messages of lines, as the parser sees them."""
    reader, masked = Reader(layouts), mask(lines)
    found: list[str] = []
    for row, (line, form) in enumerate(zip(lines.to_pylist(), masked.forms.to_pylist(), strict=True)):
        heading = reader.read(line.encode())
        if heading.names_fields:
            named = fields.READERS[heading.names_fields](pa.array([line]))["message"][0].as_py()
            found += masked_messages(pa.array([line if named is None else named]), PLAIN)
        else:
            found.append(_Places(line.encode(), masked, row).masked_from(heading.message, form))
    return found


def _near(timestamps: Column | None, count: int) -> Indices:
    if timestamps is None:
        return np.full(count, time.time_ns() // 1000, np.int64)
    return np.asarray(fill(timestamps.cast(pa.timestamp("us")).cast(pa.int64()), 0))


def decode(lines: Column) -> tuple[Column, Column]:
    """Return lines as strings, and the bytes of those that are not valid UTF-8."""
    try:
        return fill(lines.cast(pa.string()), ""), pa.nulls(len(lines), pa.binary())
    except pa.ArrowInvalid:
        values = lines.cast(pa.binary()).to_pylist()
    texts, raws = [], []
    for value in values:
        text = (value or b"").decode(errors="replace")
        texts.append(text)
        raws.append(None if text.encode() == (value or b"") else value)
    return pa.array(texts, pa.string()), pa.array(raws, pa.binary())


def _levels(words: Column) -> Column:
    from quiver.spark.logs.levels import level_of

    encoded = pc.dictionary_encode(words)
    found = [level_of(word) for word in encoded.dictionary.to_pylist()]
    return pa.array(found, pa.string()).take(encoded.indices)


def _put_together(parts: Sequence[Parsed], orders: Sequence[Indices], raw: Column | None) -> Parsed:
    """Return rows that were parsed in parts in their order."""
    if not parts:
        return Parsed(pa.RecordBatch.from_pylist([], schema=SCHEMA), pa.array([], pa.bool_()))
    columns = [pa.concat_arrays(own) for own in zip(*(part.rows.columns for part in parts), strict=True)]
    is_new = pa.concat_arrays([part.is_new for part in parts])
    order = np.concatenate(orders)
    if (np.diff(order) < 0).any():
        back = pa.array(np.argsort(order, kind="stable"))
        columns, is_new = [column.take(back) for column in columns], is_new.take(back)
    if raw is not None:
        columns[-1] = raw
    return Parsed(pa.RecordBatch.from_arrays(columns, schema=SCHEMA), is_new)


def _parameters(plans: Sequence[tuple[int, ...]], each: Indices, masked: Masked) -> Column:
    """Return the parameters of each line, cut from the text as the plan of its form says."""
    sizes = np.array([len(plan) // 4 for plan in plans], np.int64)
    steps = np.array([number for plan in plans for number in plan], np.int64).reshape(-1, 4)
    counts = sizes[each] if len(sizes) else np.zeros(0, np.int64)
    firsts = (np.cumsum(sizes) - sizes)[each] if len(sizes) else np.zeros(0, np.int64)
    first, after_first, last, after_last = steps[ragged(counts, firsts)].T
    row = np.repeat(np.arange(len(each)), counts)
    starts, ends = masked.place(row, first, after_first), masked.place(row, last, after_last)
    offsets = np.zeros(len(each) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), slices(masked.text, starts, ends, pa.string()))
