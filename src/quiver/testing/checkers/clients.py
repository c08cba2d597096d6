"""Does the committed log hold what clients were answered? (I8, I9, I11, I12, I17, F2, F4, and reads)

`check_ack` and `check_end_read` check an answer when it arrives; `check_sends` checks the whole history against
the committed log when the run is over, value by value.
"""

from __future__ import annotations

from collections.abc import Iterable

from quiver.model import NodeId, Offset
from quiver.partition import ConsumeResult
from quiver.record import Batch, Record
from quiver.testing.checkers.committed import CommittedLog
from quiver.testing.groups.history import EndRead, SentBatch
from quiver.testing.simulator.report import require, violated


def check_ack(send: SentBatch, base_offset: Offset, committed: CommittedLog) -> None:
    """Check an acknowledgement: the batch is committed at that offset, after all that was acknowledged before."""
    facts = {"group": send.group, "producer": send.producer_id, "sequence": send.base_sequence, "offset": base_offset}
    batch = committed.at_offset(base_offset)
    if batch is None:
        violated("I7", "a send is acknowledged at an offset where nothing is committed", **facts)
    header = batch.header
    is_same = (header.producer_id, header.producer_epoch, header.base_sequence, header.record_count) == (
        send.producer_id,
        send.epoch,
        send.base_sequence,
        len(send.values),
    )
    require(is_same, "I8", "a send is acknowledged at an offset that holds another batch", **facts)
    require(
        base_offset >= send.acked_before,
        "I8",
        "a send was put before what was acknowledged when it began",
        acked_before=send.acked_before,
        **facts,
    )


def check_end_read(read: EndRead, end_offset: Offset, committed: CommittedLog, *, node: NodeId) -> None:
    """Check a linearizable read of the end: no older than its call, no newer than what is committed."""
    facts = {"group": read.group, "node": node, "read": end_offset}
    require(end_offset >= read.at_least, "I7", "a read is stale", known_before=read.at_least, **facts)
    require(end_offset <= committed.end_offset, "I7", "a read shows what is not committed", **facts)


def check_sends(sends: Iterable[SentBatch], committed: CommittedLog) -> None:
    """Check a group's whole history against its committed log."""
    places = _find_values(committed.data_batches())
    known: set[bytes] = set()
    for send in sends:
        known.update(send.values)
        offsets = [places.get(value) for value in send.values]
        facts = {"group": send.group, "producer": send.producer_id, "epoch": send.epoch, "value": send.values[0]}
        require(send.outcome != "pending", "F4", "a send has no outcome", **facts)
        is_there = offsets[0] is not None
        require(all((offset is not None) == is_there for offset in offsets), "I9", "a batch is there in part", **facts)
        if send.outcome == "ok":
            require(is_there, "F2", "an acknowledged send is lost", **facts)
            expected = list(range(send.base_offset or 0, (send.base_offset or 0) + len(send.values)))
            require(offsets == expected, "I8", "an acknowledged send has moved", at=offsets, **facts)
        elif send.outcome == "fail":
            require(not is_there, "I12", "a send that was not done is there", **facts)
    unknown = places.keys() - known
    require(not unknown, "I9", "a value is there that nobody sent", value=min(unknown, default=b""))


def _find_values(batches: Iterable[Batch]) -> dict[bytes, Offset]:
    places: dict[bytes, Offset] = {}
    for batch in batches:
        batch.verify()
        for at, value in enumerate(batch.values()):
            if value is None or value in places:
                violated("I11", "a value is there twice, or is null", value=value, offset=batch.header.base_offset + at)
            places[value] = Offset(batch.header.base_offset + at)
    return places


def check_consumed(consumed: ConsumeResult, committed: CommittedLog, *, node: NodeId) -> None:
    """Check the records that a consumer was given: committed ones, without a gap, up to the cursor."""
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
    """Check records that a consumer was given one by one: they are those that are committed at their offsets."""
    for record in records:
        facts = {"group": committed.group, "node": node, "offset": record.offset}
        require(record.value == committed.value_at(record.offset), "I7", "a record is not what is committed", **facts)


def check_nothing_skipped(
    seen: set[Offset], committed: CommittedLog, *, first_offset: Offset, lost_max: int, consumer: int
) -> None:
    """Check a consumer that has read to the end: it misses no more than unanswered calls may have consumed."""
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
