"""The schedule of a run's faults, drawn before it begins.

Each fault has a number, a time, a kind and a duration, and draws everything else (its targets, say) from a
stream of its own when it strikes. So leaving one out changes nothing about the choices of the others: that
is what makes a failing schedule shrinkable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from quiver.clock import Rng

CALM_SHARE = 0.25
"""How much of the time is free of new faults, in stretches."""
_CALM_STRETCH_MS = (1_000, 4_000)
_DURATIONS_MS = (20, 100, 300, 800, 2_000, 5_000)


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault."""

    number: int
    at_ms: int
    kind: str
    duration_ms: int

    def __str__(self) -> str:
        return f"#{self.number} at {self.at_ms} ms: {self.kind} for {self.duration_ms} ms"


class Plan(Protocol):
    """What a seed's knobs say of its faults."""

    @property
    def weights(self) -> Mapping[str, int]:
        """Return the kinds that are on, with how often each is drawn."""
        ...

    @property
    def chaos_ms(self) -> int:
        """Return how long faults are begun."""
        ...

    @property
    def gap_ms(self) -> int:
        """Return about how long it is from one to the next."""
        ...


def plan_faults(rng: Rng, knobs: Plan) -> list[Fault]:
    """Draw the faults of a run: bursts of them, and about a quarter of the time none."""
    kinds = [kind for kind, weight in knobs.weights.items() for _ in range(weight)]
    faults: list[Fault] = []
    at_ms = 500 + rng.randrange(1_500)
    while at_ms < knobs.chaos_ms:
        duration_ms = _DURATIONS_MS[rng.randrange(len(_DURATIONS_MS))]
        duration_ms += rng.randrange(duration_ms)
        faults.append(Fault(len(faults), at_ms, kinds[rng.randrange(len(kinds))], duration_ms))
        at_ms += 10 + rng.randrange(2 * knobs.gap_ms)
        # A stretch is about 2.5 s: enough of them make up the share.
        if rng.random() < CALM_SHARE * knobs.gap_ms / 2_000:
            at_ms += _CALM_STRETCH_MS[0] + rng.randrange(_CALM_STRETCH_MS[1] - _CALM_STRETCH_MS[0])
    return faults
