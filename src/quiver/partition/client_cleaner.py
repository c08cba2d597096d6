"""Drops the state of clients that are gone: the leader compares the state with the metadata, and proposes *forget*.

State is dropped by two rules only:
- *removed*: the client's registration is gone from the metadata, because it expired or was forgotten. Ids are assigned
  in ascending order and never reused, so a client that the metadata does not list, with an id below the next one to
  assign, is gone for good, however old the metadata is. The entry carries the metadata's index: from then on the
  partition admits a client without state only if it was found registered at that index or later. So a delayed retry of
  a removed producer is refused, and never appended a second time.
- *idle*: the table of producers is nearly full, and a producer has not been active for `partition.dedup_window_ms`. The
  time is measured by the leader's monotonic clock, from the log index that it had applied by then: a new leader waits
  for a whole window, and a clock that jumps drops nothing.

Nothing here has to succeed: what is left is found again by the next scan, or by the next leader.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from quiver.model import ConsumerId, Index, ProducerId
from quiver.partition.entries import ForgetEntry
from quiver.partition.proposal_gate import ProposalGate
from quiver.partition.state import PartitionState

IDS_PER_ENTRY = 1_000
"""Clients that one entry drops: applying it must not hold the event loop."""
IDS_PER_STEP = 2_000
"""Clients compared with the metadata before others get a turn of the event loop."""
MARKS_PER_WINDOW = 8
"""Marks that divide the window: an idle producer is dropped at most an eighth of the window late."""

Id = TypeVar("Id", ProducerId, ConsumerId)


class RegisteredClients(Protocol):
    """The registered clients in a node's metadata at one index."""

    @property
    def index(self) -> Index:
        """Return the metadata index."""
        ...

    def gone_producers(self, ids: Iterable[ProducerId]) -> list[ProducerId]:
        """Return those of these producers that were registered and are not any more."""
        ...

    def gone_consumers(self, ids: Iterable[ConsumerId]) -> list[ConsumerId]:
        """Return those of these consumers that were registered and are not any more."""
        ...


FindClients = Callable[[], RegisteredClients | None]
"""Returns the registered clients now; None while the cluster has nodes that do not know *forget* entries."""


class ClientCleaner:
    """Drops the state of gone clients from one partition, on its leader."""

    def __init__(self, gate: ProposalGate, state: PartitionState, *, idle_ms: int) -> None:
        self.find_clients: FindClients = lambda: None
        self.is_scan_due = True
        """Whether the next `clean` compares the whole state with the metadata."""
        self._gate = gate
        self._state = state
        self._idle_ms = idle_ms
        self._removed_producers: set[ProducerId] = set()
        self._removed_consumers: set[ConsumerId] = set()
        self._marks: deque[tuple[float, Index]] = deque()
        """Monotonic times in ms, and the index that was applied by then, oldest first."""
        gate.on_new_term.append(self._reset)

    def note_removed(self, *, producers: Iterable[ProducerId], consumers: Iterable[ConsumerId]) -> bool:
        """Check these clients in the next `clean`; return whether any of them has state here."""
        self._removed_producers.update(id_ for id_ in producers if id_ in self._state.producers)
        self._removed_consumers.update(id_ for id_ in consumers if id_ in self._state.cursors)
        return bool(self._removed_producers or self._removed_consumers)

    async def clean(self) -> None:
        """Drop the state of clients that are gone now.

        Raises:
            QuiverError: some were not dropped; a later call retries.
        """
        clients = self.find_clients()
        if clients is None:
            return
        producers: Sequence[ProducerId] = tuple(self._removed_producers)
        consumers: Sequence[ConsumerId] = tuple(self._removed_consumers)
        self._removed_producers.clear()
        self._removed_consumers.clear()
        if self.is_scan_due:
            # A session may be left without a cursor, if it began while its consumer was dropped.
            producers, consumers = self._state.producers.ids(), tuple(self._state.cursors | self._state.sessions)
            self.is_scan_due = False
        try:
            gone = await _filter_in_steps(producers, clients.gone_producers)
            await self._forget(clients.index, gone, ())
            await self._forget(clients.index, (), await _filter_in_steps(consumers, clients.gone_consumers))
            await self._forget_idle()
        except BaseException:
            self.is_scan_due = True
            raise

    async def _forget(
        self, metadata_index: Index, producers: Sequence[ProducerId], consumers: Sequence[ConsumerId]
    ) -> None:
        for first in range(0, max(len(producers), len(consumers)), IDS_PER_ENTRY):
            part = slice(first, first + IDS_PER_ENTRY)
            entry = ForgetEntry(metadata_index, tuple(producers[part]), tuple(consumers[part]))
            await self._gate.wait_ready()
            await self._gate.propose_entry(entry)

    async def _forget_idle(self) -> None:
        """Drop idle producers, while nothing is proposed: none of them can become active before its state is gone.

        Otherwise the state of a batch that is in flight now would be dropped with it, and a retry appended again.
        """
        if self._state.producers.is_nearly_full:
            await self._gate.wait_ready()  # a new term voids the marks: before the first one, not after it
        self._mark()
        while self._state.producers.is_nearly_full and self._find_idle():
            async with self._gate.quiesce():
                idle = self._find_idle()
                if not idle or not self._gate.is_current:
                    return
                await self._gate.propose_entry(ForgetEntry(Index(0), tuple(idle)))

    def _mark(self) -> None:
        """Remember the index that is applied now, at most a few times per window."""
        now_ms = asyncio.get_running_loop().time() * 1000
        marks = self._marks
        if not marks or now_ms - marks[-1][0] >= self._idle_ms / MARKS_PER_WINDOW:
            marks.append((now_ms, self._state.applied_index))
        while len(marks) > 1 and now_ms - marks[1][0] >= self._idle_ms:
            marks.popleft()

    def _find_idle(self) -> Sequence[ProducerId]:
        """Return producers that were idle for the whole window, as many as one entry drops."""
        now_ms = asyncio.get_running_loop().time() * 1000
        if not self._marks or now_ms - self._marks[0][0] < self._idle_ms:
            return ()
        return self._state.producers.find_idle(self._marks[0][1], ids_max=IDS_PER_ENTRY)

    def _reset(self) -> None:
        """Begin a term: everything has to be found again, and idle times are not known yet."""
        self.is_scan_due = True
        self._removed_producers.clear()
        self._removed_consumers.clear()
        self._marks.clear()


async def _filter_in_steps(ids: Sequence[Id], find: Callable[[Iterable[Id]], list[Id]]) -> list[Id]:
    """Return what `find` returns for all ids, and let others run between steps."""
    found: list[Id] = []
    left = iter(ids)
    while step := tuple(islice(left, IDS_PER_STEP)):
        found += find(step)
        await asyncio.sleep(0)
    return found
