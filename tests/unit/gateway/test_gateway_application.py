"""From a request to its handler and back: routes, failures, guests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from gateway_world import open_access

from quiver import errors
from quiver.clock import SystemClock
from quiver.errors import OverloadedError, QuiverError
from quiver.gateway.application import RoutedApplication
from quiver.gateway.codec import error_response, status_of
from quiver.gateway.contract import Answer
from quiver.gateway.hosts import HostNames
from quiver.gateway.http import HttpRequest, HttpResponse
from quiver.gateway.http_route import HttpRoute
from quiver.gateway.openapi import MEANINGS
from quiver.gateway.routes import ROUTES
from quiver.security.identity import ConnectionIdentity


async def do_nothing() -> None:
    pass


def application(**handlers: Callable[[Any], Any]) -> RoutedApplication:
    def answer(*_: object) -> Answer:
        return Answer()

    bound = {route.name: handlers.get(route.name, answer) for route in ROUTES}
    hosts = HostNames(listen_host="127.0.0.1", names=("a",))
    return RoutedApplication(
        bound,
        hosts=hosts,
        access=open_access(),
        catch_up=do_nothing,
        clock=SystemClock(),
        browser_page=HttpResponse(status=200, body=b"<html>"),
    )


def request(method: str, path: str, body: bytes = b"", **headers: str) -> HttpRequest:
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return HttpRequest(method=method, path=path, query=b"", headers={b"host": b"a:1", **named}, body=body)


def ask(app: RoutedApplication, asked: HttpRequest) -> HttpResponse:
    async def main() -> HttpResponse:
        answer = app.handle(asked)
        return answer if isinstance(answer, HttpResponse) else await answer

    return asyncio.run(main())


def shown(response: HttpResponse) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(response.body)
    return decoded


def test_credentials_that_were_not_checked_yet_wait_apart_from_strangers() -> None:
    def flow(address: str, **headers: str) -> tuple[str, str]:
        asked = request("POST", "/producer/produce", b'{"topic":"orders"}', **headers)
        return application().flow_of(msgspec.structs.replace(asked, identity=ConnectionIdentity(address=address)))

    assert flow("10.0.0.1:5000") == ("anonymous", "orders")
    assert flow("10.0.0.1:5000", authorization="Bearer x") == ("host 10.0.0.1", "orders")
    assert flow("[::1]:5000", authorization="Bearer x") == ("host ::1", "orders"), "as the wire names it"


def find_duplicates(routes: tuple[HttpRoute, ...]) -> list[str]:
    """Return the names, and the methods with paths, that occur more than once."""
    keys = [key for route in routes for key in (route.name, f"{route.method} {route.path}")]
    return sorted({key for key in keys if keys.count(key) > 1})


def test_table_names_nothing_twice() -> None:
    assert find_duplicates(ROUTES) == []
    assert find_duplicates((*ROUTES, ROUTES[0])) == ["GET /topics", "list_topics"]


def test_route_without_a_handler_is_a_mistake_of_ours() -> None:
    hosts = HostNames(listen_host="127.0.0.1", names=())
    with pytest.raises(errors.InvariantBroken, match="every route"):
        RoutedApplication({}, hosts=hosts, access=open_access(), catch_up=do_nothing, clock=SystemClock())


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_is_found_and_answers_in_the_contracts_form(route: Any) -> None:
    path = re.sub(r"\{\w+\}", "7", route.path.replace("{topic}", "a.b-c"))
    known = route.parameters.__struct_encode_fields__
    given = {"topic": "t", "producer_id": 1, "consumer_id": "1", "partition_id": 0, "user": "alice", "role": "ops"}
    given |= {"subject": "user:alice", "verb": "read", "principal": "alice", "group": "workers"}
    body = {name: value for name, value in given.items() if name in known and f"{{{name}}}" not in route.path}
    response = ask(application(), request(route.method, path, msgspec.json.encode(body)))
    assert response.status == route.success
    assert shown(response) == {"status": "success"}


def test_handler_gets_what_stands_in_the_path() -> None:
    taken: list[Any] = []

    def take(given: Any) -> Answer:
        taken.append(given.topic)
        return Answer()

    ask(application(describe_topic=take), request("GET", "/topics/é ü"))
    assert taken == ["é ü"]


def test_handler_may_be_a_coroutine_or_a_future() -> None:
    async def later(given: object) -> Answer:
        await asyncio.sleep(0)
        return Answer()

    def promised(given: object) -> asyncio.Future[HttpResponse]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(HttpResponse(status=204))
        return future

    app = application(list_topics=later, status=promised)
    assert ask(app, request("GET", "/topics")).status == 200
    assert ask(app, request("GET", "/status")).status == 204


@pytest.mark.parametrize("path", ["/nothing", "/topics/", "/topics/a/b", "//topics", "*", ""])
def test_unknown_path_is_404_in_the_contracts_form(path: str) -> None:
    response = ask(application(), request("GET", path))
    assert response.status == 404
    assert shown(response)["code"] == "unknown_path"
    assert shown(response)["status"] == "failure"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("PUT", "/topics", "GET, POST"), ("PUT", "/topics/t", "DELETE, GET, POST"), ("HEAD", "/consumer/consume", "GET")],
)
def test_method_that_a_path_does_not_have_is_405(method: str, path: str, allowed: str) -> None:
    response = ask(application(), request(method, path))
    assert response.status == 405
    assert ("Allow", allowed) in response.headers


def test_head_is_answered_where_get_changes_nothing() -> None:
    assert ask(application(), request("HEAD", "/topics")).status == 200


@pytest.mark.parametrize(
    "headers",
    [{"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"}, {"origin": "http://evil"}, {"origin": "null"}],
)
def test_page_of_another_site_may_read_but_not_change(headers: dict[str, str]) -> None:
    response = ask(application(), request("POST", "/topics", b"", **headers))
    assert response.status == 403
    assert shown(response)["code"] == "other_site"
    assert ask(application(), request("GET", "/topics", b"", **headers)).status == 200


@pytest.mark.parametrize(
    "headers", [{}, {"sec_fetch_site": "none"}, {"sec_fetch_site": "same-origin", "origin": "http://a:1"}]
)
def test_our_own_pages_and_programs_may_change(headers: dict[str, str]) -> None:
    assert ask(application(), request("POST", "/topics", b"", **headers)).status == 201


@pytest.mark.parametrize("is_later", [False, True])
def test_error_of_a_handler_is_a_failure(is_later: bool) -> None:
    def raises(given: object) -> Any:
        raise errors.NotFoundError("there is no topic 't'", code="unknown_topic")

    async def raises_later(given: object) -> Any:
        await asyncio.sleep(0)
        return raises(given)

    response = ask(application(list_topics=raises_later if is_later else raises), request("GET", "/topics"))
    assert response.status == 404
    assert shown(response) == {"status": "failure", "code": "unknown_topic", "message": "there is no topic 't'"}


def all_kinds(kind: type[QuiverError] = QuiverError) -> list[type[QuiverError]]:
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in all_kinds(child))]


@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: kind.__name__)
def test_every_error_has_a_documented_status_that_tells_its_outcome(kind: type[QuiverError]) -> None:
    response = error_response(kind("why"))
    assert response.status in MEANINGS
    told = shown(response)
    if response.status in (503, 504, 507):
        assert told["outcome"] == kind.outcome
    if kind.outcome == "unknown":
        assert response.status == 504
    assert (response.status in (429, 503)) == any(name == "Retry-After" for name, _ in response.headers)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.DecodeError, 400),
        (errors.NotAllowedError, 403),
        (errors.NotFoundError, 404),
        (errors.TrimmedError, 404),
        (errors.OutOfSequenceError, 409),
        (errors.FencedError, 409),
        (errors.TooLargeError, 413),
        (errors.OutOfRangeError, 422),
        (errors.NotLeaderError, 503),
        (errors.OutcomeUnknownError, 504),
        (errors.LogFailedError, 504),
        (errors.DiskFullError, 507),
    ],
)
def test_status_follows_from_what_the_caller_should_do(kind: type[QuiverError], status: int) -> None:
    assert status_of(kind("why")) == status


def test_time_to_come_back_is_rounded_up() -> None:
    error = OverloadedError("much to do", retry_after_ms=1100)
    assert ("Retry-After", "2") in error_response(error).headers


def test_request_is_counted_under_its_route_and_never_under_a_path_of_its_own() -> None:
    app = application()
    assert app.route_of(request("GET", "/topics/odd")) == "/topics/{topic}"
    assert app.route_of(request("GET", "/topics")) == "/topics"
    assert app.route_of(request("GET", "/odd")) == ""


def test_root_is_a_page_for_browsers_alone() -> None:
    for path in ("/", "/console/"):
        assert ask(application(), request("GET", path, b"", accept="text/html,*/*")).body == b"<html>"
    assert shown(ask(application(), request("GET", "/", b"", accept="*/*"))) == {"status": "success"}
