"""A client's certificate names its user on HTTP as on the wire."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from secured_cluster import SecuredCluster, issue_certificate, secured_cluster

from quiver.security.bootstrap import initialize
from quiver.security.permissions import Grant, ResourceKind, Verb


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    directory = tmp_path_factory.mktemp("security")
    initialize(str(directory), {})
    nobody = issue_certificate(directory, "nobody")
    settings = {"tls.client_certificates": "all"}
    with secured_cluster(directory, settings, certificate_file=nobody) as cluster:
        with cluster.admin() as admin:
            admin.create_topic("logs.web", partitions=1)
            admin.access.create_user("ann")
            for verb in (Verb.READ, Verb.WRITE):
                grant = Grant(subject="user:ann", verb=verb, kind=ResourceKind.TOPIC, name="logs.web")
                admin.access.add_grant(grant)
        yield cluster


def _connect(secured: SecuredCluster, certificate: str) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cafile=secured.ca_file)
    context.load_cert_chain(certificate)
    return http.client.HTTPSConnection(secured.url.removeprefix("https://"), context=context, timeout=60)


def _ask(
    connection: http.client.HTTPSConnection, method: str, path: str, body: Any = None, token_file: str = ""
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {Path(token_file).read_text().strip()}"} if token_file else {}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_user_of_the_certificate_is_the_caller_of_http_and_wire(secured: SecuredCluster) -> None:
    certificate = issue_certificate(secured.directory, "ann", "urn:quiver:user:ann")
    connection = _connect(secured, certificate)
    for _ in range(2):  # also on a connection that stays open
        assert _ask(connection, "GET", "/topics")[1]["topics"] == ["logs.web"]
        status, answer = _ask(connection, "GET", "/users")
        assert (status, answer["code"]) == (403, "not_allowed")
        assert "user:ann" in answer["message"]
    with secured.admin() as admin:
        admin.access.enable_user("ann", is_enabled=False)
        assert _ask(connection, "GET", "/topics")[0] == 401
        admin.access.enable_user("ann")
        assert _ask(connection, "GET", "/topics")[0] == 200
    assert _ask(connection, "GET", "/users", token_file=secured.admin_file)[0] == 200  # a token says who, too
    connection.close()


@pytest.mark.parametrize(
    ("name", "uris"),
    [
        ("other", ["urn:quiver:user:other"]),
        ("both", ["urn:quiver:user:ann", "urn:quiver:user:other"]),
        ("node", ["urn:quiver:node:1"]),
        ("odd", ["urn:quiver:user:"]),
    ],
)
def test_certificate_without_one_known_user_may_do_nothing(secured: SecuredCluster, name: str, uris: list[str]) -> None:
    connection = _connect(secured, issue_certificate(secured.directory, name, *uris))
    status, answer = _ask(connection, "GET", "/topics")
    assert (status, answer["code"]) == (401, "unauthenticated")
    connection.close()


def test_login_by_certificate_is_in_the_audit_log_once(secured: SecuredCluster) -> None:
    connection = _connect(secured, issue_certificate(secured.directory, "ann2", "urn:quiver:user:ann"))
    assert connection.sock is None
    for _ in range(3):
        assert _ask(connection, "GET", "/topics")[0] == 200
    assert connection.sock is not None
    address = "{}:{}".format(*connection.sock.getsockname())
    connection.close()
    found: list[dict[str, str]] = []
    while not found:
        lines = [line for file in secured.audit_files() for line in file.read_text().splitlines()]
        found = [event for event in (json.loads(line)["event"] for line in lines) if event.get("address") == address]
        time.sleep(0.05)
    assert [(one["principal"], one["outcome"], one["detail"]) for one in found] == [("user:ann", "done", "certificate")]
