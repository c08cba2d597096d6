"""From a request to the handler of its route, and from what that gives to a response.

It owns the bound routes and nothing else. Whatever a handler raises on purpose becomes a failure in the contract's
form; what it raises otherwise is a bug, which the server logs and answers with 500.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import msgspec

from quiver.errors import QuiverError, invariant
from quiver.gateway.contract import Answer
from quiver.gateway.failures import failure, failure_of
from quiver.gateway.http import Answer as HttpAnswer
from quiver.gateway.http import HttpRequest, HttpResponse
from quiver.gateway.parameters import ParameterReader
from quiver.gateway.routes import ROUTES, Route

Result = Answer | HttpResponse
Handler = Callable[[Any], Coroutine[Any, Any, Result] | asyncio.Future[HttpResponse] | Result]
"""Carry out a call, given its parameters: at once, as a future of the response, or as a coroutine."""

_encode = msgspec.json.Encoder().encode


class BoundRoute:
    """A route with its handler and the reader of its parameters."""

    __slots__ = ("handler", "reader", "route", "segments")

    def __init__(self, route: Route, handler: Handler) -> None:
        self.route = route
        self.handler = handler
        self.reader = ParameterReader(route.parameters)
        self.segments = route.path.split("/")

    def match(self, segments: list[str]) -> dict[str, str] | None:
        """Return the parameters in a path, or None if the path is another's."""
        if len(segments) != len(self.segments):
            return None
        values: dict[str, str] = {}
        for own, given in zip(self.segments, segments, strict=True):
            if own.startswith("{") and given:
                values[own[1:-1]] = given
            elif own != given:
                return None
        return values


class RoutedApplication:
    """Answer requests by the table of routes."""

    def __init__(self, handlers: Mapping[str, Handler], *, browser_page: HttpResponse) -> None:
        """Take a handler for the name of every route, and what browsers are shown at the root."""
        self._browser_page = browser_page
        names = {route.name for route in ROUTES}
        invariant(names == set(handlers), "every route has a handler", unbound=names ^ set(handlers))
        bound = [BoundRoute(route, handlers[route.name]) for route in ROUTES]
        self._exact = {(one.route.method, one.route.path): one for one in bound if "{" not in one.route.path}
        self._patterns = [one for one in bound if "{" in one.route.path]
        self._paths = {one.route.path for one in bound}

    def handle(self, request: HttpRequest) -> HttpAnswer:
        """Find the route, read the parameters, call the handler."""
        method = "GET" if request.method == "HEAD" else request.method
        if request.path == "/" and method == "GET" and b"text/html" in request.headers.get(b"accept", b""):
            return self._browser_page
        values: dict[str, str] = {}
        bound = self._exact.get((method, request.path))
        if bound is None:
            found = self._search(method, request.path)
            if isinstance(found, HttpResponse):
                return found
            bound, values = found
        if bound.route.changes and (refused := _refuse_guest(request)):
            return refused
        try:
            answer = bound.handler(bound.reader.read(values, request.query, request.body))
        except QuiverError as error:
            return failure_of(error)
        if isinstance(answer, asyncio.Future):
            return answer
        if isinstance(answer, Answer | HttpResponse):
            return respond(bound.route, answer)
        return _finish(bound.route, answer)

    def refuse(self, status: int, code: str, message: str) -> HttpResponse:
        """Return a failure of the server itself."""
        return failure(status, code, message)

    def route_of(self, request: HttpRequest) -> str:
        """Return the path of a request's route as it stands in the table, for counting; empty if it has none."""
        if request.path in self._paths:
            return request.path
        method = "GET" if request.method == "HEAD" else request.method
        found = self._search(method, request.path)
        return "" if isinstance(found, HttpResponse) else found[0].route.path

    def _search(self, method: str, path: str) -> tuple[BoundRoute, dict[str, str]] | HttpResponse:
        segments = path.split("/")
        allowed = {allowed_method for allowed_method, known in self._exact if known == path}
        for bound in self._patterns:
            values = bound.match(segments)
            if values is None:
                continue
            if bound.route.method == method:
                return bound, values
            allowed.add(bound.route.method)
        if not allowed:
            return failure(404, "unknown_path", f"there is no {path}; GET /docs lists what there is")
        response = failure(405, "unknown_method", f"{path} is not there for {method}")
        return msgspec.structs.replace(response, headers=(("Allow", ", ".join(sorted(allowed))),))


def respond(route: Route, result: Result) -> HttpResponse:
    """Return what a handler gave as a response."""
    if isinstance(result, HttpResponse):
        return result
    return HttpResponse(status=route.success, body=_encode(result))


async def _finish(route: Route, answer: Awaitable[Result]) -> HttpResponse:
    try:
        return respond(route, await answer)
    except QuiverError as error:
        return failure_of(error)


def _refuse_guest(request: HttpRequest) -> HttpResponse | None:
    """Refuse what changes something if a page of another site sends it, or HEAD asks for it.

    Browsers alone send these headers, and say by them whose page it is; without this any page that a developer visits
    could use the queue on his machine.
    """
    if request.method == "HEAD":
        response = failure(405, "unknown_method", f"{request.path} is not there for HEAD")
        return msgspec.structs.replace(response, headers=(("Allow", "GET"),))
    headers = request.headers
    origin = headers.get(b"origin")
    is_foreign = headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
    if is_foreign or (origin is not None and origin.partition(b"://")[2] != headers.get(b"host")):
        return failure(403, "other_site", "not done: pages of other sites may not use this")
    return None
