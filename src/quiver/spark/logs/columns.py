"""Columns in memory: the few operations on Arrow arrays that the parser is made of."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute

# The stubs of Arrow describe each kernel by the concrete types of its arrays; columns here are of any type.
pa: Any = pyarrow
pc: Any = pyarrow.compute
Column: TypeAlias = Any
"""An Arrow array."""
Batch: TypeAlias = pyarrow.RecordBatch
Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]


def fill(column: Any, value: Any) -> Any:
    """Replace nulls."""
    return pc.fill_null(column, value) if column.null_count else column


def strings_of(column: Any) -> list[str]:
    """Return a string column as Python strings, nulls as empty strings."""
    return [value or "" for value in column.to_pylist()]


def text_of(column: Column) -> tuple[Bytes, Indices]:
    """Return the bytes of a binary or string column without nulls, and the offsets of its values, which start at 0."""
    column = column.cast(pa.large_binary())
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int64, len(column) + 1, column.offset * 8) if offsets else np.zeros(1, np.int64)
    text = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    return text[bounds[0] : bounds[-1]], bounds - bounds[0]


def column_of(text: Bytes, bounds: Indices, kind: Any) -> Any:
    """Return a column whose values lie one after the other in `text`."""
    narrow = pa.types.is_string(kind) or pa.types.is_binary(kind)
    offsets = pa.py_buffer(np.ascontiguousarray(bounds, np.int32 if narrow else np.int64))
    return pa.Array.from_buffers(kind, len(bounds) - 1, [None, offsets, pa.py_buffer(np.ascontiguousarray(text))])


def gather(text: Bytes, starts: Indices, ends: Indices) -> tuple[Bytes, Indices]:
    """Copy slices of `text` one after the other; return them with their bounds."""
    lengths = np.maximum(ends - starts, 0)
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    shift = np.repeat(starts - bounds[:-1], lengths)
    return text[np.arange(bounds[-1]) + shift], bounds


def ragged(counts: Indices, firsts: Indices) -> Indices:
    """Return `firsts[i], firsts[i] + 1, …`, `counts[i]` numbers for each i."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    found: Indices = np.arange(total) + np.repeat(firsts - (ends - counts), counts)
    return found
