"""All chance in a simulation, from one seed.

Each concern draws from a stream of its own, so that a change to one (another message sent, another
client) leaves the choices of the others as they were. Streams are seeded with text, which Python
hashes with SHA-512: the numbers depend neither on `PYTHONHASHSEED` nor on the host.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from quiver.clock import Rng


class RandomStreams:
    """Derive independent random streams from one seed."""

    def __init__(self, seed: int | str) -> None:
        self.seed = seed
        self.schedule = self.stream("schedule")
        self.network = self.stream("network")
        self.disk = self.stream("disk")
        self.workload = self.stream("workload")

    def stream(self, name: str) -> random.Random:
        """Return a new stream at its start; the same name gives the same numbers again."""
        return random.Random(f"{self.seed}/{name}")  # noqa: S311 - repeatable on purpose, guards no secret


@dataclass(frozen=True, slots=True)
class Latency:
    """Describe a distribution: `minimum_ms` and up to `spread_ms` more, with rare spikes.

    Short times are likelier than long ones within the spread. With probability `p_spike` up to
    `spike_ms` are added.
    """

    minimum_ms: float = 0.0
    spread_ms: float = 0.0
    p_spike: float = 0.0
    spike_ms: float = 0.0

    def draw_ns(self, rng: Rng) -> int:
        """Draw one duration in nanoseconds."""
        share = rng.random()
        milliseconds = self.minimum_ms + self.spread_ms * share * share
        if self.p_spike > 0.0 and rng.random() < self.p_spike:
            milliseconds += self.spike_ms * rng.random()
        return int(milliseconds * 1_000_000)

    def scaled(self, factor: float) -> Latency:
        """Return a distribution that is `factor` times as slow, but for its spikes, which are long already."""
        return Latency(self.minimum_ms * factor, self.spread_ms * factor, self.p_spike, self.spike_ms)
