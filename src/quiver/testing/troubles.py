"""Faults of disks: errors, no space, slowness, bit rot and loss, never on more than a minority at a time.

An error is not damage: what was durable stays so. Bit rot and a lost disk are, and they are allowed by the
atlas alone (`Machine.may_be_damaged`): while acknowledged bytes of one node may be gone, a majority of every
electorate keeps all of theirs.
"""

from __future__ import annotations

from quiver.testing.disk_faults import Operation
from quiver.testing.strike import Grounds, Strike

_CHANGES: tuple[Operation, ...] = ("write", "write", "write", "create", "rename", "remove", "truncate")


async def sync_error(strike: Strike[Grounds]) -> None:
    """Let one of a node's next syncs fail."""
    node = strike.pick_node()
    if node is not None and node.is_up:
        node.disk.fail("sync" if strike.chance(0.8) else "sync_directory", nth=1 + strike.rng.randrange(5))


async def write_error(strike: Strike[Grounds]) -> None:
    """Let one of a node's next writes, or another change of its files, fail."""
    node = strike.pick_node()
    if node is not None and node.is_up:
        node.disk.fail(_CHANGES[strike.rng.randrange(len(_CHANGES))], nth=1 + strike.rng.randrange(5))


async def read_error(strike: Strike[Grounds]) -> None:
    """Let one of a node's next reads fail."""
    node = strike.pick_node()
    if node is not None:
        node.disk.fail("read", nth=1 + strike.rng.randrange(3))


async def full_disk(strike: Strike[Grounds]) -> None:
    """Let a disk take a little more, and then nothing until space is made."""
    node = strike.pick_node()
    if node is not None:
        node.disk.limit_space(strike.rng.randrange(8_192))
        await strike.last()
        node.disk.limit_space(None)


async def short_writes(strike: Strike[Grounds]) -> None:
    """Let a disk take a part of what it is given, again and again."""
    node = strike.pick_node()
    if node is not None:
        node.disk.rates.p_short_write = 0.3
        await strike.last()
        node.disk.rates.p_short_write = 0.0


async def slow_disk(strike: Strike[Grounds]) -> None:
    """Let a disk take many times as long."""
    node = strike.pick_node()
    if node is not None:
        node.set_disk_latency(10 + strike.rng.randrange(200))
        await strike.last()
        node.set_disk_latency(1)


async def bit_flip(strike: Strike[Grounds]) -> None:
    """Take a node down, flip bits in what is durable on its disk, and start it again."""
    world = strike.world
    node = strike.pick_node()
    if node is None or not node.may_be_damaged():
        return
    node.kill(power_loss=strike.chance(0.5))
    paths = [path for path in node.disk.paths() if node.disk.read_durable(path)]
    if paths:
        node.is_tainted = True
        for _ in range(1 + strike.rng.randrange(2)):
            path = paths[strike.rng.randrange(len(paths))]
            size = len(node.disk.read_durable(path))
            node.disk.flip_bit(path, strike.rng.randrange(size), bit=strike.rng.randrange(8))
            world.trace.record("flip", world.now_ms, node.id, path)
    await strike.last()
    node.start()


async def lost_disk(strike: Strike[Grounds]) -> None:
    """Lose a node with its disk; the operator brings a new one in its place (R22)."""
    node = strike.pick_node()
    if node is not None and node.may_be_damaged():
        node.replace()


async def wiped_disk(strike: Strike[Grounds]) -> None:
    """Start a node again under its id with an empty disk, against the rules; replace it properly later."""
    node = strike.pick_node()
    if node is not None and node.may_be_damaged():
        node.wipe()
        node.start()
        await strike.last()
        node.replace()
