"""Filter pushdown: reduce a batch read to the partitions and offsets that a query's filters can match.

Spark pushes filters to Python sources if `spark.sql.python.filterPushdown.enabled` is set, as `session()` does. Filters
on `topic`, `partition` and `offset` are applied exactly here, except `IN` on offsets, which only narrows the range.
Producers set timestamps, so no partition is sorted by them: a lower bound on `timestamp` moves the start offset and
Spark still filters every row; an upper bound is left to Spark.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from quiver.spark.offsets import OffsetRange, StreamOffset, topic_id_of

OFFSET_END: Final = 1 << 63
_PLANNER: Final = "pyspark.sql.worker.data_source_pushdown_filters"
_COMPARISONS: Final[dict[type[Filter], Callable[[Any, Any], bool]]] = {
    EqualTo: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
    In: lambda value, values: value in values,
}
_NEVER_NULL: Final = ("topic", "partition", "offset")


def is_filter_planner() -> bool:
    """Return whether this process is Spark's filter pushdown planner.

    Spark rejects a reader with `pushFilters` if pushdown is off, and offers a source no way to ask.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PLANNER in sys.modules or (main is not None and main.name == _PLANNER)


class PushedFilters(msgspec.Struct, frozen=True, kw_only=True):
    """Partitions, offsets and times that can match a query's filters."""

    comparisons: tuple[tuple[str, type[Filter], Any], ...] = ()
    """Column (`topic` or `partition`), comparison and operand; a range must pass all of them."""
    first_offset: int = 0
    end_offset: int = OFFSET_END
    timestamp: int | None = None
    """Lower bound in milliseconds; older records cannot match."""

    def prune(self, ranges: Iterable[OffsetRange], not_older: StreamOffset | None = None) -> list[OffsetRange]:
        """Return the ranges reduced to what can match; `not_older` has the first offset at or after `timestamp`."""
        chosen = (
            one for one in ranges if all(_COMPARISONS[kind](getattr(one, of), to) for of, kind, to in self.comparisons)
        )
        return [cut for one in chosen if len(cut := self._cut(one, not_older)) > 0]

    def _cut(self, one: OffsetRange, not_older: StreamOffset | None) -> OffsetRange:
        known = not_older.topics.get(one.topic) if not_older is not None else None
        oldest = known.p.get(one.partition, 0) if known is not None and topic_id_of(known.id) == one.topic_id else 0
        first = max(one.first_offset, self.first_offset, oldest)
        return msgspec.structs.replace(
            one, first_offset=first, end_offset=max(first, min(one.end_offset, self.end_offset))
        )


def push_filters(filters: Sequence[Filter]) -> tuple[PushedFilters, list[Filter]]:
    """Return the pushed filters, and those that Spark must still apply to each row."""
    pushed, rest = PushedFilters(), []
    for one in filters:
        pushed, is_applied = _push(pushed, one)
        if not is_applied:
            rest.append(one)
    return pushed, rest


def _push(before: PushedFilters, one: Filter) -> tuple[PushedFilters, bool]:
    """Add one filter; return the result and whether the filter is fully applied by it."""
    column = ".".join(getattr(one, "attribute", ()))
    if isinstance(one, IsNotNull):
        return before, column in _NEVER_NULL
    value = getattr(one, "value", None)
    if type(one) not in _COMPARISONS or value is None:
        return before, False
    if column in ("topic", "partition"):
        return msgspec.structs.replace(before, comparisons=(*before.comparisons, (column, type(one), value))), True
    if column == "offset":
        first, end = _bounds(one, value)
        first, end = max(first, before.first_offset), min(end, before.end_offset)
        return msgspec.structs.replace(before, first_offset=first, end_offset=end), not isinstance(one, In)
    if column == "timestamp" and isinstance(one, EqualTo | GreaterThan | GreaterThanOrEqual):
        oldest = max(_to_ms(value), before.timestamp or 0)
        return msgspec.structs.replace(before, timestamp=oldest), False
    return before, False


def _bounds(one: Filter, value: Any) -> tuple[int, int]:
    """Return the smallest half-open range of offsets that contains every match of a filter."""
    match one:
        case EqualTo():
            return value, value + 1
        case GreaterThan():
            return value + 1, OFFSET_END
        case GreaterThanOrEqual():
            return value, OFFSET_END
        case LessThan():
            return 0, value
        case LessThanOrEqual():
            return 0, value + 1
        case _:  # In: nulls never match
            offsets = [offset for offset in value if offset is not None]
            return (min(offsets), max(offsets) + 1) if offsets else (0, 0)


def _to_ms(time: datetime) -> int:
    return max(0, int(time.timestamp() * 1000))
