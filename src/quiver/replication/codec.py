"""Messages of many groups in one piece of the network's.

    parcel = head length u32 · head (MessagePack) · payloads

The head lists the messages with their group and the length of the payload that belongs to each: the raw
batches of an append, or a snapshot's file. Whatever several groups have for one node in one turn of the
event loop travels together, heartbeats of a thousand groups as well as one append.

Decoding checks everything before anything is handed on, batches down to their payload checksum; it raises
`DecodeError` and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct as Layout

import msgspec

from quiver.errors import DecodeError
from quiver.model import Buffer, GroupId, Index, Term
from quiver.raft import (
    Append,
    AppendResponse,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    Message,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)
from quiver.record import Batch, decode_batches
from quiver.replication.entries import decode_entry
from quiver.replication.opening import decode_snapshot_state
from quiver.storage import Snapshot, decode_snapshot

_LENGTH = Layout("<I")


class AppendHead(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="a"):
    """An `Append` without its entries: those follow as batches."""

    term: Term
    prev_index: Index
    prev_term: Term
    commit: Index
    round: int


PlainMessage = (
    AppendResponse | Heartbeat | HeartbeatResponse | InstallSnapshot | TimeoutNow | VoteRequest | VoteResponse
)


class Item(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One message of one group; `append` or `plain` is set."""

    group: GroupId
    payload_bytes: int = 0
    append: AppendHead | None = None
    plain: PlainMessage | None = None


class Head(msgspec.Struct, frozen=True, array_like=True):
    """What a parcel begins with."""

    incarnation: int
    """Which life of its process the sender is in."""
    items: list[Item]


class Received(msgspec.Struct, frozen=True, gc=False):
    """One message as decoded: an item with its batches or snapshot bytes."""

    item: Item
    batches: list[Batch]
    payload: memoryview

    def as_message(self) -> tuple[Message, Snapshot | None]:
        """Return the core's message, and the snapshot that came with it.

        Raises:
            DecodeError: entries or a snapshot that this program does not know.
        """
        if self.item.append is not None:
            head = self.item.append
            entries = [decode_entry(batch) for batch in self.batches]
            return Append(head.term, head.prev_index, head.prev_term, entries, head.commit, head.round), None
        message = self.item.plain
        assert message is not None, "decoding lets nothing else through"
        if not isinstance(message, InstallSnapshot):
            return message, None
        snapshot, mark = decode_snapshot(self.payload), message.snapshot
        decode_snapshot_state(snapshot.state)
        if (snapshot.last_index, snapshot.last_term) != (mark.last_index, mark.last_term):
            raise DecodeError("a snapshot that is not the one announced")
        return message, snapshot


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Head)


def encode_parcel(incarnation: int, items: list[Item], payloads: Sequence[Buffer]) -> list[Buffer]:
    """Return a parcel in parts; `payloads` are those of the items, in order."""
    head = _encoder.encode(Head(incarnation, items))
    return [_LENGTH.pack(len(head)) + head, *payloads]


def decode_parcel(data: memoryview) -> tuple[int, list[Received]]:
    """Return the sender's incarnation and the messages of a parcel, every checksum verified.

    Raises:
        DecodeError: the bytes are not a parcel.
    """
    if len(data) < _LENGTH.size:
        raise DecodeError("a parcel without a head")
    position = _LENGTH.size + int(_LENGTH.unpack_from(data)[0])
    try:
        head = _decoder.decode(data[_LENGTH.size : position])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DecodeError(f"a parcel whose head cannot be read: {error}") from None
    received = []
    for item in head.items:
        end = position + item.payload_bytes
        if item.payload_bytes < 0 or end > len(data) or (item.append is None) == (item.plain is None):
            raise DecodeError("a parcel whose parts do not add up")
        payload = data[position:end]
        received.append(Received(item, list(decode_batches(payload)) if item.append else [], payload))
        position = end
    if position != len(data):
        raise DecodeError(f"a parcel with {len(data) - position} bytes too many")
    return head.incarnation, received
