"""Encode messages of many groups into one envelope, the driver's unit on the network.

    envelope = header length u32 · header (MessagePack) · payloads

The header lists the messages with their group and the length of each message's payload: the raw batches of an append,
or a snapshot file. All messages that the groups of a node have for another node in one turn of the event loop travel
in one envelope, whether heartbeats of a thousand groups or one append.

Decoding verifies everything before anything is delivered, including the payload checksum of each batch. It raises
`DecodeError` and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct as Layout
from typing import Annotated

import msgspec
from msgspec import Meta

from quiver.errors import DecodeError
from quiver.model import Buffer, GroupId, Index, Term
from quiver.raft import (
    Append,
    AppendResponse,
    Entry,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    RaftMessage,
    Round,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)
from quiver.record import Batch, decode_batches
from quiver.replication.entries import decode_entry
from quiver.replication.member_files import decode_snapshot_state
from quiver.storage import StoredSnapshot, decode_snapshot

_LENGTH = Layout("<I")


class AppendHead(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="a"):
    """An `Append` without its entries, which follow as batches."""

    term: Term
    prev_index: Index
    prev_term: Term
    commit: Index
    round: Round


PlainMessage = (
    AppendResponse | Heartbeat | HeartbeatResponse | InstallSnapshot | TimeoutNow | VoteRequest | VoteResponse
)


class GroupMessage(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One message of one group; `append` or `plain` is set."""

    group: GroupId
    payload_bytes: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)] = 0
    append: AppendHead | None = None
    plain: PlainMessage | None = None


class EnvelopeHeader(msgspec.Struct, frozen=True, array_like=True):
    """The start of an envelope."""

    incarnation: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    """Identifies the sender's process: it changes with every restart."""
    messages: list[GroupMessage]


class ReceivedMessage(msgspec.Struct, frozen=True, gc=False):
    """One decoded message with its batches or snapshot bytes."""

    message: GroupMessage
    batches: list[Batch]
    payload: memoryview

    def without_payload(self) -> ReceivedMessage:
        """Return the message as if its leader had sent no entries; nothing is left of one that brings a snapshot."""
        message = GroupMessage(self.message.group, append=self.message.append)
        return ReceivedMessage(message, [], self.payload[:0])

    def as_message(self) -> tuple[RaftMessage, StoredSnapshot | None]:
        """Return the core's message and its snapshot, if it has one.

        Raises:
            DecodeError: an entry or the snapshot is malformed or of an unknown kind.
        """
        if self.message.append is not None:
            head = self.message.append
            entries = [decode_entry(batch) for batch in self.batches]
            _check_entries(head, entries)
            return Append(head.term, head.prev_index, head.prev_term, entries, head.commit, head.round), None
        message = self.message.plain
        assert message is not None, "`decode_envelope` checks that one of the two is set"
        if not isinstance(message, InstallSnapshot):
            return message, None
        snapshot, metadata = decode_snapshot(self.payload), message.snapshot
        decode_snapshot_state(snapshot.state)
        if metadata.last_term > message.term:
            raise DecodeError(f"snapshot of term {metadata.last_term} in a message of term {message.term}")
        if (snapshot.last_index, snapshot.last_term) != (metadata.last_index, metadata.last_term):
            raise DecodeError(f"snapshot at index {snapshot.last_index}, announced as index {metadata.last_index}")
        return message, snapshot


def _check_entries(head: AppendHead, entries: Sequence[Entry]) -> None:
    """Refuse an append that no leader sends: entries are consecutive, and terms grow up to the leader's (§5.3)."""
    index, term = head.prev_index, head.prev_term
    for entry in entries:
        if entry.index != index + 1 or entry.term < term:
            raise DecodeError(f"entry {entry.index} of term {entry.term} after entry {index} of term {term}")
        index, term = entry.index, entry.term
    if term > head.term:
        raise DecodeError(f"an entry of term {term} in an append of term {head.term}")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EnvelopeHeader)


def encode_envelope(incarnation: int, messages: list[GroupMessage], payloads: Sequence[Buffer]) -> list[Buffer]:
    """Return an envelope in parts; `payloads` are those of the messages, in order."""
    header = _encoder.encode(EnvelopeHeader(incarnation, messages))
    return [_LENGTH.pack(len(header)) + header, *payloads]


def decode_envelope(data: memoryview) -> tuple[int, list[ReceivedMessage]]:
    """Return the sender's incarnation and the messages of an envelope, with every checksum verified.

    Raises:
        DecodeError: the bytes are not an envelope.
    """
    if len(data) < _LENGTH.size:
        raise DecodeError(f"envelope of {len(data)} bytes is too short for its header length")
    position = _LENGTH.size + int(_LENGTH.unpack_from(data)[0])
    try:
        header = _decoder.decode(data[_LENGTH.size : position])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DecodeError(f"malformed envelope header: {error}") from None
    received = []
    for message in header.messages:
        end = position + message.payload_bytes
        if end > len(data) or (message.append is None) == (message.plain is None):
            raise DecodeError("malformed envelope: a payload length or a message is invalid")
        payload = data[position:end]
        received.append(ReceivedMessage(message, list(decode_batches(payload)) if message.append else [], payload))
        position = end
    if position != len(data):
        raise DecodeError(f"malformed envelope: {len(data) - position} bytes after the last payload")
    return header.incarnation, received
