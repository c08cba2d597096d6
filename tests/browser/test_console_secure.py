"""The console of a secure cluster in a real browser: it asks for a token, and shows what its user may see."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from console_page import PATIENCE_MS
from playwright.sync_api import Browser, Page, expect
from secured_cluster import SecuredCluster, secured_cluster


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    # In a thread of its own: playwright's event loop runs in this one, and the SDK needs one, too.
    with ThreadPoolExecutor(1) as thread:
        running = secured_cluster(tmp_path_factory.mktemp("secure"))
        cluster = thread.submit(running.__enter__).result()
        cluster.must("POST", "/topics", {"topic_name": "orders"})
        cluster.must("POST", "/topics", {"topic_name": "salaries"})
        yield cluster
        thread.submit(running.__exit__, None, None, None).result()


def add_user(secured: SecuredCluster, user: str, **grant: str) -> tuple[str, str]:
    """Create a user with one grant; return the id of its token, and the token."""
    secured.must("POST", "/users", {"user": user})
    secured.must("POST", "/acls", {"subject": f"user:{user}", **grant})
    token = secured.must("POST", "/tokens", {"user": user})
    return token["token_id"], token["token"]


@pytest.fixture
def page(browser: Browser, secured: SecuredCluster) -> Iterator[Page]:
    context = browser.new_context(ignore_https_errors=True)
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE_MS)
    opened.goto(f"{secured.url}/console")
    yield opened
    context.close()


def log_in(page: Page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()


def test_login_with_a_token_that_stays_in_the_tab(page: Page, secured: SecuredCluster) -> None:
    log_in(page, "not-a-token")
    expect(page.get_by_role("alert")).to_contain_text("not valid")
    log_in(page, secured.secrets[0])
    expect(page.locator(".health")).to_contain_text("1 node up")
    expect(page.locator("header.top")).to_contain_text("admin")
    assert page.context.cookies() == []
    assert page.evaluate("Object.keys(localStorage).filter(key => /token/i.test(key))") == []
    page.reload()
    expect(page.locator(".health")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Token")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Token")).to_be_visible()


def test_user_sees_and_does_what_the_api_allows(page: Page, secured: SecuredCluster) -> None:
    _, token = add_user(secured, "clerk", verb="read", kind="topic", name="orders")
    log_in(page, token)
    expect(page.get_by_role("alert")).to_contain_text("may not read the cluster")
    page.goto(f"{secured.url}/console#/topics")
    expect(page.get_by_role("link", name="orders")).to_be_visible()
    expect(page.get_by_role("link", name="salaries")).to_have_count(0)
    page.get_by_role("link", name="orders").click()
    page.get_by_role("button", name="Delete topic").click()
    page.get_by_label("Type orders to confirm").fill("orders")
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("may not delete topic orders")
    assert "orders" in secured.must("GET", "/topics")["topics"]


def test_stream_ends_when_its_token_is_revoked(secured: SecuredCluster) -> None:
    token_id, token = add_user(secured, "guard", verb="read", kind="cluster")
    tls = ssl.create_default_context(cafile=secured.ca_file)
    with closing(http.client.HTTPSConnection(urlsplit(secured.url).netloc, timeout=60, context=tls)) as connection:
        connection.request("GET", "/console/events", headers={"Authorization": f"Bearer {token}"})
        with connection.getresponse() as response:
            assert response.status == 200
            assert response.readline().startswith(b"event: history")
            secured.must("DELETE", f"/tokens/{token_id}")
            events = [line for line in response if line.startswith(b"event:")]
    assert len(events) < 30, "the stream has ended"
    status, _ = secured.call("GET", "/console/events", token=token)
    assert status == 401


def test_strangers_get_the_page_and_nothing_else(secured: SecuredCluster) -> None:
    for path in ("/console/session", "/console/topics", "/console/events", "/topics/orders/records", "/pipelines"):
        assert secured.call("GET", path, token="")[0] == 401, path
    for path in ("/deleted_topics", "/consumers", "/cluster/settings", "/cluster/events", "/cluster/holds"):
        assert secured.call("GET", path, token="")[0] == 401, path
    status, answer = secured.call("POST", "/consumers/1/reset", {"topic": "orders", "to": "earliest"}, token="")
    assert (status, answer["code"]) == (401, "unauthenticated")
