"""Columns in memory: the few operations on Arrow arrays that the parser is made of."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

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
OFFSET_MAX: Final = 2**31 - 1
"""The largest offset in a column of strings."""


def fill(column: Any, value: Any) -> Any:
    """Replace nulls."""
    return pc.fill_null(column, value) if column.null_count else column


def strings_of(column: Any) -> list[str]:
    """Return a string column as Python strings, nulls as empty strings."""
    return [value or "" for value in column.to_pylist()]


def text_of(column: Column) -> tuple[Bytes, Indices]:
    """Return the bytes of a binary or string column without nulls, and the offsets of its values in them."""
    is_large = pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type)
    width = np.int64 if is_large else np.int32
    _, offsets, data = column.buffers()
    if not len(column) or offsets is None:
        return np.zeros(0, np.uint8), np.zeros(len(column) + 1, np.int64)
    bounds = np.frombuffer(offsets, width, len(column) + 1, column.offset * width().itemsize).astype(np.int64)
    text = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    return text, bounds


def slices(text: Bytes, starts: Indices, ends: Indices, kind: Any, present: Flags | None = None) -> Column:
    """Return slices of `text`, in whatever order, as a column; null where `present` is false."""
    count = len(starts)
    if not count:
        return pa.array([], kind)
    ends = np.maximum(ends, starts)
    offsets = np.empty(2 * count, np.int64)
    offsets[0::2], offsets[1::2] = starts, ends
    is_narrow = pa.types.is_string(kind) or pa.types.is_binary(kind)
    if starts.min() < 0 or ends.max() > len(text):  # Arrow would read memory that is not the text's
        raise ValueError(f"slices from {starts.min()} to {ends.max()} are not in a text of {len(text)} bytes")
    # Slices that overlap cannot share one row of offsets, and narrow offsets do not reach far.
    if (starts[1:] < ends[:-1]).any() or (is_narrow and ends.max() > OFFSET_MAX):
        return _copied(text, starts, ends, kind, present)
    bounds = pa.py_buffer(offsets.astype(np.int32) if is_narrow else offsets)
    pieces = pa.Array.from_buffers(kind, 2 * count - 1, [None, bounds, pa.py_buffer(text)])
    every = np.arange(0, 2 * count, 2)
    return pieces.take(pa.array(every, mask=None if present is None else ~present))


def _copied(text: Bytes, starts: Indices, ends: Indices, kind: Any, present: Flags | None) -> Column:
    lengths = ends - starts
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    copied = text[np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], lengths)]
    is_narrow = pa.types.is_string(kind) or pa.types.is_binary(kind)
    if is_narrow and bounds[-1] > OFFSET_MAX:
        raise ValueError(f"a column of {bounds[-1]} bytes is too large, at most {OFFSET_MAX} fit: use smaller batches")
    offsets = pa.py_buffer(bounds.astype(np.int32) if is_narrow else bounds)
    column = pa.Array.from_buffers(kind, len(lengths), [None, offsets, pa.py_buffer(copied)])
    return column if present is None else pc.if_else(pa.array(present), column, pa.scalar(None, kind))


def ragged(counts: Indices, firsts: Indices) -> Indices:
    """Return `firsts[i], firsts[i] + 1, …`, `counts[i]` numbers for each i."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    found: Indices = np.arange(total) + np.repeat(firsts - (ends - counts), counts)
    return found
