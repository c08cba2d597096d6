"""A segment's searches against a plain list of its batches."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.model import Index, Offset, Term
from quiver.record.header import KIND_CONTROL, KIND_DATA, BatchHeader
from quiver.storage.frames import SEGMENT_HEADER_BYTES, SegmentHeader
from quiver.storage.segment import Segment, is_segment_name, segment_name

FIRST_INDEX, FIRST_OFFSET, PREVIOUS_TERM = 11, 40, 2
Described = tuple[int, int, int, int, int]
"""Records, timestamp, size, how much the term grows, bytes of a mark before."""
DESCRIBED = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 50),
        st.integers(96, 400),
        st.sampled_from([0, 0, 0, 1, 3]),
        st.sampled_from([0, 16]),
    ),
    max_size=25,
)


def build(described: list[Described], interval_bytes: int) -> tuple[Segment, list[tuple[int, BatchHeader]]]:
    header = SegmentHeader(
        generation=0,
        first_index=Index(FIRST_INDEX),
        first_offset=Offset(FIRST_OFFSET),
        previous_term=Term(PREVIOUS_TERM),
        created_ms=1,
    )
    segment, placed = Segment(header, segment_name(FIRST_INDEX)), []
    position, offset, term = SEGMENT_HEADER_BYTES, FIRST_OFFSET, PREVIOUS_TERM
    for number, (records, timestamp, size_bytes, term_growth, mark_bytes) in enumerate(described):
        term, position = term + term_growth, position + mark_bytes
        batch = BatchHeader(
            term=Term(term),
            index=Index(FIRST_INDEX + number),
            base_offset=Offset(offset),
            append_timestamp=100 + number,
            kind=KIND_DATA if records else KIND_CONTROL,
            record_count=records,
            first_timestamp=timestamp,
            max_timestamp=timestamp,
        )
        segment.add(batch, position=position, size_bytes=size_bytes, index_interval_bytes=interval_bytes)
        placed.append((position, batch))
        position, offset = position + size_bytes, offset + records
    return segment, placed


@settings(max_examples=200, deadline=None)
@given(DESCRIBED, st.sampled_from([64, 500, 1500]))
def test_searches_end_at_or_before_what_is_wanted_and_not_far_from_it(
    described: list[Described], interval: int
) -> None:
    segment, placed = build(described, interval)
    places = {position for position, _ in placed} | {SEGMENT_HEADER_BYTES}
    for position, batch in placed:
        found = segment.position_before_index(batch.index)
        assert found in places
        assert position - interval - 400 < found <= position
        for offset in range(batch.base_offset, batch.end_offset):
            assert position - interval - 400 < segment.position_before_offset(offset) <= position
    for timestamp in range(52):
        wanted = next((p for p, b in placed if b.record_count and b.max_timestamp >= timestamp), None)
        found = segment.position_before_timestamp(timestamp)
        assert found in places
        if wanted is not None:
            assert found <= wanted


@settings(max_examples=100, deadline=None)
@given(DESCRIBED)
def test_bookkeeping_is_that_of_the_batches(described: list[Described]) -> None:
    segment, placed = build(described, 500)
    batches = [batch for _, batch in placed]
    assert segment.is_empty == (not batches)
    assert segment.end_index == FIRST_INDEX + len(batches)
    assert segment.end_offset == FIRST_OFFSET + sum(batch.record_count for batch in batches)
    assert segment.term_at(FIRST_INDEX - 1) == PREVIOUS_TERM
    assert [segment.term_at(batch.index) for batch in batches] == [batch.term for batch in batches]
    assert segment.last_term == (batches[-1].term if batches else PREVIOUS_TERM)
    starts = [b for a, b in zip([None, *batches], batches, strict=False) if a is None or a.term != b.term]
    assert segment.terms == [(batch.index, batch.term) for batch in starts]
    timestamps = [batch.max_timestamp for batch in batches if batch.record_count]
    assert segment.max_timestamp == max(timestamps, default=-(2**63))


@settings(max_examples=100, deadline=None)
@given(DESCRIBED, st.integers(0, 30))
def test_a_rewound_segment_grows_to_the_same_again(described: list[Described], back_to: int) -> None:
    segment, placed = build(described, 500)
    rewound = segment.rewound(FIRST_INDEX + back_to)
    assert rewound.end_index <= max(FIRST_INDEX + back_to, FIRST_INDEX)
    for (position, batch), (_, _, size_bytes, _, _) in zip(placed, described, strict=True):
        if batch.index >= rewound.end_index:
            rewound.add(batch, position=position, size_bytes=size_bytes, index_interval_bytes=500)
    for name in ("end_index", "end_offset", "size_bytes", "max_timestamp", "terms", "last_term"):
        assert getattr(rewound, name) == getattr(segment, name)
    for _, batch in placed:
        position = rewound.position_before_index(batch.index)
        assert position >= segment.position_before_index(batch.index), "a grown segment is indexed no worse"


@settings(max_examples=100, deadline=None)
@given(DESCRIBED)
def test_a_sealed_segment_is_the_same_from_its_footer(described: list[Described]) -> None:
    segment, _ = build(described, 500)
    restored = Segment.from_footer(segment.name, segment.seal())
    for name in Segment.__slots__:
        if name not in ("index", "next_indexed_position"):
            assert getattr(restored, name) == getattr(segment, name)
    assert restored.index.encode() == segment.index.encode()


def test_names_are_those_of_segments_only() -> None:
    assert segment_name(42) == "00000000000000000042.log"
    assert is_segment_name(segment_name(0))
    assert not any(map(is_segment_name, ("42.log", "0000000000000000004x.log", "00000000000000000042.log.damaged", "")))
