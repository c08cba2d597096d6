"""Draws that both models share.

Swarm testing: a run with every fault at once explores less than many runs with a few faults each, because faults hide
each other. Each seed therefore picks a size, knobs that make rare things common (tiny segments, tiny caches, short
timeouts) and a mix of fault kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from quiver.clock import Rng
from quiver.model import NodeId
from quiver.testing.randomness import Latency

T = TypeVar("T")

NEAR: Final = Latency(0.1, 1.0)
FAR: Final = Latency(0.5, 10.0)
JITTERY: Final = Latency(0.1, 2.0, 0.01, 300.0)

QUICK_DISK: Final = Latency(0.05, 1.0)
PLAIN_DISK: Final = Latency(0.2, 5.0)
STALLING_DISK: Final = Latency(0.05, 2.0, 0.002, 1_500.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationKnobs:
    """Knobs of one seed that every model has: its machines, its network and its faults."""

    disk_latency: Latency
    disk_workers: int
    network_latency: Latency
    p_loss: float
    p_double: float
    keep_order: bool
    chaos_ms: int
    """How long new faults are injected."""
    gap_ms: int
    """About how long it is from one fault to the next."""
    weights: Mapping[str, int] = field(default_factory=dict)
    """The fault kinds that are on, with how often each is drawn."""
    drifts_ppm: tuple[int, ...] = ()

    def drift_ppm(self, node: NodeId) -> int:
        """Return a node's initial clock drift."""
        return self.drifts_ppm[node % len(self.drifts_ppm)]


def pick(rng: Rng, choices: tuple[T, ...]) -> T:
    """Draw one of several choices."""
    return choices[rng.randrange(len(choices))]


def between(rng: Rng, bounds: tuple[int, int]) -> int:
    """Draw a whole number within bounds, both inclusive."""
    return bounds[0] + rng.randrange(bounds[1] - bounds[0] + 1)
