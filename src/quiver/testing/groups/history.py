"""The history of a run's clients: what they sent and read, and the check of it by the history checker.

Outcomes are Jepsen's: `ok` was acknowledged, `fail` was certainly not done, `info` is unknown. Every value is unique,
so that a record in a log belongs to exactly one send. The checkers of `quiver.testing.checkers` know the product's
types; the history checker knows only what clients saw. `check_client_history` writes the sends and the committed log as
a history for it, in the order of simulated time; two events at the same instant count as concurrent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from quiver.model import GroupId, Offset, ProducerId
from quiver.record import Batch
from quiver.testing.history import HistoryEvent, check_history
from quiver.testing.simulator.report import require

Outcome = Literal["pending", "ok", "fail", "info"]


@dataclass(slots=True)
class RecordedBatch:
    """One batch that a producer wants in the log, over all its attempts."""

    group: GroupId
    producer_id: ProducerId
    epoch: int
    base_sequence: int
    values: tuple[bytes, ...]
    invoked_ns: int
    acked_before: Offset
    """The end of what was acknowledged in the group when this was invoked."""
    may_be_done: bool = False
    """Whether some attempt has an unknown outcome."""
    outcome: Outcome = "pending"
    base_offset: Offset | None = None
    completed_ns: int = 0

    @property
    def end_sequence(self) -> int:
        """Return the sequence number after the last record."""
        return self.base_sequence + len(self.values)


@dataclass(slots=True)
class EndRead:
    """One linearizable read of a partition's end."""

    group: GroupId
    invoked_ns: int
    at_least: Offset
    """The highest end that was acknowledged or read before this was invoked."""


@dataclass(slots=True)
class ClientHistory:
    """Everything that the clients of one run did."""

    sends: list[RecordedBatch] = field(default_factory=list)
    acked_ends: dict[GroupId, Offset] = field(default_factory=dict)
    """For each group the highest end offset that a client was answered."""
    reads_done: int = 0
    consumed: int = 0
    """How many records consumers were given."""

    def acked_end(self, group: GroupId) -> Offset:
        """Return the end of what clients of a group know to be there."""
        return self.acked_ends.get(group, Offset(0))

    def note_end(self, group: GroupId, end_offset: Offset) -> None:
        """Record that a client knows of records up to here."""
        if end_offset > self.acked_end(group):
            self.acked_ends[group] = end_offset


_INVOKE, _COMPLETE = 0, 1
"""Beginnings first: then what ends in the same instant did not end before."""


def check_client_history(sends: Iterable[RecordedBatch], batches: Iterable[Batch]) -> None:
    """Require that the history checker finds nothing in the sends of one group and its committed log."""
    verdict = check_history(_events(sends, batches))
    require(verdict.is_clean, "J", str(verdict))


def _events(sends: Iterable[RecordedBatch], batches: Iterable[Batch]) -> Iterator[HistoryEvent]:
    moments = sorted(_moments(sends), key=lambda moment: moment[:2])
    end_ns = moments[-1][0] if moments else 0
    last = 0
    for last, (at_ns, _, proc, kind, value) in enumerate(moments, 1):
        yield HistoryEvent(last, at_ns, proc, kind, "send", "log", value)
    records = [
        (batch.header.base_offset + at, _text(value)) for batch in batches for at, value in enumerate(batch.values())
    ]
    drained = records[-1][0] + 1 if records else 0
    notes: tuple[tuple[str, str, Any], ...] = (
        ("ok", "assign", 0),
        ("invoke", "poll", None),
        ("ok", "poll", records),
        ("ok", "drain", drained),
    )
    for i, (kind, f, value) in enumerate(notes, last + 1):
        yield HistoryEvent(i, end_ns, "drain", kind, f, "log", value)


def _moments(sends: Iterable[RecordedBatch]) -> Iterator[tuple[int, int, str, str, Any]]:
    """Yield when, what first, who, what kind and which value; each send is a process, since several overlap."""
    for number, send in enumerate(sends):
        proc = f"send {number}"
        yield send.invoked_ns, _INVOKE, proc, "invoke", [_text(value) for value in send.values]
        if send.outcome == "ok":
            yield send.completed_ns, _COMPLETE, proc, "ok", send.base_offset
        elif send.outcome == "fail":
            yield send.invoked_ns, _COMPLETE, proc, "fail", None


def _text(value: bytes | None) -> str:
    return "null" if value is None else value.decode()
