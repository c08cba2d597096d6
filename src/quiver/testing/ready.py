"""The order in which ready callbacks run: shuffled by a seed, or first come, first served.

asyncio promises first come, first served; a program that needs it across tasks is fragile, because
one more `await` anywhere changes it. The shuffled queue shows that; the other one serves to tell a
scheduling fault from a logical one, and to shrink a failing run.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from quiver.clock import Rng
from quiver.testing.scope import Event, Scope

Policy = Literal["shuffle", "fifo"]


class ShuffledQueue(list[Event]):
    """Pick any ready event, each with the same chance."""

    def __init__(self, rng: Rng) -> None:
        super().__init__()
        self._random = rng.random

    def take(self) -> Event:
        """Remove and return a random event in constant time."""
        last = self.pop()
        count = len(self)
        if not count:
            return last
        chosen = int(self._random() * (count + 1))
        if chosen == count:
            return last
        event = self[chosen]
        self[chosen] = last
        return event

    def take_scope(self, scope: Scope) -> list[Event]:
        """Remove and return every event of one scope."""
        taken = [event for event in self if event.scope is scope]
        self[:] = [event for event in self if event.scope is not scope]
        return taken


class FifoQueue(deque[Event]):
    """Run events in the order in which they became ready."""

    take = deque[Event].popleft

    def take_scope(self, scope: Scope) -> list[Event]:
        """Remove and return every event of one scope."""
        events = list(self)
        self.clear()
        self.extend(event for event in events if event.scope is not scope)
        return [event for event in events if event.scope is scope]


ReadyQueue = ShuffledQueue | FifoQueue
"""What the loop takes its next event from."""
