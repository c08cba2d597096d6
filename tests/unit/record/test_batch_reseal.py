"""A producer's batch under another epoch and sequence: the same records, checksums that hold."""

from __future__ import annotations

import pytest

from quiver.errors import DecodeError, RequestError
from quiver.model import Index, Offset, ProducerId, Term
from quiver.record import Batch, Compression, build_batch, reseal_batch, stamp


@pytest.mark.parametrize("compression", list(Compression))
def test_resealed_batch_is_what_building_it_anew_gives(compression: Compression) -> None:
    def build(epoch: int, sequence: int) -> bytes:
        return build_batch(
            [b"value" * 20, None],
            keys=["k", None],
            timestamp=5,
            compression=compression,
            producer_id=ProducerId(7),
            producer_epoch=epoch,
            base_sequence=sequence,
        )

    resealed = reseal_batch(build(1, 10), producer_epoch=2, base_sequence=30)
    assert resealed == build(2, 30)
    Batch.decode(resealed).verify()


def test_batch_becomes_another_producers() -> None:
    built = build_batch([b"x"], timestamp=5, producer_id=ProducerId(7), producer_epoch=1, base_sequence=2)
    expected = build_batch([b"x"], timestamp=5, producer_id=ProducerId(8), producer_epoch=3, base_sequence=4)
    assert reseal_batch(built, producer_id=ProducerId(8), producer_epoch=3, base_sequence=4) == expected


def test_resealing_takes_the_stamp_off() -> None:
    built = build_batch([b"x"], timestamp=5, producer_id=ProducerId(7))
    stamped = stamp(built, term=Term(3), index=Index(4), base_offset=Offset(5), append_timestamp=6)
    assert reseal_batch(stamped, producer_epoch=0, base_sequence=0) == built


def test_sequence_out_of_range_and_other_bytes_are_refused() -> None:
    built = build_batch([b"x"], timestamp=5, producer_id=ProducerId(7))
    with pytest.raises(RequestError):
        reseal_batch(built, producer_epoch=0, base_sequence=-1)
    with pytest.raises(DecodeError):
        reseal_batch(b"no batch", producer_epoch=0, base_sequence=0)
