"""Turns consumed records into Arrow tables and pandas or polars frames; the libraries are optional.

Each library is loaded when it is first needed. `require_…` raises before any position advances, so that no record is
lost because a library is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quiver.client.consumer_core import Slice
from quiver.errors import RequestError

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa


def require_arrow() -> None:
    """Raise `RequestError` if pyarrow is not installed."""
    try:
        import quiver.client.tables  # noqa: F401 - loads the optional libraries
    except ImportError as error:
        message = "Arrow tables need pyarrow and numpy: pip install 'quivermq[arrow]'"
        raise RequestError(message, code="arrow_not_installed") from error


def require_library(name: str) -> None:
    """Raise `RequestError` if pyarrow or the library of a kind of frames is not installed."""
    require_arrow()
    if find_spec(name) is None:
        raise RequestError(f"not done: {name} frames need {name}: pip install {name}", code=f"{name}_not_installed")


def table_of(slices: Sequence[Slice], *, is_with_headers: bool, schema: pa.Schema | None = None) -> pa.Table:
    """Return the records of slices as a table; with a schema, their JSON values as its columns."""
    from quiver.client.tables import build_table, parse_values

    parts = [(reader.topic, reader.partition_id, batch, first, end) for reader, batch, first, end in slices]
    table = build_table(parts, is_with_headers=is_with_headers)
    return table if schema is None else parse_values(table, schema)


def to_pandas(table: pa.Table) -> pd.DataFrame:
    """Return a table as a pandas frame; timestamps keep their time zone."""
    frame: Any = table.to_pandas()
    return frame


def to_polars(table: pa.Table) -> pl.DataFrame:
    """Return a table as a polars frame; the bytes are not copied."""
    import polars as pl

    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame
