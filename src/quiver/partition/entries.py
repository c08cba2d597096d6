"""The log entries of a partition that are not records. Pure.

Each is a control batch: it uses an index but no offset (R21). Its payload is `CONTROL_STATE`, a version byte, and a
tagged msgpack array. The version is the lowest feature level whose programs know the entry (`quiver.features`).
`docs/protocol/partition.md` describes the format.

- *fence*: a producer has begun an epoch;
- *cursors*: consumers have moved, many in one entry;
- *state snapshot*: the whole state after every entry before this one;
- *trim*: records below an offset are removed, and entries below a state snapshot are no longer needed;
- *forget*: the state of producers and consumers is dropped;
- *queue*: records of work queues are leased and settled, any number of operations in one entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

import msgspec

from quiver.errors import DecodeError, UnknownVersionError
from quiver.features import LEVEL_MAX, LEVEL_MIN, version_of
from quiver.model import ConsumerId, Index, Offset, ProducerId
from quiver.partition.queue_operations import QueueOperation, QueuePart
from quiver.record import HEADER_BYTES, Batch, build_control_batch
from quiver.replication import CONTROL_STATE


class SentBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One remembered batch of a producer: its half-open range of sequences and the offset of its first record."""

    first_sequence: int
    end_sequence: int
    base_offset: Offset


class ProducerSnapshot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One producer in the state; `sent` holds its newest batches of all epochs, oldest first."""

    producer_id: ProducerId
    epoch: int
    next_sequence: int = 0
    sent: tuple[SentBatch, ...] = ()
    last_index: Index = Index(0)
    """Index of its last batch or fence; 0 in snapshots from before this field existed."""


class TrimPoint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A state snapshot in the log, to which the log may be trimmed, with the totals of the records before it."""

    index: Index
    offset: Offset
    record_bytes: int
    newest_ms: int


class StateSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """A partition's whole state, except for its position in the log; equal states give equal bytes."""

    first_offset: Offset = Offset(0)
    """Records below it were trimmed."""
    trimmed_index: Index = Index(0)
    """Entries below it are no longer needed: the index of a state snapshot, or 0."""
    record_bytes: int = 0
    """Total size of all batches of records ever appended."""
    newest_ms: int = 0
    """The latest append time of a record, by the clocks of the leaders."""
    producers: tuple[ProducerSnapshot, ...] = ()
    """Least recently active first."""
    cursors: tuple[tuple[ConsumerId, Offset], ...] = ()
    """Sorted by consumer."""
    trim_points: tuple[TrimPoint, ...] = ()
    """The state snapshot of the last trim and those since, oldest first."""
    metadata_index: Index = Index(0)
    """Metadata index by which clients were last found to be removed; a check against older metadata may admit them."""
    sessions: tuple[tuple[ConsumerId, int], ...] = ()
    """The last session of each consumer that has one, sorted by consumer."""
    queues: tuple[QueuePart, ...] = ()
    """The windows of work queues, in small rows, sorted by group."""


class FenceEntry(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A producer has begun an epoch: batches of earlier epochs are refused from here on."""

    producer_id: ProducerId
    epoch: int


class CursorsEntry(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Sets consumers' cursors, and the sessions of consumers that have begun to use them."""

    cursors: tuple[tuple[ConsumerId, Offset], ...]
    sessions: tuple[tuple[ConsumerId, int], ...] = ()


class StateSnapshotEntry(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The whole state before this entry: a replica needs no earlier entry to know the state from here on."""

    contents: StateSnapshot


class TrimEntry(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Removes records below `offset`; entries below `index`, a state snapshot's, are no longer needed."""

    index: Index
    offset: Offset


class ForgetEntry(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Drops the state of producers and consumers that are not registered any more at `metadata_index`, or are idle."""

    metadata_index: Index
    producers: tuple[ProducerId, ...] = ()
    consumers: tuple[ConsumerId, ...] = ()


class QueueEntry(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Operations of work queues, in the order in which they are applied."""

    operations: tuple[QueueOperation, ...]


PartitionEntry = FenceEntry | CursorsEntry | StateSnapshotEntry | TrimEntry | ForgetEntry | QueueEntry

_TAGS = frozenset(kind.__struct_config__.tag for kind in get_args(PartitionEntry))
_SNAPSHOT_TAG = StateSnapshotEntry.__struct_config__.tag
_DOCUMENT_AT = len(CONTROL_STATE) + 1
"""Position of the encoded entry in a payload, after the version; it begins with the array's header and the tag."""
_decoder: msgspec.msgpack.Decoder[PartitionEntry] = msgspec.msgpack.Decoder(PartitionEntry)


def build_entry(entry: PartitionEntry, *, level: int = LEVEL_MAX) -> bytes:
    """Return an entry for a cluster at a feature level as a control batch, not yet stamped with index and term.

    Raises:
        ConflictError: programs of that level do not know the entry.
    """
    version = bytes((version_of(type(entry), level),))
    return build_control_batch(CONTROL_STATE + version + msgspec.msgpack.encode(entry), timestamp=0)


def join_snapshot_entry(parts: Iterable[bytes], *, level: int = LEVEL_MAX) -> bytearray:
    """Return a `StateSnapshotEntry` that was encoded in parts, as `build_entry` does, but not sealed yet.

    Sealing (`seal_control_batch`) is a step of its own, since each of the two takes milliseconds for a large state.
    """
    version = bytes((version_of(StateSnapshotEntry, level),))
    return bytearray().join((bytes(HEADER_BYTES), CONTROL_STATE, version, *parts))


def is_snapshot(batch: Batch, *, level_max: int = LEVEL_MAX) -> bool:
    """Return whether a control batch is a state snapshot of a known version, without decoding it."""
    payload = batch.payload()
    is_known = len(payload) > _DOCUMENT_AT + 1 and LEVEL_MIN <= payload[1] <= level_max
    return is_known and bytes(payload[:1]) == CONTROL_STATE and payload[_DOCUMENT_AT + 1] == _SNAPSHOT_TAG


def snapshot_document(batch: Batch) -> bytes:
    """Return the encoded state snapshot of a batch."""
    return bytes(memoryview(batch.payload())[_DOCUMENT_AT:])


def decode_entry(batch: Batch, *, level_max: int = LEVEL_MAX) -> PartitionEntry | None:
    """Return the partition entry in a control batch; None if the batch belongs to the replication layer.

    `level_max` is the highest feature level that this program knows.

    Raises:
        UnknownVersionError: a newer program wrote the entry.
        DecodeError: its bytes are malformed.
    """
    payload = bytes(batch.payload())
    if payload[:1] != CONTROL_STATE:
        return None
    where = f"the partition entry at index {batch.header.index}"
    if len(payload) < len(CONTROL_STATE) + 1:
        raise DecodeError(f"{where} has no version")
    if not LEVEL_MIN <= payload[1] <= level_max:
        raise UnknownVersionError(
            f"{where} has version {payload[1]}, but this program reads versions {LEVEL_MIN} to {level_max}: "
            "upgrade this node"
        )
    try:
        return _decoder.decode(payload[2:])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        if _is_of_unknown_kind(payload[2:]):
            raise UnknownVersionError(
                f"{where} is of a kind that this program does not know: upgrade this node"
            ) from None
        raise DecodeError(f"{where} cannot be decoded: {error}") from None


def _is_of_unknown_kind(data: bytes) -> bool:
    try:
        found = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return isinstance(found, list) and bool(found) and isinstance(found[0], int) and found[0] not in _TAGS
