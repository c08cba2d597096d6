"""Scanning and reading, where a log as a whole never leads: files that are short, split oddly, or do not fit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_world import DIRECTORY, control_batch, data_batch

from quiver.errors import DamageError
from quiver.model import Index, Offset, Term
from quiver.record import Batch
from quiver.storage.frames import MARK_BYTES, SEGMENT_HEADER_BYTES, SegmentHeader, encode_mark
from quiver.storage.reader import ReadFilter, SegmentRange, read_batches
from quiver.storage.scan import CHUNK_BYTES_MAX, BadFrame, SegmentFrame, scan, scan_entries
from quiver.storage.segment import Segment, segment_name
from quiver.storage.truncation import truncate_suffix
from quiver.testing import SimulatedDisk, SimulatedFile

PATH = f"{DIRECTORY}/{segment_name(1)}"


def entries(first_index: int, *sizes: int) -> list[Batch]:
    return [
        data_batch([b"x" * size], index=first_index + n, offset=first_index + n - 1) for n, size in enumerate(sizes)
    ]


def written(*frames: bytes, name: str = segment_name(1)) -> tuple[SimulatedDisk, SimulatedFile]:
    disk = SimulatedDisk()
    disk.write_file(f"{DIRECTORY}/{name}", b"".join(frames))
    return disk, disk.open(f"{DIRECTORY}/{name}")


def segment_of(disk: SimulatedDisk, first_index: int, batches: list[Batch]) -> Segment:
    """Put batches into a file as a segment, and return its bookkeeping."""
    header = SegmentHeader(
        generation=0,
        first_index=Index(first_index),
        first_offset=Offset(first_index - 1),
        previous_term=Term(0),
        created_ms=0,
    )
    segment = Segment(header, segment_name(first_index))
    for batch in batches:
        segment.add(batch.header, position=segment.size_bytes, size_bytes=len(batch.data), index_interval_bytes=1 << 20)
    content = header.encode() + b"".join(bytes(batch.data) for batch in batches)
    disk.write_file(f"{DIRECTORY}/{segment.name}", content)
    return segment


FRAMES = st.lists(st.one_of(st.integers(0, 700).map(lambda size: ("batch", size)), st.just(("mark", 0))), max_size=12)


@settings(max_examples=100, deadline=None)
@given(FRAMES, st.integers(1, 900))
def test_frames_are_the_same_whatever_the_chunks(described: list[tuple[str, int]], chunk_bytes: int) -> None:
    frames, index = [], 1
    for kind, size in described:
        if kind == "mark":
            frames.append(encode_mark(5))
            continue
        frames.append(bytes(control_batch(b"p" * size, index=index, offset=0).data))
        index += 1
    disk, file = written(*frames)
    found = list(scan(file, 0, file.size(), chunk_bytes=chunk_bytes))
    assert all(isinstance(frame, SegmentFrame) for frame in found)
    content = disk.read_file(PATH)
    assert [content[frame.position : frame.end] for frame in found if isinstance(frame, SegmentFrame)] == frames


def test_a_scan_of_large_batches_reads_little_twice() -> None:
    sizes = [1_000_000] * 20
    disk, file = written(*(bytes(batch.data) for batch in entries(1, *sizes)))
    before = disk.bytes_read
    assert len(list(scan(file, 0, file.size()))) == 20
    assert disk.bytes_read - before < 1.35 * file.size()


def test_a_batch_larger_than_any_chunk_is_read() -> None:
    _, file = written(*(bytes(batch.data) for batch in entries(1, CHUNK_BYTES_MAX + 10, 5)))
    assert len(list(scan(file, 0, file.size()))) == 2


@pytest.mark.parametrize("missing", [1, 30, 130, 140, 500])
def test_a_file_shorter_than_it_should_be_ends_the_scan(missing: int) -> None:
    batches = entries(1, 30, 30)
    content = b"".join(bytes(batch.data) for batch in batches)
    _, file = written(content[:-missing] if missing < len(content) else b"")
    for chunk_bytes in (50, 100, 10_000):
        *intact, bad = scan(file, 0, len(content), chunk_bytes=chunk_bytes)
        assert isinstance(bad, BadFrame)
        assert all(isinstance(frame, SegmentFrame) for frame in intact)


def test_a_read_ends_with_the_last_segment() -> None:
    disk = SimulatedDisk()
    first, second = segment_of(disk, 1, entries(1, 10, 10)), segment_of(disk, 3, entries(3, 10))
    part = SegmentRange([first, second], SEGMENT_HEADER_BYTES, second.size_bytes)
    found = read_batches(disk, DIRECTORY, part, ReadFilter(end_index=99, bytes_max=10_000))
    assert [batch.header.index for batch in found] == [1, 2, 3]


def test_a_gap_between_segments_is_damage() -> None:
    disk = SimulatedDisk()
    first, third = segment_of(disk, 1, entries(1, 10)), segment_of(disk, 3, entries(3, 10))
    part = SegmentRange([first, third], SEGMENT_HEADER_BYTES, third.size_bytes)
    with pytest.raises(DamageError, match="entry 3, expected 2"):
        read_batches(disk, DIRECTORY, part, ReadFilter(first_index=2, end_index=99, bytes_max=10_000))


def test_a_cut_through_damage_is_refused() -> None:
    disk = SimulatedDisk()
    segment = segment_of(disk, 1, entries(1, 300, 300, 300))
    content = bytearray(disk.read_file(PATH))
    content[SEGMENT_HEADER_BYTES + 200] ^= 1
    disk.write_file(PATH, bytes(content))
    with pytest.raises(DamageError):
        truncate_suffix(disk, DIRECTORY, [segment], Index(3), index_interval_bytes=64)
    assert disk.read_file(PATH) == content


@pytest.mark.parametrize("is_known", [True, False])
def test_bad_marks_are_stepped_over_and_other_bad_frames_are_not(*, is_known: bool) -> None:
    first, second = (bytes(batch.data) for batch in entries(1, 20, 20))
    bad_mark, good_mark = b"MRKQ" + bytes(12), encode_mark(9)
    before = first if is_known else b""
    _, file = written(before, bad_mark, good_mark, bad_mark, second, bad_mark)
    found = list(scan_entries(file, 0, file.size()))
    assert [frame.header.index for frame in found if isinstance(frame, SegmentFrame) and frame.header] == (
        [1, 2] if is_known else [2]
    )
    assert isinstance(found[-1], BadFrame), "nothing proves that the last one was a mark"
    assert found[-1].position == file.size() - MARK_BYTES


def test_an_entry_that_does_not_follow_does_not_make_the_bytes_before_it_a_mark() -> None:
    first, third = bytes(entries(1, 20)[0].data), bytes(entries(3, 20)[0].data)
    _, file = written(first, b"MRKQ" + bytes(12), third)
    assert isinstance(list(scan_entries(file, 0, file.size()))[-1], BadFrame)
