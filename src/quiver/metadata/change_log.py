"""What has changed lately, for those who follow the metadata: brokers, caches, dashboards.

A watcher says up to which index it knows everything and gets, in order, what has changed since. The newest changes
are kept; a watcher that asks for older ones, or that slept through a restored snapshot, is told to begin anew from
a view. Watchers have no queues: they read from the one history at their own pace.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from itertools import takewhile
from typing import Protocol

import msgspec

from quiver.metadata.state import Change, Counters, LogPosition, MetadataState, View
from quiver.model import Index

CHANGES_MAX = 20_000
"""How many changes are kept: a few MB, and minutes of the busiest cluster."""


class WatchEvent(msgspec.Struct, frozen=True):
    """What a watcher learns: the rows that differ from what it knew, or everything."""

    index: Index
    """Up to where the watcher now knows everything."""
    changes: tuple[Change, ...]
    """In the order in which they were made; a row may be among them more than once."""
    view: View | None = None
    """All there is, if the watcher must begin anew; `changes` is empty then. Else None: showing costs a copy."""

    @property
    def is_reset(self) -> bool:
        """Tell whether the watcher must compare all of the view with what it has."""
        return self.view is not None


class ChangeSource(Protocol):
    """Where views come from: the state machine."""

    @property
    def state(self) -> MetadataState:
        """Return the state as it is now."""
        ...


class ChangeLog:
    """The newest changes, and those who wait for the next ones. Lives in the event loop."""

    def __init__(self, source: ChangeSource, *, changes_max: int = CHANGES_MAX) -> None:
        self._source = source
        self._changes_max = changes_max
        self._kept: deque[tuple[Index, Change]] = deque()
        self._floor = source.state.position.index
        """Changes at or below it are not kept."""
        self._is_closed = False
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def is_closed(self) -> bool:
        """Tell whether every watch has ended."""
        return self._is_closed

    def add(self, changes: Sequence[Change], _: Counters, position: LogPosition) -> None:
        """Take what was applied up to a position; a watcher gets all of it or none."""
        self._kept.extend((position.index, change) for change in changes)
        while len(self._kept) > self._changes_max:
            self._floor = self._kept[0][0]
            while self._kept and self._kept[0][0] <= self._floor:
                self._kept.popleft()
        self._notify()

    def replace(self, view: View) -> None:
        """Take a whole new state: every watcher begins anew."""
        self._kept.clear()
        self._floor = view.index
        self._notify()

    def close(self) -> None:
        """End every watch; idempotent."""
        self._is_closed = True
        self._notify()

    async def watch(self, after_index: Index) -> AsyncIterator[WatchEvent]:
        """Yield what changes after an index, for ever; `Index(0)` begins with a view of everything."""
        known = after_index
        while not self._is_closed:
            changed = self._since(known)
            if changed is not None:
                known = changed.index
                yield changed
            else:
                known = max(known, self._index)
                await self.wait_newer(known)

    async def wait_newer(self, index: Index) -> None:
        """Return once something after an index is applied, or the history is closed."""
        while self._index <= index and not self._is_closed:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting

    async def wait_next(self) -> None:
        """Return when anything is applied, or `wake` is called, or the history is closed."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def wake(self) -> None:
        """Let everybody who waits look again."""
        self._notify()

    def _since(self, known: Index) -> WatchEvent | None:
        """Return what a watcher has missed; None if nothing it could see."""
        if known < self._floor or not known:
            return WatchEvent(self._index, (), self._source.state.view()) if self._index else None
        newer = [change for _, change in takewhile(lambda item: item[0] > known, reversed(self._kept))]
        return WatchEvent(self._index, tuple(reversed(newer))) if newer else None

    @property
    def _index(self) -> Index:
        return self._source.state.position.index

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            if not item.done():
                item.set_result(None)
