"""The memory of a node's answers: reserved before records are read, released when the answer is sent or dropped.

It counts the bytes of clients' requests in flight, of the answers that are being made, and of those that wait to be
sent. A handler that finds no room waits for it until its deadline; connections take turns, and each keeps its order. A
connection that holds much already has to wait for its own answers to be sent once half of the memory is in use: the
other half is for all others, so that readers that are slow do not starve them. An answer that is larger than a limit is
admitted alone: requests that wait do not count then, or they would wait for themselves.

Invariant: `bytes` is the sum of what all sessions hold, `answers_bytes` the part of it that is not requests.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol

HEAVY_SHARE = 64
"""A connection is heavy if it holds more than this part of the memory."""
REQUESTS_SHARE = 4
"""This part of the memory is for requests: answers never use all of it."""


class Holder(Protocol):
    """One connection, as the memory sees it."""

    @property
    def held_bytes(self) -> int:
        """Return the bytes of its requests, reservations and unsent answers."""
        ...

    @property
    def answers_bytes(self) -> int:
        """Return the bytes of its reservations and unsent answers."""
        ...

    @property
    def is_gone(self) -> bool:
        """Return whether the connection has ended."""
        ...


class AnswerMemory:
    """Admit the answers of one node within its limits."""

    def __init__(self, *, limit_bytes: int, connection_bytes_max: int) -> None:
        self.bytes = 0
        self.answers_bytes = 0
        self._limit_bytes = limit_bytes
        self._connection_bytes_max = connection_bytes_max
        # By connection, in the order of their turns: what waits, oldest first.
        self._waiting: OrderedDict[Holder, OrderedDict[asyncio.Future[None], int]] = OrderedDict()
        self._will_wake = False

    @property
    def waiting(self) -> int:
        """Return how many answers wait for memory."""
        return sum(map(len, self._waiting.values()))

    async def wait_room(self, holder: Holder, size_bytes: int) -> None:
        """Wait until an answer of this size fits; the caller then counts it in the same turn of the loop."""
        if not self._waiting and self._fits(holder, size_bytes):
            return
        granted = self._wait(holder, size_bytes)
        self._wake_later()
        try:
            while True:
                await granted
                if self._fits(holder, size_bytes):
                    return
                granted = self._wait(holder, size_bytes)
                self._waiting[holder].move_to_end(granted, last=False)
        finally:
            self._forget(holder, granted)

    def count(self, change_bytes: int) -> None:
        """Record that a connection holds more or less of answers."""
        self.answers_bytes += change_bytes
        self.count_request(change_bytes)

    def count_request(self, change_bytes: int) -> None:
        """Record that a connection holds more or less of requests."""
        self.bytes += change_bytes
        if change_bytes < 0 and self._waiting:
            self._wake_later()

    def _wait(self, holder: Holder, size_bytes: int) -> asyncio.Future[None]:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(holder, OrderedDict())[granted] = size_bytes
        return granted

    def _forget(self, holder: Holder, granted: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(holder)
        if waiting is not None:
            waiting.pop(granted, None)
            if not waiting:
                del self._waiting[holder]

    def _fits(self, holder: Holder, size_bytes: int) -> bool:
        held_bytes = holder.held_bytes
        if held_bytes + size_bytes > self._connection_bytes_max and holder.answers_bytes:
            return False
        is_heavy = held_bytes > self._limit_bytes // HEAVY_SHARE
        room_bytes = self._limit_bytes // 2 if is_heavy else self._limit_bytes - self._limit_bytes // REQUESTS_SHARE
        return self.bytes + size_bytes <= room_bytes or not self.answers_bytes

    def _wake_later(self) -> None:
        if not self._will_wake:
            self._will_wake = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        """Admit the first answer of each connection that fits now, and look again once they are counted.

        One that has to wait for its own connection holds no other connection up.
        """
        self._will_wake = False
        promised_bytes = 0
        admitted: list[tuple[Holder, asyncio.Future[None]]] = []
        for holder, waiting in self._waiting.items():
            granted, size_bytes = next(iter(waiting.items()))
            if holder.is_gone or self._fits(holder, size_bytes + promised_bytes):
                promised_bytes += size_bytes
                admitted.append((holder, granted))
        for holder, granted in admitted:
            self._waiting.move_to_end(holder)
            self._forget(holder, granted)
            if not granted.done():
                granted.set_result(None)
        if admitted and self._waiting:
            self._wake_later()
