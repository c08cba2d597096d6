"""All chance in a simulation, from one seed.

Each concern draws from a stream of its own, so that a change to one (another message sent, another
client) leaves the choices of the others as they were. Streams are seeded with text, which Python
hashes with SHA-512: the numbers depend neither on `PYTHONHASHSEED` nor on the host.
"""

from __future__ import annotations

import random


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
