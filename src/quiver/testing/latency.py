"""How long simulated things take: mostly little, at times more, rarely seconds.

Draws use only multiplication, whose result is the same on every host, unlike that of `math.log`.
"""

from __future__ import annotations

from dataclasses import dataclass

from quiver.clock import Rng


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


NO_LATENCY = Latency()
"""Everything happens at the same instant of virtual time."""
