"""Parsed lines as tables: the columns, records to rows in Arrow, and the same on DataFrames.

A row is a record, or a record and those after it that continue it, such as a stack trace; `records` says how many. A
line that is not UTF-8 keeps its bytes in `raw`. The source of a line is what the line itself says, else the record's
header `source`, `service` or `file`, else its key.

`learn_lines` and `parse_lines` are for programs that have a DataFrame of records:

    records = spark.read.format("quiver").options(servers=…, subscribe="logs").load()
    model = learn_lines(records)
    events = parse_lines(records, model)

Everything works on whole columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import compute

from quiver.spark import logs
from quiver.spark.logs import Model, Parser
from quiver.spark.logs.parser import decode
from quiver.spark.pipelines.lake import LakeLayout

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pc: Any = compute
Column = Any
"""An Arrow array; pyarrow's stubs reject much of what its functions take."""

FILE_SCHEMA: Final = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("us", "UTC"), nullable=False),
        *logs.SCHEMA,
        pa.field("records", pa.int32(), nullable=False),
    ]
)
EVENTS: Final = LakeLayout(name="a table of parsed lines", file_schema=FILE_SCHEMA, folders=("topic", "partition"))
"""The layout of a table of parsed lines."""
RECORD_COLUMNS: Final = ("offset", "timestamp", "key", "value", "headers")
"""What is read of records."""
SOURCE_HEADERS: Final = ("source", "service", "file", "path")
HOST_HEADERS: Final = ("host", "hostname")
LEADING_LEVEL: Final = (
    r"^(?P<level>TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|SEVERE|CRITICAL|FATAL|PANIC|EMERGENCY|ALERT)"
    r"(?:[\s:,;|\])]|$)"
)
PARSED_LINES: Final = 32_768
"""Lines that are parsed at once: enough to pay for the calls, few enough for the processor's caches."""
LEARNED_LINES_MAX: Final = 2_000
"""Lines of new form that one batch of records adds to a model."""


class ParsedBatch(msgspec.Struct, frozen=True):
    """Rows of `FILE_SCHEMA`, and the lines whose form the model did not know, with their sources."""

    rows: pa.RecordBatch
    new_count: int
    new_lines: Column
    """At most `LEARNED_LINES_MAX` of them."""
    new_sources: Column | None

    def learn(self) -> Model:
        """Return a model of the new lines."""
        return logs.learn(self.new_lines, sources=self.new_sources)


@lru_cache(maxsize=2)
def parser_of(model: bytes) -> Parser:
    """Return this process's parser of a stored model."""
    return Model.from_bytes(model).parser()


class Joined(msgspec.Struct, frozen=True):
    """Records of one partition, in order, with continuations joined to the records that they continue."""

    lines: Column
    raw: Column
    """Bytes of lines that are not UTF-8; a line for each record."""
    firsts: np.ndarray[Any, Any]
    """Index of the first record of each line."""
    records: pa.RecordBatch
    formats: Column | None
    """What each record comes from, if headers say so: records of one source share their format."""

    def __len__(self) -> int:
        return len(self.lines)


def join_records(records: pa.RecordBatch, *, first_max: int | None = None) -> Joined:
    """Join continuations; at most `first_max` to the first record."""
    formats = _from_headers(records, SOURCE_HEADERS)
    formats = formats if formats is not None else _from_headers(records, HOST_HEADERS)
    text, raw = decode(records["value"])
    lines, firsts = _join(text, raw, formats, first_max)
    return Joined(lines, raw, firsts, records, formats)


def parse_joined(joined: Joined, parser: Parser, first: int = 0, end: int | None = None) -> Iterator[ParsedBatch]:
    """Parse lines between two indices, in batches."""
    end = len(joined) if end is None else end
    bounds = np.append(joined.firsts, len(joined.records))
    for start in range(first, end, PARSED_LINES):
        stop = min(end, start + PARSED_LINES)
        yield _parse_slice(joined, parser, bounds, slice(start, stop))


def _parse_slice(joined: Joined, parser: Parser, bounds: Any, own: slice) -> ParsedBatch:
    firsts = bounds[own]
    is_dense = int(bounds[own.stop]) - int(firsts[0]) == len(firsts)
    records = joined.records.slice(int(firsts[0]), int(bounds[own.stop]) - int(firsts[0]))
    records = records if is_dense else records.take(pa.array(firsts - firsts[0]))
    formats = None if joined.formats is None else joined.formats.take(pa.array(firsts))
    parsed = parser.parse(joined.lines[own], sources=formats, timestamps=records["timestamp"])
    columns = dict(zip(parsed.rows.schema.names, parsed.rows.columns, strict=True))
    columns["offset"], columns["timestamp"] = records["offset"], records["timestamp"]
    columns["records"] = pa.array(np.diff(bounds[own.start : own.stop + 1]).astype(np.int32))
    columns["source"] = _first_known(columns["source"], _from_headers(records, SOURCE_HEADERS), _keys(records))
    columns["level"] = _with_leading_levels(columns["level"], columns["message"])
    columns["host"] = _first_known(columns["host"], _from_headers(records, HOST_HEADERS))
    if joined.raw.null_count < len(joined.raw):
        columns["raw"] = joined.raw.take(pa.array(firsts))
    new = pa.array(np.flatnonzero(np.asarray(parsed.is_new)))
    sample = new[:LEARNED_LINES_MAX]
    return ParsedBatch(
        pa.RecordBatch.from_arrays([columns[name] for name in FILE_SCHEMA.names], schema=FILE_SCHEMA),
        len(new),
        joined.lines[own].take(sample),
        None if formats is None else formats.take(sample),
    )


def learn_records(records: pa.RecordBatch, formats: Sequence[str] = ()) -> Model:
    """Learn a model from records."""
    joined = join_records(records)
    sources = None if joined.formats is None else joined.formats.take(pa.array(joined.firsts))
    return logs.learn(joined.lines, sources=sources, formats=formats)


def merge_models(models: Iterable[Model]) -> Model:
    """Merge models pairwise, so that large ones are merged seldom."""
    level = list(models)
    while len(level) > 1:
        level = [one.merge(other) for one, other in zip(level[::2], level[1::2], strict=False)] + level[
            len(level) & ~1 :
        ]
    return level[0] if level else Model()


def _join(
    text: Column, raw: Column, groups: Column | None, first_max: int | None
) -> tuple[Column, np.ndarray[Any, Any]]:
    """Join lines with their continuations, except lines whose bytes are kept."""
    continues = np.array(logs.find_continuations(text, groups))
    if first_max is not None and len(text) > first_max + 1 and continues[1 : first_max + 2].all():
        continues[first_max + 1] = False
    if raw.null_count < len(raw):
        is_kept = np.array(pc.is_valid(raw))
        continues &= ~is_kept
        continues[1:] &= ~is_kept[:-1]
    firsts = np.flatnonzero(~continues)
    if len(firsts) == len(text):
        return text, firsts
    offsets = pa.array(np.append(firsts, len(text)), pa.int32())
    return pc.binary_join(pa.ListArray.from_arrays(offsets, text), "\n"), firsts


def _with_leading_levels(level: Column, message: Column) -> Column:
    """Return levels, for lines without one the word in capitals that the message begins with, if it is a level."""
    if not level.null_count:
        return level
    found = pc.struct_field(pc.extract_regex(message, LEADING_LEVEL), "level")
    return pc.coalesce(level, found)


def _first_known(*columns: Any) -> Any:
    known = [column for column in columns if column is not None]
    return pc.coalesce(*known) if len(known) > 1 else known[0]


def _keys(records: pa.RecordBatch) -> Any:
    """Return the records' keys as text; None if there are none, or one is not text."""
    if "key" not in records.schema.names or records["key"].null_count == len(records):
        return None
    try:
        return records["key"].cast(pa.string())
    except pa.ArrowInvalid:
        return None


def _from_headers(records: pa.RecordBatch, names: Sequence[str]) -> Any:
    """Return the text of each record's first header of these names; None if no record has one."""
    if "headers" not in records.schema.names:
        return None
    headers = records["headers"]
    if headers.null_count == len(headers) or not len(flat := pc.list_flatten(headers)):
        return None
    chosen = np.flatnonzero(np.asarray(pc.is_in(pc.struct_field(flat, "key"), value_set=pa.array(names))))
    if not len(chosen):
        return None
    parents = np.asarray(pc.list_parent_indices(headers))[chosen]
    rows, at = np.unique(parents, return_index=True)
    try:
        texts = pc.struct_field(flat, "value").take(pa.array(chosen[at])).cast(pa.string())
    except pa.ArrowInvalid:
        return None
    places = np.full(len(records), -1)
    places[rows] = np.arange(len(rows))
    return texts.take(pa.array(places, mask=places < 0))


# -- DataFrames ------------------------------------------------------------------------------------


def learn_lines(records: DataFrame, *, formats: Sequence[str] = ()) -> Model:
    """Learn a model from all records of a DataFrame with `value`, and optionally `headers`. Runs a Spark job."""

    def learn(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        model = Model(formats=formats)
        for batch in batches:
            model = model.merge(learn_records(batch, formats))
        yield pa.RecordBatch.from_pydict({"model": [model.to_bytes()]})

    used = [name for name in ("value", "headers") if name in records.columns]
    rows = records.select(*used).mapInArrow(learn, "model binary").collect()
    return merge_models([Model(formats=formats), *(Model.from_bytes(bytes(row["model"])) for row in rows)])


def parse_lines(records: DataFrame, model: Model) -> DataFrame:
    """Return parsed lines of records with `topic, partition, offset, timestamp, value`, optionally `key, headers`.

    Continuations are joined within an Arrow batch of one partition. Lines of unknown form are their own template.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    data = model.to_bytes()
    schema = EVENTS.schema

    def parse(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for own in _by_partition(batch):
                for parsed in parse_joined(join_records(own), parser_of(data)):
                    places = [pa.repeat(own[name][0], len(parsed.rows)) for name in EVENTS.folders]
                    yield pa.RecordBatch.from_arrays([*places, *parsed.rows.columns], schema=schema)

    used = ["topic", "partition", *(name for name in RECORD_COLUMNS if name in records.columns)]
    return records.select(*used).mapInArrow(parse, from_arrow_schema(schema))


def _by_partition(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield neighbouring records of one partition."""
    if not len(batch):
        return
    partitions = batch["partition"].to_numpy(zero_copy_only=False)
    topics = batch["topic"].dictionary_encode().indices.to_numpy(zero_copy_only=False)
    edges = np.flatnonzero((np.diff(partitions) != 0) | (np.diff(topics) != 0)) + 1
    bounds = [0, *edges.tolist(), len(batch)]
    for first, end in pairwise(bounds):
        yield batch.slice(first, end - first)
