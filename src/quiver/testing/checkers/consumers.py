"""Do consumers get every record, and none of them twice? (I17)

`check_consumed` and `check_taken` judge an answer when it arrives, `check_nothing_skipped` a consumer that has read to
the end.
"""

from __future__ import annotations

from quiver.model import NodeId, Offset
from quiver.partition import ConsumeResult
from quiver.record import Record
from quiver.testing.checkers.committed import CommittedLog
from quiver.testing.finding import require


def check_consumed(consumed: ConsumeResult, committed: CommittedLog, *, node: NodeId) -> None:
    """Judge the records that a consumer was given: committed ones, without a gap, up to the cursor."""
    facts = {"group": committed.group, "node": node, "first": consumed.first_offset, "cursor": consumed.cursor}
    for batch in consumed.batches:
        committed.check_read(node, batch)
    at = consumed.first_offset
    for batch in consumed.batches:
        require(batch.header.base_offset <= at < batch.header.end_offset, "I17", "records are left out", **facts)
        at = batch.header.end_offset
    require(consumed.first_offset <= consumed.cursor <= at, "I17", "a cursor is where no record was read", **facts)
    is_cut_too_short = bool(consumed.batches) and consumed.cursor <= consumed.batches[-1].header.base_offset
    require(not is_cut_too_short, "I17", "a batch was returned of which no record is meant", **facts)


def check_taken(records: list[Record], committed: CommittedLog, *, node: NodeId) -> None:
    """Judge records that a consumer was given one by one: they are those that are committed at their offsets."""
    for record in records:
        facts = {"group": committed.group, "node": node, "offset": record.offset}
        require(record.value == committed.value_at(record.offset), "I7", "a record is not what is committed", **facts)


def check_nothing_skipped(
    seen: set[Offset], committed: CommittedLog, *, first_offset: Offset, lost_max: int, consumer: int
) -> None:
    """Judge a consumer that has read to the end: it misses no more than unanswered calls may have taken along."""
    missing = [offset for offset in range(first_offset, committed.end_offset) if offset not in seen]
    require(
        len(missing) <= lost_max,
        "I17",
        "a consumer never got records that no call can have taken along",
        group=committed.group,
        consumer=consumer,
        missing=missing[:5],
        count=len(missing),
        lost_max=lost_max,
    )
