"""The memory of large jobs, where it is shared: reserved before they are leased, released when a worker has them.

Only a gateway gives a dispatcher something to reserve with. Without it, jobs are received whatever their size.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from quiver.client.queue_jobs import LeasedJob
from quiver.wire.queue_messages import QueueReceived

ROOM_BYTES: Final = 4 * 1024 * 1024
"""Bytes of records, once decoded, for which nothing is reserved: as much as a leader decodes for any receive."""

Release = Callable[[], None]
ReserveRoom = Callable[[int], Awaitable[Release]]
"""Waits for memory for so many bytes of records, and returns what releases it."""
Answer = tuple[QueueReceived, memoryview]


def release_nothing() -> None:
    """Release what was not reserved."""


class QueueRooms:
    """The memory of the large jobs that no worker of a dispatcher has taken yet."""

    def __init__(self, reserve: ReserveRoom | None) -> None:
        self._reserve = reserve
        self._held: dict[LeasedJob, Release] = {}
        """By the first job of a receive."""

    async def receive(self, ask: Callable[[int], Awaitable[Answer]]) -> tuple[Answer, Release]:
        """Ask a leader with the room that there is, and again with what it needs; return what releases the memory."""
        if self._reserve is None:
            return await ask(0), release_nothing
        answer, release = await ask(ROOM_BYTES), release_nothing
        try:
            while large_bytes := answer[0].large_bytes:
                release()
                release = await self._reserve(large_bytes)
                answer = await ask(large_bytes)
        except BaseException:
            release()
            raise
        return answer, release

    def keep(self, jobs: Sequence[LeasedJob], release: Release) -> None:
        """Release the memory of jobs when a worker takes them; at once if there are none."""
        if not jobs:
            release()
        elif release is not release_nothing:
            self._held[jobs[0]] = release

    def take(self, job: LeasedJob) -> None:
        """Release what is held until this job is taken; its worker counts it from now on."""
        if self._held and (release := self._held.pop(job, None)):
            release()

    def close(self) -> None:
        """Release everything."""
        while self._held:
            self._held.popitem()[1]()
