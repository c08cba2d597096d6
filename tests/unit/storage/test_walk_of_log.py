"""Random walks through everything a log can do, against a plain dictionary of entries.

A walk appends, waits, cuts, trims, resets, reads, closes and reopens a log on a simulated disk whose work is
done a random number of turns later, and at some point the power may go. While the log is open it must be
exactly the dictionary; after a crash it must keep every promise in the `Ledger`. A failure names its seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from log_world import InlineExecutor, all_entries, control_batch, data_batch, open_log, wait_durable
from test_crash import MOMENTS, Ledger, run_until_power_loss

from quiver.config import LogSettings
from quiver.model import Index, Offset, Term
from quiver.record import Batch
from quiver.storage import Lane
from quiver.testing import SimulatedDisk

T = TypeVar("T")
WALKS = 300
LIVES = 4
STEPS_PER_LIFE = 14


class DelayingExecutor(InlineExecutor):
    """Do work some turns of the event loop later, in no fixed order."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.is_killed = False
        self._rng = rng

    def submit(self, work: Callable[[], T], lane: Lane = Lane.WRITES) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def perform(turns: int) -> None:
            if self.is_killed:
                return
            if turns:
                loop.call_soon(perform, turns - 1)
                return
            finished = super(DelayingExecutor, self).submit(work, lane)
            if finished.done():
                _copy_outcome(finished, done)

        perform(self._rng.randrange(4))
        return done


def _copy_outcome(finished: asyncio.Future[T], done: asyncio.Future[T]) -> None:
    error = finished.exception()
    if error is None:
        done.set_result(finished.result())
    else:
        done.set_exception(error)


class Walker:
    """One log, and what it should be."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.disk = SimulatedDisk()
        self.ledger = Ledger()
        self.entries: dict[int, Batch] = {}
        self.settings = LogSettings(
            segment_bytes_max=rng.choice([1024, 2048, 8192]),
            index_interval_bytes=rng.choice([64, 500, 4096]),
            tail_cache_bytes_max=rng.choice([0, 2500, 1_000_000]),
        )

    async def live(self, executor: DelayingExecutor) -> None:
        """Open the log, check it, use it for a while, and end it in one way or another."""
        self.log = log = open_log(self.disk, self.settings, executor=executor)
        await self.ledger.check(log)
        self.entries = {int(entry.header.index): entry for entry in await all_entries(log)}
        self.ledger.durable(list(self.entries.values()))
        steps: tuple[Callable[[], Awaitable[None]], ...] = (
            *[self.append] * 5, *[self.settle] * 2, *[self.read] * 3, self.cut, self.trim, self.roll, self.reset
        )  # fmt: skip
        for _ in range(STEPS_PER_LIFE):
            await self.rng.choice(steps)()
            self.check_ends()
        if self.rng.random() < 0.5:
            await log.close()
            self.ledger.durable(list(self.entries.values()))

    async def append(self) -> None:
        batches = []
        index, offset, term = self.log.end_index, self.log.end_offset, max(self.log.last_term, 1)
        for _ in range(self.rng.randrange(1, 5)):
            term = Term(term + self.rng.choice([0, 0, 0, 1]))
            values = [b"v" * self.rng.choice([0, 10, 10, 600])] * self.rng.randrange(4)
            make = data_batch(values, index=index, offset=offset, term=term, timestamp=self.rng.randrange(1000)) if (
                values
            ) else control_batch(b"c" * self.rng.randrange(50), index=index, offset=offset, term=term)  # fmt: skip
            batches.append(make)
            index, offset = Index(index + 1), make.header.end_offset
        self.ledger.appending(batches)
        self.log.append(batches)
        self.entries |= {int(batch.header.index): batch for batch in batches}

    async def settle(self) -> None:
        await wait_durable(self.log, self.log.end_index)
        assert self.log.durable_end_index == self.log.end_index
        self.ledger.durable(list(self.entries.values()))

    async def cut(self) -> None:
        end_index = Index(self.rng.randrange(self.log.first_index, self.log.end_index + 1))
        self.ledger.cutting(end=end_index)
        self.log.truncate_suffix(end_index)
        self.entries = {index: entry for index, entry in self.entries.items() if index < end_index}

    async def trim(self) -> None:
        first_index = Index(self.rng.randrange(self.log.first_index, self.log.end_index + 1))
        self.ledger.cutting(first=first_index)
        await self.log.truncate_prefix(first_index)
        assert self.log.first_index <= first_index
        self._forget_removed()

    async def roll(self) -> None:
        await self.log.roll_if_old()
        self.ledger.durable([e for e in self.entries.values() if e.header.index < self.log.durable_end_index])

    def _forget_removed(self) -> None:
        self.ledger.first_index_min = self.log.first_index
        self.entries = {index: entry for index, entry in self.entries.items() if index >= self.log.first_index}

    async def reset(self) -> None:
        if self.rng.random() < 0.7:
            return  # seldom, or no log would ever grow
        self.ledger.cutting(end=0)
        self.ledger.first_index_min, self.entries = 0, {}
        first_index = Index(self.rng.randrange(1, self.log.end_index + 50))
        await self.log.reset(
            first_index=first_index, first_offset=Offset(self.rng.randrange(500)), previous_term=Term(1)
        )
        assert (self.log.first_index, self.log.end_index) == (first_index, first_index)
        self.ledger.first_index_min, self.ledger.allowed = first_index, {}

    async def read(self) -> None:
        await self.rng.choice((self.read_entries, self.read_records, self.find_timestamp))()

    async def read_entries(self) -> None:
        first = self.rng.randrange(self.log.first_index, self.log.end_index + 1)
        end = self.rng.randrange(first, self.log.end_index + 2)
        found = await self.log.read_entries(
            Index(first), end_index=Index(end), bytes_max=self.rng.choice([1, 900, 9000])
        )
        expected = [self.entries[index] for index in range(first, min(end, self.log.end_index))]
        assert len(found) >= min(1, len(expected))
        assert [bytes(entry.data) for entry in found] == [bytes(entry.data) for entry in expected[: len(found)]]

    async def read_records(self) -> None:
        first = self.rng.randrange(self.log.first_offset, self.log.end_offset + 1)
        found = await self.log.read_records(
            Offset(first), end_offset=self.log.end_offset, bytes_max=self.rng.choice([1, 900, 9000])
        )
        expected = [entry for entry in self.entries.values() if len(entry) and entry.header.end_offset > first]
        assert len(found) >= min(1, len(expected))
        assert [bytes(batch.data) for batch in found] == [bytes(batch.data) for batch in expected[: len(found)]]

    async def find_timestamp(self) -> None:
        wanted = self.rng.randrange(1000)
        expected = next(
            (e.header.base_offset for e in self.entries.values() if len(e) and e.header.max_timestamp >= wanted), None
        )
        assert await self.log.find_timestamp(wanted, end_offset=self.log.end_offset) == expected

    def check_ends(self) -> None:
        log, indexes = self.log, sorted(self.entries)
        assert indexes == list(range(log.first_index, log.end_index))
        assert log.durable_end_index <= log.end_index
        assert [log.term_at(Index(index)) for index in indexes] == [self.entries[i].header.term for i in indexes]
        starts = [
            i for i in indexes if i == indexes[0] or self.entries[i].header.term != self.entries[i - 1].header.term
        ]
        assert log.term_starts() == [(index, self.entries[index].header.term) for index in starts]
        if indexes:
            assert log.end_offset == self.entries[indexes[-1]].header.end_offset
            assert log.first_offset == self.entries[indexes[0]].header.base_offset


async def walk(seed: int) -> None:
    walker = Walker(seed)
    rng = walker.rng
    for _ in range(LIVES):
        executor = DelayingExecutor(rng)
        loses_power = rng.random() < 0.6
        if loses_power:
            walker.disk.crash_after(1 + rng.randrange(60), moment=rng.choice(MOMENTS), written_share=rng.random())
        await run_until_power_loss(executor, lambda executor=executor: walker.live(executor))  # type: ignore[misc]
        executor.is_killed = True
        if loses_power:
            walker.disk.crash(rng)
        else:
            walker.disk.restart()


@pytest.mark.parametrize("first_seed", range(0, WALKS, 50))
def test_walks_agree_with_the_model_and_keep_every_promise(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        try:
            asyncio.run(walk(seed))
        except Exception as error:
            error.add_note(f"replay it with asyncio.run(walk({seed}))")
            raise
