"""An inspection tells the state of every byte and changes none."""

from __future__ import annotations

import asyncio

import pytest
from log_world import DIRECTORY, TINY, all_entries, append, control_batch, data_batch, open_log

from quiver.config import LogSettings
from quiver.errors import DamageError
from quiver.model import Index, NodeId, Offset, Term
from quiver.record import Batch
from quiver.storage import HardStateFile, SnapshotStore, StoredHardState, StoredSnapshot
from quiver.storage.frames import SEGMENT_HEADER_BYTES, encode_mark
from quiver.storage.inspection import LogFinding, LogInspection, read_frames, verify_directory
from quiver.storage.scan import BadRange, SegmentFrame
from quiver.storage.segment import segment_name
from quiver.testing import SimulatedDisk

ONE_SEGMENT = LogSettings(tail_cache_bytes_max=0)
FIRST = segment_name(1)


def build(*values: bytes, settings: LogSettings = TINY) -> SimulatedDisk:
    """Return a disk with a cleanly closed log of one batch per value."""
    disk = SimulatedDisk()

    async def write() -> None:
        log = open_log(disk, settings)
        for value in values:
            await append(log, value)
        await log.close()

    asyncio.run(write())
    return disk


def log_names(disk: SimulatedDisk) -> list[str]:
    return [name for name in disk.names(DIRECTORY) if name.endswith(".log")]


def content(disk: SimulatedDisk, name: str) -> bytes:
    file = disk.open(f"{DIRECTORY}/{name}")
    return file.read(file.size(), 0)


def overwrite(disk: SimulatedDisk, name: str, data: bytes, position: int) -> None:
    file = disk.open(f"{DIRECTORY}/{name}")
    file.write([data], position)
    file.close()


def flip(disk: SimulatedDisk, name: str, position: int) -> None:
    overwrite(disk, name, bytes([content(disk, name)[position] ^ 1]), position)


def create(disk: SimulatedDisk, name: str, data: bytes) -> None:
    file = disk.open(f"{DIRECTORY}/{name}", create=True)
    file.write([data], 0)
    file.close()


def verify(disk: SimulatedDisk) -> LogInspection:
    """Inspect, and fail if anything on the disk was touched."""
    before = disk.operation_count
    inspection = verify_directory(disk, DIRECTORY)
    assert disk.operation_count == before
    return inspection


def frames_of(disk: SimulatedDisk, name: str) -> list[SegmentFrame]:
    return [
        found for segment, found in read_frames(disk, DIRECTORY) if segment == name and isinstance(found, SegmentFrame)
    ]


def batches_of(disk: SimulatedDisk, name: str) -> list[SegmentFrame]:
    return [frame for frame in frames_of(disk, name) if frame.header is not None]


def test_whole_log_is_described_as_it_is() -> None:
    disk = build(*(b"%050d" % n for n in range(20)))
    inspection = verify(disk)
    assert inspection.is_whole
    assert inspection.notes == ()
    assert [segment.name for segment in inspection.segments] == log_names(disk)
    assert [segment.is_sealed for segment in inspection.segments][-2:] == [True, False]
    assert sum(segment.batches for segment in inspection.segments) == 20
    assert sum(segment.records for segment in inspection.segments) == 20
    assert (inspection.segments[0].first_index, inspection.segments[-1].end_index) == (1, 21)
    assert (inspection.segments[0].first_offset, inspection.segments[-1].end_offset) == (0, 20)
    for segment in inspection.segments:
        assert segment.size_bytes == len(content(disk, segment.name))
        assert (segment.terms, segment.torn_bytes) == ((1,), 0)


def test_empty_log_is_whole() -> None:
    (segment,) = verify(build()).segments
    assert (segment.batches, segment.terms, segment.end_index, segment.is_sealed) == (0, (), 1, False)


def test_marks_are_counted_and_tell_what_was_on_disk() -> None:
    disk = build(b"a", b"b", settings=ONE_SEGMENT)
    (segment,) = verify(disk).segments
    marks = [frame for frame in frames_of(disk, FIRST) if frame.header is None]
    assert segment.marks == len(marks) > 1
    assert segment.vouched_bytes == marks[-1].durable_end == marks[-1].position


def test_every_flipped_byte_is_found_and_left_alone() -> None:
    pristine = build(*(b"%050d" % n for n in range(12)))
    for name in log_names(pristine):
        for position in range(len(content(pristine, name))):
            flip(pristine, name, position)
            try:
                inspection = verify(pristine)
            except DamageError:
                assert position < SEGMENT_HEADER_BYTES
            else:
                assert inspection.damage or inspection.notes, (name, position)
            flip(pristine, name, position)
    assert verify(pristine).is_whole


def test_flip_in_a_sealed_segments_batch_is_damage_though_a_restart_would_not_look() -> None:
    disk = build(*(b"%050d" % n for n in range(12)))
    batch = batches_of(disk, FIRST)[2]
    flip(disk, FIRST, batch.end - 1)
    (finding,) = verify(disk).damage
    assert (finding.name, finding.first_position, finding.end_position) == (FIRST, batch.position, batch.end)
    assert (finding.first_index, finding.end_index_max) == (3, 4)
    assert "checksum" in finding.reason


def test_walk_goes_on_behind_a_batch_whose_header_is_damaged() -> None:
    disk = build(*(b"%050d" % n for n in range(12)))
    batches = batches_of(disk, FIRST)
    flip(disk, FIRST, batches[1].position + 20)
    inspection = verify(disk)
    (finding,) = inspection.damage
    assert (finding.first_position, finding.end_position) == (batches[1].position, batches[2].position)
    assert (finding.first_index, finding.end_index_max) == (2, 3)
    assert inspection.segments[0].batches == len(batches) - 1


def test_two_damaged_places_are_two_findings() -> None:
    disk = build(*(b"%050d" % n for n in range(12)))
    batches = batches_of(disk, FIRST)
    flip(disk, FIRST, batches[0].end - 1)
    flip(disk, FIRST, batches[2].end - 1)
    assert [(finding.first_index, finding.end_index_max) for finding in verify(disk).damage] == [(1, 2), (3, 4)]


def test_last_batch_of_a_sealed_segment_is_bounded_by_the_footer() -> None:
    disk = build(*(b"%050d" % n for n in range(12)))
    last = batches_of(disk, FIRST)[-1]
    assert last.header is not None
    flip(disk, FIRST, last.position + 20)
    (finding,) = verify(disk).damage
    assert (finding.first_index, finding.end_index_max) == (last.header.index, last.header.index + 1)


def test_batch_inside_a_damaged_payload_is_not_taken_for_a_frame() -> None:
    inner = bytes(data_batch([b"inner"], index=77, offset=9).data)
    disk = build(b"before", inner + b"tail", b"after", settings=ONE_SEGMENT)
    outer = batches_of(disk, FIRST)[1]
    flip(disk, FIRST, outer.position + 20)
    (finding,) = verify(disk).damage
    assert (finding.first_index, finding.end_index_max) == (2, 3)
    assert finding.end_position > outer.end - 1


def test_damage_that_the_walk_cannot_pass_is_bounded_by_its_bytes() -> None:
    disk = build(b"a", b"b", settings=ONE_SEGMENT)
    last = batches_of(disk, FIRST)[-1]
    flip(disk, FIRST, last.position + 20)
    (finding,) = verify(disk).damage
    assert finding.first_index == 2
    assert finding.end_position == len(content(disk, FIRST))
    assert finding.end_index_max is not None
    assert finding.end_index_max >= 3


def test_damaged_mark_hides_no_entry() -> None:
    disk = build(b"a", b"b", b"c", settings=ONE_SEGMENT)
    mark = next(frame for frame in frames_of(disk, FIRST) if frame.header is None)
    flip(disk, FIRST, mark.end - 1)
    (finding,) = verify(disk).damage
    assert (finding.first_position, finding.end_position) == (mark.position, mark.end)
    assert finding.first_index == finding.end_index_max


def test_torn_tail_is_reported_and_is_no_damage() -> None:
    disk = build(b"a", b"b", settings=ONE_SEGMENT)
    size = len(content(disk, FIRST))
    overwrite(disk, FIRST, bytes(data_batch([b"c"], index=3, offset=2).data)[:50], size)
    inspection = verify(disk)
    assert inspection.is_whole
    assert (inspection.segments[0].torn_bytes, inspection.segments[0].end_index) == (50, 3)
    (note,) = inspection.notes
    assert "the next start will report" in note
    assert "torn tail" in note


def test_missing_segment_is_a_finding_between_its_neighbours() -> None:
    disk = build(*(b"%050d" % n for n in range(20)))
    first, missing, after, *_ = verify(disk).segments
    disk.remove(f"{DIRECTORY}/{missing.name}")
    (finding,) = verify(disk).damage
    assert (finding.name, finding.first_index, finding.end_index_max) == (
        first.name,
        missing.first_index,
        after.first_index,
    )


def test_second_segment_cut_short_is_damage() -> None:
    disk = build(*(b"%050d" % n for n in range(20)))
    name = log_names(disk)[1]
    file = disk.open(f"{DIRECTORY}/{name}")
    file.truncate(batches_of(disk, name)[1].end)
    assert [finding.name for finding in verify(disk).damage] == [name]


def test_directory_whose_start_is_unknown_is_refused() -> None:
    disk = build(settings=ONE_SEGMENT)
    flip(disk, FIRST, 10)
    with pytest.raises(DamageError, match="where the log starts is unknown"):
        verify(disk)


def test_hard_state_is_shown() -> None:
    disk = build(b"a")
    HardStateFile(disk, DIRECTORY).save(StoredHardState(term=Term(4), vote=NodeId(2), commit_index=Index(1)))
    state = verify(disk).hard_state
    assert state is not None
    assert (state.term, state.vote, state.commit_index, state.intact_copies) == (4, 2, 1, 2)


def test_hard_state_with_one_damaged_copy_is_noted() -> None:
    disk = build(b"a")
    HardStateFile(disk, DIRECTORY).save(StoredHardState(term=Term(4)))
    flip(disk, "hardstate", 12)
    inspection = verify(disk)
    assert inspection.is_whole
    assert inspection.hard_state is not None
    assert inspection.hard_state.intact_copies == 1
    assert [note.split(":")[0] for note in inspection.notes] == ["hardstate"]


def test_hard_state_with_both_copies_damaged_is_damage() -> None:
    disk = build(b"a")
    HardStateFile(disk, DIRECTORY).save(StoredHardState(term=Term(4)))
    flip(disk, "hardstate", 12)
    flip(disk, "hardstate", 4096 + 12)
    inspection = verify(disk)
    assert inspection.hard_state is None
    assert [(finding.name, finding.end_position) for finding in inspection.damage] == [("hardstate", 8192)]


def test_interrupted_first_save_of_the_hard_state_is_noted() -> None:
    disk = build(b"a")
    create(disk, "hardstate", b"QVHS")
    inspection = verify(disk)
    assert (inspection.hard_state, inspection.is_whole) == (None, True)
    assert "first save was interrupted" in inspection.notes[0]


def test_snapshots_are_shown_and_damaged_ones_found() -> None:
    disk = build(b"a", b"b")
    store = SnapshotStore(disk, DIRECTORY)
    for index in (1, 2):
        store.save(StoredSnapshot(last_index=Index(index), last_term=Term(1), end_offset=Offset(index), state=b"state"))
    newer, older = sorted(store.names(), reverse=True)
    flip(disk, newer, 40)
    inspection = verify(disk)
    assert [(snapshot.name, snapshot.last_index) for snapshot in inspection.snapshots] == [(older, 1)]
    assert inspection.damage == (
        LogFinding(
            name=newer, first_position=0, end_position=len(content(disk, newer)), reason=inspection.damage[0].reason
        ),
    )


def test_other_files_are_noted() -> None:
    disk = build(b"a")
    for name in (f"{FIRST}.damaged", "notes.txt", f"{segment_name(9)}.tmp"):
        create(disk, name, b"x")
    inspection = verify(disk)
    assert inspection.is_whole
    assert sorted(note.split(": ")[-1] for note in inspection.notes) == [
        "bytes that an earlier repair moved aside; not part of the log",
        "not a file of Quiver",
        "removed, a leftover of an interrupted write",
    ]


def append_raw(disk: SimulatedDisk, *batches: Batch) -> None:
    """Put intact batches behind a one-segment log, as no program of ours would."""
    for batch in batches:
        overwrite(disk, FIRST, bytes(batch.data), len(content(disk, FIRST)))
    # A mark vouches for them, so that they are no torn tail.
    overwrite(disk, FIRST, encode_mark(len(content(disk, FIRST))), len(content(disk, FIRST)))


@pytest.mark.parametrize(
    ("batch", "reason", "entries"),
    [
        (data_batch([b"x"], index=5, offset=2), "found entry 5, expected entry 3", (3, 5)),
        (data_batch([b"x"], index=1, offset=2), "found entry 1, expected entry 3", (3, 3)),
        (data_batch([b"x"], index=3, offset=9), "entry 3 starts at offset 9, expected 2", (3, 3)),
    ],
)
def test_intact_batch_in_a_wrong_place_is_found(batch: Batch, reason: str, entries: tuple[int, int]) -> None:
    disk = build(b"a", b"b", settings=ONE_SEGMENT)
    append_raw(disk, batch)
    (finding,) = verify(disk).damage
    assert finding.reason == reason
    assert (finding.first_index, finding.end_index_max) == entries


def test_term_that_goes_back_is_found() -> None:
    disk = build(b"a", b"b", settings=ONE_SEGMENT)
    append_raw(disk, control_batch(b"", index=3, offset=2, term=3), control_batch(b"", index=4, offset=2, term=2))
    (finding,) = verify(disk).damage
    assert finding.reason == "entry 4 has term 2, below the previous entry's term 3"


def test_mark_that_vouches_for_what_follows_it_is_found() -> None:
    disk = build(b"a", settings=ONE_SEGMENT)
    size = len(content(disk, FIRST))
    overwrite(disk, FIRST, encode_mark(size + 1), size)
    (finding,) = verify(disk).damage
    assert (finding.first_position, finding.reason) == (
        size,
        f"a mark covers bytes up to {size + 1}, beyond its own position {size}",
    )


def test_frames_are_read_from_an_entry_on() -> None:
    disk = build(*(b"%050d" % n for n in range(20)))
    frames = [frame for _, frame in read_frames(disk, DIRECTORY, first_index=7) if isinstance(frame, SegmentFrame)]
    assert [frame.header.index for frame in frames if frame.header] == list(range(7, 21))


def test_frames_end_with_the_torn_tail() -> None:
    disk = build(b"a", settings=ONE_SEGMENT)
    size = len(content(disk, FIRST))
    overwrite(disk, FIRST, b"QVB1 and no more", size)
    *_, (name, last) = read_frames(disk, DIRECTORY)
    assert (name, last.position, last.end) == (FIRST, size, size + 16)
    assert isinstance(last, BadRange)


def test_frames_go_on_behind_damage() -> None:
    disk = build(b"a", b"b", b"c", settings=ONE_SEGMENT)
    flip(disk, FIRST, batches_of(disk, FIRST)[1].end - 1)
    kinds = [
        type(frame).__name__ for _, frame in read_frames(disk, DIRECTORY) if isinstance(frame, BadRange) or frame.header
    ]
    assert kinds == ["SegmentFrame", "BadRange", "SegmentFrame"]


def test_inspected_log_opens_and_goes_on() -> None:
    disk = build(b"a", b"b")
    verify(disk)

    async def go_on() -> int:
        log = open_log(disk)
        await append(log, b"c")
        return len(await all_entries(log))

    assert asyncio.run(go_on()) == 3


def test_checkpoint_is_known_and_a_damaged_one_is_no_damage() -> None:
    disk = build(b"a", b"b")
    checkpoint = StoredSnapshot(last_index=Index(2), last_term=Term(1), end_offset=Offset(2), state=b"s")
    SnapshotStore(disk, DIRECTORY).save_checkpoint(checkpoint)
    assert not verify_directory(disk, DIRECTORY).notes
    flip(disk, "checkpoint", 20)
    found = verify_directory(disk, DIRECTORY)
    assert found.is_whole
    assert any(note.startswith("checkpoint: ") for note in found.notes)
