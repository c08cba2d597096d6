"""Do trims take away only what they may? (I18)"""

from __future__ import annotations

from collections.abc import Sequence

from quiver.model import Index
from quiver.partition.entries import StateSnapshotEntry, TrimEntry, decode_entry
from quiver.record import Batch
from quiver.testing.finding import require


def check_trim(trim: TrimEntry, batches: Sequence[Batch], *, index: Index) -> None:
    """Judge a trim: it ends at a summary that lies before it, and at the place where that one stands."""
    facts = {"index": index, "trimmed_to": trim.index, "offset": trim.offset}
    require(0 < trim.index < index, "I18", "a trim ends behind itself", **facts)
    summary = batches[trim.index - 1]
    is_summary = summary.header.is_control and isinstance(decode_entry(summary), StateSnapshotEntry)
    require(is_summary, "I18", "a trim does not end at a summary", **facts)
    require(summary.header.base_offset == trim.offset, "I18", "a trim ends at another offset than its summary", **facts)
