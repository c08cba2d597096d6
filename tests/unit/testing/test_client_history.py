"""The history checker sees what simulated clients were told."""

from __future__ import annotations

import pytest

from quiver.model import GroupId, Index, Offset, ProducerId, Term
from quiver.record import Batch, build_batch, stamp
from quiver.testing.groups.history import Outcome, RecordedBatch, check_client_history
from quiver.testing.simulator.report import Violation


def _send(*values: bytes, at: int | None, began: int, ended: int = 0, outcome: Outcome = "ok") -> RecordedBatch:
    return RecordedBatch(
        group=GroupId(7),
        producer_id=ProducerId(1),
        epoch=0,
        base_sequence=0,
        values=values,
        invoked_ns=began,
        acked_before=Offset(0),
        outcome=outcome,
        base_offset=None if at is None else Offset(at),
        completed_ns=ended,
    )


def _log(*batches: tuple[bytes, ...]) -> list[Batch]:
    made: list[Batch] = []
    offset = 0
    for values in batches:
        index = Index(len(made) + 1)
        data = build_batch(values, timestamp=1)
        made.append(
            Batch.decode(stamp(data, term=Term(1), index=index, base_offset=Offset(offset), append_timestamp=1))
        )
        offset += len(values)
    return made


def test_history_that_agrees_with_its_log_passes() -> None:
    sends = [
        _send(b"a", b"b", at=0, began=0, ended=10),
        _send(b"c", at=2, began=10, ended=20),
        _send(b"d", at=None, began=30, outcome="info"),
        _send(b"e", at=None, began=30, outcome="info"),
        _send(b"f", at=None, began=40, outcome="fail"),
    ]
    check_client_history(sends, _log((b"a", b"b"), (b"c",), (b"d",)))
    check_client_history([], [])


def test_send_that_begins_as_another_ends_overlaps_it() -> None:
    sends = [_send(b"b", at=1, began=0, ended=10), _send(b"a", at=0, began=10, ended=20)]
    check_client_history(sends, _log((b"a",), (b"b",)))


@pytest.mark.parametrize(
    ("anomaly", "sends"),
    [
        ("unseen", [_send(b"a", at=0, began=0, ended=1), _send(b"b", at=1, began=2, ended=3)]),
        ("aborted-read", [_send(b"a", at=None, began=0, outcome="fail")]),
        ("unexpected", []),
        ("inconsistent-offsets", [_send(b"b", at=0, began=0, ended=1), _send(b"a", at=None, began=0, outcome="info")]),
        ("real-time-violation", [_send(b"b", at=1, began=0, ended=1), _send(b"a", at=0, began=2, ended=3)]),
    ],
)
def test_anomaly_ends_the_run(anomaly: str, sends: list[RecordedBatch]) -> None:
    with pytest.raises(Violation, match=anomaly) as caught:
        check_client_history(sends, _log((b"a",)))
    assert caught.value.invariant == "J"
