"""What can go wrong on a simulated disk, and when: planned failures and seeded ones.

A test plans exact failures ("the third sync fails"); a simulation sets probabilities, drawn from the
stream it passes in. Both count what they did in `counts`, so that a run can prove that its faults
happened. This module decides; `quiver.testing.disk` carries the decision out.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from dataclasses import dataclass
from typing import Final, Literal

from quiver.clock import Rng

DiskOperation = Literal["read", "write", "truncate", "sync", "create", "rename", "remove", "sync_directory"]
"""Everything that can fail; all but `read` change something and are counted as mutating operations."""

Moment = Literal["before", "during", "after"]
"""When the power goes, as seen from the operation it interrupts."""


_ERROR_RATES: Final[dict[DiskOperation, str]] = {"read": "p_eio_read", "write": "p_eio_write", "sync": "p_eio_sync"}


class PowerLoss(BaseException):
    """Stop the program immediately: the machine lost its power.

    Not an `Exception`, so that no handler for errors can hide it: the program no longer runs.
    """


@dataclass(slots=True)
class DiskFaults:
    """Give each seeded fault its probability per operation; a simulation may change them as it runs."""

    p_eio_read: float = 0.0
    p_eio_write: float = 0.0
    p_eio_sync: float = 0.0
    p_short_write: float = 0.0
    p_misdirect: float = 0.0
    p_lying_sync: float = 0.0


@dataclass(slots=True)
class _Planned:
    """One planned fault: it happens when `countdown` matching operations have passed."""

    operation: DiskOperation
    path: str | None
    countdown: int
    kind: str
    value: int

    def matches(self, operation: DiskOperation, path: str) -> bool:
        """Count one operation and tell whether it is the one."""
        if operation != self.operation or (self.path is not None and self.path != path):
            return False
        self.countdown -= 1
        return self.countdown == 0


class DiskFaultPlan:
    """Decide for each operation whether it fails, and count the faults by kind."""

    def __init__(self, faults: DiskFaults, rng: Rng | None) -> None:
        self.faults = faults
        self.counts: Counter[str] = Counter()
        self._rng = rng
        self._planned: list[_Planned] = []

    def plan(self, operation: DiskOperation, *, kind: str, nth: int, path: str | None, value: int) -> None:
        """Let the `nth` matching operation from now on suffer a fault of this kind."""
        if nth < 1:
            raise ValueError(f"nth counts from 1, got {nth}")
        self._planned.append(_Planned(operation, path, nth, kind, value))

    def forget(self) -> None:
        """Plan nothing any more, and give every fault the probability 0."""
        self._planned.clear()
        self.faults = DiskFaults()

    def error(self, operation: DiskOperation, path: str) -> OSError | None:
        """Return the error that this operation must raise, if any."""
        number = self._take(operation, path, "error") if self._planned else None
        if number is None and self._draw(getattr(self.faults, _ERROR_RATES.get(operation, ""), 0.0)):
            number = errno.EIO
        if number is None:
            return None
        self.counts[f"{errno.errorcode[number].lower()}_{operation}"] += 1
        return OSError(number, os.strerror(number), path)

    def short_length(self, path: str, length: int) -> int:
        """Return how many of `length` bytes this write may take: at least one of them."""
        wanted = self._take("write", path, "short_write") if self._planned else None
        if wanted is None and length > 1 and self._draw(self.faults.p_short_write):
            wanted = 1 + self._stream().randrange(length - 1)
        if wanted is None or wanted >= length:
            return length
        self.counts["short_write"] += 1
        return max(1, wanted)

    def landing(self, path: str, *, position: int, size: int) -> int:
        """Return where this write lands on the platter: at `position` unless it is misdirected."""
        landing = self._take("write", path, "misdirect") if self._planned else None
        if landing is None and size and self._draw(self.faults.p_misdirect):
            landing = self._stream().randrange(size)
        if landing is None or landing == position:
            return position
        self.counts["misdirect"] += 1
        return landing

    def is_lying(self, path: str) -> bool:
        """Return whether this sync reports success without making anything durable."""
        if self._take("sync", path, "lying_sync") is None and not self._draw(self.faults.p_lying_sync):
            return False
        self.counts["lying_sync"] += 1
        return True

    def _take(self, operation: DiskOperation, path: str, kind: str) -> int | None:
        matched = [planned for planned in self._planned if planned.kind == kind and planned.matches(operation, path)]
        if not matched:
            return None
        self._planned = [planned for planned in self._planned if planned.countdown > 0]
        return matched[0].value

    def _draw(self, probability: float) -> bool:
        return probability > 0.0 and self._stream().random() < probability

    def _stream(self) -> Rng:
        if self._rng is None:
            raise ValueError("fault probabilities need a random stream: pass rng to the disk")
        return self._rng
