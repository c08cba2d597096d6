"""A job: one leased record of a work queue, as `AsyncJob` and `Job` share it.

A job is settled once: acknowledged, returned, released or rejected. A call that failed without the record having been
leased to another worker may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from quiver.errors import ConflictError
from quiver.model import Offset, PartitionId, TopicId
from quiver.record import Headers, Record

SettleKind = Literal["ack", "release", "return", "extend", "reject"]
_PAST: dict[str, str] = {
    "ack": "acknowledged",
    "release": "released",
    "return": "returned",
    "reject": "rejected",
}


class LeaseGrant(msgspec.Struct, frozen=True):
    """What the jobs of one receive have in common."""

    topic_id: TopicId
    partition_id: PartitionId
    grant: int
    lease_ms: int


class LeasedJob:
    """A record, and the lease under which this process works on it."""

    __slots__ = ("_settled", "attempt", "ends_ms", "grant", "is_extending", "record")

    def __init__(self, record: Record, attempt: int, grant: LeaseGrant, ends_ms: int) -> None:
        self.record = record
        """The record, as a consumer reads it."""
        self.attempt = attempt
        """How often the record has been delivered, this time included."""
        self.grant = grant
        self.ends_ms = ends_ms
        """When the lease ends at the earliest, by the monotonic clock of this process."""
        self.is_extending = False
        self._settled: SettleKind | Literal["in_progress"] | None = None

    @property
    def value(self) -> bytes | None:
        """The record's value."""
        return self.record.value

    @property
    def key(self) -> bytes | None:
        """The record's key."""
        return self.record.key

    @property
    def headers(self) -> Headers:
        """The record's headers, as pairs."""
        return self.record.headers

    @property
    def timestamp(self) -> int:
        """The record's timestamp in milliseconds since 1970-01-01 UTC."""
        return self.record.timestamp

    @property
    def topic(self) -> str:
        """The topic of the record."""
        return self.record.topic or ""

    @property
    def partition(self) -> PartitionId:
        """The partition of the record."""
        return self.grant.partition_id

    @property
    def offset(self) -> Offset:
        """The offset of the record; with the partition it names the record for ever, whatever the attempt."""
        return self.record.offset

    @property
    def text(self) -> str | None:
        """The value as text, None for a null; raises `DecodeError` if it is not UTF-8."""
        return self.record.text

    def json(self) -> Any:
        """Return the value, parsed as JSON, None for a null; raises `DecodeError` if it is not JSON."""
        return self.record.json()

    @property
    def is_settled(self) -> bool:
        """Whether it was acknowledged, returned, released or rejected."""
        return self._settled is not None

    def begin_settling(self, kind: SettleKind) -> bool:
        """Return whether the job is to be settled now; False if the same was done before. For use in the SDK only.

        Raises:
            ConflictError: it was settled differently, or another call is settling it.
        """
        if self._settled is None:
            self._settled = "in_progress"
            return True
        if self._settled == kind:
            return False
        was = _PAST.get(self._settled)
        state = "is being settled by another call" if was is None else f"was {was} before"
        raise ConflictError(f"not done: job {self.describe()} {state}", code="job_settled")

    def end_settling(self, kind: SettleKind | None) -> None:
        """Set how it was settled; None: it was not. For use in the SDK only."""
        self._settled = kind

    def describe(self) -> str:
        """Return where its record is."""
        return f"{self.topic}/{self.partition}:{self.offset}"

    def __repr__(self) -> str:
        state = self._settled or "leased"
        return f"<{type(self).__name__} {self.describe()} attempt={self.attempt} {state}>"


Range = tuple[int, int, int]
"""First offset, number of records, grant."""


def to_ranges(jobs: Iterable[LeasedJob]) -> Iterator[tuple[tuple[TopicId, PartitionId], list[Range]]]:
    """Yield the receipts of jobs by partition, those of neighbouring records as one range."""
    by_place: dict[tuple[TopicId, PartitionId], list[tuple[int, int]]] = {}
    for job in jobs:
        grant = job.grant
        by_place.setdefault((grant.topic_id, grant.partition_id), []).append((grant.grant, job.record.offset))
    for place, receipts in by_place.items():
        yield place, merge_receipts(receipts)


def merge_receipts(receipts: list[tuple[int, int]]) -> list[Range]:
    """Return ranges of receipts, which are pairs of grant and offset; a repeated one counts once."""
    receipts.sort()
    grant, first = receipts[0]
    end = first + 1
    ranges: list[Range] = []
    for next_grant, offset in receipts:
        if next_grant != grant or offset > end:
            ranges.append((first, end - first, grant))
            grant, first = next_grant, offset
        end = offset + 1
    ranges.append((first, end - first, grant))
    return ranges
