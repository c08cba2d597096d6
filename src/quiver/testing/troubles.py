"""Faults of disks: errors, no space, slowness, bit rot and loss, never on more than a minority at a time.

An error is not damage: what was durable stays so. Bit rot and a lost disk are, and they are allowed by the
atlas alone (`World.may_taint`): while acknowledged bytes of one node may be gone, a majority of every
electorate keeps all of theirs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quiver.clock import Rng

if TYPE_CHECKING:
    from quiver.testing.world import World


async def sync_error(world: World, rng: Rng, duration_ms: int) -> None:
    """Let one of a node's next syncs fail."""
    node = world.pick_node(rng)
    if node is not None and node.is_up:
        node.disk.fail("sync" if rng.random() < 0.8 else "sync_directory", nth=1 + rng.randrange(5))


async def write_error(world: World, rng: Rng, duration_ms: int) -> None:
    """Let one of a node's next writes, or another change of its files, fail."""
    node = world.pick_node(rng)
    if node is not None and node.is_up:
        operation = ("write", "write", "write", "create", "rename", "remove", "truncate")[rng.randrange(7)]
        node.disk.fail(operation, nth=1 + rng.randrange(5))  # type: ignore[arg-type] # one of the literals above


async def read_error(world: World, rng: Rng, duration_ms: int) -> None:
    """Let one of a node's next reads fail."""
    node = world.pick_node(rng)
    if node is not None:
        node.disk.fail("read", nth=1 + rng.randrange(3))


async def full_disk(world: World, rng: Rng, duration_ms: int) -> None:
    """Let a disk take a little more, and then nothing until space is made."""
    node = world.pick_node(rng)
    if node is not None:
        node.disk.limit_space(rng.randrange(8_192))
        await asyncio.sleep(duration_ms / 1000)
        node.disk.limit_space(None)


async def short_writes(world: World, rng: Rng, duration_ms: int) -> None:
    """Let a disk take a part of what it is given, again and again."""
    node = world.pick_node(rng)
    if node is not None:
        node.disk.rates.p_short_write = 0.3
        await asyncio.sleep(duration_ms / 1000)
        node.disk.rates.p_short_write = 0.0


async def slow_disk(world: World, rng: Rng, duration_ms: int) -> None:
    """Let a disk take many times as long."""
    node = world.pick_node(rng)
    if node is not None:
        node.set_disk_latency(10 + rng.randrange(200))
        await asyncio.sleep(duration_ms / 1000)
        node.set_disk_latency(1)


async def bit_flip(world: World, rng: Rng, duration_ms: int) -> None:
    """Take a node down, flip bits in what is durable on its disk, and start it again."""
    node = world.pick_node(rng)
    if node is None or not world.may_taint(node):
        return
    node.kill(power_loss=rng.random() < 0.5)
    paths = [path for path in node.disk.paths() if node.disk.read_durable(path)]
    if paths:
        node.is_tainted = True
        for _ in range(1 + rng.randrange(2)):
            path = paths[rng.randrange(len(paths))]
            size = len(node.disk.read_durable(path))
            node.disk.flip_bit(path, rng.randrange(size), bit=rng.randrange(8))
            world.trace.record("flip", world.now_ms, node.id, path)
    await asyncio.sleep(duration_ms / 1000)
    node.start()


async def lost_disk(world: World, rng: Rng, duration_ms: int) -> None:
    """Lose a node with its disk; the operator brings a new one in its place (R22)."""
    node = world.pick_node(rng)
    if node is not None and world.may_taint(node):
        world.replace(node)
