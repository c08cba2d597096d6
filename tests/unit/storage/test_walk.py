"""A walk covers every byte, and is not fooled by what lies inside damage."""

from __future__ import annotations

import random
from itertools import pairwise

from log_world import data_batch

from quiver.storage.frames import encode_mark
from quiver.storage.scan import CHUNK_BYTES, BadRange, SegmentFrame, walk
from quiver.testing import SimulatedDisk
from quiver.testing.disk import SimulatedFile


def file_of(*parts: bytes) -> SimulatedFile:
    file = SimulatedDisk().open("/f", create=True)
    file.write([b"".join(parts)], 0)
    return file


def batch(index: int, value: bytes = b"value") -> bytes:
    return bytes(data_batch([value], index=index, offset=index).data)


def walked(file: SimulatedFile, *, next_index: int = 1) -> list[SegmentFrame | BadRange]:
    return list(walk(file, 0, file.size(), next_index=next_index))


def entries(found: list[SegmentFrame | BadRange]) -> list[int]:
    return [frame.header.index for frame in found if isinstance(frame, SegmentFrame) and frame.header]


def test_walk_covers_every_byte_whatever_is_broken() -> None:
    rng = random.Random(5)
    pristine = b"".join((batch(1), encode_mark(100), batch(2, b"x" * 300), batch(3), encode_mark(400), batch(4)))
    for _ in range(300):
        data = bytearray(pristine)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        found = walked(file_of(bytes(data)))
        assert found[0].position == 0
        assert found[-1].end == len(data)
        assert all(before.end == after.position for before, after in pairwise(found))


def test_garbage_alone_is_one_bad_range() -> None:
    (found,) = walked(file_of(b"\0" * 5000))
    assert isinstance(found, BadRange)
    assert (found.position, found.end) == (0, 5000)


def test_batch_behind_much_garbage_is_found() -> None:
    for garbage in (CHUNK_BYTES - 2, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 17):
        found = walked(file_of(b"\0" * garbage, batch(1)))
        assert [frame.end - frame.position for frame in found] == [garbage, len(batch(1))]


def test_garbage_shorter_than_a_magic_at_the_end_is_reported() -> None:
    found = walked(file_of(batch(1), b"QV"))
    assert isinstance(found[-1], BadRange)
    assert found[-1].end - found[-1].position == 2


def test_old_entry_behind_damage_is_not_resumed_at() -> None:
    found = walked(file_of(b"\0" * 200, batch(3), batch(4)), next_index=4)
    assert entries(found) == [4]


def test_entry_that_could_not_be_that_far_on_is_not_resumed_at() -> None:
    found = walked(file_of(batch(1), b"\0" * 200, batch(40), batch(3)))
    assert entries(found) == [1, 3]


def test_header_alone_is_not_resumed_at() -> None:
    found = walked(file_of(b"\0" * 200, batch(1)[:-1]))
    assert entries(found) == []


def test_magic_alone_is_not_resumed_at() -> None:
    found = walked(file_of(b"\0QVB1\0QVB1", batch(1)))
    assert entries(found) == [1]


def test_damaged_payload_at_the_end_is_skipped_by_its_length() -> None:
    damaged = bytearray(batch(2))
    damaged[-1] ^= 1
    found = walked(file_of(batch(1), bytes(damaged)))
    assert [frame.end for frame in found] == [len(batch(1)), 2 * len(batch(1))]


def test_mark_behind_a_damaged_payload_is_kept() -> None:
    damaged = bytearray(batch(1))
    damaged[-1] ^= 1
    found = walked(file_of(bytes(damaged), encode_mark(0), batch(2)))
    assert [frame.end - frame.position for frame in found] == [len(damaged), 16, len(batch(2))]


def test_damaged_payload_with_damage_behind_is_searched_on() -> None:
    damaged = bytearray(batch(1))
    damaged[-1] ^= 1
    found = walked(file_of(bytes(damaged), b"\0" * 20, batch(2)))
    assert [frame.end - frame.position for frame in found] == [len(damaged) + 20, len(batch(2))]


def test_single_bad_byte_at_the_end_is_reported() -> None:
    found = walked(file_of(batch(1), b"Q"))
    assert [frame.end - frame.position for frame in found] == [len(batch(1)), 1]
