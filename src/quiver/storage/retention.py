"""Decide what a log may forget: pure arithmetic over its segments.

Retention works in whole segments, oldest first, and never touches the last one. A limit that is not
set lets nothing go; when several are set, a segment goes as soon as any of them lets it go.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quiver.model import Offset
from quiver.storage.segment import Segment


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How long records are kept."""

    age_ms_max: int | None = None
    """Remove a segment when its last append is older than this."""
    size_bytes_max: int | None = None
    """Remove the oldest segments while the log is larger than this."""
    consumed_end_offset: Offset | None = None
    """Remove what lies below this offset: every registered consumer is past it."""


def count_removable(segments: Sequence[Segment], policy: RetentionPolicy, *, now_ms: int) -> int:
    """Return how many of the oldest segments may be removed now."""
    size_bytes = sum(segment.size_bytes for segment in segments)
    removable = 0
    for segment in segments[:-1]:
        if not _may_go(segment, policy, size_bytes, now_ms):
            break
        removable += 1
        size_bytes -= segment.size_bytes
    return removable


def _may_go(segment: Segment, policy: RetentionPolicy, size_bytes: int, now_ms: int) -> bool:
    is_old = policy.age_ms_max is not None and now_ms - segment.last_append_ms > policy.age_ms_max
    is_over = policy.size_bytes_max is not None and size_bytes > policy.size_bytes_max
    is_consumed = policy.consumed_end_offset is not None and segment.end_offset <= policy.consumed_end_offset
    return is_old or is_over or is_consumed
