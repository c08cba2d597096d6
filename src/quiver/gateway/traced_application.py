"""The application of a gateway that traces: a span for each call that produces or consumes.

Produced records carry the context of the call; a call that consumes links to those that its records carry. A call
continues the trace that its header `traceparent` names. Everything else is as in `RoutedApplication`, which knows
nothing of traces and is what runs while they are off.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from typing import Any, Final

import msgspec

from quiver.gateway.application import BoundRoute, RoutedApplication
from quiver.gateway.contract import ConsumeBatchQuery, ConsumeQuery, ProduceBatchBody, ProduceBody
from quiver.gateway.http import HttpRequest, HttpResponse, HttpResult
from quiver.security.identity import ConnectionIdentity
from quiver.security.permissions import Permissions
from quiver.tracing import TRACEPARENT, RequestSpan, Tracing

_OPERATIONS: Final[dict[type, str]] = {
    ProduceBody: "send",
    ProduceBatchBody: "send",
    ConsumeQuery: "receive",
    ConsumeBatchQuery: "receive",
}
_CARRIED: Final = re.compile(rb'"traceparent":"([0-9a-f-]{55})"')
"""A context in the headers of a returned record; in a message the quotes would be escaped."""


class TracedApplication(RoutedApplication):
    """Answer requests by the table of routes, and make spans of those that produce."""

    def __init__(self, *arguments: Any, tracing: Tracing, **options: Any) -> None:
        """Accept what `RoutedApplication` does, and what makes spans."""
        super().__init__(*arguments, **options)
        self._tracing = tracing

    def _pass_on(
        self,
        bound: BoundRoute,
        identity: ConnectionIdentity,
        permissions: Permissions,
        given: Any,
        request: HttpRequest,
    ) -> HttpResult:
        operation = _OPERATIONS.get(type(given))
        if operation is None:
            return super()._pass_on(bound, identity, permissions, given, request)
        name = f"{request.method} {bound.route.path}"
        span = self._tracing.start_request(name, given.topic, operation, request.headers)
        if span is None:
            return super()._pass_on(bound, identity, permissions, given, request)
        if operation == "send":
            given = _carry(given, span.traceparent)
        try:
            answer = super()._pass_on(bound, identity, permissions, given, request)
        except BaseException as error:
            span.fail(error)
            raise
        if isinstance(answer, HttpResponse):
            _finish(span, answer)
        elif isinstance(answer, asyncio.Future):
            answer.add_done_callback(lambda done: _finish(span, None if done.cancelled() else done.result()))
        else:
            return _wait(span, answer)
        return answer


def _carry(given: ProduceBody | ProduceBatchBody, traceparent: str) -> ProduceBody | ProduceBatchBody:
    """Return a body whose records carry a context, in place of an earlier one."""
    changes: dict[str, Any] = {"headers": {**(given.headers or {}), TRACEPARENT: traceparent}}
    changes["headers_b64"] = _without(given.headers_b64)
    if isinstance(given, ProduceBatchBody) and given.records is not None:
        changes["records"] = [
            msgspec.structs.replace(
                one,
                headers={**(one.headers or {}), TRACEPARENT: traceparent},
                headers_b64=_without(one.headers_b64),
            )
            if one.headers or one.headers_b64  # the others have those of the batch
            else one
            for one in given.records
        ]
    return msgspec.structs.replace(given, **changes)


def _without(headers: dict[str, str] | None) -> dict[str, str] | None:
    return None if headers is None else {name: value for name, value in headers.items() if name != TRACEPARENT}


async def _wait(span: RequestSpan, answer: Coroutine[Any, Any, HttpResponse]) -> HttpResponse:
    try:
        response = await answer
    except BaseException as error:
        span.fail(error)
        raise
    _finish(span, response)
    return response


def _finish(span: RequestSpan, response: HttpResponse | None) -> None:
    """End the span of a request; without a response the client has disconnected."""
    if response is not None:
        span.link(found.decode() for found in _CARRIED.findall(response.body))
    if response is None:
        span.finish(status=0, error_code="disconnected")
    else:
        span.finish(status=response.status, error_code=response.error_code)
