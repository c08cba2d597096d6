"""Each checker of committed logs and histories finds the anomaly it is for, and lets a sound run pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quiver.model import GroupId, Index, NodeId, Offset, ProducerId, Term
from quiver.partition.entries import FenceEntry, build_entry
from quiver.record import Batch, build_batch, build_control_batch, stamp
from quiver.testing.checkers import CommittedLog, check_ack, check_end_read, check_sends
from quiver.testing.groups.history import ClientHistory, EndRead, Outcome, RecordedBatch
from quiver.testing.simulator.report import Violation

GROUP = GroupId(1)
N1, N2 = NodeId(1), NodeId(2)


def batch(
    index: int, offset: int, *values: bytes, term: int = 1, producer: int = 5, epoch: int = 0, sequence: int = 0
) -> Batch:
    data = build_batch(
        values, timestamp=1, producer_id=ProducerId(producer), producer_epoch=epoch, base_sequence=sequence
    )
    return stamped(data, index, offset, term)


def control(index: int, offset: int, *, term: int = 1) -> Batch:
    return stamped(build_control_batch(b"\x01", timestamp=1), index, offset, term)


def stamped(data: bytes, index: int, offset: int, term: int) -> Batch:
    return Batch.decode(
        stamp(data, term=Term(term), index=Index(index), base_offset=Offset(offset), append_timestamp=1)
    )


def committed(*batches: Batch) -> CommittedLog:
    log = CommittedLog(GROUP)
    terms = {found.header.index: found.header.term for found in batches}
    for found in batches:
        log.commit(N1, found.header.index, terms.get)
        log.apply(N1, found)
    return log


def send(
    *values: bytes, outcome: Outcome = "ok", offset: int | None = 0, sequence: int = 0, epoch: int = 0
) -> RecordedBatch:
    base_offset = None if offset is None else Offset(offset)
    return RecordedBatch(
        GROUP, ProducerId(5), epoch, sequence, values, 0, Offset(0), outcome=outcome, base_offset=base_offset
    )


def finds(invariant: str, act: Callable[[], object]) -> None:
    with pytest.raises(Violation) as caught:
        act()
    assert caught.value.invariant == invariant


SOUND = (control(1, 0), batch(2, 0, b"a", b"b"), batch(3, 2, b"c", sequence=2))


def test_members_that_agree_are_left_alone() -> None:
    log = committed(*SOUND)
    for found in SOUND:
        log.apply(N2, found)
    log.commit(N2, Index(3), lambda _: Term(1))
    assert (log.commit_index, log.applied_index, log.end_offset) == (3, 3, 3)


def test_two_entries_committed_at_one_index_are_found() -> None:
    finds("I3", lambda: committed(*SOUND).commit(N2, Index(2), lambda _: Term(2)))


def test_commit_of_an_entry_that_is_not_there_is_found() -> None:
    finds("I4", lambda: committed(*SOUND).commit(N2, Index(4), lambda _: None))


def test_other_bytes_at_an_applied_index_are_found() -> None:
    finds("I9", lambda: committed(*SOUND).apply(N2, batch(2, 0, b"a", b"X")))


def test_other_term_at_an_applied_index_is_found() -> None:
    finds("I5", lambda: committed(*SOUND).apply(N2, batch(2, 0, b"a", b"b", term=2)))


def test_applied_entry_that_nobody_committed_is_found() -> None:
    finds("I7", lambda: committed(*SOUND).apply(N2, batch(4, 3, b"d", sequence=3)))


def test_applied_entry_behind_a_hole_is_found() -> None:
    finds("I5", lambda: committed(*SOUND).apply(N2, batch(5, 3, b"d", sequence=3)))


def test_applied_entry_of_another_term_than_the_committed_is_found() -> None:
    log = committed(*SOUND)
    log.commit(N1, Index(4), lambda _: Term(1))
    finds("I3", lambda: log.apply(N2, batch(4, 3, b"d", sequence=3, term=2)))


def test_gap_between_offsets_is_found() -> None:
    finds("I8", lambda: committed(*SOUND, batch(4, 4, b"d", sequence=3)))


def test_batch_that_is_there_twice_is_found() -> None:
    finds("I11", lambda: committed(*SOUND, batch(4, 3, b"c", sequence=2)))


def test_missing_batch_of_a_producer_is_found() -> None:
    finds("I11", lambda: committed(*SOUND, batch(4, 3, b"d", sequence=7)))


def test_batch_of_a_fenced_epoch_is_found() -> None:
    finds("I11", lambda: committed(batch(1, 0, b"a", epoch=2), batch(2, 1, b"b", epoch=1)))


def test_batch_behind_the_fence_that_shuts_it_out_is_found() -> None:
    fence = stamped(build_entry(FenceEntry(ProducerId(5), 1)), 4, 3, 1)
    finds("I11", lambda: committed(*SOUND, fence, batch(5, 3, b"d", sequence=3)))


def test_epoch_that_does_not_begin_where_the_last_one_ended_is_found() -> None:
    committed(*SOUND, batch(4, 3, b"d", epoch=1, sequence=3))
    finds("I11", lambda: committed(*SOUND, batch(4, 3, b"d", epoch=1, sequence=0)))


def test_states_that_differ_at_one_index_are_found() -> None:
    log = committed(*SOUND)
    log.snapshot(N1, Index(3), b"state")
    log.snapshot(N2, Index(3), b"state")
    finds("I14", lambda: log.snapshot(N2, Index(3), b"other"))


def test_reader_is_served_committed_bytes_only() -> None:
    log = committed(*SOUND)
    log.check_read(N1, SOUND[1])
    finds("I9", lambda: log.check_read(N1, batch(2, 0, b"a", b"X")))
    finds("I7", lambda: log.check_read(N1, batch(4, 3, b"d", sequence=3)))


def test_acknowledgement_is_held_to_its_offset() -> None:
    log = committed(*SOUND)
    check_ack(send(b"a", b"b"), Offset(0), log)
    finds("I7", lambda: check_ack(send(b"a", b"b"), Offset(1), log))
    finds("I8", lambda: check_ack(send(b"a", b"b"), Offset(2), log))


def test_send_placed_before_what_was_acknowledged_is_found() -> None:
    late = send(b"a", b"b")
    late.acked_before = Offset(3)
    finds("I8", lambda: check_ack(late, Offset(0), committed(*SOUND)))


def test_stale_and_premature_reads_are_found() -> None:
    log = committed(*SOUND)
    check_end_read(EndRead(GROUP, 0, Offset(3)), Offset(3), log, node=N1)
    finds("I7", lambda: check_end_read(EndRead(GROUP, 0, Offset(3)), Offset(2), log, node=N1))
    finds("I7", lambda: check_end_read(EndRead(GROUP, 0, Offset(0)), Offset(4), log, node=N1))


def test_sound_history_passes() -> None:
    sends = [send(b"a", b"b"), send(b"c", outcome="info", offset=None, sequence=2), send(b"x", outcome="fail")]
    check_sends(sends, committed(*SOUND))


@pytest.mark.parametrize(
    ("invariant", "sends"),
    [
        ("F2", [send(b"a", b"b"), send(b"c", sequence=2, offset=2), send(b"lost", offset=3)]),
        ("I8", [send(b"a", b"b"), send(b"c", sequence=2, offset=9)]),
        ("I12", [send(b"a", b"b"), send(b"c", outcome="fail", sequence=2, offset=None)]),
        ("I9", [send(b"a", b"b"), send(b"c", b"never", outcome="info", sequence=2)]),
        ("I9", [send(b"a", b"b")]),
        ("F4", [send(b"a", b"b"), send(b"c", outcome="pending", sequence=2)]),
    ],
    ids=["lost", "moved", "not_done_but_there", "torn", "never_sent", "unresolved"],
)
def test_broken_history_is_found(invariant: str, sends: list[RecordedBatch]) -> None:
    finds(invariant, lambda: check_sends(sends, committed(*SOUND)))


def test_value_that_is_there_twice_is_found() -> None:
    log = committed(batch(1, 0, b"a"), batch(2, 1, b"a", producer=6))
    finds("I11", lambda: check_sends([send(b"a")], log))


def test_history_remembers_the_furthest_end() -> None:
    history = ClientHistory()
    history.note_end(GROUP, Offset(5))
    history.note_end(GROUP, Offset(3))
    assert history.acked_end(GROUP) == 5
