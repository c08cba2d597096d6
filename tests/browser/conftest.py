"""A cluster of three processes, and a page of its console in a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chaos_cluster import Cluster, running_cluster
from chromium import find_chromium
from gateway_nodes import ask

pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright: pip install 'quivermq[dev]'")
from console_page import PATIENCE_MS, Console
from playwright.sync_api import Browser, sync_playwright


# Ends with its module: while playwright runs, no test of this process can start an event loop of its own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = find_chromium()
    if not chromium:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu"]
        running = playwright.chromium.launch(executable_path=chromium, args=arguments, timeout=PATIENCE_MS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster for each module, also with the module's own SETTINGS."""
    settings = (
        *("--log-index-interval-bytes", "32768"),  # so that one has another source than its default
        *("--gateway-request-timeout-ms", str(PATIENCE_MS)),  # a node is as patient as the tests
        *getattr(request.module, "SETTINGS", ()),
    )
    with running_cluster(tmp_path_factory.mktemp("console"), settings=settings) as found:
        yield found


@pytest.fixture(scope="module")
def call(cluster: Cluster) -> Callable[..., Any]:
    """Call the API as a program does."""

    def send(method: str, path: str, body: Any = None, *, node: int = -1) -> Any:
        status, answer = ask(cluster.nodes[node].http, method, path, body)
        assert status < 300, (method, path, answer)
        return answer

    return send


@pytest.fixture(scope="module")
def orders(call: Callable[..., Any]) -> str:
    """A topic with 3,000 records, and a consumer that has read a few of them."""
    call("POST", "/topics", {"topic_name": "orders", "partitions": 3})
    producer = call("POST", "/producer/register", {"topic": "orders"})["producer_id"]
    for partition in range(3):
        records = [
            {
                "message": json.dumps({"order": at, "user": {"name": f"user {at % 7}"}}),
                "key": f"k{at}",
                "headers": {"n": "1"},
            }
            for at in range(1000)
        ]
        body = {"topic": "orders", "producer_id": producer, "partition_id": partition, "records": records}
        call("POST", "/producer/produce_batch", body)
    consumer = call("POST", "/consumer/register", {"topic": "orders"})["consumer_id"]
    call("GET", f"/consumer/consume_batch?topic=orders&consumer_id={consumer}&partition_id=0&max=100")
    return "orders"


@pytest.fixture
def console(browser: Browser, cluster: Cluster) -> Iterator[Console]:
    context = browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme="light")
    opened = Console(context.new_page(), cluster.nodes[0].http)
    try:
        yield opened
        assert opened.problems == []
        assert opened.hosts <= set(cluster.http_addresses), "the page asks its cluster and nobody else"
    finally:
        context.close()
