"""The memory of a node's answers: reserved before records are read, released when the answer is sent or dropped.

It counts the bytes of clients' requests in flight, of the answers that are being made, and of those that wait to be
sent, in all and for each principal, on the wire and over HTTP (`answer_room`). A handler that finds no room waits for
it until its deadline; connections take turns, and each keeps its order. Readers that are slow do not starve others: a
connection that holds much waits for its own answers to be sent once half of the memory is in use, and so does, a little
later, a principal with many connections that holds more than is free. So there is always room left for a principal that
holds little, whatever the others do. An answer that is larger than a limit is admitted alone: requests that wait do not
count then, or they would wait for themselves.

Invariant: `bytes` is the sum of what all sessions hold, and of what all accounts hold; `answers_bytes` is the part of
it that is not requests.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol

from quiver.config import WireSettings
from quiver.security import Principal

HEAVY_SHARE = 64
"""A connection is heavy if it holds more than this part of the memory."""
REQUESTS_SHARE = 4
"""This part of the memory is for requests: answers never use all of it."""
PRINCIPAL_SHARE = 8
"""Beyond half of the memory and this part of it, answers are only for principals that hold less than is free."""
STALLED_S = 0.5
"""A connection that has not read what was last written to it, up to a chunk of the outbox, for this long is closed if
others need the memory of its answers."""
REQUESTS_FACTOR = 3
"""How many times what is free a principal may have in flight in requests: alone three quarters of everything."""


class Evictable(Protocol):
    """A connection that can be closed for the memory that it holds."""

    def evict(self) -> None:
        """Drop its unsent answers at once, and close it."""
        ...


class Account:
    """What one principal has in flight on all its connections."""

    __slots__ = ("blocked", "bytes", "principal", "requests", "sessions")

    def __init__(self, principal: Principal) -> None:
        self.principal = principal
        self.sessions = 0
        self.requests = 0
        self.bytes = 0
        self.blocked: dict[Evictable, float] = {}
        """Connections with answers that wait to be sent, and when the other side last read some; longest ago first."""


class Holder(Protocol):
    """One connection, as the memory sees it."""

    @property
    def account(self) -> Account:
        """Return the account of its principal."""
        ...

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
        self.limit_bytes = limit_bytes
        self._accounts: dict[Principal, Account] = {}
        self._connection_bytes_max = connection_bytes_max
        # By connection, in the order of their turns: what waits, oldest first.
        self._waiting: OrderedDict[Holder, OrderedDict[asyncio.Future[None], int]] = OrderedDict()
        self._will_wake = False

    @property
    def waiting(self) -> int:
        """Return how many answers wait for memory."""
        return sum(map(len, self._waiting.values()))

    @property
    def is_tight(self) -> bool:
        """Return whether answers hold so much that even small ones should be reserved before they are made."""
        return self.answers_bytes > self.limit_bytes // 2

    def has_room(self, holder: Holder, size_bytes: int) -> bool:
        """Return whether an answer of this size fits now and none of its principal waits; the caller then counts it."""
        return all(other.account is not holder.account for other in self._waiting) and self._fits(holder, size_bytes)

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

    def open_account(self, principal: Principal) -> Account:
        """Return the account of a principal for one more connection, until `close_account`."""
        account = self._accounts.get(principal)
        if account is None:
            account = self._accounts[principal] = Account(principal)
        account.sessions += 1
        return account

    def close_account(self, account: Account) -> None:
        """Forget an account with its last connection."""
        account.sessions -= 1
        if not account.sessions:
            del self._accounts[account.principal]

    def count(self, account: Account, change_bytes: int) -> None:
        """Record that a connection holds more or less of answers."""
        self.answers_bytes += change_bytes
        self.count_request(account, change_bytes)

    def count_request(self, account: Account, change_bytes: int) -> None:
        """Record that a connection holds more or less of requests."""
        self.bytes += change_bytes
        account.bytes += change_bytes
        if change_bytes < 0 and self._waiting:
            self._wake_later()

    def is_over_share(self, account: Account) -> bool:
        """Return whether a principal holds so much that its connections with unsent answers are not read."""
        return self.bytes > self.limit_bytes // 2 and account.bytes > self._room_bytes - self.bytes

    def evict_blocked(self, now_s: float) -> None:
        """Close connections that have read nothing for a while, if one principal's leave too little to others.

        Small answers are not reserved, so what they take is only known once they exist.
        """
        if self.bytes <= self._room_bytes:
            return
        account = max(self._accounts.values(), key=_bytes_of)
        while self.bytes > self._room_bytes and account.bytes > self.limit_bytes // 2 and account.blocked:
            connection, since_s = next(iter(account.blocked.items()))
            if now_s - since_s < STALLED_S:
                return
            del account.blocked[connection]
            connection.evict()

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

    @property
    def _room_bytes(self) -> int:
        return self.limit_bytes - self.limit_bytes // REQUESTS_SHARE

    def _fits(self, holder: Holder, size_bytes: int) -> bool:
        held_bytes, limit_bytes = holder.held_bytes, self.limit_bytes
        if held_bytes + size_bytes > self._connection_bytes_max and holder.answers_bytes:
            return False
        total_bytes = self.bytes + size_bytes
        if total_bytes <= limit_bytes // 2 or not self.answers_bytes:
            return True
        if held_bytes > limit_bytes // HEAVY_SHARE:
            return False
        if holder.account.bytes + size_bytes <= self._room_bytes - self.bytes:
            return total_bytes <= self._room_bytes
        # Half of what is left, so that something is left for the next connection, which may ask for little.
        return total_bytes + size_bytes <= limit_bytes // 2 + limit_bytes // PRINCIPAL_SHARE

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


def make_answer_memory(settings: WireSettings) -> AnswerMemory:
    """Return the memory of the answers of a node with these settings."""
    return AnswerMemory(limit_bytes=settings.requests_bytes_max, connection_bytes_max=settings.connection_bytes_max)


def _bytes_of(account: Account) -> int:
    return account.bytes
