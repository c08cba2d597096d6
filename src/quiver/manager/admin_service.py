"""What any node answers about the cluster, and where it takes what only the primary can do.

Reads are answered from this node's own copy of the metadata, at most `metadata.staleness_ms_max` old, and no older than
the index that the asker knows already; linearizable ones by the primary. What changes something is done on the primary
(`changes`); every other node hands it on (`handing_on`). Nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from quiver.client.transport import Transport
from quiver.clock import Clock
from quiver.config import ManagerSettings
from quiver.errors import NotAllowedError, UnavailableError
from quiver.manager import describe
from quiver.manager.changes import ChangeRequest, Changes, Heartbeats
from quiver.manager.forwarding import Answer, Forwarder
from quiver.metadata import MetadataStore
from quiver.model import Index, NodeId
from quiver.tasks import timeout
from quiver.wire.holds import ListHolds
from quiver.wire.messages import (
    BrokerHeartbeatRequest,
    GetMetadata,
    ListClients,
    ListMoves,
    MetadataFound,
    SubmitCommand,
)
from quiver.wire.serving import Caller

AdministrativeRequest = GetMetadata | ListClients | ListMoves | ListHolds | ChangeRequest
"""What is answered here."""

WAIT_SHARE = 0.8
"""How much of a caller's time may pass until this node knows what the caller does; the rest is for saying no."""


class AdminService:
    """One node's answers about the cluster. `heartbeats` is None on nodes that are no managers."""

    def __init__(
        self,
        node: NodeId,
        store: MetadataStore,
        transport: Transport,
        *,
        clock: Clock,
        settings: ManagerSettings,
        seeds: Mapping[NodeId, str] | None = None,
        heartbeats: Heartbeats | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._changes = Changes(store, clock=clock, settings=settings, heartbeats=heartbeats)
        self._route = Forwarder(node, store, transport, clock=clock, seeds=seeds)

    async def handle(self, caller: Caller, request: AdministrativeRequest, payload: memoryview) -> Answer:
        """Answer a request; raises errors of `quiver.errors`, each true about whether it was done."""
        match request:
            case GetMetadata(is_linearizable=True):
                return await self._route.carry_out(
                    request, payload, deadline_ms=caller.deadline_ms, locally=partial(self._read_current, request)
                )
            case GetMetadata():
                await self._wait_known(request.known_index, caller)
                view = await self._store.read()
                return describe.describe_metadata(view, request, primary=self._store.primary), ()
            case ListClients():
                await self._wait_known(request.known_index, caller)
                view = await self._store.read()
                now_ms, alive_ms = self._clock.wall_ms(), self._settings.client_alive_ms
                return describe.describe_clients(view, request, now_ms=now_ms, alive_ms=alive_ms), ()
            case ListMoves():
                return describe.describe_moves(await self._store.read()), ()
            case ListHolds():
                await self._wait_known(request.known_index, caller)
                return describe.describe_holds(await self._store.read()), ()
            case _:
                return await self._change(caller, request, payload)

    async def _read_current(self, request: GetMetadata) -> tuple[MetadataFound, tuple[()]]:
        view = await self._store.read(linearizable=True)
        return describe.describe_metadata(view, request, primary=self._store.primary), ()

    async def _wait_known(self, index: Index, caller: Caller) -> None:
        """Wait until this node knows as much as the asker."""
        if self._store.applied_index >= index:
            return
        try:
            async with timeout(caller.remaining_ms(self._clock.monotonic_ms()) * WAIT_SHARE / 1000):
                await self._store.wait_applied(index)
        except TimeoutError:
            message = f"this node knows the metadata up to {self._store.applied_index}, not yet up to {index}"
            raise UnavailableError(message, code="behind") from None

    async def _change(self, caller: Caller, request: ChangeRequest, payload: memoryview) -> Answer:
        if isinstance(request, SubmitCommand | BrokerHeartbeatRequest) and not caller.is_node:
            raise NotAllowedError("not done: only nodes may ask for this")
        return await self._route.carry_out(
            request,
            payload,
            deadline_ms=caller.deadline_ms,
            locally=partial(self._changes.carry_out, request, payload),
        )
