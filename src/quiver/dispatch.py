"""The entry of every request into a node, whether it came over the wire or through the node's own gateway.

A request is passed to the handler of its type, if `AccessControl` allows it. One that carries a metadata index
(`known_index`) first waits until this node has applied that much, so that it is judged by metadata that is no older
than its sender's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

import msgspec

from quiver.access import AccessControl
from quiver.access.rules import AUDITED, ResponseFilter, describe_operation
from quiver.clock import Clock
from quiver.errors import ConflictError, QuiverError, RequestError
from quiver.metadata import MetadataStore
from quiver.metadata.quotas import OWNED_QUOTAS
from quiver.model import TopicId
from quiver.security import PrincipalKind
from quiver.security.quotas import Quotas, Use
from quiver.wire.group_messages import ConfigureGroup, JoinGroup
from quiver.wire.messages import (
    AddPartitionsRequest,
    AnyRequest,
    CreateTopicRequest,
    RegisterConsumerRequest,
    RegisterProducerRequest,
)
from quiver.wire.requests import Request, request_name
from quiver.wire.security_messages import AUTHENTICATIONS
from quiver.wire.serving import Answer, Caller, RequestHandler

CREATIONS = frozenset((CreateTopicRequest, RegisterProducerRequest, RegisterConsumerRequest, JoinGroup, ConfigureGroup))
"""Requests that leave something behind that lasts."""
OWNED = CREATIONS | {AddPartitionsRequest}
"""Requests that may be refused because of what a user owns."""


class FlowWeights:
    """The weights by which principals and topics share the turns of a node; requests may name a topic by its id."""

    def __init__(self, store: MetadataStore, quotas: Quotas) -> None:
        self._store = store
        self._quotas = quotas

    def weight_of(self, principal: str) -> int:
        """See `quiver.turns.Weights`."""
        return self._quotas.weight_of(principal)

    def topic_weight_of(self, topic: str) -> int:
        """See `quiver.turns.Weights`."""
        topic_id = topic.removeprefix("#")
        if topic_id != topic and topic_id.isdecimal():
            row = self._store.view().topics.get(TopicId(int(topic_id)))
            topic = "" if row is None else row.name
        return self._quotas.topic_weight_of(topic)


class RequestDispatcher:
    """Pass each request to the handler of its type."""

    def __init__(self, store: MetadataStore, clock: Clock, access: AccessControl, quotas: Quotas | None = None) -> None:
        self._store = store
        self._quotas = quotas or Quotas()
        self._access = access
        self._clock = clock
        self._handlers: dict[type[Request[Any]], RequestHandler] = {}

    def add(self, handlers: Mapping[type[Request[Any]], RequestHandler]) -> None:
        """Serve these types of requests from now on."""
        self._handlers.update(handlers)

    def handle(self, caller: Caller, request: AnyRequest, payload: memoryview) -> Awaitable[Answer]:
        """Return the answer to a request, to be awaited; awaiting it raises errors of `quiver.errors`."""
        handler = self._handlers.get(type(request))
        if handler is None:
            raise RequestError(f"this node does not serve {request_name(request)}", code="unknown_request")
        is_free = caller.identity.principal.kind is PrincipalKind.NODE or type(request) in AUTHENTICATIONS
        if not is_free and self._quotas.is_active:
            answer: Awaitable[Answer] = self._handle_by_quota(self._quotas, handler, caller, request, payload)
        else:
            answer = self._handle(handler, caller, request, payload)
        return self._note_owned(answer) if type(request) in OWNED else answer

    async def _note_owned(self, answer: Awaitable[Answer]) -> Answer:
        """Count what the primary refuses because of what a user owns."""
        try:
            return await answer
        except ConflictError as error:
            if error.code in OWNED_QUOTAS and self._store.is_primary:
                self._quotas.refusals[OWNED_QUOTAS[error.code]] += 1
            raise

    async def _handle_by_quota(
        self, quotas: Quotas, handler: RequestHandler, caller: Caller, request: AnyRequest, payload: memoryview
    ) -> Answer:
        """Answer a client's request within its quotas; a node, which keeps the cluster alive, has none.

        The gateway of a node counts its clients' requests itself, and its own requests are a node's.
        """
        now_ms = self._clock.monotonic_ms()
        use = Use(bytes_in=len(payload), is_mutation=not request.is_read, is_creation=type(request) in CREATIONS)
        topic, principal = self._topic_of(request), caller.identity.principal
        error = quotas.admit_connection(caller.identity, now_ms) or quotas.admit(principal, use, now_ms)
        if error is None and topic and self._access.is_allowed(caller.identity, request, payload):
            # Whoever may not use a topic must not use up its quota either; the refusal follows below.
            error = quotas.admit_topic(topic, use, now_ms)
        waits = getattr(request, "wait_ms", 0) > 0
        if error is None and waits:
            error = quotas.begin_long_poll(principal, now_ms)
        if error is not None:
            raise error
        try:
            response, parts = await self._handle(handler, caller, request, payload)
        finally:
            if waits:
                quotas.end_long_poll(principal)
        quotas.charge(principal, topic, sum(map(len, parts)), self._clock.monotonic_ms())
        return response, parts

    def _topic_of(self, request: AnyRequest) -> str:
        topic_id = getattr(request, "topic_id", None)
        row = None if topic_id is None else self._store.view().topics.get(topic_id)
        return "" if row is None else row.name

    def _handle(
        self, handler: RequestHandler, caller: Caller, request: AnyRequest, payload: memoryview
    ) -> Awaitable[Answer]:
        if request.waits_for_index and request.known_index > self._store.applied_index:
            # Waiting takes one of the requests that may be in flight: nothing for strangers.
            identity = caller.identity
            describe = partial(describe_operation, request, caller.correlation_id)
            self._access.check_early(identity, self._access.permissions(identity), describe)
            return self._handle_later(handler, caller, request, payload)
        return self._handle_now(handler, caller, request, payload)

    async def _handle_later(
        self, handler: RequestHandler, caller: Caller, request: AnyRequest, payload: memoryview
    ) -> Answer:
        await self._store.wait_known(request.known_index, caller.wait_ms(self._clock.monotonic_ms()))
        return await self._handle_now(handler, caller, request, payload)

    def _handle_now(
        self, handler: RequestHandler, caller: Caller, request: AnyRequest, payload: memoryview
    ) -> Awaitable[Answer]:
        identity, keep = self._access.check(caller.identity, request, payload, caller.correlation_id)
        if identity is not caller.identity:
            caller = msgspec.structs.replace(caller, identity=identity)
        elif type(request) in AUDITED:
            return self._handle_audited(handler, caller, request, payload)
        if keep is not None:
            return self._handle_filtered(handler, caller, request, payload, keep)
        return handler(caller, request, payload)

    async def _handle_filtered(
        self, handler: RequestHandler, caller: Caller, request: AnyRequest, payload: memoryview, keep: ResponseFilter
    ) -> Answer:
        response, parts = await handler(caller, request, payload)
        return self._access.filter(caller.identity, keep, response), parts

    async def _handle_audited(
        self, handler: RequestHandler, caller: Caller, request: AnyRequest, payload: memoryview
    ) -> Answer:
        """Record a client's administrative change with its outcome; a node that forwards one has recorded it."""
        outcome = "unknown"
        try:
            answer = await handler(caller, request, payload)
            outcome = "done"
        except QuiverError as error:
            outcome = error.code
            raise
        else:
            return answer
        finally:
            if not caller.is_node:
                operation = describe_operation(request, caller.correlation_id)
                self._access.note_change(caller.identity, operation, outcome)
