"""Read checks shared by `fetch` and `consume`: offset bounds, damaged records, and long polls.

A reader that waits is woken when the high watermark moves, never by polling. When the leader cannot read its own
records, the reader must not be the only one to notice: a retry would read the same damaged bytes forever. So the damage
is reported to the member, whose node stops, verifies its log at the next start, and fetches the bad part from the other
replicas; meanwhile another replica leads.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from quiver.errors import DamageError, OutOfRangeError, OverloadedError, QuiverError, TrimmedError, UnavailableError
from quiver.model import Offset
from quiver.partition.proposal_gate import ProposalGate
from quiver.partition.state import PartitionState
from quiver.record import Batch
from quiver.replication import Member
from quiver.storage import UNBOUNDED, LargeBatch, Log

Admit = Callable[[int], Awaitable[int]]
"""Wait for the memory of an answer with this many bytes of records, and return how many its first batch may have.

Called only when there are records. A further call replaces the one before: what was read is dropped.
"""


class LargeRecords(Exception):  # noqa: N818 - no failure: the caller asks again with more room
    """Report that the records take more memory than the caller has room for; nothing was done."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.size_bytes = size_bytes


def admit_up_to(admit: Admit, bytes_max: int) -> Admit:
    """Return what admits as `admit` does, but raises `LargeRecords` beyond `bytes_max`; 0: never."""
    if not bytes_max:
        return admit

    async def admit_within(size_bytes: int) -> int:
        if size_bytes > bytes_max:
            raise LargeRecords(size_bytes)
        return min(await admit(size_bytes), bytes_max)

    return admit_within


async def admit_all(_: int) -> int:
    """Read without waiting for memory."""
    return UNBOUNDED


async def read_admitted(
    log: Log, first_offset: Offset, *, end_offset: Offset, bytes_max: int, admitted: int, admit: Admit
) -> list[Batch]:
    """Read as `Log.read_records` does; wait for more memory if the first batch needs more than was admitted."""
    while True:
        try:
            return await log.read_records(
                first_offset, end_offset=end_offset, bytes_max=bytes_max, first_bytes_max=admitted
            )
        except LargeBatch as large:
            size_bytes = large.size_bytes
        admitted = await admit(size_bytes)


WAITERS_MAX = 10_000
"""Readers that may wait for records of one partition: about 5 MB."""
COMPACT_WAITERS_MIN = 64
"""Fewer queued waiters are never compacted: the scan would cost more than the memory."""


async def check_in_range(gate: ProposalGate, state: PartitionState, offset: Offset) -> None:
    """Refuse an offset outside the partition's records; the high watermark itself is allowed.

    Raises:
        TrimmedError: the offset is below the first record.
        OutOfRangeError: the offset is beyond the high watermark.
    """
    if offset > state.end_offset:
        await gate.wait_confirmed()  # a deposed leader that has not noticed yet lacks the newest records
    if offset > state.end_offset:
        message = f"offset {offset} is beyond the high watermark {state.end_offset}"
        raise OutOfRangeError(message, code="offset_out_of_range")
    if offset < state.first_offset:
        raise TrimmedError(f"offset {offset} was trimmed; the first record is at {state.first_offset}")


@contextmanager
def repair_on_damage(member: Member) -> Iterator[None]:
    """Report damage met inside to the member, which has it repaired; the caller retries at the next leader.

    Raises:
        UnavailableError: not done; the stored records are damaged (`damaged`).
    """
    try:
        yield
    except DamageError as error:
        member.handle_failure(error)
        message = (
            f"not done: this node's copy of group {member.group} is damaged and will be repaired from the other "
            f"replicas; retry: {error}"
        )
        raise UnavailableError(message, code="damaged") from error


class FetchWaiters:
    """The readers of one partition that wait for records, ordered by offset."""

    def __init__(self, *, waiters_max: int = WAITERS_MAX) -> None:
        self._waiters_max = waiters_max
        self._waiting: list[tuple[Offset, int, asyncio.Future[None]]] = []
        self._numbers = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    async def wait_past(self, offset: Offset) -> None:
        """Wait until there is a record at `offset`; the caller has checked in the same turn that there is none yet.

        Raises:
            OverloadedError: too many readers wait.
            QuiverError: the error passed to `fail`.
        """
        if self._live >= self._waiters_max:
            raise OverloadedError(f"not done: {self._waiters_max} readers already wait for this partition; retry later")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._numbers += 1
        self._live += 1
        heapq.heappush(self._waiting, (offset, self._numbers, done))
        try:
            await done
        finally:
            self._live -= 1
            self._compact()

    def wake(self, end_offset: Offset) -> None:
        """Wake the readers whose offset is below the new high watermark."""
        waiting = self._waiting
        while waiting and waiting[0][0] < end_offset:
            done = heapq.heappop(waiting)[2]
            if not done.done():
                done.set_result(None)

    def fail(self, error: QuiverError) -> None:
        """Fail every waiting reader."""
        waiting, self._waiting = self._waiting, []
        for _, _, done in waiting:
            if not done.done():
                done.set_exception(error)

    def _compact(self) -> None:
        """Drop cancelled waiters, which otherwise fill memory while no record arrives."""
        if len(self._waiting) > COMPACT_WAITERS_MIN and len(self._waiting) > 2 * self._live:
            self._waiting = [item for item in self._waiting if not item[2].done()]
            heapq.heapify(self._waiting)
