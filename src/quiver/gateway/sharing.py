"""Calls for one thing each, answered together: what comes while somebody is asking is asked for in one go.

Consumers that take message by message over several connections would pay a replicated step for each. Here the first
call asks; those that come meanwhile wait, and then one of them asks for all. Each still gets a thing of its own, in the
order in which they came.

Invariant: as long as a key has a line, exactly one call leads it, and leading is handed on when that call ends, however
it ends; nobody who waits is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from quiver.client.delivery import fresh
from quiver.errors import QuiverError

T = TypeVar("T")

TOGETHER_MAX = 256
"""How many calls are answered together."""


class _Lead(Generic[T]):
    """Told to one who waits: ask, for yourself and for these."""

    def __init__(self, followers: list[asyncio.Future[_Outcome[T]]]) -> None:
        self.followers = followers


_Outcome = _Lead[T] | list[T]


class Sharing(Generic[T]):
    """Calls in lines, by key."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, list[asyncio.Future[_Outcome[T]]]] = {}

    async def take(self, key: Hashable, take_many: Callable[[int], Awaitable[Sequence[T]]]) -> list[T]:
        """Return one thing, or none if there are not enough; `take_many` gets up to so many things.

        Raises what `take_many` raised for this call or for the one that asked for it.
        """
        followers: list[asyncio.Future[_Outcome[T]]] = []
        if key in self._lines:
            told = await self._wait(key)
            if not isinstance(told, _Lead):
                return told
            followers = told.followers
        else:
            self._lines[key] = []
        return await self._lead(key, followers, take_many)

    async def _wait(self, key: Hashable) -> _Outcome[T]:
        place: asyncio.Future[_Outcome[T]] = asyncio.get_running_loop().create_future()
        self._lines[key].append(place)
        try:
            return await place
        except asyncio.CancelledError:
            is_told = place.done() and not place.cancelled() and place.exception() is None
            if is_told and isinstance(lead := place.result(), _Lead):
                self._hand_on(key, lead.followers)
            raise

    async def _lead(
        self,
        key: Hashable,
        followers: list[asyncio.Future[_Outcome[T]]],
        take_many: Callable[[int], Awaitable[Sequence[T]]],
    ) -> list[T]:
        unserved = followers = [place for place in followers if not place.done()]
        try:
            taken = await take_many(1 + len(followers))
            unserved = []
            for number, place in enumerate(followers, start=1):
                if not place.done():
                    place.set_result(list(taken[number : number + 1]))
            return list(taken[:1])
        except QuiverError as error:
            unserved = []
            for place in followers:
                if not place.done():
                    place.set_exception(fresh(error))
            raise
        finally:
            self._hand_on(key, unserved)

    def _hand_on(self, key: Hashable, unserved: list[asyncio.Future[_Outcome[T]]]) -> None:
        """Let the first who still waits lead, or end the line."""
        waiting = [place for place in (*unserved, *self._lines[key]) if not place.done()]
        if not waiting:
            del self._lines[key]
            return
        self._lines[key] = waiting[TOGETHER_MAX:]
        waiting[0].set_result(_Lead(waiting[1:TOGETHER_MAX]))
