"""The schedule of a run's faults, and the nemesis that injects them.

The schedule is drawn before the run begins. Each fault has a number, a time, a kind and a duration, and draws
everything else (its targets, for example) from a random stream of its own when it is injected. Leaving one out
therefore changes nothing about the choices of the others: that is what makes a failing schedule shrinkable.

Every fault is a task that begins, lasts and is undone. When the chaos phase is over the nemesis cancels the rest, and
`SimulatedWorld.heal` repairs everything.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from quiver.clock import Rng
from quiver.testing.simulator.faults import FaultInjection, W
from quiver.testing.simulator.swarm import SimulationKnobs

CALM_SHARE = 0.25
"""Share of the time without new faults, in stretches."""
_CALM_STRETCH_MS = (1_000, 4_000)
_DURATIONS_MS = (20, 100, 300, 800, 2_000, 5_000)


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault of a schedule."""

    number: int
    at_ms: int
    kind: str
    duration_ms: int

    def __str__(self) -> str:
        return f"#{self.number} at {self.at_ms} ms: {self.kind} for {self.duration_ms} ms"


def plan_faults(rng: Rng, knobs: SimulationKnobs) -> list[PlannedFault]:
    """Draw the faults of a run: bursts of them, and none during about a quarter of the time."""
    kinds = [kind for kind, weight in knobs.weights.items() for _ in range(weight)]
    faults: list[PlannedFault] = []
    at_ms = 500 + rng.randrange(1_500)
    while at_ms < knobs.chaos_ms:
        duration_ms = _DURATIONS_MS[rng.randrange(len(_DURATIONS_MS))]
        duration_ms += rng.randrange(duration_ms)
        faults.append(PlannedFault(len(faults), at_ms, kinds[rng.randrange(len(kinds))], duration_ms))
        at_ms += 10 + rng.randrange(2 * knobs.gap_ms)
        # A calm stretch is about 2.5 s: this probability makes up the share.
        if rng.random() < CALM_SHARE * knobs.gap_ms / 2_000:
            at_ms += _CALM_STRETCH_MS[0] + rng.randrange(_CALM_STRETCH_MS[1] - _CALM_STRETCH_MS[0])
    return faults


class Nemesis(Generic[W]):
    """Inject the faults of one schedule; `injected` counts them by kind."""

    def __init__(
        self,
        world: W,
        schedule: Sequence[PlannedFault],
        faults: Mapping[str, Callable[[FaultInjection[W]], Awaitable[None]]],
    ) -> None:
        self.injected: Counter[str] = Counter()
        self._world = world
        self._schedule = schedule
        self._faults = faults
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Inject every fault at its time."""
        for fault in self._schedule:
            self._tasks.append(self._world.loop.create_task(self._inject(fault)))

    def cancel(self) -> None:
        """Stop the faults under way and those to come."""
        for task in self._tasks:
            task.cancel()

    async def _inject(self, fault: PlannedFault) -> None:
        await asyncio.sleep(fault.at_ms / 1000)
        self.injected[fault.kind] += 1
        self._world.trace.record("fault", self._world.now_ms, fault.number, fault.kind, fault.duration_ms)
        rng = self._world.streams.stream(f"fault-{fault.number}")
        await self._faults[fault.kind](FaultInjection(self._world, rng, fault.duration_ms))
