"""The names of a simulated file system: folders, and name changes that are not durable yet.

A folder's `current` names are what programs see, its `durable` names what is on the platter. All
changes wait in one ordered list, because a rename may touch two folders and must stay atomic: it
is kept or lost as a whole. Changes that share a name are kept in order, from the first on; changes
of unrelated names survive a power loss independently. This module never looks into file contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quiver.clock import Rng
from quiver.testing.content import SURVIVALS, Content


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
