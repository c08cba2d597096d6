"""The latest changes of the metadata, for watchers: brokers, caches, dashboards.

A watcher names the index up to which it knows everything and gets the later changes in order. Only the newest changes
are kept. A watcher that asks for older ones, or that missed a restored snapshot, gets a full view and starts again
from it. Watchers have no queues of their own: all read the one log at their own speed.
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
"""How many changes are kept: a few MB, which covers minutes of the busiest cluster."""


class WatchEvent(msgspec.Struct, frozen=True):
    """What a watcher receives: the rows changed since its index, or a full view."""

    index: Index
    """The index up to which the watcher now knows everything."""
    changes: tuple[Change, ...]
    """In the order in which they were made; a row may be among them more than once."""
    view: View | None = None
    """A full view if the watcher must start again; `changes` is empty then. Otherwise None: a view may cost a copy."""

    @property
    def is_reset(self) -> bool:
        """Return whether the watcher must replace what it knows by the view."""
        return self.view is not None


class ChangeSource(Protocol):
    """The owner of the state: the state machine."""

    @property
    def state(self) -> MetadataState:
        """Return the current state."""
        ...


class ChangeLog:
    """The newest changes and the waiters for the next ones. Used only in the event loop."""

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
        """Return whether the log is closed and every watch has ended."""
        return self._is_closed

    def add(self, changes: Sequence[Change], _: Counters, position: LogPosition) -> None:
        """Append the changes applied up to a position; a watcher gets all of them or none."""
        self._kept.extend((position.index, change) for change in changes)
        while len(self._kept) > self._changes_max:
            self._floor = self._kept[0][0]
            while self._kept and self._kept[0][0] <= self._floor:
                self._kept.popleft()
        self._notify()

    def replace(self, view: View) -> None:
        """Drop all changes because a snapshot was restored: every watcher starts again from a view."""
        self._kept.clear()
        self._floor = view.index
        self._notify()

    def close(self) -> None:
        """End every watch; idempotent."""
        self._is_closed = True
        self._notify()

    async def watch(self, after_index: Index) -> AsyncIterator[WatchEvent]:
        """Yield the changes after an index until the log closes; `Index(0)` starts with a full view."""
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
        """Return once an entry after an index is applied, or the log is closed."""
        while self._index <= index and not self._is_closed:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting

    async def wait_next(self) -> None:
        """Return when the next entry is applied, `wake` is called, or the log is closed. Always suspends."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def wake(self) -> None:
        """Wake all waiters, which check their conditions again."""
        self._notify()

    def _since(self, known: Index) -> WatchEvent | None:
        """Return the changes after an index; None if there are none."""
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
