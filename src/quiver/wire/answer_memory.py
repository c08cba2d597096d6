"""The memory of a node's answers: reserved before records are read, released when the answer is sent or dropped.

It counts the bytes of clients' requests in flight, of the answers that are being made, and of those that wait to be
sent. A handler that finds no room waits for it, in order, until its deadline. A connection that holds much already has
to wait for its own answers to be sent once half of the memory is in use: the other half is for all others, so that
readers that are slow do not starve them.

Invariant: `bytes` is the sum of what all sessions hold.
"""

from __future__ import annotations

import asyncio
from collections import deque
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
    def is_gone(self) -> bool:
        """Return whether the connection has ended."""
        ...


class AnswerMemory:
    """Admit the answers of one node within its limits."""

    def __init__(self, *, limit_bytes: int, connection_bytes_max: int) -> None:
        self.bytes = 0
        self._limit_bytes = limit_bytes
        self._connection_bytes_max = connection_bytes_max
        self._waiting: deque[tuple[Holder, int, asyncio.Future[None]]] = deque()
        self._will_wake = False

    @property
    def waiting(self) -> int:
        """Return how many answers wait for memory."""
        return len(self._waiting)

    async def wait_room(self, holder: Holder, size_bytes: int) -> None:
        """Wait until an answer of this size fits; the caller then counts it in the same turn of the loop."""
        if not self._waiting and self._fits(holder, size_bytes):
            return
        granted = asyncio.get_running_loop().create_future()
        entry = (holder, size_bytes, granted)
        self._waiting.append(entry)
        self._wake_later()
        try:
            while True:
                await granted
                if self._fits(holder, size_bytes):
                    return
                granted = asyncio.get_running_loop().create_future()
                entry = (holder, size_bytes, granted)
                self._waiting.appendleft(entry)
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def count(self, change_bytes: int) -> None:
        """Record that a connection holds more or less."""
        self.bytes += change_bytes
        if change_bytes < 0 and self._waiting:
            self._wake_later()

    def _fits(self, holder: Holder, size_bytes: int) -> bool:
        held_bytes = holder.held_bytes
        if held_bytes and held_bytes + size_bytes > self._connection_bytes_max:
            return False
        is_heavy = held_bytes > self._limit_bytes // HEAVY_SHARE
        room_bytes = self._limit_bytes // 2 if is_heavy else self._limit_bytes - self._limit_bytes // REQUESTS_SHARE
        return self.bytes + size_bytes <= room_bytes or not self.bytes

    def _wake_later(self) -> None:
        if not self._will_wake:
            self._will_wake = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        """Admit, in order, those that fit now; one that has to wait for its own connection holds nobody up."""
        self._will_wake = False
        promised_bytes = 0
        kept: deque[tuple[Holder, int, asyncio.Future[None]]] = deque()
        for entry in self._waiting:
            holder, size_bytes, granted = entry
            if granted.done():
                continue
            if holder.is_gone or self._fits(holder, size_bytes + promised_bytes):
                promised_bytes += size_bytes
                granted.set_result(None)
            else:
                kept.append(entry)
        self._waiting = kept
