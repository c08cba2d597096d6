"""The partition's own entries: what stands in its log beside records. Pure.

Each is a control batch, so that it takes an index and no offset (R21). Its payload is `CONTROL_STATE`, a byte of
version, and a tagged msgpack array. `docs/protocol/partition.md` describes them.

- *fence*: a producer has begun an epoch;
- *cursors*: consumers have moved, many in one entry;
- *summary*: the whole state, as every entry before this one has led to it;
- *trim*: the records below an offset are gone, and entries below a summary are no longer needed.
"""

from __future__ import annotations

import msgspec

from quiver.errors import DecodeError
from quiver.model import ConsumerId, Index, Offset, ProducerId
from quiver.record import Batch, build_control_batch
from quiver.replication import CONTROL_STATE

VERSION = 1
_PREFIX = CONTROL_STATE + bytes([VERSION])


class Sent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One remembered batch of a producer: its sequence numbers, half-open, and the offset of its first record."""

    first_sequence: int
    end_sequence: int
    base_offset: Offset


class ProducerRow(msgspec.Struct, frozen=True, array_like=True):
    """One producer; `sent` holds its newest batches, over all its epochs, oldest first."""

    producer_id: ProducerId
    epoch: int
    next_sequence: int
    sent: tuple[Sent, ...]


class Mark(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A summary in the log, and what lies before it: how far records go, how many bytes, how new."""

    index: Index
    offset: Offset
    record_bytes: int
    newest_ms: int


class Contents(msgspec.Struct, frozen=True, array_like=True):
    """A partition's whole state but for where it stands; equal states give equal bytes."""

    first_offset: Offset = Offset(0)
    """Records below it were trimmed."""
    trimmed_index: Index = Index(0)
    """Entries below it are not needed any more: one before a summary, or 0."""
    record_bytes: int = 0
    """The size of all batches of records there ever were."""
    newest_ms: int = 0
    """The latest time at which records were appended, by the clocks of their leaders."""
    producers: tuple[ProducerRow, ...] = ()
    """The one that was silent longest first."""
    cursors: tuple[tuple[ConsumerId, Offset], ...] = ()
    """By consumer."""
    marks: tuple[Mark, ...] = ()
    """The summary that was last trimmed to, and those since, oldest first."""


class Fence(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A producer has begun an epoch: batches of earlier ones are refused from here on."""

    producer_id: ProducerId
    epoch: int


class Cursors(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Consumers' cursors are at these offsets now."""

    cursors: tuple[tuple[ConsumerId, Offset], ...]


class Summary(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The state before this entry, whole: who knows nothing of what was before knows everything from here on."""

    contents: Contents


class Trim(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Records below `offset` are gone, and entries below `index`, a summary's, are no longer needed."""

    index: Index
    offset: Offset


Entry = Fence | Cursors | Summary | Trim

_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def build_entry(entry: Entry) -> bytes:
    """Return the unstamped control batch that holds an entry."""
    return build_control_batch(_PREFIX + msgspec.msgpack.encode(entry), timestamp=0)


def decode_entry(batch: Batch) -> Entry | None:
    """Return the partition's entry in a control batch; None if it belongs to the layer below.

    Raises:
        DecodeError: an entry of a version or kind that this program does not know.
    """
    payload = bytes(batch.payload())
    if payload[:1] != CONTROL_STATE:
        return None
    if payload[1:2] != _PREFIX[1:]:
        raise DecodeError(f"a partition's entry of unknown version {payload[1:2]!r}")
    try:
        return _decoder.decode(payload[2:])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DecodeError(f"a partition's entry that cannot be read: {error}") from None
