"""Outputs of the core that wait: one is being carried out, others queue behind it while it is saved.

The core runs ahead of what has been carried out. Whoever needs to know how things will stand when all of it
has been, asks here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from quiver.model import Offset, Term
from quiver.raft import Output
from quiver.record import Batch
from quiver.storage import Snapshot


class Step(msgspec.Struct):
    """An output with the bytes that belong to it."""

    output: Output
    batches: Sequence[Batch] = ()
    snapshot: Snapshot | None = None


class Backlog:
    """The step that is under way, and those that wait for it, in order."""

    __slots__ = ("_waiting", "under_way")

    def __init__(self) -> None:
        self.under_way = Step(Output(Term(0), None))
        self._waiting: deque[Step] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, step: Step) -> None:
        """Let a step wait for its turn."""
        self._waiting.append(step)

    def take(self) -> Step:
        """Return the step whose turn it is."""
        return self._waiting.popleft()

    def end_offset(self) -> Offset | None:
        """Return where the log's records will end when all of this has been carried out; None: where they end now."""
        for step in (*reversed(self._waiting), self.under_way):
            if step.batches:
                return step.batches[-1].header.end_offset
            if step.snapshot is not None:
                return step.snapshot.end_offset
        return None
