"""Deduplication: the producer table decides new, duplicate, gap or fenced, equally on every replica."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from quiver.model import NO_PRODUCER, Index, Offset, ProducerId
from quiver.partition.producers import WINDOW_BATCHES, ProducerTable, SequenceKind
from quiver.record import BatchHeader
from quiver.record.header import KIND_CONTROL


def batch(sequence: int, *, count: int = 1, producer: int = 7, epoch: int = 0, offset: int = 0) -> BatchHeader:
    return BatchHeader(
        base_offset=Offset(offset),
        record_count=count,
        producer_id=ProducerId(producer),
        producer_epoch=epoch,
        base_sequence=sequence,
    )


def table_of(headers: Iterable[BatchHeader]) -> ProducerTable:
    table = ProducerTable()
    for header in headers:
        table.apply(header)
    return table


def test_first_batch_of_a_producer_is_new() -> None:
    assert ProducerTable().judge(batch(0)).kind is SequenceKind.NEW


def test_unknown_producer_must_begin_with_sequence_0() -> None:
    assert ProducerTable().judge(batch(3)).kind is SequenceKind.GAP


def test_batch_that_follows_the_last_one_is_new() -> None:
    assert table_of([batch(0, count=4)]).judge(batch(4)).kind is SequenceKind.NEW


def test_batch_after_a_gap_is_refused() -> None:
    assert table_of([batch(0, count=4)]).judge(batch(5)).kind is SequenceKind.GAP


def test_retry_gets_the_offset_of_the_first_send() -> None:
    table = table_of([batch(0, count=2, offset=100), batch(2, count=3, offset=140), batch(5, offset=200)])
    assert table.judge(batch(2, count=3)).kind is SequenceKind.DUPLICATE
    assert table.judge(batch(2, count=3)).base_offset == 140


def test_batch_that_overlaps_a_known_one_is_refused() -> None:
    assert table_of([batch(0, count=4), batch(4)]).judge(batch(0, count=2)).kind is SequenceKind.GAP


def test_each_of_the_last_batches_is_remembered_and_no_more() -> None:
    table = table_of(batch(number, offset=number) for number in range(WINDOW_BATCHES + 3))
    for number in range(3, WINDOW_BATCHES + 3):
        assert table.judge(batch(number)).base_offset == number
    assert table.judge(batch(2)).kind is SequenceKind.GAP


def test_window_holds_more_than_the_five_batches_that_may_be_in_flight() -> None:
    assert WINDOW_BATCHES >= 5


def test_sequences_continue_in_a_later_epoch_and_the_earlier_one_is_fenced() -> None:
    table = table_of([batch(0), batch(1), batch(2, epoch=1, offset=9)])
    assert table.judge(batch(3)).kind is SequenceKind.FENCED
    assert table.judge(batch(2, epoch=1)).base_offset == 9
    assert table.judge(batch(3, epoch=1)).kind is SequenceKind.NEW


def test_later_epoch_must_begin_where_the_last_one_ended() -> None:
    table = table_of([batch(0)])
    assert table.judge(batch(0, count=2, epoch=1)).kind is SequenceKind.GAP
    assert table.judge(batch(2, epoch=1)).kind is SequenceKind.GAP
    assert table.judge(batch(1, epoch=1)).kind is SequenceKind.NEW


def test_fence_sets_the_epoch_and_keeps_the_sequence_and_the_window() -> None:
    table = table_of([batch(0, count=3, offset=40)])
    table.fence(ProducerId(7), 2, Index(1))
    assert table.judge(batch(3, epoch=1)).kind is SequenceKind.FENCED
    assert table.judge(batch(3, epoch=2)).kind is SequenceKind.NEW
    retried = table.judge(batch(0, count=3, epoch=2))
    assert (retried.kind, retried.base_offset) == (SequenceKind.DUPLICATE, 40)
    table.fence(ProducerId(7), 1, Index(2))
    assert table.judge(batch(3, epoch=1)).kind is SequenceKind.FENCED, "an older fence changes nothing"


def test_fence_of_an_unknown_producer_makes_it_known() -> None:
    table = ProducerTable()
    table.fence(ProducerId(7), 4, Index(1))
    assert table.next_sequence(ProducerId(7), 4) == 0
    assert table.judge(batch(0, epoch=3)).kind is SequenceKind.FENCED


def test_next_sequence_is_known_by_epoch() -> None:
    table = table_of([batch(0, count=3, epoch=2)])
    assert table.next_sequence(ProducerId(7), 2) == 3
    assert table.next_sequence(ProducerId(7), 3) == 3
    assert table.next_sequence(ProducerId(7), 1) is None
    assert table.next_sequence(ProducerId(8), 5) == 0


def test_batches_without_a_producer_are_always_new_and_leave_no_trace() -> None:
    header = batch(0, producer=NO_PRODUCER)
    table = table_of([header])
    assert table.judge(header).kind is SequenceKind.NEW
    assert len(table) == 0


def test_control_batches_leave_no_trace() -> None:
    assert len(table_of([BatchHeader(kind=KIND_CONTROL, producer_id=ProducerId(7))])) == 0


def test_batch_that_should_not_be_in_the_log_changes_nothing() -> None:
    table = table_of([batch(0, offset=5)])
    before = table.rows()
    for stray in (batch(0, offset=9), batch(7), batch(3, epoch=1), batch(1, epoch=-1)):
        table.apply(stray)
    assert table.rows() == before


def test_producer_that_was_silent_longest_is_forgotten_first() -> None:
    table = ProducerTable(producers_max=2)
    for header in (batch(0, producer=1), batch(0, producer=2), batch(1, producer=1), batch(0, producer=3)):
        table.apply(header)
    assert table.judge(batch(1, producer=2)).kind is SequenceKind.GAP
    assert table.judge(batch(2, producer=1)).kind is SequenceKind.NEW
    assert len(table) == 2


def test_restored_table_answers_as_the_original() -> None:
    table = table_of(batch(number, offset=number, producer=number % 3) for number in range(3))
    copy = ProducerTable()
    copy.replace(table.rows())
    assert copy.rows() == table.rows()
    assert copy.judge(batch(0, producer=0)).base_offset == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 6), st.integers(1, 3)), max_size=60))
def test_table_agrees_with_a_plain_list_of_everything(sends: list[tuple[int, int, int, int]]) -> None:
    table, log = ProducerTable(), list[BatchHeader]()
    for producer, epoch, sequence, count in sends:
        header = batch(sequence, count=count, producer=producer, epoch=epoch, offset=len(log))
        verdict = table.judge(header)
        assert verdict.kind is plain_kind(log, header)
        if verdict.kind is SequenceKind.NEW:
            table.apply(header)
            log.append(header)
    copy = ProducerTable()
    copy.replace(table.rows())
    assert copy.rows() == table.rows()


def plain_kind(log: list[BatchHeader], header: BatchHeader) -> SequenceKind:
    own = [sent for sent in log if sent.producer_id == header.producer_id]
    epoch = max((sent.producer_epoch for sent in own), default=-1)
    if header.producer_epoch < epoch:
        return SequenceKind.FENCED
    expected = sum(sent.record_count for sent in own)
    if header.base_sequence == expected:
        return SequenceKind.NEW
    recent = own[-WINDOW_BATCHES:]
    if any((sent.base_sequence, sent.record_count) == (header.base_sequence, header.record_count) for sent in recent):
        return SequenceKind.DUPLICATE
    return SequenceKind.GAP
