"""Dispatch a request to the handler of its route, and turn the result into a response.

It owns the bound routes and nothing else. A `QuiverError` of a handler becomes a failure in the contract's form. Any
other exception is a bug, which the HTTP server logs and answers with 500.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec

from quiver.access.authentication import UnappliedTokenError
from quiver.clock import Clock
from quiver.errors import NotFoundError, QuiverError, invariant
from quiver.gateway.access import ROUTE_RULES, HttpAccess, request_id_of
from quiver.gateway.codec import ParameterDecoder, error_response, failure_response
from quiver.gateway.contract import Answer
from quiver.gateway.hosts import HostNames
from quiver.gateway.http import HttpHead, HttpRequest, HttpResponse, HttpResult
from quiver.gateway.http.messages import REQUEST_ID
from quiver.gateway.http_route import HttpRoute
from quiver.gateway.origins import NodeOrigins, allowing, preflight
from quiver.gateway.routes import EXEMPT_PATHS, PROBE_PATHS, ROUTES
from quiver.security import ANONYMOUS, Principal
from quiver.security.identity import ConnectionIdentity
from quiver.security.permissions import Permissions
from quiver.security.quotas import Quotas, Use

HandlerResult = Answer | HttpResponse
RouteHandler = Callable[..., Coroutine[Any, Any, HandlerResult] | asyncio.Future[HttpResponse] | HandlerResult]
"""Handle a call, given its parameters: return the result, a future of the response, or a coroutine.

The handler of a signed route also gets the principal in whose name it passes its request on; empty for the node itself.
That of another route with records gets the principal for whom their memory counts.
"""
NOT_AUDITED = frozenset(
    (
        "register_producer",
        "register_consumer",
        "receive_jobs",
        "ack_jobs",
        "nack_jobs",
        "extend_jobs",
        "reject_jobs",
        "console_session",
    )
)
"""Signed routes that are no administrative changes."""

PEEKED_BYTES = 1_024
"""Bytes of a body in which its topic is looked for; clients write it first."""
SITE_HEADERS = frozenset((b"origin", b"sec-fetch-site", b"user-agent"))
"""Headers without which a request is not from a page of a browser: `_is_cross_site` needs one of them."""
BROWSER_PATHS = frozenset(("/", "/console/"))
"""Paths at which browsers are sent to the console."""
_TOPIC_IN_QUERY = re.compile(rb"(?:^|&)topic=([^&]{1,300})")
_TOPIC_IN_BODY = re.compile(rb'"topic"\s*:\s*"([^"\\]{1,300})"')
_encode = msgspec.json.Encoder().encode


class BoundRoute:
    """A route with its handler and the decoder of its parameters."""

    __slots__ = ("decoder", "handler", "route", "segments")

    def __init__(self, route: HttpRoute, handler: RouteHandler) -> None:
        self.route = route
        self.handler = handler
        self.decoder = ParameterDecoder(route.parameters)
        self.segments = route.path.split("/")

    def match(self, segments: list[str]) -> dict[str, str] | None:
        """Return the parameters in a path, or None if the path does not match this route."""
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

    exempt_paths = EXEMPT_PATHS

    def __init__(
        self,
        handlers: Mapping[str, RouteHandler],
        *,
        hosts: HostNames,
        clock: Clock,
        quotas: Quotas | None = None,
        access: HttpAccess,
        catch_up: Callable[[], Awaitable[None]],
        routes: Sequence[HttpRoute] = ROUTES,
        browser_page: HttpResponse | None = None,
        origins: NodeOrigins | None = None,
    ) -> None:
        """Bind a handler to every route by name; `browser_page` is what browsers get at `BROWSER_PATHS`.

        Pages of `origins` may call; without them, only those of the gateway itself.
        `catch_up` waits until this node knows all metadata that the primary has.
        """
        self._browser_page = browser_page
        self._hosts = hosts
        self._origins = origins
        self._clock = clock
        self._quotas = quotas or Quotas()
        self._access = access
        self._catch_up = catch_up
        names = {route.name for route in ROUTES}
        invariant(names == set(handlers), "every route has a handler", unbound=names ^ set(handlers))
        invariant(names == set(ROUTE_RULES), "every route has a rule", without=names ^ set(ROUTE_RULES))
        bound = [BoundRoute(route, handlers[route.name]) for route in routes]
        self._exact = {(one.route.method, one.route.path): one for one in bound if "{" not in one.route.path}
        self._patterns = [one for one in bound if "{" in one.route.path]
        self.has_quotas = False
        """Whether anything was limited when the last request was admitted: looked up once, not in each step of it."""
        self.paths = frozenset(one.route.path for one in bound)
        """The paths and path templates of the routes."""

    def admit(self, head: HttpHead) -> HttpResponse | None:
        """Refuse a request whose principal is over a quota; asked before its body is kept, let alone decoded."""
        self.has_quotas = self._quotas.is_active
        if not self.has_quotas:
            return None
        bound = self._exact.get((head.method, head.path))
        if bound is not None and bound.route.is_probe:
            return None
        is_asking = head.method == "OPTIONS"  # a browser asks whether a page may call; nothing changes
        use = Use(
            bytes_in=max(0, head.length),
            is_mutation=not is_asking and (bound is None or bound.route.changes),
            is_creation=bound is not None and bound.route.creates,
        )
        principal = self.principal_of(head)
        if principal == ANONYMOUS and b"authorization" in head.headers:
            # Credentials that were not seen before, or are spelled differently, are checked now: the use of strangers
            # must not lock out who presents them, and a new spelling must not be a way around the quota.
            try:
                principal = self._access.identify(head, is_final=False)[0].principal
            except UnappliedTokenError:
                pass  # a stranger's so far; decided when its body has arrived
            except QuiverError as error:
                return _with_request_id(error_response(error), head)
        refusal = self._quotas.admit(principal, use, self._clock.monotonic_ms())
        return None if refusal is None else error_response(refusal)

    def principal_of(self, request: HttpRequest | HttpHead) -> Principal:
        """Return who a request speaks for; anonymous for credentials that were not seen before."""
        return self._access.principal_of(request)

    def charge(self, request: HttpRequest, response: HttpResponse) -> None:
        """Count the bytes of an answer against the quotas of its principal."""
        self._quotas.charge(self.principal_of(request), "", response.size_bytes, self._clock.monotonic_ms())

    def handle(self, request: HttpRequest) -> HttpResult:
        """Find the route, decode the parameters, call the handler."""
        method = "GET" if request.method == "HEAD" else request.method
        host = request.headers.get(b"host", b"localhost")  # only HTTP/1.0, which no browser speaks, has none
        if host not in self._hosts.known and request.path not in PROBE_PATHS and not self._hosts.accepts(host):
            return _refuse_host(host)
        if b"origin" in request.headers and (origin := self._find_node_origin(request, host)) is not None:
            if request.method == "OPTIONS":
                return preflight(origin)
            return _finish_allowed(self._route(method, _without_site(request)), origin)
        return self._route(method, request)

    def _find_node_origin(self, request: HttpRequest, host: bytes) -> bytes | None:
        """Return the origin of a page that another node of the cluster served; None for every other page."""
        origin = request.headers[b"origin"]
        if self._origins is None or origin.partition(b"://")[2] == host or not self._origins.accepts(origin):
            return None
        return origin

    def _route(self, method: str, request: HttpRequest) -> HttpResult:
        if request.path in BROWSER_PATHS and method == "GET" and b"text/html" in request.headers.get(b"accept", b""):
            return self._browser_page or failure_response(404, "unknown_path", f"unknown path {request.path}")
        values: dict[str, str] = {}
        bound = self._exact.get((method, request.path))
        if bound is None:
            found = self._search(method, request.path)
            if isinstance(found, HttpResponse):
                return found
            bound, values = found
        if (
            bound.route.changes
            and (request.method == "HEAD" or not request.headers.keys().isdisjoint(SITE_HEADERS))
            and (refused := _refuse_cross_site(request))
        ):
            return refused
        if self.has_quotas and b"transfer-encoding" in request.headers:
            self._quotas.charge_in(self.principal_of(request), len(request.body), self._clock.monotonic_ms())
        return self._call(bound, values, request)

    def _call(self, bound: BoundRoute, values: dict[str, str], request: HttpRequest) -> HttpResult:
        try:
            caller = self._access.identify(request, is_final=False)
        except UnappliedTokenError:
            return self._call_later(bound, values, request)
        except QuiverError as error:
            return _with_request_id(error_response(error), request)
        return self._call_as(caller, bound, values, request)

    async def _call_later(self, bound: BoundRoute, values: dict[str, str], request: HttpRequest) -> HttpResponse:
        """Answer a call with a token that this node may not know yet."""
        await self._access.catch_up(request)
        try:
            caller = self._access.identify(request)
        except QuiverError as error:
            return _with_request_id(error_response(error), request)
        answer = self._call_as(caller, bound, values, request)
        return answer if isinstance(answer, HttpResponse) else await answer

    def _call_as(
        self,
        caller: tuple[ConnectionIdentity, Permissions],
        bound: BoundRoute,
        values: dict[str, str],
        request: HttpRequest,
    ) -> HttpResult:
        access, name, (identity, permissions) = self._access, bound.route.name, caller
        try:
            if permissions.is_powerless:
                access.check_early(name, identity, permissions, request)
            given = bound.decoder.decode(values, request.query, request.body)
            if not permissions.is_admin:
                try:
                    access.check(name, identity, permissions, given, request)
                except NotFoundError:
                    return self._answer_later(bound, identity, permissions, given, request)
            answer = self._answer(bound, identity, permissions, given, request)
        except QuiverError as error:
            return _with_request_id(error_response(error), request)
        if isinstance(answer, HttpResponse) and answer.stream is not None:
            stream = self._watch_stream(answer.stream, bound, given, request)
            return msgspec.structs.replace(answer, stream=stream)
        return answer

    async def _watch_stream(
        self, pieces: AsyncIterator[bytes], bound: BoundRoute, given: Any, request: HttpRequest
    ) -> AsyncIterator[bytes]:
        """Yield the pieces of a stream as long as its caller may have it: a token can be revoked meanwhile."""
        async with aclosing(cast("AsyncGenerator[bytes, None]", pieces)):
            async for piece in pieces:
                try:
                    identity, permissions = self._access.identify(request)
                    self._access.check(bound.route.name, identity, permissions, given, request)
                except QuiverError:
                    return
                yield piece

    async def _answer_later(
        self,
        bound: BoundRoute,
        identity: ConnectionIdentity,
        permissions: Permissions,
        given: Any,
        request: HttpRequest,
    ) -> HttpResponse:
        """Answer a call that names a client which this node does not know yet: its owner decides."""
        try:
            await self._catch_up()
            self._access.check(bound.route.name, identity, permissions, given, request)
            answer = self._answer(bound, identity, permissions, given, request)
        except QuiverError as error:
            return _with_request_id(error_response(error), request)
        return answer if isinstance(answer, HttpResponse) else await answer

    def _answer(
        self,
        bound: BoundRoute,
        identity: ConnectionIdentity,
        permissions: Permissions,
        given: Any,
        request: HttpRequest,
    ) -> HttpResult:
        """Answer a call that is allowed, if its topic and its principal's waiting requests are within their quotas.

        By the decoded parameters, since the same one can be written in many ways; and only now, since who may not use
        a topic must not use up its quota.
        """
        if not self.has_quotas or bound.route.is_probe:
            return self._pass_on(bound, identity, permissions, given, request)
        quotas, now_ms, principal = self._quotas, self._clock.monotonic_ms(), identity.principal
        topic, waits = getattr(given, "topic", None) or "", bool(getattr(given, "wait_ms", 0))
        use = Use(bytes_in=len(request.body), is_mutation=bound.route.changes)
        error = quotas.admit_topic(topic, use, now_ms) if topic else None
        if error is None and waits:
            error = quotas.begin_long_poll(principal, now_ms)
        if error is not None:
            raise error

        def finish(response: HttpResponse | None) -> None:
            if waits:
                quotas.end_long_poll(principal)
            if topic and response is not None:
                quotas.charge_topic(topic, response.size_bytes, self._clock.monotonic_ms())

        return _finish_with(finish, lambda: self._pass_on(bound, identity, permissions, given, request))

    def _pass_on(
        self,
        bound: BoundRoute,
        identity: ConnectionIdentity,
        permissions: Permissions,
        given: Any,
        request: HttpRequest,
    ) -> HttpResult:
        route = bound.route
        if route.is_signed:
            # Who may do everything without credentials is the node itself: an open cluster knows no principals.
            is_node = permissions.is_admin and not permissions.is_known
            answer = bound.handler(given, "" if is_node else identity.on_behalf_of)
        elif route.has_records:
            answer = bound.handler(given, identity.principal)
        else:
            answer = bound.handler(given)
        if isinstance(answer, asyncio.Future):
            return answer
        if isinstance(answer, Answer | HttpResponse):
            return respond(route, self._access.filter(permissions, answer))
        if route.is_signed:
            return self._finish_audited(bound.route, answer, identity, permissions, given, request)
        return self._finish(route, answer, permissions)

    async def _finish(
        self, route: HttpRoute, answer: Awaitable[HandlerResult], permissions: Permissions
    ) -> HttpResponse:
        try:
            return respond(route, self._access.filter(permissions, await answer))
        except QuiverError as error:
            return error_response(error)

    async def _finish_audited(
        self,
        route: HttpRoute,
        answer: Awaitable[HandlerResult],
        identity: ConnectionIdentity,
        permissions: Permissions,
        given: object,
        request: HttpRequest,
    ) -> HttpResponse:
        outcome, response = "unknown", None
        try:
            response, outcome = respond(route, self._access.filter(permissions, await answer)), "done"
        except QuiverError as error:
            response, outcome = error_response(error), error.code
        finally:
            if route.name not in NOT_AUDITED:
                self._access.note_change(route.name, identity, given, outcome, request)
        return _with_request_id(response, request)

    def refuse(self, status: int, code: str, message: str) -> HttpResponse:
        """Return the response for a failure of the server itself."""
        return failure_response(status, code, message)

    def flow_of(self, request: HttpRequest) -> tuple[str, str]:
        """Return the principal and the topic of a request, from its first bytes and without decoding it.

        Credentials that were not checked yet wait with those of their host, as on the wire: strangers who send much
        must not keep others from proving who they are.
        """
        principal = self.principal_of(request)
        name = str(principal)
        if principal == ANONYMOUS and b"authorization" in request.headers:
            name = f"host {request.identity.address.rpartition(':')[0].strip('[]')}"
        found = _TOPIC_IN_QUERY.search(request.query) or _TOPIC_IN_BODY.search(request.body, 0, PEEKED_BYTES)
        return name, "" if found is None else found[1].decode("latin-1")

    def is_long_poll(self, request: HttpRequest) -> bool:
        """Return whether a request asks to wait for messages, from its first bytes and without decoding it."""
        return b"wait_ms" in request.query or request.body.find(b'"wait_ms"', 0, PEEKED_BYTES) >= 0

    def route_of(self, request: HttpRequest) -> str:
        """Return the path template of a request's route, as a label for metrics; empty if no route matches."""
        if request.path in self.paths:
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
            return failure_response(404, "unknown_path", f"unknown path {path}; GET /docs lists all paths")
        response = failure_response(405, "unknown_method", f"{path} does not support {method}")
        return msgspec.structs.replace(response, headers=(("Allow", ", ".join(sorted(allowed))),))


def respond(route: HttpRoute, result: HandlerResult) -> HttpResponse:
    """Return a handler's result as a response."""
    if isinstance(result, HttpResponse):
        return result
    return HttpResponse(status=route.success, body=_encode(result))


def _finish_with(finish: Callable[[HttpResponse | None], None], call: Callable[[], HttpResult]) -> HttpResult:
    """Return the result of a call; `finish` gets its response, or None if it fails or is cancelled."""
    try:
        answer = call()
    except BaseException:
        finish(None)
        raise
    if isinstance(answer, HttpResponse):
        finish(answer)
    elif isinstance(answer, asyncio.Future):
        answer.add_done_callback(lambda done: finish(_response_of(done)))
    else:
        return _finish_later(finish, answer)
    return answer


def _response_of(done: asyncio.Future[HttpResponse]) -> HttpResponse | None:
    return None if done.cancelled() or done.exception() is not None else done.result()


async def _finish_later(finish: Callable[[HttpResponse | None], None], answer: Awaitable[HttpResponse]) -> HttpResponse:
    response = None
    try:
        response = await answer
    finally:
        finish(response)
    return response


def _refuse_cross_site(request: HttpRequest) -> HttpResponse | None:
    """Refuse a call that changes state if a page of another site sends it, or if its method is HEAD.

    Only browsers send these headers, which name the site of the page. Without this check any page that a developer
    visits could use the queue on the developer's machine.
    """
    if request.method == "HEAD":
        response = failure_response(405, "unknown_method", f"{request.path} does not support HEAD")
        return msgspec.structs.replace(response, headers=(("Allow", "GET"),))
    if _is_cross_site(request):
        return failure_response(403, "other_site", "not done: pages of other sites may not make this call")
    return None


def _without_site(request: HttpRequest) -> HttpRequest:
    """Return the request of a page that was checked, as if a program had sent it."""
    headers = {name: value for name, value in request.headers.items() if name not in SITE_HEADERS}
    return msgspec.structs.replace(request, headers=headers)


def _finish_allowed(answer: HttpResult, origin: bytes) -> HttpResult:
    """Return an answer that a page of another node may read."""
    if isinstance(answer, HttpResponse):
        return msgspec.structs.replace(answer, headers=(*answer.headers, *allowing(origin)))
    return _finish_allowed_later(answer, origin)


async def _finish_allowed_later(answer: Awaitable[HttpResponse], origin: bytes) -> HttpResponse:
    response = await answer
    return msgspec.structs.replace(response, headers=(*response.headers, *allowing(origin)))


def _is_cross_site(request: HttpRequest) -> bool:
    headers = request.headers
    host, origin, site = headers.get(b"host"), headers.get(b"origin"), headers.get(b"sec-fetch-site")
    if origin is not None and origin.partition(b"://")[2] != host:
        return True
    if site is not None:
        return site not in (b"none", b"same-origin")
    # Browsers name the site only to https and to this machine, and send no Origin with a GET such as that of an image.
    is_browser = request.method == "GET" and headers.get(b"user-agent", b"").startswith(b"Mozilla/")
    return is_browser and headers.get(b"referer", b"").partition(b"://")[2].partition(b"/")[0] != host


def _with_request_id(response: HttpResponse, request: HttpRequest | HttpHead) -> HttpResponse:
    """Return a response with the request id by which the audit log knows the request, if it has one."""
    if REQUEST_ID not in request.headers:
        return response
    field = ("X-Request-Id", request_id_of(request))
    return msgspec.structs.replace(response, headers=(*response.headers, field))


def _refuse_host(host: bytes) -> HttpResponse:
    name = host.decode("latin-1")[:300]
    message = f"not done: this node does not answer to the host {name!r}; if it is its name, set gateway.allowed_hosts"
    return failure_response(421, "unknown_host", message)
