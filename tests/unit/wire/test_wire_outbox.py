"""The queue before a socket: order, counts, and how it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.config import WireSettings
from quiver.errors import ConfigError
from quiver.model import Buffer
from quiver.wire.outbox import CHUNK_BYTES, Outbox

sizes = st.integers(1, 300) | st.sampled_from([CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])


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
