"""The operations of work queues on their windows, as they are in a partition's log, and the parts of a window. Pure.

A `QueueEntry` is a sequence of operations, of any number of queues. `queue_window` applies them.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from quiver.model import POSITION_MAX, ConsumerId, Offset, PartitionId, ProducerId, TopicId

Number = Annotated[int, Meta(ge=0, le=POSITION_MAX)]
Positive = Annotated[int, Meta(ge=1, le=POSITION_MAX)]

LEASED: Final = 0
WAITING: Final = 1
NOT_PARKED: Final = -1
"""In `QueueLeases.fresh`: the records are leased at once."""

Span = tuple[Number, Positive]
"""Neighbouring records: the first offset, and how many."""
GrantedSpan = tuple[Number, Positive, Number]
"""Neighbouring records and the grant by which they were leased; 0: they never were."""
FreshSpan = tuple[Positive, Annotated[int, Meta(ge=NOT_PARKED, le=POSITION_MAX)], Number]
"""Records from `next_offset` on: how many, when they may be delivered or `NOT_PARKED`, and the hash of their key."""


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Neighbouring outstanding records with the same state."""

    first: Number
    count: Positive
    state: Annotated[int, Meta(ge=LEASED, le=WAITING)]
    attempt: Number
    """How often each was delivered."""
    grant: Number
    """The grant of the last lease; 0: they were never leased."""
    time_ms: Number
    """Leased: when the lease ends. Waiting: when they may be delivered."""
    key: Number = 0
    """Hash of their key, if the queue keeps the order of keys; 0: no key."""

    @property
    def end(self) -> int:
        """Return the offset after the last record."""
        return self.first + self.count


class DeadRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Neighbouring records that died together and have to be moved to the dead-letter topic."""

    first: Number
    count: Positive
    sequence: Number
    """The dead-letter sequence of the first; those of the others follow."""
    attempt: Number
    grant: Number
    time_ms: Number
    """When they died."""
    reason: str = ""


class DeadTarget(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where dead letters go: `producer_id` sends the one with sequence `base + n` as its record with sequence `n`."""

    topic_id: TopicId
    partition_id: PartitionId
    producer_id: ProducerId
    base: Annotated[int, Meta(ge=-POSITION_MAX, le=POSITION_MAX)]


class QueueHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a window has beside its runs."""

    next_offset: Offset
    grants: Number = 0
    dead_next: Number = 0
    target: DeadTarget | None = None


class QueuePart(msgspec.Struct, frozen=True, array_like=True):
    """A row of a state snapshot: up to `PART_RUNS` runs of a window; the first row of each window has its head."""

    group_id: ConsumerId
    head: QueueHead | None = None
    runs: tuple[Run, ...] = ()
    dead: tuple[DeadRun, ...] = ()


# -- operations --------------------------------------------------------------------------------------


class QueueOpen(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Begin a window at an offset; a window that exists stays as it is."""

    group_id: ConsumerId
    offset: Offset


class QueueLeases(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Lease records: outstanding ones `again`, and `fresh` ones from `first` on, some of which are parked instead."""

    group_id: ConsumerId
    grant: Positive
    deadline_ms: Number
    again: tuple[Span, ...] = ()
    first: Offset = Offset(0)
    """`next_offset` of the window that the leader planned with."""
    fresh: tuple[FreshSpan, ...] = ()


class QueueAcks(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Acknowledge records: they are settled."""

    group_id: ConsumerId
    spans: tuple[GrantedSpan, ...]


class QueueReturns(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Return records: they wait until `not_before_ms`; `is_counted`: the delivery counts as an attempt."""

    group_id: ConsumerId
    spans: tuple[GrantedSpan, ...]
    not_before_ms: Number
    is_counted: bool


class QueueExtends(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Change when leases end."""

    group_id: ConsumerId
    spans: tuple[GrantedSpan, ...]
    deadline_ms: Number


class QueueKills(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Turn records into dead letters: leased ones, and with `is_final` waiting ones, too."""

    group_id: ConsumerId
    spans: tuple[GrantedSpan, ...]
    time_ms: Number
    reason: str
    is_final: bool


class QueueBurial(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Forget dead letters below a sequence: they are in the dead-letter topic."""

    group_id: ConsumerId
    end_sequence: Number


class QueueTarget(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Set where the dead letters go from now on."""

    group_id: ConsumerId
    target: DeadTarget


QueueOperation = (
    QueueOpen | QueueLeases | QueueAcks | QueueReturns | QueueExtends | QueueKills | QueueBurial | QueueTarget
)
