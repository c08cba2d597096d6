"""The bytes of one simulated file: what is durable, what is pending, what a power loss leaves.

`current` is the page cache: what reads see. `durable` is the platter. `pending` holds, in order, the
writes and truncates that separate them. Appending costs the appended bytes and a sync costs the
pending bytes, never the file's size: crash tests and simulations make millions of small appends.

A power loss acts on sectors of 512 bytes. A sector keeps some prefix of the writes that touched it
and never a mix, but different sectors keep prefixes of different lengths, so that later bytes may
survive while earlier ones are lost. This module never draws a random number it was not handed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


class Folder:
    """Hold the current and the durable names of one folder."""

    __slots__ = ("current", "durable")

    def __init__(self) -> None:
        self.current: dict[str, Entry] = {}
        self.durable: dict[str, Entry] = {}


Entry = Content | Folder
Key = tuple[Folder, str]


@dataclass(frozen=True, slots=True)
class NameChange:
    """One atomic change: every listed name comes to mean its entry, or nothing."""

    changes: tuple[tuple[Folder, str, Entry | None], ...]

    def touched(self) -> list[Key]:
        """Return the names that this changes."""
        return [(folder, name) for folder, name, _ in self.changes]

    def apply_to_current(self) -> None:
        """Let programs see the change."""
        for folder, name, entry in self.changes:
            _set(folder.current, name, entry)

    def apply_to_durable(self) -> None:
        """Bring the change to the platter."""
        for folder, name, entry in self.changes:
            _set(folder.durable, name, entry)


class NameTable:
    """Own the root folder and the name changes that are not durable yet."""

    __slots__ = ("pending", "root")

    def __init__(self) -> None:
        self.root = Folder()
        self.pending: list[NameChange] = []

    def change(self, *changes: tuple[Folder, str, Entry | None]) -> None:
        """Make one atomic change. Not durable yet."""
        change = NameChange(changes)
        change.apply_to_current()
        self.pending.append(change)

    def sync(self, folder: Folder) -> None:
        """Make a folder's names durable, with the earlier changes elsewhere that they follow from."""
        needed: set[Key] = set()
        taken: list[NameChange] = []
        left: list[NameChange] = []
        for change in reversed(self.pending):
            keys = change.touched()
            if any(owner is folder for owner, _ in keys) or not needed.isdisjoint(keys):
                needed.update(keys)
                taken.append(change)
            else:
                left.append(change)
        for change in reversed(taken):
            change.apply_to_durable()
        left.reverse()
        self.pending = left

    def sync_all(self) -> None:
        """Make every name durable."""
        for change in self.pending:
            change.apply_to_durable()
        self.pending.clear()

    def lose_power(self, rng: Rng | None) -> None:
        """Keep a seeded part of the pending changes, or none without `rng`."""
        for change in self._survivors(rng) if rng is not None and self.pending else ():
            change.apply_to_durable()
        self.pending.clear()
        for folder in _durable_folders(self.root):
            folder.current = dict(folder.durable)

    def clone(self, copy_content: Callable[[Content], Content]) -> NameTable:
        """Return an independent copy of the whole tree."""
        copies: dict[Entry, Entry] = {}

        def copy(entry: Entry) -> Entry:
            known = copies.get(entry)
            if known is not None:
                return known
            if isinstance(entry, Content):
                copies[entry] = made = copy_content(entry)
                return made
            return copy_folder(entry)

        def copy_folder(folder: Folder) -> Folder:
            copies[folder] = made = Folder()
            made.current = {name: copy(entry) for name, entry in folder.current.items()}
            made.durable = {name: copy(entry) for name, entry in folder.durable.items()}
            return made

        def copy_change(change: NameChange) -> NameChange:
            return NameChange(
                tuple(
                    (_as_folder(copy(folder)), name, None if entry is None else copy(entry))
                    for folder, name, entry in change.changes
                )
            )

        table = NameTable()
        table.root = copy_folder(self.root)
        table.pending = [copy_change(change) for change in self.pending]
        return table

    def _survivors(self, rng: Rng) -> list[NameChange]:
        match SURVIVALS[rng.randrange(len(SURVIVALS))]:
            case "all":
                return self.pending
            case "none":
                return []
            case "prefix":
                return self.pending[: rng.randrange(len(self.pending) + 1)]
            case _:
                return self._independent_survivors(rng)

    def _independent_survivors(self, rng: Rng) -> list[NameChange]:
        """Keep, of each chain of changes that share names, a prefix of its own length."""
        chains = _chains(self.pending)
        kept = {id(change) for chain in chains for change in chain[: rng.randrange(len(chain) + 1)]}
        return [change for change in self.pending if id(change) in kept]


def _chains(pending: list[NameChange]) -> list[list[NameChange]]:
    """Group changes that share a name, directly or through others, each group in order."""
    leaders = list(range(len(pending)))

    def leader(place: int) -> int:
        while leaders[place] != place:
            place = leaders[place]
        return place

    latest: dict[Key, int] = {}
    for place, change in enumerate(pending):
        for key in change.touched():
            if key in latest:
                leaders[leader(latest[key])] = place
            latest[key] = place
    chains: dict[int, list[NameChange]] = {}
    for place, change in enumerate(pending):
        chains.setdefault(leader(place), []).append(change)
    return list(chains.values())


def _durable_folders(folder: Folder) -> Iterator[Folder]:
    yield folder
    for entry in folder.durable.values():
        if isinstance(entry, Folder):
            yield from _durable_folders(entry)


def _as_folder(entry: Entry) -> Folder:
    assert isinstance(entry, Folder)
    return entry


def _set(names: dict[str, Entry], name: str, entry: Entry | None) -> None:
    if entry is None:
        names.pop(name, None)
    else:
        names[name] = entry
