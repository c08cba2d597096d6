"""Faults of whole nodes and of their clocks: kills, power losses, pauses, jumps and drift."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quiver.clock import Rng
from quiver.testing.disk_faults import Moment
from quiver.testing.node import SimulatedNode

if TYPE_CHECKING:
    from quiver.testing.world import World

_MOMENTS: tuple[Moment, ...] = ("before", "during", "after")


async def kill(world: World, rng: Rng, duration_ms: int) -> None:
    """Kill a process and start it again."""
    await _down(world, world.pick_node(rng), duration_ms, power_loss=False)


async def power_loss(world: World, rng: Rng, duration_ms: int) -> None:
    """Take a machine's power and give it back."""
    await _down(world, world.pick_node(rng), duration_ms, power_loss=True)


async def power_loss_at_operation(world: World, rng: Rng, duration_ms: int) -> None:
    """Take a machine's power in the middle of one of its next disk operations."""
    node = world.pick_node(rng)
    if node is not None and node.is_up:
        node.restart_after_ms = duration_ms
        node.disk.crash_after(
            1 + rng.randrange(12), moment=_MOMENTS[rng.randrange(3)], written_share=rng.randrange(100) / 100
        )


async def kill_all(world: World, rng: Rng, duration_ms: int) -> None:
    """Kill every process at once."""
    await _all_down(world, rng, duration_ms, power_loss=False)


async def power_loss_all(world: World, rng: Rng, duration_ms: int) -> None:
    """Take the power of every machine at once."""
    await _all_down(world, rng, duration_ms, power_loss=True)


async def pause(world: World, rng: Rng, duration_ms: int) -> None:
    """Stop a process and let it go on later."""
    node = world.pick_node(rng)
    if node is not None:
        node.pause()
        await asyncio.sleep(duration_ms / 1000)
        node.resume()


async def clock_jump(world: World, rng: Rng, duration_ms: int) -> None:
    """Move a node's wall clock by up to ten minutes."""
    node = world.pick_node(rng)
    if node is not None:
        node.clock.jump_wall(rng.randrange(1_200_000) - 600_000)


async def clock_drift(world: World, rng: Rng, duration_ms: int) -> None:
    """Let a node's clocks run up to a tenth too fast or too slow."""
    node = world.pick_node(rng)
    if node is not None:
        node.clock.set_drift(rng.randrange(200_000) - 100_000)


async def _down(world: World, node: SimulatedNode | None, duration_ms: int, *, power_loss: bool) -> None:
    if node is not None:
        node.kill(power_loss=power_loss)
        await asyncio.sleep(duration_ms / 1000)
        node.start()


async def _all_down(world: World, rng: Rng, duration_ms: int, *, power_loss: bool) -> None:
    nodes = world.live_nodes()
    for node in nodes:
        node.kill(power_loss=power_loss)
    await asyncio.sleep(duration_ms / 1000)
    for node in nodes:
        node.start()
        await asyncio.sleep(rng.randrange(200) / 1000)
