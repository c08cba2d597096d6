"""When records may go, and when a summary is due: pure arithmetic over a partition's state.

A partition is trimmed to one of its summaries, never to a place in between: who starts there knows the whole state from
the first entry that matters on. So a bound is kept to within the distance of two summaries: never too early, a little
late. When several bounds are given, records go as soon as any of them lets them go, unless somebody holds them.
"""

from __future__ import annotations

import msgspec

from quiver.config import PartitionSettings
from quiver.model import ConsumerId, Offset
from quiver.partition.entries import Mark
from quiver.partition.state import PartitionState

SUMMARIES_PER_BOUND = 8
"""How many summaries lie in what a bound keeps: records stay at most an eighth of the bound longer."""
SUMMARY_BYTES_MIN = 4096
"""Less than this many bytes of records are not worth a summary, however small a bound is."""


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How long records are kept; a bound that is not given lets nothing go."""

    age_ms: int | None = None
    """Records go when they were appended longer ago than this."""
    size_bytes: int | None = None
    """The oldest records go while at least this many bytes stay."""
    consumers: frozenset[ConsumerId] | None = None
    """Records go when all of these consumers are past them; one that has no cursor holds everything back."""
    held_offset: Offset | None = None
    """Records from here on stay, whatever the bounds say: somebody has yet to read them."""


KEEP_EVERYTHING = Retention()


def find_trim(state: PartitionState, retention: Retention, *, now_ms: int) -> Mark | None:
    """Return the newest summary to which the partition may be trimmed now; None if it stays as it is."""
    return next(
        (
            mark
            for mark in reversed(state.marks)
            if mark.index > state.trimmed_index and _may_go(state, mark, retention, now_ms)
        ),
        None,
    )


def is_summary_due(state: PartitionState, retention: Retention, settings: PartitionSettings, *, now_ms: int) -> bool:
    """Tell whether enough has happened since the last summary."""
    last = state.marks[-1] if state.marks else None
    new_bytes = state.record_bytes - (last.record_bytes if last is not None else 0)
    new_entries = state.applied_index - (last.index if last is not None else 0)
    if new_bytes >= _distance_bytes(retention, settings) or new_entries >= settings.summary_entries:
        return True
    if retention.age_ms is None or not new_bytes:
        return False
    return now_ms - (last.newest_ms if last is not None else 0) >= retention.age_ms // SUMMARIES_PER_BOUND


def _distance_bytes(retention: Retention, settings: PartitionSettings) -> int:
    if retention.size_bytes is None:
        return settings.summary_bytes
    return min(settings.summary_bytes, max(retention.size_bytes // SUMMARIES_PER_BOUND, SUMMARY_BYTES_MIN))


def _may_go(state: PartitionState, mark: Mark, retention: Retention, now_ms: int) -> bool:
    """Tell whether all records before a summary may go."""
    if retention.held_offset is not None and mark.offset > retention.held_offset:
        return False
    is_old = retention.age_ms is not None and now_ms - mark.newest_ms > retention.age_ms
    is_over = retention.size_bytes is not None and state.record_bytes - mark.record_bytes >= retention.size_bytes
    return is_old or is_over or _is_consumed(state, mark, retention)


def _is_consumed(state: PartitionState, mark: Mark, retention: Retention) -> bool:
    if not retention.consumers:
        return False  # nobody has read anything
    cursors = state.cursors
    return all(cursors.get(consumer, -1) >= mark.offset for consumer in retention.consumers)
