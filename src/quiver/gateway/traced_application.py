"""The application of a gateway that traces: a span for each produce call, whose context its records carry.

A call continues the trace that its header `traceparent` names. Everything else is as in `RoutedApplication`, which
knows nothing of traces and is what runs while they are off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from quiver.gateway.application import BoundRoute, RoutedApplication
from quiver.gateway.contract import ProduceBatchBody, ProduceBody
from quiver.gateway.http import HttpRequest, HttpResponse, HttpResult
from quiver.security.identity import ConnectionIdentity
from quiver.security.permissions import Permissions
from quiver.tracing import TRACEPARENT, RequestSpan, Tracing


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
        if not isinstance(given, ProduceBody | ProduceBatchBody):
            return super()._pass_on(bound, identity, permissions, given, request)
        span = self._tracing.start_request(f"{request.method} {bound.route.path}", given.topic, request.headers)
        if span is None:
            return super()._pass_on(bound, identity, permissions, given, request)
        try:
            answer = super()._pass_on(bound, identity, permissions, _carry(given, span.traceparent), request)
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
    if response is None:
        span.finish(status=0, error_code="disconnected")
    else:
        span.finish(status=response.status, error_code=response.error_code)
