"""A node's clocks over a simulation's virtual time: they drift, and the wall clock jumps.

Only whole numbers are used, so that no rounding of the host shows. The monotonic clock never goes
back, whatever is done to the drift; the wall clock may.
"""

from __future__ import annotations

from typing import Final, Protocol

PARTS: Final = 1_000_000
"""Drift is given in parts per million of real time."""

DEFAULT_WALL_START_MS: Final = 1_700_000_000_000
"""A date in 2023: far from zero, so that a missing stamp is seen as such."""


class VirtualTime(Protocol):
    """A source of virtual time, such as `SimulatedLoop`."""

    @property
    def now_ns(self) -> int:
        """Return nanoseconds since the simulation began."""
        ...


class SimulatedClock:
    """One node's clocks: virtual time, run fast or slow by `drift_ppm`."""

    def __init__(
        self,
        time: VirtualTime,
        *,
        drift_ppm: int = 0,
        monotonic_start_ms: int = 0,
        wall_start_ms: int = DEFAULT_WALL_START_MS,
    ) -> None:
        self._time = time
        self._wall_offset_ms = wall_start_ms - monotonic_start_ms
        self._made_ns = self._base_ns = time.now_ns
        self._start_ns = self._own_base_ns = monotonic_start_ms * 1_000_000
        self._drift_ppm = drift_ppm
        self.jumps_ms = (0, 0)
        """By how much the wall clock was back, and ahead, at most because it was moved."""
        self._jumped_ms = 0
        self.set_drift(drift_ppm)

    def monotonic_ms(self) -> int:
        """Return this node's monotonic milliseconds."""
        return self._own_ns() // 1_000_000

    def wall_ms(self) -> int:
        """Return this node's wall time in milliseconds since 1970-01-01 UTC."""
        return self.monotonic_ms() + self._wall_offset_ms

    def set_drift(self, drift_ppm: int) -> None:
        """Run fast (positive) or slow from now on; neither clock jumps."""
        if drift_ppm <= -PARTS:
            raise ValueError(f"a clock cannot stand still or run back: {drift_ppm} ppm")
        self._own_base_ns = self._own_ns()
        self._base_ns = self._time.now_ns
        self._drift_ppm = drift_ppm

    def jump_wall(self, by_ms: int) -> None:
        """Move the wall clock, forward or back, as an operator or a time service does."""
        self._wall_offset_ms += by_ms
        self._jumped_ms += by_ms
        self.jumps_ms = (min(self.jumps_ms[0], self._jumped_ms), max(self.jumps_ms[1], self._jumped_ms))

    def drifted_ms(self) -> int:
        """Return by how much the monotonic clock is ahead of virtual time since this clock was made."""
        passed_ns = self._time.now_ns - self._made_ns
        return (self._own_ns() - self._start_ns - passed_ns) // 1_000_000

    def _own_ns(self) -> int:
        passed_ns = self._time.now_ns - self._base_ns
        return self._own_base_ns + passed_ns * (PARTS + self._drift_ppm) // PARTS
