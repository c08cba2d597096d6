"""What is replicated: the state machine behind a group, as the driver sees it.

The layer above implements it: a partition's dedup table and cursors, or the managers' metadata. The
driver calls it in the event loop, with committed batches only, each exactly once per life, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quiver.record import Batch


class StateMachine(Protocol):
    """State that every member of a group computes from the same batches."""

    def apply(self, batches: Sequence[Batch]) -> None:
        """Take committed batches, consecutive by index, control batches of every kind among them; never raises."""
        ...

    def snapshot(self) -> bytes:
        """Return the state that all batches applied so far have led to."""
        ...

    def restore(self, state: bytes) -> None:
        """Replace the state by a snapshot; empty bytes stand for the beginning."""
        ...
