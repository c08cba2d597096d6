"""Carry a schedule of faults out, and count what struck.

Every fault is a task of its own that begins, lasts and is undone. When the chaos is over the rest is called
off, and `World.heal` sets everything right.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, Generic

from quiver.testing import cuts, operations, outages, troubles
from quiver.testing.faults import Fault
from quiver.testing.strike import Strike, W

if TYPE_CHECKING:
    from quiver.testing.world import World

STRIKES: Final[Mapping[str, Callable[[Strike[World]], Awaitable[None]]]] = {
    "kill": outages.kill,
    "power_loss": outages.power_loss,
    "power_loss_at_operation": outages.power_loss_at_operation,
    "kill_all": outages.kill_all,
    "power_loss_all": outages.power_loss_all,
    "pause": outages.pause,
    "clock_jump": outages.clock_jump,
    "clock_drift": outages.clock_drift,
    "isolate": cuts.isolate,
    "cut_one_way": cuts.cut_one_way,
    "cut_both_ways": cuts.cut_both_ways,
    "split": cuts.split,
    "ring": cuts.ring,
    "clog": cuts.clog,
    "swizzle": cuts.swizzle,
    "slow_network": cuts.slow_network,
    "lossy_network": cuts.lossy_network,
    "doubling_network": cuts.doubling_network,
    "slow_disk": troubles.slow_disk,
    "sync_error": troubles.sync_error,
    "write_error": troubles.write_error,
    "read_error": troubles.read_error,
    "full_disk": troubles.full_disk,
    "short_writes": troubles.short_writes,
    "bit_flip": troubles.bit_flip,
    "lost_disk": troubles.lost_disk,
    "wiped_disk": troubles.wiped_disk,
    "add_member": operations.add_member,
    "remove_member": operations.remove_member,
    "swap_member": operations.swap_member,
    "demote_member": operations.demote_member,
    "transfer": operations.transfer,
    "snapshot": operations.snapshot,
    "burst": operations.burst,
}


class Nemesis(Generic[W]):
    """The faults of one run."""

    def __init__(
        self, world: W, schedule: list[Fault], strikes: Mapping[str, Callable[[Strike[W]], Awaitable[None]]]
    ) -> None:
        self.struck: Counter[str] = Counter()
        self._world = world
        self._schedule = schedule
        self._strikes = strikes
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Let every fault strike at its time."""
        for fault in self._schedule:
            self._tasks.append(self._world.loop.create_task(self._strike(fault)))

    def call_off(self) -> None:
        """End the faults that last, and those to come."""
        for task in self._tasks:
            task.cancel()

    async def _strike(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_ms / 1000)
        self.struck[fault.kind] += 1
        self._world.trace.record("fault", self._world.now_ms, fault.number, fault.kind, fault.duration_ms)
        rng = self._world.streams.stream(f"fault-{fault.number}")
        await self._strikes[fault.kind](Strike(self._world, rng, fault.duration_ms))
