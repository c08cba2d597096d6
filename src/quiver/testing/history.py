"""What clients did and what they were told: the history that checkers judge.

Outcomes are Jepsen's: `ok` was acknowledged, `fail` was certainly not done, `info` is unknown. Every value
is unique, so that a record found in a log belongs to exactly one send.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quiver.model import GroupId, Offset, ProducerId

Outcome = Literal["pending", "ok", "fail", "info"]


@dataclass(slots=True)
class Send:
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
        """Return the sequence number behind the last record."""
        return self.base_sequence + len(self.values)


@dataclass(slots=True)
class EndRead:
    """One linearizable read of a partition's end."""

    group: GroupId
    invoked_ns: int
    at_least: Offset
    """The highest end that was acknowledged or read before this was invoked."""


@dataclass(slots=True)
class History:
    """Everything that the clients of one run did."""

    sends: list[Send] = field(default_factory=list)
    acked_ends: dict[GroupId, Offset] = field(default_factory=dict)
    """For each group the end of what clients were told is there."""
    reads_done: int = 0
    consumed: int = 0
    """How many records consumers were given."""

    def acked_end(self, group: GroupId) -> Offset:
        """Return the end of what clients of a group know to be there."""
        return self.acked_ends.get(group, Offset(0))

    def note_end(self, group: GroupId, end_offset: Offset) -> None:
        """Take note that a client was told of records up to here."""
        if end_offset > self.acked_end(group):
            self.acked_ends[group] = end_offset
