"""The way of a request to the primary, wherever it is: done here, or handed on to the node that is taken for it.

It owns the tries and what may be said about them in the end. A try that was certainly not done is made again until the
caller's time is over: while managers elect, callers wait instead of failing. A try that was perhaps done is made again
only if the request bears that; and once one was perhaps done, nothing less is ever said. A request is handed on once:
the node that gets it does it, or says who could.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from quiver.client.transport import Transport
from quiver.clock import Clock
from quiver.errors import (
    DiskFullError,
    NotLeaderError,
    OutcomeUnknownError,
    OverloadedError,
    QuiverError,
    UnavailableError,
)
from quiver.metadata import MetadataStore, NotPrimaryError
from quiver.model import Buffer, NodeId
from quiver.wire.exchange import Request, Response
from quiver.wire.holds import PlaceHoldRequest, ReleaseHoldRequest
from quiver.wire.messages import (
    BrokerHeartbeatRequest,
    ConfigureTopicRequest,
    CreateTopicRequest,
    DrainBroker,
    GetMetadata,
    RebalanceBrokers,
    RegisterConsumerRequest,
    RegisterProducerRequest,
)

PAUSE_MS_MIN = 20
"""How long is waited before the first new try; then twice as long each time."""
PAUSE_MS_MAX = 500
TRY_MS_MIN = 100
"""How much time a new try needs: one that is cut short would leave open what is known to be not done."""
TRY_MS_MAX = 3_000
"""How long one try of a request that can be repeated may take: a primary that hangs must not use up all the time."""
FINAL_CODES = frozenset(("brokers_dead", "behind"))
"""Why something was not done now that a new try within the same call does not mend."""

Answer = tuple[Response, Sequence[Buffer]]


class Forwarder:
    """The way to the primary from one node; `seeds` are the managers that it was started with."""

    def __init__(
        self,
        node: NodeId,
        store: MetadataStore,
        transport: Transport,
        *,
        clock: Clock,
        seeds: Mapping[NodeId, str] | None = None,
    ) -> None:
        self._node = node
        self._store = store
        self._transport = transport
        self._clock = clock
        self._seeds = dict(seeds or {})

    async def carry_out(
        self,
        request: Request[Any],
        payload: Buffer,
        *,
        deadline_ms: int,
        locally: Callable[[], Awaitable[Answer]],
    ) -> Answer:
        """Have the primary answer a request; `locally` does it on this node. The deadline is by the monotonic clock.

        Raises:
            UnavailableError: not done; no primary was found in time, or it could not do it now.
            OutcomeUnknownError: perhaps done.
            QuiverError: what the primary said.
        """
        hint: NodeId | None = None
        pause_ms = PAUSE_MS_MIN
        unknown: OutcomeUnknownError | None = None
        while True:
            try:
                return await self._try(request, payload, hint, deadline_ms=deadline_ms, locally=locally)
            except (UnavailableError, OutcomeUnknownError) as error:
                failure: QuiverError = error
            if isinstance(failure, OutcomeUnknownError):
                unknown = failure
            is_over = self._clock.monotonic_ms() + pause_ms + TRY_MS_MIN >= deadline_ms
            if is_over or request.is_handed_on or not _may_repeat(request, failure):
                raise unknown or failure
            known, hint = hint, failure.leader if isinstance(failure, NotLeaderError) else None
            if hint is None or known is not None:  # a hint is followed at once, but not from one to the next
                await asyncio.sleep(pause_ms / 1000)
                pause_ms = min(2 * pause_ms, PAUSE_MS_MAX)

    async def _try(
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
        if request.is_handed_on or primary is None or primary == self._node:
            raise NotPrimaryError("not done: this node is not the primary", leader=self._store.primary)
        timeout_ms = max(1, deadline_ms - self._clock.monotonic_ms())
        if _bears_repeating(request):
            timeout_ms = min(timeout_ms, TRY_MS_MAX)
        handed_on = msgspec.structs.replace(request, is_handed_on=True)
        parts = (payload,) if len(payload) else ()
        response, data = await self._transport.call(self._address(primary), handed_on, parts, timeout_ms=timeout_ms)
        return response, (data,) if len(data) else ()

    def _address(self, node: NodeId) -> str:
        broker = self._store.view().brokers.get(node)
        address = self._seeds.get(node) if broker is None else broker.wire_address
        if address is None:
            raise UnavailableError(f"not done: the address of the primary, node {node}, is not known here yet")
        return address


def _may_repeat(request: Request[Any], failure: QuiverError) -> bool:
    if isinstance(failure, OutcomeUnknownError):
        return _bears_repeating(request)
    return not isinstance(failure, OverloadedError | DiskFullError) and failure.code not in FINAL_CODES


def _bears_repeating(request: Request[Any]) -> bool:
    """Tell whether a request that was perhaps done may be made again: it finds what it made, or changes nothing."""
    match request:
        case CreateTopicRequest():
            return bool(request.request_id)
        case RegisterConsumerRequest():
            return bool(request.request_id) or request.consumer_id is not None
        case RegisterProducerRequest():  # it begins one more epoch, and the caller only ever hears of the last
            return bool(request.name) or request.producer_id is not None
        case PlaceHoldRequest() | ReleaseHoldRequest():
            return True
        case ConfigureTopicRequest() | DrainBroker() | RebalanceBrokers() | BrokerHeartbeatRequest() | GetMetadata():
            return True
        case _:
            return False
