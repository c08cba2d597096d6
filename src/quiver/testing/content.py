"""The bytes of one simulated file: what is durable, what is pending, what a power loss leaves.

`current` is the page cache: what reads see. `durable` is the platter. `pending` holds, in order, the
writes and truncates that separate them. Appending costs the appended bytes and a sync costs the
pending bytes, never the file's size: crash tests and simulations make millions of small appends.

A power loss acts on sectors of 512 bytes. A sector keeps some prefix of the writes that touched it
and never a mix, but different sectors keep prefixes of different lengths, so that later bytes may
survive while earlier ones are lost. This module never draws a random number it was not handed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from quiver.clock import Rng

SECTOR_BYTES = 512
"""What a disk writes atomically."""

Pending = tuple[int, bytes | None]
"""A write (position, bytes), or a truncate (size, None). A plain tuple: one is made for every append."""

Survival = Literal["all", "none", "prefix", "sectors"]
"""How much of a file's pending operations a power loss kept."""

SURVIVALS: tuple[Survival, ...] = ("all", "none", "prefix", "sectors")


class Content:
    """Hold one file's durable and pending bytes."""

    __slots__ = ("current", "durable", "pending")

    def __init__(self, data: bytes = b"") -> None:
        self.durable = bytearray(data)
        self.current = bytearray(data)
        self.pending: list[Pending] = []

    def write(self, position: int, data: bytes) -> None:
        """Write into the cache; a gap before `position` reads as zeros. Not durable yet."""
        operation: Pending = (position, data)
        _apply(self.current, operation)
        self.pending.append(operation)

    def write_misdirected(self, position: int, landing: int, data: bytes) -> None:
        """Write into the cache at `position`, but onto the platter at `landing`.

        The length is kept right, as it is in the file system's own records: what should have been
        written reads as before, or as zeros, once the cache is gone.
        """
        size = len(self.current)
        _apply(self.current, (position, data))
        if len(self.current) > size:
            self.pending.append((len(self.current), None))
        self.pending.append((landing, data))

    def truncate(self, size: int) -> None:
        """Cut the cached file to `size`, or extend it with zeros. Not durable yet."""
        operation: Pending = (size, None)
        _apply(self.current, operation)
        self.pending.append(operation)

    def sync(self) -> int:
        """Make everything pending durable; return how many bytes were written."""
        written = 0
        for operation in self.pending:
            _apply(self.durable, operation)
            if operation[1] is not None:
                written += len(operation[1])
        self.pending.clear()
        return written

    def fail_sync(self) -> None:
        """Lose the pending bytes as a failed `fsync` does: still in the cache, never on the platter.

        Truncates stay pending, as the file system's journal holds them.
        """
        self.pending = [operation for operation in self.pending if operation[1] is None]

    def drop_cache(self) -> None:
        """Forget cached bytes that are not pending, so that reads see the platter."""
        self.current = bytearray(self.durable)
        for operation in self.pending:
            _apply(self.current, operation)

    def flip_bit(self, position: int, bit: int) -> None:
        """Flip one durable bit; reads see it unless a pending write covers it."""
        self.durable[position] ^= 1 << bit
        self.drop_cache()

    def clone(self) -> Content:
        """Return an independent copy."""
        copy = Content.__new__(Content)
        copy.durable = self.durable[:]
        copy.current = self.current[:]
        copy.pending = self.pending[:]
        return copy

    def lose_power(self, rng: Rng | None) -> Survival:
        """Keep a seeded part of what is pending (nothing without `rng`) and return which part."""
        survival = self._choose_survival(rng) if rng is not None and self.pending else "none"
        self.pending.clear()
        self.current = self.durable[:]
        return survival

    def _choose_survival(self, rng: Rng) -> Survival:
        survival = SURVIVALS[rng.randrange(len(SURVIVALS))]
        if survival == "all":
            self.sync()
        elif survival == "prefix":
            self._keep_prefix(rng)
        elif survival == "sectors":
            self._keep_sectors(rng)
        return survival

    def _keep_prefix(self, rng: Rng) -> None:
        """Keep the first operations, the last of them torn at a sector's edge or at any byte."""
        whole = rng.randrange(len(self.pending))
        for operation in self.pending[:whole]:
            _apply(self.durable, operation)
        position, data = self.pending[whole]
        if data is None:
            return
        kept = rng.randrange(len(data) + 1)
        if rng.random() < 0.5:
            kept = max(0, (position + kept) // SECTOR_BYTES * SECTOR_BYTES - position)
        if kept:
            _apply(self.durable, (position, data[:kept]))

    def _keep_sectors(self, rng: Rng) -> None:
        """Keep some sectors and lose others, in no order; lose each truncate or keep it."""
        length = len(self.current)
        kept_writes = self._draw_kept_writes(rng)
        for position, data in self.pending:
            if data is None:
                if rng.random() < 0.5:
                    _apply(self.durable, (position, None))
                continue
            for sector, start, piece in _pieces(position, data):
                if kept_writes[sector] > 0:
                    kept_writes[sector] -= 1
                    _apply(self.durable, (start, piece))
        if len(self.durable) < length and rng.random() < 0.5:
            # The length reached the platter, the last sectors did not: they read as zeros.
            _apply(self.durable, (length, None))

    def _draw_kept_writes(self, rng: Rng) -> dict[int, int]:
        """Return for every pending sector how many of its writes survive, from the first on."""
        writes: dict[int, int] = {}
        for position, data in self.pending:
            for sector, _, _ in _pieces(position, data or b""):
                writes[sector] = writes.get(sector, 0) + 1
        return {sector: _draw_kept(rng, count) for sector, count in writes.items()}


def _draw_kept(rng: Rng, count: int) -> int:
    """Return all, none or some of `count`."""
    match rng.randrange(3):
        case 0:
            return count
        case 1:
            return 0
        case _:
            return rng.randrange(count + 1)


def _pieces(position: int, data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Cut a write at sector edges into (sector, position, bytes)."""
    start, end = position, position + len(data)
    while start < end:
        sector = start // SECTOR_BYTES
        stop = min(end, (sector + 1) * SECTOR_BYTES)
        yield sector, start, data[start - position : stop - position]
        start = stop


def _apply(target: bytearray, operation: Pending) -> None:
    position, data = operation
    gap = position - len(target)
    if gap > 0:
        target.extend(bytes(gap))
    if data is None:
        del target[position:]
    else:
        target[position : position + len(data)] = data
