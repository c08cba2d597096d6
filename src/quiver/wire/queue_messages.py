"""Requests of work queues: receive, settle and inspect the records of a group in one partition. Pure.

All of them are sent to the partition's leader, like `Consume`. A group is a registered consumer; `group_id` is its
consumer id.

A record is *leased* to the worker that receives it. The lease has a number, its *grant*: a later lease of the record
has a higher one. A **receipt** is (topic id, partition, group id, offset, grant), so a worker whose lease was given to
another cannot settle the record. Receipts of neighbouring records with one grant are written as one *range*: first
offset, number of records, grant.

`docs/protocol/wire.md` describes the payload of a `QueueReceived`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quiver.errors import DecodeError
from quiver.groups.settings import DELAY_MS_MAX, LEASE_MS_MAX
from quiver.model import POSITION_MAX, Buffer, ConsumerId, Offset, TopicId
from quiver.wire.requests import Count, DecodedRoom, LargeBytes, PartitionNumber, Request, Response

QUEUE_RECORDS_MAX = 5_000
"""Most records of one `QueueReceive`, and of the ranges of one `QueueSettle` together."""
QUEUE_RANGES_MAX = 1_000
"""Most ranges of one kind in a `QueueSettle`, and of leases in a `QueueReceived`."""
REASON_CHARACTERS_MAX = 200
"""Longest reason of a rejected record; longer ones are refused."""

Position = Annotated[int, Meta(ge=0, le=POSITION_MAX)]
RangeCount = Annotated[int, Meta(ge=1, le=QUEUE_RECORDS_MAX)]
Grant = Annotated[int, Meta(ge=1, le=POSITION_MAX)]
LeaseMs = Annotated[int, Meta(ge=1, le=LEASE_MS_MAX)]
DelayMs = Annotated[int, Meta(ge=0, le=DELAY_MS_MAX)]
Reason = Annotated[str, Meta(max_length=REASON_CHARACTERS_MAX)]

QueueStall = Literal["", "empty", "in_flight_max", "waiting", "key_order"]
"""Why nothing is leased now: there is no such reason; every record is leased or settled; as many records are under way
as the group allows; the rest waits for its time; the rest waits for an earlier record of its key."""


class ReceiptRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The receipts of neighbouring records: [`first`, `first` + `count`), all of one grant."""

    first: Position
    count: RangeCount
    grant: Grant


class QueueReturn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Records to deliver again, after `delay_ms`; None: as the group's backoff says for the record's attempts."""

    first: Position
    count: RangeCount
    grant: Grant
    delay_ms: DelayMs | None = None


class QueueExtension(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Records whose leases end `lease_ms` from now, earlier or later than before."""

    first: Position
    count: RangeCount
    grant: Grant
    lease_ms: LeaseMs


class QueueReject(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Records that become dead letters at once, and why."""

    first: Position
    count: RangeCount
    grant: Grant
    reason: Reason = ""


class QueueLease(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Neighbouring leased records: [`first`, `first` + `count`), each delivered for the `attempt`-th time."""

    first: Offset
    count: int
    attempt: int


class QueueRecord(msgspec.Struct, frozen=True, array_like=True):
    """One record in the payload of a `QueueReceived`; its offset follows from the leases."""

    timestamp: int
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class QueueReceived(Response, frozen=True):
    """Leased records. The payload is a MessagePack array with a `QueueRecord` for each of `leases`, in their order.

    Records whose leases expired come first, then those that waited, then new ones; each in the order of offsets.
    """

    leases: tuple[QueueLease, ...] = ()
    grant: int = 0
    """The grant of all of these leases."""
    deadline_ms: int = 0
    """When the leases end, by the leader's clock, in milliseconds since 1970."""
    lease_ms: int = 0
    """How long the leases last from when they were granted: for workers whose clock differs from the leader's."""
    stall: QueueStall = ""
    """Why there are no leases, if there are none."""
    large_bytes: LargeBytes = 0


class QueueReceive(Request[QueueReceived], frozen=True, tag="queue_receive"):
    """Lease records of a group to a worker, and return them when the leases are committed.

    If no record is ready, wait for one for up to `wait_ms`. At least one record is returned if one is ready, even if it
    exceeds `bytes_max`. If the outcome is unknown, a repeat is safe: what the first attempt leased is delivered again
    when its leases end.

    Refused with `not_a_queue` if the group reads its topics as streams.
    """

    response = QueueReceived
    waits_for_index = True

    topic_id: TopicId
    partition_id: PartitionNumber
    group_id: ConsumerId
    records_max: RangeCount = 1
    bytes_max: Count = 1024 * 1024
    lease_ms: LeaseMs | None = None
    """None: as the group's settings say."""
    wait_ms: Count = 0
    decoded_bytes_max: DecodedRoom = 0
    """At least as much as a node decodes for any receive."""


class QueueSettled(Response, frozen=True):
    """Everything was done, except for the records in `stale`, which were not changed.

    A record is stale for a receipt if it was leased again since, if it was returned, or (except for acknowledgements
    and rejections, which are done then) if it is acknowledged or dead.
    """

    stale: tuple[tuple[Offset, int], ...] = ()
    """Ranges of offsets: the first, and the number of records. Sorted; no two of them touch."""
    settled_before: tuple[tuple[Offset, int], ...] = ()
    """Of what was to be acknowledged or rejected: records that were settled before this request came, by an earlier
    attempt of it or by another receipt, and perhaps in another way (a record whose last attempt was over may be a dead
    letter by now). Whoever has sent the request only once knows that it was not by this receipt."""
    deadline_ms: int = 0
    """The latest new deadline of `extends`, in milliseconds since 1970 by the leader's clock; 0 without any."""


class QueueSettle(Request[QueueSettled], frozen=True, tag="queue_settle"):
    """Acknowledge, return, extend, release or reject leased records, in one replicated step.

    A receipt whose lease has ended is still good as long as the record was not leased again. Idempotent: a repeat
    changes nothing, and has the same response. The ranges must not overlap.
    """

    response = QueueSettled
    waits_for_index = True
    _idempotent = True

    topic_id: TopicId
    partition_id: PartitionNumber
    group_id: ConsumerId
    acks: Annotated[tuple[ReceiptRange, ...], Meta(max_length=QUEUE_RANGES_MAX)] = ()
    """Records that are done: they are never delivered again."""
    releases: Annotated[tuple[ReceiptRange, ...], Meta(max_length=QUEUE_RANGES_MAX)] = ()
    """Records that were not worked on: they are ready at once, and the attempt does not count."""
    returns: Annotated[tuple[QueueReturn, ...], Meta(max_length=QUEUE_RANGES_MAX)] = ()
    """Records whose work failed: they are delivered again later, or are dead letters after the last attempt."""
    extends: Annotated[tuple[QueueExtension, ...], Meta(max_length=QUEUE_RANGES_MAX)] = ()
    rejects: Annotated[tuple[QueueReject, ...], Meta(max_length=QUEUE_RANGES_MAX)] = ()


class QueueFound(Response, frozen=True):
    """The records of a group in one partition, no older than the request. Counts are of records."""

    ready: int
    """Deliverable now: never leased, returned and due, or with an expired lease."""
    leased: int
    """Leased, and the lease has not ended."""
    waiting: int
    """Delayed, to be retried later, or parked for an earlier record of their key."""
    dying: int
    """On their way to the dead-letter topic."""
    next_offset: Offset
    """No record from here on was ever leased or parked."""
    first_unsettled: Offset
    """The group's cursor: every record below it is acknowledged or dead."""
    first_offset: Offset
    end_offset: Offset
    """The high watermark."""
    in_flight_max: int
    stall: QueueStall = ""
    """Why a receive would return nothing now."""


class GetQueue(Request[QueueFound], frozen=True, tag="get_queue"):
    """Return the state of a group's queue in a partition."""

    response = QueueFound
    waits_for_index = True
    is_read = True

    topic_id: TopicId
    partition_id: PartitionNumber
    group_id: ConsumerId


QueueRequest = QueueReceive | QueueSettle | GetQueue

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[QueueRecord])


def encode_queue_records(records: Sequence[QueueRecord | tuple[object, ...]]) -> bytes:
    """Return the payload of a `QueueReceived`; a tuple has the fields of a `QueueRecord`, at least the first two."""
    return _encode(records)


def decode_queue_records(payload: Buffer) -> list[QueueRecord]:
    """Return the records that `encode_queue_records` encoded; raises `DecodeError`."""
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise DecodeError(f"not a valid payload of received records: {error}") from None
