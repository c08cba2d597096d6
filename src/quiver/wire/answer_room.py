"""The room of one answer that is not sent on the wire, such as one over HTTP, in the memory of the node's answers.

It is a holder of `AnswerMemory` by itself: what it reserves before its records are read, and what it has until it is
sent, count beside the answers on the wire. What nobody releases counts until the object is gone.
"""

from __future__ import annotations

from quiver.errors import OverloadedError
from quiver.record.header import PAYLOAD_BYTES_MAX
from quiver.security import Principal
from quiver.tasks import timeout
from quiver.wire.answer_memory import Account, AnswerMemory

RETRY_AFTER_MS = 1_000
"""Hint for a caller that got no memory: an answer is read within seconds."""


class AnswerRoom:
    """The room of one answer. `release` it once it is sent."""

    __slots__ = ("_is_open", "_memory", "account", "held_bytes")

    def __init__(self, memory: AnswerMemory, principal: Principal) -> None:
        self._memory = memory
        self._is_open = True
        self.account: Account = memory.open_account(principal)
        self.held_bytes = 0
        """What counts for it now."""

    @property
    def answers_bytes(self) -> int:
        """Return what counts for it: it has no requests."""
        return self.held_bytes

    @property
    def is_gone(self) -> bool:
        """Return whether nobody waits for it any more."""
        return not self._is_open

    @property
    def is_memory_tight(self) -> bool:
        """Return whether even small answers should be reserved before they are made."""
        return self._memory.is_tight

    async def reserve_large(self, decoded_bytes: int, *, timeout_s: float) -> None:
        """Reserve, as `reserve` does, for records out of a batch that has so many bytes once it is decoded.

        Records have at most the bytes of a payload. What decoding takes beside it is not the answer's: reserving it
        here, too, could make the answer wait until there is no other.
        """
        await self.reserve(min(decoded_bytes, PAYLOAD_BYTES_MAX), timeout_s=timeout_s)

    async def reserve(self, size_bytes: int, *, timeout_s: float) -> None:
        """Wait, first come, first served, until an answer of this size fits; it takes the place of what was held.

        Raises:
            OverloadedError: not done; there was no room within `timeout_s`.
        """
        self.count(0)  # or it would wait for itself
        try:
            async with timeout(timeout_s):
                await self._memory.wait_room(self, size_bytes)
        except TimeoutError:
            raise self._overloaded(size_bytes) from None
        self.count(size_bytes)

    def reserve_nowait(self, size_bytes: int) -> None:
        """Reserve as `reserve` does, but raise `OverloadedError` instead of waiting."""
        if not self._memory.has_room(self, size_bytes):
            raise self._overloaded(size_bytes)
        self.count(size_bytes)

    def count(self, size_bytes: int) -> None:
        """Count what the answer has now, more or less than before, whether or not there is room for it."""
        self._memory.count(self.account, size_bytes - self.held_bytes)
        self.held_bytes = size_bytes

    def release(self) -> None:
        """Count nothing any more; idempotent."""
        if self._is_open:
            self.count(0)
            self._is_open = False
            self._memory.close_account(self.account)

    def __del__(self) -> None:
        """Release what was dropped on its way, such as the answer to a client that is gone."""
        self.release()

    def _overloaded(self, size_bytes: int) -> OverloadedError:
        return OverloadedError(
            f"not done: the answer takes {size_bytes} bytes, and other answers that are being sent have "
            f"{self._memory.answers_bytes} (limit wire.requests_bytes_max, {self._memory.limit_bytes}); retry later",
            retry_after_ms=RETRY_AFTER_MS,
        )
