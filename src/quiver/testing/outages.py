"""Faults of whole nodes and of their clocks: kills, power losses, pauses, jumps and drift."""

from __future__ import annotations

import asyncio

from quiver.testing.disk_faults import Moment
from quiver.testing.strike import Grounds, Machine, Strike

_MOMENTS: tuple[Moment, ...] = ("before", "during", "after")


async def kill(strike: Strike[Grounds]) -> None:
    """Kill a process and start it again."""
    await _down(strike, strike.pick_node(), power_loss=False)


async def power_loss(strike: Strike[Grounds]) -> None:
    """Take a machine's power and give it back."""
    await _down(strike, strike.pick_node(), power_loss=True)


async def power_loss_at_operation(strike: Strike[Grounds]) -> None:
    """Take a machine's power in the middle of one of its next disk operations."""
    node = strike.pick_node()
    if node is not None and node.is_up:
        node.restart_after_ms = strike.duration_ms
        moment = _MOMENTS[strike.rng.randrange(3)]
        node.disk.crash_after(1 + strike.rng.randrange(12), moment=moment, written_share=strike.rng.random())


async def kill_all(strike: Strike[Grounds]) -> None:
    """Kill every process at once."""
    await _all_down(strike, power_loss=False)


async def power_loss_all(strike: Strike[Grounds]) -> None:
    """Take the power of every machine at once."""
    await _all_down(strike, power_loss=True)


async def pause(strike: Strike[Grounds]) -> None:
    """Stop a process and let it go on later."""
    node = strike.pick_node()
    if node is not None:
        node.pause()
        await strike.last()
        node.resume()


async def clock_jump(strike: Strike[Grounds]) -> None:
    """Move a node's wall clock by up to ten minutes."""
    node = strike.pick_node()
    if node is not None:
        node.clock.jump_wall(strike.rng.randrange(1_200_000) - 600_000)


async def clock_drift(strike: Strike[Grounds]) -> None:
    """Let a node's clocks run up to a tenth too fast or too slow."""
    node = strike.pick_node()
    if node is not None:
        node.clock.set_drift(strike.rng.randrange(200_000) - 100_000)


async def _down(strike: Strike[Grounds], node: Machine | None, *, power_loss: bool) -> None:
    if node is not None:
        node.kill(power_loss=power_loss)
        await strike.last()
        node.start()


async def _all_down(strike: Strike[Grounds], *, power_loss: bool) -> None:
    nodes = strike.world.live_nodes()
    for node in nodes:
        node.kill(power_loss=power_loss)
    await strike.last()
    for node in nodes:
        node.start()
        await asyncio.sleep(strike.rng.randrange(200) / 1000)
