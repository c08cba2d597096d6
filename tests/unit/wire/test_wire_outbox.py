"""The queue before a socket: order, counts, and how it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.config import WireSettings
from quiver.errors import ConfigError
from quiver.model import Buffer
from quiver.wire.outbox import CHUNK_BYTES, Outbox

sizes = st.integers(1, 300) | st.sampled_from([CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])


@settings(deadline=None)  # megabytes are copied, and the machine may have other work
@given(st.lists(st.lists(sizes, min_size=1, max_size=3), max_size=8))
def test_everything_leaves_once_in_order_and_in_bounded_chunks(frames: list[list[int]]) -> None:
    outbox = Outbox()
    expected = b""
    for at, frame in enumerate(frames):
        buffers: list[Buffer] = [bytes([at + 1]) * size for size in frame]
        outbox.push(buffers)
        expected += b"".join(buffers)
    assert (outbox.bytes, outbox.messages) == (len(expected), len(frames))
    left = b""
    while chunk := outbox.next_chunk():
        assert len(chunk) <= CHUNK_BYTES
        left += chunk
        assert outbox.bytes == len(expected) - len(left)
    assert left == expected
    assert (outbox.bytes, outbox.messages) == (0, 0)


def test_small_frames_leave_together_and_large_ones_uncopied() -> None:
    outbox = Outbox()
    large = bytearray(2 * CHUNK_BYTES)
    frames: list[list[Buffer]] = [[b"a"], [b"b"], [b"head", large], [b"c"]]
    for buffers in frames:
        outbox.push(buffers)
    assert [bytes(outbox.next_chunk()) for _ in range(2)] == [b"ab", b"head"]
    slices = [outbox.next_chunk() for _ in range(2)]
    assert [piece.obj is large for piece in slices] == [True, True]
    assert outbox.messages == 1
    assert bytes(outbox.next_chunk()) == b"c"


def test_cleared_outbox_counts_frames_not_wholly_given_out() -> None:
    outbox = Outbox()
    outbox.push([b"a"])
    outbox.push([b"head", bytes(2 * CHUNK_BYTES)])
    outbox.push([b"b"])
    for _ in range(3):
        outbox.next_chunk()
    assert outbox.clear() == 2
    assert (outbox.bytes, outbox.messages, len(outbox.next_chunk())) == (0, 0, 0)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"wire\.peer_buffer_bytes_max"):
        WireSettings(frame_bytes_max=2**20, peer_buffer_bytes_max=2**20 - 1)
    with pytest.raises(ConfigError, match=r"wire\.reconnect_delay_ms_max"):
        WireSettings(reconnect_delay_ms_min=100, reconnect_delay_ms_max=99)


def test_frame_is_held_until_its_last_byte_is_given_out() -> None:
    outbox = Outbox()
    small = outbox.push([b"one"])
    large = outbox.push([b"head", bytes(CHUNK_BYTES + 1)])
    assert (outbox.holds(small), outbox.holds(large)) == (True, True)
    outbox.next_chunk()
    assert (outbox.holds(small), outbox.holds(large)) == (False, True)
    while outbox.bytes:
        assert outbox.holds(large)
        outbox.next_chunk()
    assert not outbox.holds(large)


def test_withdrawn_frames_are_not_given_out_and_the_others_are() -> None:
    outbox = Outbox()
    numbers = [outbox.push([b"%d" % at]) for at in range(5)]
    large = outbox.push([b"head", bytes(CHUNK_BYTES)])
    outbox.push([b"end"])
    assert [outbox.withdraw(number) for number in (numbers[1], numbers[4], large)] == [True] * 3
    given = bytearray()
    while outbox.bytes:
        given += outbox.next_chunk()
    assert given == b"023end"
    assert not outbox.holds(numbers[4])


def test_frame_of_which_a_part_was_given_out_cannot_be_withdrawn() -> None:
    outbox = Outbox()
    given = outbox.push([b"given"])
    large = outbox.push([b"head", bytes(2 * CHUNK_BYTES)])
    outbox.next_chunk()
    assert outbox.withdraw(given) is False
    outbox.next_chunk()
    assert outbox.withdraw(large) is False
    untouched = outbox.push([b"head", bytes(CHUNK_BYTES)])
    while outbox.bytes > 4 + CHUNK_BYTES:
        outbox.next_chunk()
    assert outbox.withdraw(untouched) is True
    assert outbox.bytes == 0


def test_cleared_outbox_begins_anew() -> None:
    outbox = Outbox()
    outbox.push([b"head", bytes(2 * CHUNK_BYTES)])
    outbox.next_chunk()
    outbox.clear()
    number = outbox.push([b"next"])
    assert outbox.holds(number)
    assert outbox.withdraw(number) is True
