"""A node's requests to other nodes: by id, to the primary, and to the leader of a partition's group.

Addresses come from the metadata, from the seeds that the node was started with, or, for a primary that is newer than
both, from other nodes (`find_primary`). `ask` and what builds on it make one
attempt: their callers know whether a repeat is safe. `forward` serves a client's request that only the primary can do,
on this node if it is the primary, else by forwarding it; it retries until the caller's deadline, so that callers wait
during an election instead of failing. Its rules:

- An attempt that was not done is repeated. One of unknown outcome is repeated only if the request is idempotent.
- Once an attempt had an unknown outcome, the final error is *unknown*, also if the last attempt is refused: a topic
  that "exists already" may be the one that the first attempt created.
- A request is forwarded once: its receiver does it, or answers who could.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from quiver import __version__
from quiver.addresses import parse_address
from quiver.backoff import Backoff
from quiver.clock import Clock, Rng
from quiver.errors import (
    DiskFullError,
    NotLeaderError,
    OutcomeUnknownError,
    OverloadedError,
    QuiverError,
    RequestError,
    UnavailableError,
)
from quiver.metadata import Command, MetadataStore, NotPrimaryError, PartitionRow, View
from quiver.metadata.commands import encode_payload
from quiver.model import Buffer, NodeId
from quiver.routing.retry import as_unknown
from quiver.routing.transport import Transport
from quiver.wire.messages import GetMembers, GetMetadata, MembersFound, SubmitCommand
from quiver.wire.requests import R, Request
from quiver.wire.serving import Answer

REQUEST_TIMEOUT_MS = 5_000
"""Timeout of a request to another node: longer than an election takes."""
BACKOFF_MS_FIRST = 25
BACKOFF_MS_MAX = 500
ATTEMPT_MS_MIN = 100
"""Time that a further attempt needs: a shorter one could leave unknown what is known to be not done."""
ATTEMPT_MS_MAX = 3_000
"""Timeout of one attempt of an idempotent request: a primary that hangs must not use up the caller's time."""
FINAL_CODES = frozenset(("brokers_dead", "behind"))
"""Refusals that a further attempt within the same call does not change."""


class NodeRouter:
    """The requests of one node to the others; `seeds` are the managers that it was started with."""

    def __init__(
        self,
        node: NodeId,
        store: MetadataStore,
        transport: Transport,
        *,
        clock: Clock,
        rng: Rng,
        seeds: Mapping[NodeId, str] | None = None,
    ) -> None:
        self._node = node
        self._store = store
        self._transport = transport
        self._clock, self._rng = clock, rng
        self._seeds = dict(sorted((seeds or {}).items()))
        self._learned: dict[NodeId, str] = {}
        self._turns = count()
        self._catch_ups = 0
        self._catching_up = asyncio.Lock()
        self._caught_up: tuple[int, QuiverError | None] = (0, None)
        """How many calls of `catch_up` had been made when its last request was sent, and the error that it met."""

    # -- one attempt -----------------------------------------------------------------------------

    async def ask(self, node: NodeId, request: Request[R], payload: Sequence[Buffer] = ()) -> R:
        """Ask a node.

        Raises:
            UnavailableError: not done; its address is not known, or it was not reached.
            QuiverError: the node's own error, or `OutcomeUnknownError` if its answer was lost.
        """
        address = self._address(node)
        response, _ = await self._transport.call(address, request, payload, timeout_ms=REQUEST_TIMEOUT_MS)
        return response

    async def ask_primary(self, request: Request[R], payload: Sequence[Buffer] = ()) -> R:
        """Ask the primary; raises as `ask`.

        While this node does not know the primary, another node is asked who it is. That one does not forward the
        request: what a node says of itself is accepted from itself alone.
        """
        primary = self._store.primary
        if primary is None or self.find_address(primary) is None:
            primary = await self.find_primary()
        return await self.ask(primary, request, payload)

    async def find_primary(self) -> NodeId:
        """Ask the next of the known managers, or of all known nodes, who the primary is; learn where the nodes are.

        Raises:
            UnavailableError: no node is known, or the one asked does not know a primary.
            QuiverError: as `ask`.
        """
        known = self._known_managers() or sorted(self._store.view().brokers.keys() - {self._node})
        if not known:
            raise UnavailableError("not done: this node does not know the primary yet")
        asked = known[next(self._turns) % len(known)]
        found = await self.ask(asked, GetMetadata(topics=()))
        self._learned = {info.node: info.wire_address for info in found.nodes}
        if found.primary is None:
            raise UnavailableError(f"not done: node {asked} does not know a primary, either")
        return found.primary

    def find_address(self, node: NodeId) -> str | None:
        """Return the address of a node, if it is known: by the metadata, from other nodes, or as a seed."""
        broker = self._store.view().brokers.get(node)
        return broker.wire_address if broker is not None else self._learned.get(node, self._seeds.get(node))

    def _known_managers(self) -> list[NodeId]:
        """Return the managers of the last configuration in this node's log, and the seeds: any of them may be gone."""
        voters = self._store.members.voters if self._store.is_attached else ()
        known = {*voters, *self._seeds} - {self._node}
        return sorted(node for node in known if self.find_address(node) is not None)

    async def submit(self, command: Command[Any]) -> None:
        """Submit a command to the metadata; raises as `MetadataStore.submit` and `ask` do."""
        if self._store.is_primary:
            await self._store.submit(command)
        else:
            request = SubmitCommand(level_max=self._store.level_max, program=__version__)
            await self.ask_primary(request, [encode_payload(command)])

    async def catch_up(self) -> View:
        """Return this node's metadata once it is no older than this call; raises as `ask` does.

        Calls that are made while a request is under way share the next one, which is sent after all of them.
        """
        self._catch_ups += 1
        call = self._catch_ups
        async with self._catching_up:
            if self._caught_up[0] < call:
                sharing = self._catch_ups  # later calls need another request
                self._caught_up = (sharing, await self._try_catch_up())
            error = self._caught_up[1]
        if error is not None:
            raise error
        return self._store.view()

    async def _try_catch_up(self) -> QuiverError | None:
        try:
            found = await self.ask_primary(GetMetadata(topics=(), is_linearizable=True))
            await self._store.wait_applied(found.index)
        except QuiverError as error:
            return error
        return None

    async def find_members(self, partition: PartitionRow, *, everywhere: bool = False) -> MembersFound:
        """Ask a partition's leader for the members of its group.

        With `everywhere` all replicas are asked, even if one has answered: those of a deleted topic open when asked.

        Raises:
            UnavailableError: no replica answered that could prove its leadership.
        """
        asked: set[NodeId] = set()
        found: MembersFound | None = None
        waiting = [node for node in (partition.leader, *partition.replicas) if node is not None]
        while waiting and (found is None or everywhere):
            node = waiting.pop(0)
            if node in asked:
                continue
            asked.add(node)
            try:
                found = await self.ask(node, GetMembers(group=partition.group_id))
            except NotLeaderError as error:
                if error.leader is not None:
                    waiting.insert(0, error.leader)
            except (UnavailableError, OutcomeUnknownError):
                continue  # a read: the next node may be asked whatever the outcome was
        if found is not None:
            return found
        raise UnavailableError(
            f"not done: none of nodes {sorted(asked)} proved that it leads group {partition.group_id}"
        )

    # -- on behalf of a client -------------------------------------------------------------------

    async def forward(
        self,
        request: Request[Any],
        payload: Buffer,
        *,
        deadline_ms: int,
        locally: Callable[[], Awaitable[Answer]],
        on_behalf_of: str = "",
    ) -> Answer:
        """Have the primary do a request; `locally` does it on this node. The deadline is by the monotonic clock.

        The primary decides whether `on_behalf_of`, by an identity, may; without it, the request is this node's own.

        Raises:
            UnavailableError: not done; no primary was found in time, or it could not do it now.
            OutcomeUnknownError: the outcome is unknown.
            QuiverError: the primary's own error.
        """
        if on_behalf_of:
            request = msgspec.structs.replace(request, on_behalf_of=on_behalf_of)
        hint: NodeId | None = None
        backoff = Backoff(self._rng, first_ms=BACKOFF_MS_FIRST, max_ms=BACKOFF_MS_MAX)
        unknown: OutcomeUnknownError | None = None
        while True:
            try:
                return await self._attempt(request, payload, hint, deadline_ms=deadline_ms, locally=locally)
            except QuiverError as error:
                failure = error
            if isinstance(failure, OutcomeUnknownError):
                unknown = failure
            known, hint = hint, failure.leader if isinstance(failure, NotLeaderError) else None
            # The first hint is followed immediately; a chain of hints is not, or two nodes could bounce a request.
            wait_ms = 0.0 if hint is not None and known is None else backoff.next_ms()
            is_over = self._clock.monotonic_ms() + wait_ms + ATTEMPT_MS_MIN >= deadline_ms
            if is_over or request.is_forwarded or not _is_retried(request, failure):
                raise failure if unknown is None else as_unknown(unknown, failure)
            if wait_ms:
                await asyncio.sleep(wait_ms / 1000)

    async def _attempt(
        self,
        request: Request[Any],
        payload: Buffer,
        hint: NodeId | None,
        *,
        deadline_ms: int,
        locally: Callable[[], Awaitable[Answer]],
    ) -> Answer:
        if self._store.is_primary:
            return await locally()
        primary = hint or self._store.primary
        if request.is_forwarded or primary is None or primary == self._node:
            raise NotPrimaryError(f"not done: node {self._node} is not the primary", leader=self._store.primary)
        timeout_ms = max(1, deadline_ms - self._clock.monotonic_ms())
        if request.is_idempotent:
            timeout_ms = min(timeout_ms, ATTEMPT_MS_MAX)
        forwarded = msgspec.structs.replace(request, is_forwarded=True)
        parts = (payload,) if len(payload) else ()
        response, data = await self._transport.call(self._address(primary), forwarded, parts, timeout_ms=timeout_ms)
        return response, (data,) if len(data) else ()

    def _address(self, node: NodeId) -> str:
        address = self.find_address(node)
        if address is None:
            raise UnavailableError(f"not done: this node does not know the address of node {node} yet")
        try:
            parse_address(address)
        except RequestError as error:  # a bad row must not look like a bad request of our caller's
            raise UnavailableError(f"not done: node {node} cannot be reached: {error.message}") from error
        return address


def _is_retried(request: Request[Any], failure: QuiverError) -> bool:
    if isinstance(failure, OutcomeUnknownError):
        return request.is_idempotent
    if not isinstance(failure, UnavailableError):
        return False  # the primary's own refusal
    return not isinstance(failure, OverloadedError | DiskFullError) and failure.code not in FINAL_CODES
