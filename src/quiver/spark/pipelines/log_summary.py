"""A summary of parsed log lines: counts by window, level, source and template, examples, and sampled parameters. Pure.

A summary is made of Arrow tables and merges associatively, so that tasks summarize their own lines and the driver
merges what they return. Nothing here loops over lines.

Windows are of the lines' own time. Their length is given, or chosen: then it begins at a second and grows along
`WINDOWS_S`, in which each length divides the next, until there are at most `WINDOWS_MAX` windows. A line without a time
is counted in the window of the line before it, or, if no line nearby has a time, in that of its record's timestamp; how
many there are is counted, too.

Counts are exact. Parameters are counted in the first lines of each template in each batch, and only the most frequent
values are kept: they say which values are typical, not how often each occurs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import compute

pc: Any = compute
Column = Any
"""Arrow arrays; pyarrow's stubs reject much of what its functions take."""

NO_LEVEL: Final = "NONE"
LEVELS: Final = ("FATAL", "ERROR", "WARN", "INFO", "DEBUG", "TRACE", NO_LEVEL)
"""All levels, gravest first."""
_SAME: Final = {
    "CRITICAL": "FATAL", "CRIT": "FATAL", "EMERGENCY": "FATAL", "EMERG": "FATAL", "ALERT": "FATAL", "PANIC": "FATAL",
    "ERR": "ERROR", "SEVERE": "ERROR", "FAILURE": "ERROR", "FAIL": "ERROR", "WARNING": "WARN",
    "NOTICE": "INFO", "INFORMATION": "INFO", "INFORMATIONAL": "INFO", "SUCCESS": "INFO", "AUDIT": "INFO",
    "CONFIG": "DEBUG", "FINE": "DEBUG", "VERBOSE": "TRACE", "FINER": "TRACE", "FINEST": "TRACE",
}  # fmt: skip
"""What other systems call the levels."""
ERRORS: Final = frozenset(("FATAL", "ERROR"))
WINDOWS_S: Final = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 21_600, 86_400, 864_000, 8_640_000, 86_400_000)
"""Lengths of windows that are chosen by time range; each divides the next."""
WINDOWS_MAX: Final = 720
EXAMPLE_CHARACTERS_MAX: Final = 500
SAMPLED_LINES: Final = 50
"""Lines of each template and batch whose parameters are counted."""
VALUES_MAX: Final = 10
"""Most frequent values that are kept of each parameter."""
VALUE_CHARACTERS_MAX: Final = 100
POSITIONS_MAX: Final = 12
"""Parameters of a template that are counted."""
_PARTITION_SHIFT: Final = 1 << 44

_COUNTS_TYPES: Final[dict[str, pa.DataType]] = {
    "window_ms": pa.int64(),
    "level": pa.string(),
    "source": pa.string(),
    "template_id": pa.string(),
    "count": pa.int64(),
    "latency_ms_sum": pa.int64(),
    "latency_ms_max": pa.int64(),
    "first": pa.int64(),
}
_COUNTS: Final = pa.schema(_COUNTS_TYPES)
_TEMPLATES_TYPES: Final[dict[str, pa.DataType]] = {
    "template_id": pa.string(),
    "template": pa.string(),
    "count": pa.int64(),
    "first_ms": pa.int64(),
    "last_ms": pa.int64(),
    "first": pa.int64(),
    "example": pa.string(),
}
_TEMPLATES: Final = pa.schema(_TEMPLATES_TYPES)
_PARAMETERS_TYPES: Final[dict[str, pa.DataType]] = {
    "template_id": pa.string(),
    "position": pa.int32(),
    "value": pa.string(),
    "count": pa.int64(),
}
_PARAMETERS: Final = pa.schema(_PARAMETERS_TYPES)
_KEYS: Final = ["window_ms", "level", "source", "template_id"]


class LogSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Counts, templates and sampled parameters of parsed lines. Picklable."""

    window_ms: int
    is_chosen: bool
    """Whether the length of windows may still grow."""
    counts: pa.Table
    """By window, level, source and template; `first` is the position of the first line: see `position_of`."""
    templates: pa.Table
    parameters: pa.Table
    without_time: int = 0
    """Lines without a time of their own."""
    undecodable: int = 0
    """Lines that are not UTF-8."""

    @property
    def lines(self) -> int:
        """The number of lines."""
        return _total(self.counts["count"])


def position_of(first: int) -> tuple[int, int]:
    """Return the partition and offset of a position."""
    return divmod(first, _PARTITION_SHIFT)


def empty_summary(window_ms: int = 0) -> LogSummary:
    """Return the summary of no lines; a window of 0 ms is chosen by the time range of the lines."""
    return LogSummary(
        window_ms=window_ms or WINDOWS_S[0] * 1000,
        is_chosen=not window_ms,
        counts=_COUNTS.empty_table(),
        templates=_TEMPLATES.empty_table(),
        parameters=_PARAMETERS.empty_table(),
    )


def summarize(events: pa.RecordBatch | pa.Table, *, window_ms: int = 0, now_ms: int | None = None) -> LogSummary:
    """Summarize parsed lines with the columns of the event table; with `now_ms`, also their latency until then.

    The latency is the time since the record's timestamp, column `timestamp`, and at least 0: clocks may differ.
    """
    table = pa.Table.from_batches([events]) if isinstance(events, pa.RecordBatch) else events
    start = empty_summary(window_ms)
    if not len(table):
        return start
    time_ms = _to_ms(_event_time(table))
    waited = pa.chunked_array([pa.nulls(len(table), pa.int64())])
    if now_ms is not None:
        waited = pc.max_element_wise(pc.subtract(now_ms, _to_ms(table["timestamp"])), 0)
    first = pc.add(pc.multiply(pc.cast(table["partition"], pa.int64()), _PARTITION_SHIFT), table["offset"])
    columns: dict[str, Column] = {
        "window_ms": _floor(time_ms, start.window_ms),
        "level": _levels(table["level"]),
        "source": pc.fill_null(table["source"], ""),
        "template_id": table["template_id"],
        "count": pa.repeat(pa.scalar(1, pa.int64()), len(table)),
        "latency_ms_sum": pc.fill_null(waited, 0),
        "latency_ms_max": pc.fill_null(waited, 0),
        "first": first,
    }
    lines = pa.table(columns)
    raw = table["raw"]
    summary = LogSummary(
        window_ms=start.window_ms,
        is_chosen=start.is_chosen,
        counts=_add_up(lines),
        templates=_templates(table, time_ms, first),
        parameters=_parameters(table),
        without_time=table["time"].null_count,
        undecodable=len(raw) - raw.null_count,
    )
    return _coarsen(summary)


def merge(summaries: Iterable[LogSummary]) -> LogSummary:
    """Merge summaries whose windows are all chosen, or all of one length."""
    parts = list(summaries)
    if not parts:
        return empty_summary()
    window_ms = max(part.window_ms for part in parts)
    counts = pa.concat_tables([_rewindow(part.counts, window_ms) for part in parts])
    templates = pa.concat_tables([part.templates for part in parts])
    parameters = pa.concat_tables([part.parameters for part in parts])
    merged = LogSummary(
        window_ms=window_ms,
        is_chosen=parts[0].is_chosen,
        counts=_add_up(counts),
        templates=_merge_templates(templates),
        parameters=_most_frequent(parameters),
        without_time=sum(part.without_time for part in parts),
        undecodable=sum(part.undecodable for part in parts),
    )
    return _coarsen(merged)


def rename_templates(summary: LogSummary, renamed: dict[str, str], texts: dict[str, str]) -> LogSummary:
    """Return a summary whose lines of merged templates are counted under the template that replaced theirs."""
    if not renamed.keys() & set(summary.templates["template_id"].to_pylist()):
        return summary

    def rename(table: pa.Table) -> pa.Table:
        encoded: Any = table["template_id"].combine_chunks().dictionary_encode()
        names = pa.array([renamed.get(name, name) for name in encoded.dictionary.to_pylist()], pa.string())
        at = table.schema.get_field_index("template_id")
        return table.set_column(at, "template_id", names.take(encoded.indices))

    templates = rename(summary.templates)
    ids: list[Any] = templates["template_id"].to_pylist()
    own = [texts.get(name, text) for name, text in zip(ids, templates["template"].to_pylist(), strict=True)]
    templates = templates.set_column(1, "template", pa.array(own, pa.string()))
    return msgspec.structs.replace(
        summary,
        counts=_add_up(rename(summary.counts)),
        templates=_merge_templates(templates),
        parameters=_most_frequent(rename(summary.parameters)),
    )


def drop_windows(summary: LogSummary, before_ms: int) -> LogSummary:
    """Return a summary without the windows before a time; templates stay known."""
    kept = pc.greater_equal(summary.counts["window_ms"], before_ms)
    return msgspec.structs.replace(summary, counts=summary.counts.filter(kept))


def to_bytes(summary: LogSummary) -> bytes:
    """Encode a summary: a header and three Arrow streams."""
    streams = []
    for table in (summary.counts, summary.templates, summary.parameters):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        streams.append(sink.getvalue().to_pybytes())
    return msgspec.msgpack.encode(
        (1, summary.window_ms, summary.is_chosen, summary.without_time, summary.undecodable, streams)
    )


def from_bytes(data: bytes) -> LogSummary:
    """Decode a summary."""
    kind = tuple[int, int, bool, int, int, list[bytes]]
    _, window_ms, is_chosen, without_time, undecodable, streams = msgspec.msgpack.decode(data, type=kind)
    counts, templates, parameters = (pa.ipc.open_stream(stream).read_all() for stream in streams)
    return LogSummary(
        window_ms=window_ms,
        is_chosen=is_chosen,
        counts=counts,
        templates=templates,
        parameters=parameters,
        without_time=without_time,
        undecodable=undecodable,
    )


# -- tables ----------------------------------------------------------------------------------------


def _add_up(counts: pa.Table) -> pa.Table:
    sums: Any = [("count", "sum"), ("latency_ms_sum", "sum"), ("latency_ms_max", "max"), ("first", "min")]
    found = counts.group_by(_KEYS).aggregate(sums)
    return found.rename_columns([_plain(name) for name in found.column_names]).select(_COUNTS.names).cast(_COUNTS)


def _plain(name: str) -> str:
    for own in _COUNTS.names:
        if name in (f"{own}_sum", f"{own}_max", f"{own}_min"):
            return own
    return name


def _event_time(table: pa.Table) -> Any:
    """Return each line's own time, else that of a line nearby, else its record's timestamp."""
    time = table["time"]
    if not time.null_count:
        return time
    if time.null_count == len(time):
        return table["timestamp"]
    return pc.fill_null_backward(pc.fill_null_forward(time.combine_chunks()))


def _levels(column: Any) -> Any:
    """Return levels by their common names, `NO_LEVEL` without one."""
    encoded = pc.fill_null(column, NO_LEVEL).combine_chunks().dictionary_encode()
    names = [level_name(word) for word in encoded.dictionary.to_pylist()]
    return pa.array(names, pa.string()).take(encoded.indices)


def level_name(word: str) -> str:
    """Return the common name of a level."""
    return _SAME.get(word, word)


def _floor(time_ms: Any, window_ms: int) -> Any:
    """Return the start of each time's window."""
    return pa.array(time_ms.to_numpy() // window_ms * window_ms, pa.int64())


def _to_ms(times: Any) -> Any:
    return pc.cast(pc.cast(times, pa.timestamp("ms", "UTC"), safe=False), pa.int64())


def _rewindow(counts: pa.Table, window_ms: int) -> pa.Table:
    return counts.set_column(0, "window_ms", _floor(counts["window_ms"], window_ms)) if len(counts) else counts


def _coarsen(summary: LogSummary) -> LogSummary:
    """Return the summary with longer windows if it has too many, and may choose them."""
    counts, window_ms = summary.counts, summary.window_ms
    if not summary.is_chosen:
        return summary
    for length in (seconds * 1000 for seconds in WINDOWS_S):
        if length < window_ms:
            continue
        if length > window_ms:
            counts, window_ms = _rewindow(counts, length), length
        span = pc.min_max(counts["window_ms"]).as_py()
        if span["min"] is None or (span["max"] - span["min"]) // window_ms < WINDOWS_MAX:
            break
        if pc.count_distinct(counts["window_ms"]).as_py() <= WINDOWS_MAX // 8:
            break  # few moments, far apart, such as the logs of two years
    if window_ms == summary.window_ms:
        return summary
    return msgspec.structs.replace(summary, counts=_add_up(counts), window_ms=window_ms)


def _templates(table: pa.Table, time_ms: Any, first: Any) -> pa.Table:
    lines = pa.table({"template_id": table["template_id"], "time_ms": time_ms, "first": first})
    lines = lines.append_column("row", pa.array(np.arange(len(table), dtype=np.int64)))
    found = lines.group_by("template_id").aggregate(
        [("row", "count"), ("time_ms", "min"), ("time_ms", "max"), ("first", "min"), ("row", "min")]
    )
    rows = found["row_min"]
    return pa.table(
        [
            found["template_id"],
            table["template"].take(rows),
            found["row_count"],
            found["time_ms_min"],
            found["time_ms_max"],
            found["first_min"],
            pc.utf8_slice_codeunits(table["line"].take(rows), 0, EXAMPLE_CHARACTERS_MAX),
        ],
        schema=_TEMPLATES,
    )


def _merge_templates(templates: pa.Table) -> pa.Table:
    if not len(templates):
        return templates
    # The example is that of the first line: rows are sorted by position, and "first" keeps this order in one thread.
    ordered = templates.sort_by("first")
    found = ordered.group_by("template_id", use_threads=False).aggregate(
        [
            ("template", "first"),
            ("count", "sum"),
            ("first_ms", "min"),
            ("last_ms", "max"),
            ("first", "min"),
            ("example", "first"),
        ]
    )
    names = ["template_id", "template_first", "count_sum", "first_ms_min", "last_ms_max", "first_min", "example_first"]
    merged: list[Column] = [found[name] for name in names]
    return pa.table(merged, schema=_TEMPLATES)


def _parameters(table: pa.Table) -> pa.Table:
    """Count the parameters of the first lines of each template."""
    ids = table["template_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    order = np.argsort(ids, kind="stable")
    ranked = ids[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    rank = np.arange(len(ranked)) - np.repeat(starts, np.diff(np.r_[starts, len(ranked)]))
    rows: Any = pa.array(order[rank < SAMPLED_LINES])
    lists = table["parameters"].combine_chunks().take(rows)
    parents = pc.list_parent_indices(lists).to_numpy()
    if not len(parents):
        return _PARAMETERS.empty_table()
    begins = np.flatnonzero(np.r_[True, parents[1:] != parents[:-1]])
    positions = np.arange(len(parents)) - np.repeat(begins, np.diff(np.r_[begins, len(parents)]))
    kept = positions < POSITIONS_MAX
    sampled: dict[str, Column] = {
        "template_id": table["template_id"].take(rows).take(pa.array(parents[kept])),
        "position": pa.array(positions[kept].astype(np.int32)),
        "value": pc.utf8_slice_codeunits(pc.list_flatten(lists).filter(pa.array(kept)), 0, VALUE_CHARACTERS_MAX),
        "count": pa.repeat(pa.scalar(1, pa.int64()), int(kept.sum())),
    }
    return _most_frequent(pa.table(sampled))


def _most_frequent(parameters: pa.Table) -> pa.Table:
    """Add up, and keep the most frequent values of each parameter."""
    if not len(parameters):
        return parameters.cast(_PARAMETERS)
    keys = ["template_id", "position", "value"]
    found = parameters.group_by(keys).aggregate([("count", "sum")])
    found = found.select([*keys, "count_sum"]).rename_columns(_PARAMETERS.names).cast(_PARAMETERS)
    ordered = found.sort_by([("template_id", "ascending"), ("position", "ascending"), ("count", "descending")])
    ids = ordered["template_id"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    groups = ids * POSITIONS_MAX + ordered["position"].to_numpy()
    starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
    rank = np.arange(len(groups)) - np.repeat(starts, np.diff(np.r_[starts, len(groups)]))
    return ordered.filter(pa.array(rank < VALUES_MAX)).combine_chunks()


def _total(column: Any) -> int:
    return pc.sum(column).as_py() or 0


def total_by(counts: pa.Table, names: Sequence[str]) -> dict[Any, int]:
    """Return the number of lines by one column, or by a tuple of columns."""
    found = counts.group_by(list(names)).aggregate([("count", "sum")])
    columns = [found[name].to_pylist() for name in names]
    totals: list[Any] = found["count_sum"].to_pylist()
    keys: Any = columns[0] if len(columns) == 1 else zip(*columns, strict=True)
    return dict(zip(keys, totals, strict=True))
