"""Parcels: everything that goes in comes out, and nothing else does any harm."""

from __future__ import annotations

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import DecodeError
from quiver.model import Buffer, GroupId, Index, Offset, Term
from quiver.raft import (
    Append,
    Configuration,
    Entry,
    EntryKind,
    Heartbeat,
    InstallSnapshot,
    SnapshotMetadata,
    TimeoutNow,
)
from quiver.record import Batch, build_batch, build_control_batch, stamp
from quiver.replication.codec import AppendHead, EnvelopeHeader, GroupMessage, decode_envelope, encode_envelope
from quiver.replication.entries import CONTROL_STATE, decode_entry, encode_own_entry
from quiver.replication.member_files import SnapshotState, encode_snapshot_state, join_snapshot_state
from quiver.storage import StoredSnapshot as SnapshotFile

GROUP = GroupId(7)
MEMBERS = Configuration(voters=(1, 2, 3))  # type: ignore[arg-type]  # plain numbers for node ids


def stamped(built: bytes, index: int) -> bytes:
    return bytes(stamp(built, term=Term(3), index=Index(index), base_offset=Offset(5), append_timestamp=9))


def joined(parts: list[Buffer]) -> memoryview:
    return memoryview(b"".join(parts))


def test_append_carries_its_batches_as_the_bytes_they_are() -> None:
    batches = [stamped(build_batch([b"a", b"b"], timestamp=1), 11), stamped(build_batch([b"c"], timestamp=1), 12)]
    size_bytes = sum(map(len, batches))
    item = GroupMessage(GROUP, size_bytes, append=AppendHead(Term(3), Index(10), Term(2), Index(9), 4))
    other = GroupMessage(GroupId(8), plain=Heartbeat(Term(5), Index(6), 7))
    incarnation, (received, beat) = decode_envelope(joined(encode_envelope(42, [item, other], batches)))
    assert incarnation == 42
    message, snapshot = received.as_message()
    assert isinstance(message, Append)
    assert snapshot is None
    assert [bytes(entry.data) for entry in message.entries] == batches
    assert [entry.index for entry in message.entries] == [11, 12]
    assert beat.as_message() == (Heartbeat(Term(5), Index(6), 7), None)


def test_snapshot_carries_its_file() -> None:
    state = encode_snapshot_state(SnapshotState(MEMBERS, b"machine"))
    file = SnapshotFile(last_index=Index(4), last_term=Term(2), end_offset=Offset(3), state=state)
    for mark_index, is_right in ((4, True), (5, False)):
        mark = SnapshotMetadata(Index(mark_index), Term(2), MEMBERS)
        item = GroupMessage(GROUP, len(file.encode()), plain=InstallSnapshot(Term(3), mark, 1))
        _, (received,) = decode_envelope(joined(encode_envelope(1, [item], [file.encode()])))
        if is_right:
            assert received.as_message() == (item.plain, file)
        else:
            with pytest.raises(DecodeError, match="announced"):
                received.as_message()


@pytest.mark.parametrize("count", [0, 1, 255, 256, 65_535, 65_536, 1 << 21])
def test_state_joined_from_parts_is_the_state_encoded_at_once(count: int) -> None:
    machine = bytes(range(256)) * (count // 256 + 1)
    parts = [machine[: count // 3], b"", machine[count // 3 : count]]
    encoded = encode_snapshot_state(SnapshotState(MEMBERS, machine[:count]))
    assert join_snapshot_state(MEMBERS, parts) == encoded


def test_snapshot_with_foreign_state_is_refused() -> None:
    file = SnapshotFile(last_index=Index(4), last_term=Term(2), end_offset=Offset(3), state=b"something else")
    item = GroupMessage(
        GROUP, len(file.encode()), plain=InstallSnapshot(Term(3), SnapshotMetadata(Index(4), Term(2), MEMBERS), 1)
    )
    _, (received,) = decode_envelope(joined(encode_envelope(1, [item], [file.encode()])))
    with pytest.raises(DecodeError):
        received.as_message()


@pytest.mark.parametrize(
    "item",
    [
        GroupMessage(GROUP),
        GroupMessage(GROUP, append=AppendHead(Term(1), Index(0), Term(0), Index(0), 0), plain=TimeoutNow(Term(1))),
        GroupMessage(GROUP, payload_bytes=5, plain=TimeoutNow(Term(1))),
        GroupMessage(GROUP, payload_bytes=-1, plain=TimeoutNow(Term(1))),
        GroupMessage(GROUP, payload_bytes=3, append=AppendHead(Term(1), Index(0), Term(0), Index(0), 0)),
    ],
)
def test_items_that_do_not_add_up_are_refused(item: GroupMessage) -> None:
    with pytest.raises(DecodeError):
        decode_envelope(joined(encode_envelope(1, [item], [b"abc"])))


def test_bytes_too_many_are_refused() -> None:
    envelope = joined(encode_envelope(1, [GroupMessage(GROUP, plain=TimeoutNow(Term(1)))], [b"abc"]))
    with pytest.raises(DecodeError, match="3 bytes after the last payload"):
        decode_envelope(envelope)


def test_append_with_a_flipped_bit_is_refused_whole() -> None:
    batch = stamped(build_batch([b"payload"], timestamp=1), 11)
    item = GroupMessage(GROUP, len(batch), append=AppendHead(Term(3), Index(10), Term(2), Index(9), 4))
    envelope = bytearray(joined(encode_envelope(1, [item], [batch])))
    for position in range(len(envelope) - len(batch), len(envelope)):
        envelope[position] ^= 4
        with pytest.raises(DecodeError):
            decode_envelope(memoryview(bytes(envelope)))
        envelope[position] ^= 4
    decode_envelope(memoryview(bytes(envelope)))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_decode_error_or_nothing(data: bytes) -> None:
    for envelope in (data, struct.pack("<I", len(data)) + data):
        try:
            _, received = decode_envelope(memoryview(envelope))
            for message in received:
                message.as_message()
        except DecodeError:
            pass


@given(
    st.recursive(
        st.none() | st.integers(-5, 1 << 40) | st.text(max_size=9) | st.binary(max_size=9), st.lists, max_leaves=9
    )
)
def test_arbitrary_heads_raise_decode_error_or_nothing(head: object) -> None:
    encoded = msgspec.msgpack.encode([1, [head]])
    with contextlib.suppress(DecodeError):
        decode_envelope(memoryview(struct.pack("<I", len(encoded)) + encoded))


def test_own_entries_become_control_batches_and_back() -> None:
    for entry in (
        Entry(Index(4), Term(2), EntryKind.NOOP),
        Entry(Index(5), Term(2), EntryKind.CONFIG, b"", MEMBERS),
    ):
        batch = encode_own_entry(entry, base_offset=Offset(9), timestamp=77)
        found = decode_entry(Batch.decode(bytes(batch.data)))
        assert (found.index, found.term, found.kind, found.configuration) == (
            entry.index,
            entry.term,
            entry.kind,
            entry.configuration,
        )
        assert batch.header.end_offset == 9


def test_control_batches_of_other_kinds() -> None:
    ours = Batch.decode(stamped(build_control_batch(CONTROL_STATE + b"x", timestamp=1), 3))
    assert decode_entry(ours).kind is EntryKind.DATA
    for payload in (b"", b"\x09", b"\x02not a configuration"):
        with pytest.raises(DecodeError):
            decode_entry(Batch.decode(stamped(build_control_batch(payload, timestamp=1), 3)))


def test_head_is_small_for_a_heartbeat() -> None:
    envelope = joined(encode_envelope(1 << 60, [GroupMessage(GROUP, plain=Heartbeat(Term(5), Index(600), 70))], []))
    assert len(envelope) < 80
    assert msgspec.msgpack.decode(envelope[4:], type=EnvelopeHeader).messages[0].group == GROUP
