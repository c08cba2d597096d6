"""A job: one leased record of a work queue, as `AsyncJob` and `Job` share it.

A job is settled once: acknowledged, returned, released or rejected. A call that failed without the record having been
leased to another worker may be repeated. A job whose receipt was refused is lost: nothing can be done with it any more,
and every further call says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from quiver.errors import ConflictError, FencedError
from quiver.model import ConsumerId, Offset, PartitionId, TopicId
from quiver.record import Headers, Record

SettleKind = Literal["ack", "release", "return", "extend", "reject"]
_PAST: dict[str, str] = {
    "ack": "acknowledged",
    "release": "released",
    "return": "returned",
    "reject": "rejected",
}


class LeaseGrant(msgspec.Struct, frozen=True, eq=False):
    """What the jobs of one receive have in common."""

    group: str
    group_id: ConsumerId
    topic: str
    topic_id: TopicId
    partition_id: PartitionId
    grant: int
    lease_ms: int


class LeasedJob(msgspec.Struct, eq=False, repr_omit_defaults=True):
    """A record, and the lease under which this process works on it.

    A struct, because queues make one for each record.
    """

    queue: Any
    """The queue object that received it."""
    record: Record
    """The record, as a consumer reads it."""
    attempt: int
    """How often the record has been delivered, this time included."""
    grant: LeaseGrant
    ends_ms: int
    """When the lease ends at the earliest, by the monotonic clock of this process; 0: another worker has it."""
    is_extending: bool = False
    is_doubtful: bool = False
    """Whether a call that may have settled it failed: one that finds it settled may repeat that call."""
    settled: SettleKind | Literal["in_progress", "lost"] | None = None
    """How it was settled; None: not yet. Lost: it cannot be settled, its receipt was refused."""

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
        """Whether nothing is left to do: it was acknowledged, returned, released or rejected, or is lost."""
        return self.settled is not None

    @property
    def is_lost(self) -> bool:
        """Whether a call for it was refused, because its lease had ended, and the record went elsewhere."""
        return self.settled == "lost"

    def check_settled(self, kind: SettleKind) -> None:
        """Raise `ConflictError` unless the job was settled in this way before. For use inside the SDK only."""
        if self.settled != kind:
            self.check_unsettled()

    def check_unsettled(self) -> None:
        """Raise `ConflictError` if the job was settled, or is being settled. For use inside the SDK only."""
        if self.settled is None:
            return
        was = _PAST.get(self.settled or "")
        state = "is being settled by another call" if was is None else f"was {was} before"
        raise ConflictError(f"not done: job {self.describe()} {state}", code="job_settled")

    def describe(self) -> str:
        """Return where its record is."""
        return f"{self.topic}/{self.partition}:{self.offset}"

    def __repr__(self) -> str:
        state = self.settled or "leased"
        return f"<{type(self).__name__} {self.describe()} attempt={self.attempt} {state}>"


Range = tuple[int, int, int]
"""First offset, number of records, grant."""
Receipt = tuple[int, int]
"""Grant and offset: what names one lease of one record of a partition."""


class Refusals(msgspec.Struct, frozen=True):
    """Receipts for which a call did nothing."""

    stale: frozenset[Receipt] = frozenset()
    """Another worker has the record, or, unless it was to be acknowledged or rejected, it is settled."""
    before: frozenset[Receipt] = frozenset()
    """The record was settled before the call: by another receipt, or by an earlier call whose outcome was unknown."""


def merge_refusals(refusals: Iterable[Refusals]) -> Refusals:
    """Return the receipts of all of them."""
    stale: set[Receipt] = set()
    before: set[Receipt] = set()
    for one in refusals:
        stale |= one.stale
        before |= one.before
    return Refusals(frozenset(stale), frozenset(before))


def find_lost(jobs: Iterable[LeasedJob], refusals: Iterable[tuple[LeaseGrant, Refusals]]) -> list[LeasedJob]:
    """Return the jobs that were refused, and not because an earlier call that failed has settled them."""
    refused: dict[LeaseGrant, list[Refusals]] = {}
    for grant, one in refusals:
        if one.stale or one.before:
            refused.setdefault(grant, []).append(one)
    return [job for job in jobs if any(_is_lost(job, one) for one in refused.get(job.grant, ()))]


def _is_lost(job: LeasedJob, refused: Refusals) -> bool:
    receipt = (job.grant.grant, job.record.offset)
    return receipt in refused.stale or (receipt in refused.before and not job.is_doubtful)


def to_ranges(jobs: Iterable[LeasedJob]) -> dict[LeaseGrant, list[Range]]:
    """Return the receipts of jobs by their grant; neighbouring records that follow each other are one range."""
    by_grant: dict[LeaseGrant, list[Range]] = {}
    grant: LeaseGrant | None = None
    first = end = -1
    for job in jobs:
        offset = job.record.offset
        if job.grant is grant and offset == end:
            end = offset + 1
            continue
        if grant is not None:
            by_grant.setdefault(grant, []).append((first, end - first, grant.grant))
        grant, first, end = job.grant, offset, offset + 1
    if grant is not None:
        by_grant.setdefault(grant, []).append((first, end - first, grant.grant))
    return by_grant


def merge_receipts(receipts: list[Receipt]) -> list[Range]:
    """Return ranges of receipts; a repeated one counts once."""
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


def raise_lost(lost: Sequence[LeasedJob], *, others: int) -> None:
    """Raise `FencedError` if jobs were lost; `others` were settled in the same call."""
    if not lost:
        return
    rest = "" if others <= 0 else f"; the other {others} are done"
    shown = ", ".join([job.describe() for job in lost[:3]]) + (" …" if len(lost) > 3 else "")
    raise FencedError(
        f"not done for {shown}: the lease ended, and the record went to another worker or is settled{rest}",
        code="stale_receipt",
    )
