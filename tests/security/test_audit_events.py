"""Audit events of a secure node: principal, address, verb, resource, outcome and request id, for wire and HTTP."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from secured_cluster import SecuredCluster, secured_cluster

from quiver.errors import NotAllowedError
from quiver.security.permissions import Verb

Event = dict[str, str]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    with secured_cluster(tmp_path_factory.mktemp("security")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alice(secured: SecuredCluster) -> str:
    return secured.add_user("alice", (Verb.READ, "logs."))


def _events(secured: SecuredCluster, is_wanted: Callable[[Event], bool]) -> list[Event]:
    """Return the events that a test is about; wait until there is one."""
    while True:
        lines = [line for file in secured.audit_files() for line in file.read_text().splitlines()]
        if found := [event for event in (json.loads(line)["event"] for line in lines) if is_wanted(event)]:
            return found
        time.sleep(0.02)


def test_denial_and_change_on_the_wire_have_every_field(secured: SecuredCluster, alice: str) -> None:
    with secured.connect(alice) as cluster, pytest.raises(NotAllowedError):
        cluster.create_topic("logs.denied")
    (denied,) = _events(secured, lambda event: event.get("resource") == "topic logs.denied")
    assert (denied["kind"], denied["outcome"], denied["principal"]) == ("denial", "not_allowed", "user:alice")
    assert (denied["request"], denied["verb"]) == ("create_topic", "create")
    assert int(denied["request_id"]) > 0
    assert denied["address"].startswith("127.0.0.1:")
    with secured.admin() as cluster:
        cluster.create_topic("logs.made")
    (made,) = _events(secured, lambda event: event.get("resource") == "topic logs.made")
    assert (made["kind"], made["outcome"], made["verb"]) == ("change", "done", "create")
    assert int(made["request_id"]) > 0


def _ask(
    secured: SecuredCluster, token_file: str, body: Any, request_id: str = ""
) -> tuple[int, http.client.HTTPMessage, str]:
    context = ssl.create_default_context(cafile=secured.ca_file)
    connection = http.client.HTTPSConnection(secured.url.removeprefix("https://"), context=context, timeout=60)
    headers = {"Authorization": f"Bearer {Path(token_file).read_text().strip()}"} if token_file else {}
    try:
        connection.request(
            "POST", "/topics", json.dumps(body), headers | ({"X-Request-Id": request_id} if request_id else {})
        )
        assert connection.sock is not None
        address = "{}:{}".format(*connection.sock.getsockname())
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers, address
    finally:
        connection.close()


@pytest.mark.parametrize("given", ["trace-17", ""])
def test_denial_and_change_over_http_have_every_field(secured: SecuredCluster, alice: str, given: str) -> None:
    for token_file, kind, code in ((alice, "denial", 403), (secured.admin_file, "change", 201)):
        topic = f"logs.{kind}{given}"
        status, headers, address = _ask(secured, token_file, {"topic_name": topic}, given)
        assert status == code
        (event,) = _events(secured, lambda event, topic=topic: event.get("resource") == f"topic {topic}")  # type: ignore[misc]
        assert (event["kind"], event["verb"], event["request"]) == (kind, "create", "create_topic")
        assert event["address"] == address
        assert event["request_id"] == headers["X-Request-Id"] == (given or event["request_id"])


def test_failed_authentication_has_its_request_id_and_no_forged_one(secured: SecuredCluster, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("qv_0011223344556677_" + "ab" * 32)
    status, headers, address = _ask(secured, str(wrong), {}, 'x" injected')
    assert (status, headers["X-Request-Id"].isalnum()) == (401, True)
    (event,) = _events(secured, lambda event: event.get("address") == address)
    assert (event["kind"], event["verb"], event["outcome"]) == ("authentication", "authenticate", "unauthenticated")
    assert event["request_id"] == headers["X-Request-Id"]
