"""What a query's own filters say about where its records are, so that a batch read fetches only those places.

Spark hands filters to Python sources if `spark.sql.python.filterPushdown.enabled` is set, as `session()` does. Those on
`topic`, `partition` and `offset` are answered here, exactly, but for an `IN` on offsets. A timestamp is the producer's
own, and no partition is sorted by it: a least timestamp tells where reading may begin, and Spark still looks at every
row; a greatest one tells nothing.
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
    """Tell whether this process is the planner that hands filters over.

    Spark refuses a reader that takes filters where they are switched off, and does not tell a source which it is.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PLANNER in sys.modules or (main is not None and main.name == _PLANNER)


class PushedFilters(msgspec.Struct, frozen=True, kw_only=True):
    """Where the records are that filters let through."""

    places: tuple[tuple[str, type[Filter], Any], ...] = ()
    """Comparisons that a topic or partition has to pass."""
    first_offset: int = 0
    end_offset: int = OFFSET_END
    timestamp: int | None = None
    """No record is wanted that is older, in milliseconds."""

    def narrow(self, ranges: Iterable[OffsetRange], not_older: StreamOffset | None = None) -> list[OffsetRange]:
        """Return what is left of ranges; `not_older` is where the first record is that is not too old."""
        chosen = (
            one for one in ranges if all(_COMPARISONS[kind](getattr(one, of), to) for of, kind, to in self.places)
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
    """Return what filters say about places, and those that are still to be looked at row by row."""
    narrowing, rest = PushedFilters(), []
    for one in filters:
        narrowing, is_answered = _take(narrowing, one)
        if not is_answered:
            rest.append(one)
    return narrowing, rest


def _take(before: PushedFilters, one: Filter) -> tuple[PushedFilters, bool]:
    """Return what is known with one more filter, and whether it says no more than that."""
    column = ".".join(getattr(one, "attribute", ()))
    if isinstance(one, IsNotNull):
        return before, column in _NEVER_NULL
    value = getattr(one, "value", None)
    if type(one) not in _COMPARISONS or value is None:
        return before, False
    if column in ("topic", "partition"):
        return msgspec.structs.replace(before, places=(*before.places, (column, type(one), value))), True
    if column == "offset":
        first, end = _bounds(one, value)
        first, end = max(first, before.first_offset), min(end, before.end_offset)
        return msgspec.structs.replace(before, first_offset=first, end_offset=end), not isinstance(one, In)
    if column == "timestamp" and isinstance(one, EqualTo | GreaterThan | GreaterThanOrEqual):
        oldest = max(_to_ms(value), before.timestamp or 0)
        return msgspec.structs.replace(before, timestamp=oldest), False
    return before, False


def _bounds(one: Filter, value: Any) -> tuple[int, int]:
    """Return the offsets between which all are that a filter lets through."""
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
        case _:  # one of several, of which a null lets nothing through
            offsets = [offset for offset in value if offset is not None]
            return (min(offsets), max(offsets) + 1) if offsets else (0, 0)


def _to_ms(time: datetime) -> int:
    return max(0, int(time.timestamp() * 1000))
