"""What a fault has in hand when it strikes: the world, a stream of chance of its own, and how long it lasts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quiver.clock import Rng

if TYPE_CHECKING:
    from quiver.testing.node import SimulatedNode
    from quiver.testing.world import World


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault at work."""

    world: World
    rng: Rng
    duration_ms: int

    async def last(self) -> None:
        """Wait until the fault is over."""
        await asyncio.sleep(self.duration_ms / 1000)

    def pick_node(self) -> SimulatedNode | None:
        """Return a target: a leader half of the time, else any node."""
        return self.world.pick_node(self.rng)

    def chance(self, probability: float) -> bool:
        """Tell whether something of this probability happens."""
        return self.rng.random() < probability
