"""Attacks by web pages on a node that its visitor can reach: names that resolve to it, forms, images, frames."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quiver
from quiver.config import load_settings
from quiver.config.security import list_exposed
from quiver.errors import ConfigError
from quiver.gateway.hosts import HostNames
from quiver.gateway.http_route import EVENT_STREAM
from quiver.gateway.routes import ROUTES
from quiver.testing import LocalCluster
from quiver.testing.local_cluster import _free_ports

BROWSER = "Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101 Firefox/140.0"
PATIENCE_S = 60
PATHS = tuple(route.path for route in ROUTES if route.method == "GET" and route.content_type != EVENT_STREAM)
"""All that a browser can get, but for what never ends."""


class Node:
    """One node with an administrative listener, and a consumer that has records to lose."""

    def __init__(self, cluster: LocalCluster, admin: str) -> None:
        self.address = cluster.urls[0].removeprefix("http://")
        self.admin = admin
        self.ask("POST", "/producer/register", {"topic": "logs"})
        producer_id = json.loads(self.ask("POST", "/producer/register", {"topic": "logs"})[2])["producer_id"]
        self.consumer_id = json.loads(self.ask("POST", "/consumer/register", {"topic": "logs"})[2])["consumer_id"]
        message = {"topic": "logs", "producer_id": producer_id, "message": "secret"}
        assert self.ask("POST", "/producer/produce", message)[0] == 200
        self.consume = f"/consumer/consume?topic=logs&consumer_id={self.consumer_id}"

    def ask(
        self, method: str, path: str, body: Any = None, *, address: str = "", **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection(address or self.address, timeout=PATIENCE_S)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), named)
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def size(self) -> int:
        answer = self.ask("GET", f"/size?topic=logs&consumer_id={self.consumer_id}")[2]
        return int(json.loads(answer)["size"])


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    admin = f"127.0.0.1:{_free_ports(1)[0]}"
    with LocalCluster(nodes=1, settings={"gateway.admin_listen": admin}) as cluster:
        yield Node(cluster, admin)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8002", "127.0.0.1.evil.example", "192.0.2.1:8002", ""])
def test_name_that_was_bound_to_this_machine_is_refused(node: Node, host: str) -> None:
    status, _, body = node.ask("GET", node.consume, Host=host)
    assert status == 421
    assert json.loads(body)["code"] == "unknown_host"
    assert node.ask("GET", "/topics", Host=host)[0] == 421
    assert node.ask("GET", "/", Host=host, Accept="text/html")[0] == 421
    assert node.size() == 1


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.:1", "127.0.0.1", "[::1]:8002", "node-1.localhost"])
def test_names_of_this_machine_are_answered(node: Node, host: str) -> None:
    assert node.ask("GET", "/topics", Host=host)[0] == 200


def test_probes_are_answered_under_every_name(node: Node) -> None:
    for path in ("/healthz", "/livez", "/readyz"):
        assert node.ask("GET", path, Host="load-balancer.example")[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"User_Agent": BROWSER},
        {"User_Agent": BROWSER, "Referer": "http://evil.example/page"},
    ],
)
def test_page_of_another_site_consumes_nothing(node: Node, headers: dict[str, str]) -> None:
    status, _, body = node.ask("GET", node.consume, **headers)
    assert status == 403
    assert json.loads(body)["code"] == "other_site"
    assert node.ask("GET", node.consume.replace("consume?", "consume_batch?"), **headers)[0] == 403
    assert node.size() == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"User_Agent": "curl/8.5.0"},
        {"User_Agent": "python-requests/2.32"},
        {"User_Agent": BROWSER, "Sec_Fetch_Site": "none"},
        {"User_Agent": BROWSER, "Sec_Fetch_Site": "same-origin"},
    ],
)
def test_programs_and_our_own_pages_consume(node: Node, headers: dict[str, str]) -> None:
    repeatable = f"{node.consume}&partition_id=99"
    assert node.ask("GET", repeatable, **headers)[0] == 404, "it came as far as the unknown partition"


def test_answers_tell_browsers_to_keep_and_guess_nothing(node: Node) -> None:
    for address, path in ((node.address, "/topics"), (node.address, "/nothing"), (node.admin, "/metrics")):
        _, headers, _ = node.ask("GET", path, address=address)
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Server"] is None
        assert headers["Access-Control-Allow-Origin"] is None


def test_version_is_in_status_and_metrics_and_nowhere_else(node: Node) -> None:
    version = quiver.__version__.encode()
    shown = set()
    for address in (node.address, node.admin):
        for path in ("/nothing", *PATHS):
            _, headers, body = node.ask("GET", path, address=address)
            if version in str(headers).encode() + body:
                shown.add(path)
    assert shown == {"/status", "/metrics"}, "which a secure node shows to nobody without credentials"


def test_every_answer_says_what_it_is_and_text_in_which_charset(node: Node) -> None:
    for address in (node.address, node.admin):
        for path in ("/nothing", *PATHS):
            _, headers, body = node.ask("GET", path, address=address)
            kind = headers["Content-Type"]
            assert (kind is None) == (not body), path
            assert kind is None or kind == "application/json" or "charset=utf-8" in kind, path


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "TRACK", "OPTIONS", "PROPFIND"])
def test_methods_that_nothing_has_are_refused(node: Node, method: str) -> None:
    for path in ("/topics", "/", "/status"):
        status, _, body = node.ask(method, path, Cookie="secret=1")
        assert status in (400, 405, 501)
        assert b"secret=1" not in body


def test_pages_may_load_run_and_be_framed_by_nothing(node: Node) -> None:
    status, headers, body = node.ask("GET", "/docs", address=node.admin, Accept="text/html")
    assert status == 200
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"
    assert b"<script" not in body


def test_console_runs_its_own_files_alone_and_calls_nodes_alone(node: Node) -> None:
    status, headers, body = node.ask("GET", "/", Accept="text/html")
    assert (status, headers["Location"], body) == (302, "/console", b"")
    status, headers, body = node.ask("GET", "/console", Accept="text/html")
    assert status == 200
    policy = dict(one.split(" ", 1) for one in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["img-src"] == "'self'"
    assert policy["connect-src"] == f"'self' http://{node.address}"
    assert headers["X-Frame-Options"] == "DENY"
    assert b"style=" not in body
    assert body.count(b"<script") == body.count(b'<script type="module" src="/console/')


def test_pages_of_nodes_of_the_cluster_may_call_and_those_of_others_may_not(node: Node) -> None:
    own = f"http://{node.address}"
    for origin in (own, own.replace("127.0.0.1", "localhost")):
        status, headers, _ = node.ask("OPTIONS", "/topics", Origin=origin, Host="127.0.0.1:1")
        assert (status, headers["Access-Control-Allow-Origin"]) == (204, origin)
        assert headers["Access-Control-Allow-Credentials"] is None
        status, headers, _ = node.ask("GET", "/topics", Origin=origin, Host="127.0.0.1:1", Sec_Fetch_Site="same-site")
        assert (status, headers["Access-Control-Allow-Origin"], headers["Vary"]) == (200, origin, "Origin")
        status, headers, _ = node.ask("POST", "/topics", {}, Origin=origin, Host="127.0.0.1:1")
        assert (status, headers["Access-Control-Allow-Origin"]) == (400, origin), "it came as far as the missing name"
    assert node.ask("OPTIONS", "/topics", Origin=own.replace("http:", "https:"))[0] == 405
    for origin in ("http://evil.example", "http://127.0.0.1:1", "null", own + "0"):
        status, headers, _ = node.ask("OPTIONS", "/topics", Origin=origin)
        assert (status, headers["Access-Control-Allow-Origin"]) == (405, None)
        assert node.ask("POST", "/topics", {"topic_name": "x"}, Origin=origin)[0] == 403
        assert node.ask("GET", "/topics", Origin=origin)[1]["Access-Control-Allow-Origin"] is None


def test_version_is_told_by_status_alone(node: Node) -> None:
    version = quiver.__version__.encode()
    assert version in node.ask("GET", "/status")[2]
    for address, path in ((node.address, "/"), (node.admin, "/docs"), (node.admin, "/openapi.json")):
        _, headers, body = node.ask("GET", path, address=address)
        assert version not in body + str(headers).encode()


def test_administrative_pages_are_on_their_own_listener_alone(node: Node) -> None:
    for path in ("/metrics", "/docs", "/openapi.json"):
        assert node.ask("GET", path)[0] == 404
        assert node.ask("GET", path, address=node.admin)[0] == 200
    for path in ("/healthz", "/livez", "/readyz"):
        assert node.ask("GET", path, address=node.admin)[0] == 200
    assert node.ask("GET", "/topics", address=node.admin)[0] == 404
    assert node.ask("GET", "/metrics", address=node.admin, Host="evil.example")[0] == 421


def test_administrative_listener_counts_when_the_node_decides_how_it_is_protected() -> None:
    settings = load_settings(flags={"node.id": "1", "gateway.admin_listen": "0.0.0.0:9"})
    assert any("gateway.admin_listen" in claim for claim in list_exposed(settings))
    with pytest.raises(ConfigError, match=r"gateway\.admin_listen"):
        load_settings(flags={"node.id": "1", "gateway.admin_listen": "nowhere"})


@given(st.binary(max_size=60))
def test_no_host_raises_and_few_are_own(header: bytes) -> None:
    names = HostNames(listen_host="127.0.0.1", names=("proxy.example",))
    assert names.accepts(header) == (header in names.known)


@pytest.mark.parametrize(
    ("listen", "names", "host", "is_own"),
    [
        ("0.0.0.0", (), "192.0.2.7:8002", True),
        ("0.0.0.0", (), "[2001:db8::1]:8002", True),
        ("0.0.0.0", (), "evil.example", False),
        ("0.0.0.0", ("node-1.example",), "Node-1.example.:8002", True),
        ("0.0.0.0", ("*",), "evil.example", True),
        ("127.0.0.1", (), "192.0.2.7", False),
        ("127.0.0.1", ("proxy.example",), "proxy.example", True),
    ],
)
def test_names_follow_from_the_settings(listen: str, names: tuple[str, ...], host: str, is_own: bool) -> None:
    assert HostNames(listen_host=listen, names=names).accepts(host.encode()) is is_own
