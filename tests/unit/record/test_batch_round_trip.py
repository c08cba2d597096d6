"""What goes into a batch comes out of it."""

from __future__ import annotations

from quiver.model import Index, Offset, Term
from quiver.record import Batch, build_batch, build_control_batch, decode_header, stamp


def test_batch_returns_what_was_put_in() -> None:
    built = build_batch(
        [b"a", None, "ü", b""],
        timestamp=5,
        keys=[None, "k", b"", b"zz"],
        timestamps=[1, None, 9, 2],
        headers=[None, [("a", "b")], [], [("c", None), ("d", "")]],
    )
    records = [(r.timestamp, r.key, r.value, r.headers) for r in Batch.decode(built).records()]
    assert records == [
        (1, None, b"a", ()),
        (5, b"k", None, (("a", b"b"),)),
        (9, b"", "ü".encode(), ()),
        (2, b"zz", b"", (("c", None), ("d", b""))),
    ]


def test_stamp_gives_records_their_offsets() -> None:
    stamped = stamp(
        build_batch([b"a", b"b"], timestamp=5), term=Term(3), index=Index(7), base_offset=Offset(40), append_timestamp=6
    )
    assert [record.offset for record in Batch.decode(stamped).records()] == [40, 41]
    header = decode_header(stamped)
    assert (header.term, header.index, header.end_offset, header.append_timestamp) == (3, 7, 42, 6)


def test_control_batch_carries_its_payload_and_no_records() -> None:
    batch = Batch.decode(build_control_batch(b"membership", timestamp=5))
    assert batch.header.is_control
    assert bytes(batch.payload()) == b"membership"
    assert batch.values() == []
    assert list(batch.records()) == []
