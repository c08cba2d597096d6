"""What the durability checker finds on a platter is what a power loss would leave there."""

from __future__ import annotations

import asyncio

from log_world import append, next_batches, open_log

from quiver.model import Index, Term
from quiver.testing import SimulatedDisk
from quiver.testing.checkers.durability import PlatterReader

TERM = Term(1)


def test_every_durable_entry_is_found_in_any_order() -> None:
    async def test() -> None:
        disk = SimulatedDisk()
        log = open_log(disk)
        reader = PlatterReader(disk, log)
        await append(log, *(b"v" * 50 for _ in range(30)))
        assert len(log._segments) > 2
        for index in (1, 2, 29, 30, 7, 8, 30, 1):
            assert reader.holds(Index(index), TERM)
            assert not reader.holds(Index(index), Term(2)), "another entry is not the one that was committed"
        assert not reader.holds(Index(31), TERM)

    asyncio.run(test())


def test_what_was_written_but_not_synced_is_not_there() -> None:
    async def test() -> None:
        disk = SimulatedDisk()
        log = open_log(disk)
        reader = PlatterReader(disk, log)
        await append(log, b"a", b"b")
        assert reader.holds(Index(2), TERM)
        log._writer._planner.plan(log._segments, next_batches(log, b"c"), now_ms=0, sync=True)
        assert not reader.holds(Index(3), TERM), "planned, but never written"

    asyncio.run(test())


def test_a_cut_log_is_searched_anew() -> None:
    async def test() -> None:
        disk = SimulatedDisk()
        log = open_log(disk)
        reader = PlatterReader(disk, log)
        await append(log, b"a", b"long" * 20, b"c", b"d")
        assert reader.holds(Index(4), TERM)
        log.truncate_suffix(Index(2))
        await append(log, b"x", b"y", b"z", term=2)
        for index in (2, 3, 4):
            assert reader.holds(Index(index), Term(2))

    asyncio.run(test())


def test_what_retention_removed_counts_as_held() -> None:
    async def test() -> None:
        disk = SimulatedDisk()
        log = open_log(disk)
        await append(log, *(b"v" * 50 for _ in range(30)))
        await log.truncate_prefix(Index(20))
        assert log.first_index > 1
        assert PlatterReader(disk, log).holds(Index(1), TERM)

    asyncio.run(test())
