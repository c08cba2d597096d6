"""Parse batches of lines into columns with what a model has learned.

Work is done a column at a time: layouts are tried on the whole batch, the messages are masked as one piece of text, and
Python looks once at each *different* masked message; what it found is kept for the next batches. A line that no layout
fits is its own message, and a message that no template fits is its own template: no line is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from quiver.spark.logs import headings
from quiver.spark.logs.columns import Batch, Column, Indices, column_of, fill, gather, pa, pc, ragged, text_of
from quiver.spark.logs.headers import Layout
from quiver.spark.logs.messages import Columns, read_message
from quiver.spark.logs.templates import Matcher, Step, Template, parameters_of
from quiver.spark.logs.tokens import Masked, mask

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
MESSAGE_BYTES_MAX: Final = 2048
"""Templates are learned from so many bytes of a message's first line."""
CACHE_MAX: Final = 200_000
"""So many different masked messages are remembered."""


class Parsed(msgspec.Struct):
    """Parsed lines, and which of them have a message whose form the model has not seen."""

    rows: Batch
    is_new: Column


class _Known(msgspec.Struct):
    """What is remembered of a masked message."""

    template: int
    plan: list[Step]
    is_new: bool


class Parser:
    """Parses batches; keeps what it computed for the next one. Not safe for use by several threads at once."""

    def __init__(
        self, layouts: Callable[[str], Sequence[Layout]], known: dict[Columns, Template], templates: Sequence[Template]
    ) -> None:
        self._layouts = layouts
        self._templates = known
        self._matcher = Matcher(templates)
        self._known: dict[bytes, _Known] = {}
        self._forget()

    def _forget(self) -> None:
        self._known.clear()
        self._ids: list[str] = []
        self._texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def parse(self, lines: Column, *, sources: Column | None = None, timestamps: Column | None = None) -> Parsed:
        """Parse lines: one row for each, in their order.

        Args:
            lines: the lines, as strings or bytes; null is an empty line.
            sources: what each line comes from, such as its file; lines of one source share their format.
            timestamps: the records' own timestamps, for times without a year.
        """
        if isinstance(lines, pa.ChunkedArray):
            lines = lines.combine_chunks()
        text, raw = decode(lines)
        near = None if timestamps is None else np.asarray(timestamps.cast(pa.timestamp("us")).cast(pa.int64()))
        columns = self._read_headers(text, sources, near)
        message = columns.pop("message")
        templates, parameters, is_new = self._read_templates(message)
        rows = pa.RecordBatch.from_arrays(
            [
                columns["time"],
                columns["level"],
                columns["source"],
                columns["host"],
                columns["thread"],
                *templates,
                parameters,
                message,
                text,
                raw,
            ],
            schema=SCHEMA,
        )
        return Parsed(rows, is_new)

    def _read_headers(self, text: Column, sources: Column | None, near: Any) -> dict[str, Column]:
        if sources is None:
            return headings.read(text, self._layouts(""), near)
        encoded = pc.dictionary_encode(fill(sources.cast(pa.string()), ""))
        names, codes = encoded.dictionary.to_pylist(), np.asarray(encoded.indices)
        parts, orders = [], []
        for code, name in enumerate(names):
            rows = np.flatnonzero(codes == code)
            parts.append(
                headings.read(text.take(pa.array(rows)), self._layouts(name), None if near is None else near[rows])
            )
            orders.append(rows)
        return headings.scatter(parts, orders) if parts else headings.read(text, (), near)

    def _read_templates(self, message: Column) -> tuple[list[Column], Column, Column]:
        text, bounds = first_lines(message)
        masked = mask(text, bounds)
        codes = pc.dictionary_encode(column_of(masked.text, masked.bounds, pa.large_binary()))
        if len(self._known) > CACHE_MAX:
            self._forget()
        known = [self._known.get(own) or self._look_up(own) for own in codes.dictionary.to_pylist()]
        each = np.asarray(codes.indices)
        numbers = np.array([own.template for own in known], np.int64)[each] if known else np.zeros(0, np.int64)
        is_new = np.array([own.is_new for own in known], np.bool_)[each] if known else np.zeros(0, np.bool_)
        order = pa.array(numbers)
        templates = [pa.array(self._ids, pa.string()).take(order), pa.array(self._texts, pa.string()).take(order)]
        return templates, _parameters([own.plan for own in known], each, text, masked), pa.array(is_new)

    def _look_up(self, own: bytes) -> _Known:
        masked = own.decode(errors="replace")
        message = read_message(masked)
        template = self._templates.get(message.columns)
        is_new = template is None
        template = template or self._matcher.match(message.columns) or Template(message.columns)
        text = template.text
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self._ids)
            self._ids.append(template.id)
            self._texts.append(text)
        found = self._known[own] = _Known(number, parameters_of(template, message, masked.split()), is_new)
        return found


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


def first_lines(message: Column) -> tuple[Any, Indices]:
    """Return the text that templates are learned from: the first line of each message, cut at a maximum."""
    lengths = pc.binary_length(message)
    if not len(message) or (
        pc.max(lengths).as_py() <= MESSAGE_BYTES_MAX and not pc.any(pc.match_substring(message, "\n")).as_py()
    ):
        return text_of(message)
    text, bounds = text_of(message)
    ends = np.asarray(pc.find_substring(message, "\n")).astype(np.int64)
    ends = np.where(ends < 0, np.diff(bounds), ends)
    ends = bounds[:-1] + np.minimum(ends, MESSAGE_BYTES_MAX)
    for row in np.flatnonzero(ends - bounds[:-1] == MESSAGE_BYTES_MAX):  # few are so long
        ends[row] = bounds[row] + _end_of_words(text[bounds[row] : ends[row]].tobytes())
    return gather(text, bounds[:-1], ends)


def _end_of_words(text: bytes) -> int:
    """Return where the last whole word ends; a text without blanks is cut at a character."""
    end = text.rfind(b" ")
    return end if end > 0 else len(text.decode(errors="ignore").encode())


def _parameters(plans: Sequence[Sequence[Step]], each: Indices, text: Any, masked: Masked) -> Column:
    """Return the parameters of each message, cut from `text` as the plan of its masked form says."""
    sizes = np.array([len(plan) for plan in plans], np.int64)
    steps = np.array([step for plan in plans for step in plan], np.int64).reshape(-1, 5)
    counts = sizes[each] if len(sizes) else np.zeros(0, np.int64)
    firsts = (np.cumsum(sizes) - sizes)[each] if len(sizes) else np.zeros(0, np.int64)
    kind, index, last, head, tail = steps[ragged(counts, firsts)].T
    row = np.repeat(np.arange(len(each)), counts)
    is_run = kind == 0
    starts, ends = np.empty(len(row), np.int64), np.empty(len(row), np.int64)
    runs = masked.run_firsts[row[is_run]] + index[is_run]
    starts[is_run], ends[is_run] = masked.run_starts[runs], masked.run_ends[runs]
    is_word = ~is_run
    words = masked.word_firsts[row[is_word]]
    starts[is_word] = masked.word_starts[words + index[is_word]] + head[is_word]
    ends[is_word] = masked.word_ends[words + last[is_word]] - tail[is_word]
    values = column_of(*gather(text, starts, ends), pa.string())
    offsets = np.zeros(len(each) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), values)
