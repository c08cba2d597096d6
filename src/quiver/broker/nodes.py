"""The other nodes, as this one asks things of them: by id, by role, with addresses from the metadata.

Nothing here retries: an error says truthfully whether the request may have been done, and whoever asks knows whether
asking again is safe. A node that does not know the metadata yet asks its seeds, which hand on to the primary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

from quiver.client.transport import Transport
from quiver.errors import NotLeaderError, OutcomeUnknownError, UnavailableError
from quiver.metadata import Command, MetadataStore, Partition, View
from quiver.metadata.commands import encode_payload
from quiver.model import Buffer, NodeId
from quiver.wire.exchange import Request, Response
from quiver.wire.messages import GetMembers, GetMetadata, MembersFound, SubmitCommand

R = TypeVar("R", bound=Response)

REQUEST_TIMEOUT_MS = 5_000
"""How long an answer of another node is waited for: longer than an election takes."""


class Nodes:
    """The nodes of the cluster, seen from one of them; `seeds` are those whose addresses it was started with."""

    def __init__(self, store: MetadataStore, transport: Transport, *, seeds: Mapping[NodeId, str]) -> None:
        self._store = store
        self._transport = transport
        self._seeds = dict(sorted(seeds.items()))
        self._turns = count()

    async def ask(self, node: NodeId, request: Request[R], payload: Sequence[Buffer] = ()) -> R:
        """Ask a node.

        Raises:
            UnavailableError: not done; its address is not known, or it was not reached.
            QuiverError: what the node answered, or `OutcomeUnknownError` if its answer was lost.
        """
        broker = self._store.view().brokers.get(node)
        address = self._seeds.get(node) if broker is None else broker.wire_address
        if address is None:
            raise UnavailableError(f"not done: the address of node {node} is not known here yet")
        response, _ = await self._transport.call(address, request, payload, timeout_ms=REQUEST_TIMEOUT_MS)
        return response

    async def ask_primary(self, request: Request[R], payload: Sequence[Buffer] = ()) -> R:
        """Ask the primary, or, if it is not known here, a seed, which hands on; raises as `ask` does."""
        primary = self._store.primary
        if primary is None and self._seeds:
            seeds = list(self._seeds)
            primary = seeds[next(self._turns) % len(seeds)]
        if primary is None:
            raise UnavailableError("not done: no primary is known here yet")
        return await self.ask(primary, request, payload)

    async def submit(self, command: Command[Any]) -> None:
        """Have a command carried out on the metadata; raises as `MetadataStore.submit` and `ask` do."""
        if self._store.is_primary:
            await self._store.submit(command)
        else:
            await self.ask_primary(SubmitCommand(), [encode_payload(command)])

    async def catch_up(self) -> View:
        """Return the metadata as it is here once that is no older than this call; raises as `ask` does."""
        found = await self.ask_primary(GetMetadata(topics=(), is_linearizable=True))
        await self._store.wait_applied(found.index)
        return self._store.view()

    async def find_members(self, partition: Partition) -> MembersFound:
        """Ask a partition's leader who belongs to its group.

        Raises:
            UnavailableError: no leader was found that could prove that it is one.
        """
        asked: set[NodeId] = set()
        waiting = [node for node in (partition.leader, *partition.replicas) if node is not None]
        while waiting:
            node = waiting.pop(0)
            if node in asked:
                continue
            asked.add(node)
            try:
                return await self.ask(node, GetMembers(group=partition.group_id))
            except NotLeaderError as error:
                if error.leader is not None:
                    waiting.insert(0, error.leader)
            except (UnavailableError, OutcomeUnknownError):
                continue  # a question may be asked of the next one, whatever became of it
        raise UnavailableError(f"nobody who was asked could prove that it leads group {partition.group_id}")
