"""Until when each connection may stay in the state it is in, at no cost for those that just wait.

All connections in a state have the same time for it, so those that came first end first: a dictionary in order of
arrival is all it takes, and looking for what is over touches nothing else. Ten thousand idle connections cost their
memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from quiver.clock import Clock

C = TypeVar("C", bound=Hashable)


class Deadlines(Generic[C]):
    """What is in one state, and since when."""

    def __init__(self, clock: Clock, *, timeout_ms: int) -> None:
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._until_ms: dict[C, int] = {}

    def __len__(self) -> int:
        return len(self._until_ms)

    def __iter__(self) -> Iterator[C]:
        """Iterate over a copy, longest in the state first."""
        return iter(tuple(self._until_ms))

    def begin(self, item: C) -> None:
        """Note that an item has come into the state now; begins anew if it was in it."""
        self._until_ms.pop(item, None)
        self._until_ms[item] = self._clock.monotonic_ms() + self._timeout_ms

    def end(self, item: C) -> None:
        """Note that an item has left the state; no matter if it was not in it."""
        self._until_ms.pop(item, None)

    def oldest(self) -> C | None:
        """Return what has been in the state for longest."""
        return next(iter(self._until_ms), None)

    def take_expired(self) -> list[C]:
        """Return, and forget, what has been in the state for too long."""
        now_ms = self._clock.monotonic_ms()
        expired: list[C] = []
        for item, until_ms in self._until_ms.items():
            if until_ms > now_ms:
                break
            expired.append(item)
        for item in expired:
            del self._until_ms[item]
        return expired
