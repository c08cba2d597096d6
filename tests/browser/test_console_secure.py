"""The console of a secure cluster in a real browser: it asks for a token, and shows what its user may see."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import pytest
from chromium import find_axe
from console_page import PATIENCE_MS, alert
from playwright.sync_api import Browser, Page, expect
from secured_cluster import SecuredCluster, secured_cluster

EVENTS_MAX = 200
"""Events of a stream that nobody ends: more than a busy machine sends while a token is revoked."""
LEVELS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


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


@pytest.fixture
def admin(page: Page, secured: SecuredCluster) -> Page:
    """A page of the administrator."""
    log_in(page, secured.secrets[0])
    expect(page.locator(".health")).to_be_visible()
    return page


def confirm(page: Page, typed: str, button: str) -> None:
    """Type the name that a dialog asks for, and go on; anything else must not do."""
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name=button, exact=True)).to_be_disabled()
    dialog.get_by_label(f"Type {typed} to confirm").fill(typed)
    dialog.get_by_role("button", name=button, exact=True).click()
    expect(page.get_by_role("dialog")).to_have_count(0)


def log_in(page: Page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()


def test_login_with_a_token_that_stays_in_the_tab(page: Page, secured: SecuredCluster) -> None:
    log_in(page, "not-a-token")
    expect(alert(page, "not valid")).to_be_visible()
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
    expect(alert(page, "may not read the cluster")).to_be_visible()
    page.goto(f"{secured.url}/console#/topics")
    expect(page.get_by_role("link", name="orders")).to_be_visible()
    expect(page.get_by_role("link", name="salaries")).to_have_count(0)
    page.get_by_role("link", name="orders").click()
    page.get_by_role("button", name="Delete topic").click()
    page.get_by_label("Type orders to confirm").fill("orders")
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    expect(alert(page.get_by_role("dialog"), "may not delete topic orders")).to_be_visible()
    assert "orders" in secured.must("GET", "/topics")["topics"]


# -- users, grants and quotas ------------------------------------------------------------------------


def test_user_is_created_gets_a_token_and_is_deleted(admin: Page, secured: SecuredCluster) -> None:
    admin.get_by_role("link", name="Access").click()
    admin.get_by_role("button", name="Create user").click()
    admin.get_by_label("Name").fill("temp")
    admin.get_by_role("dialog").get_by_role("button", name="Create", exact=True).click()
    expect(admin.locator("h2.name")).to_contain_text("temp")

    admin.get_by_role("button", name="Create token").click()
    admin.get_by_label("Valid for").fill("2d")
    admin.get_by_role("dialog").get_by_role("button", name="Create", exact=True).click()
    secret = admin.locator("[data-secret]").inner_text()
    assert secured.call("GET", "/console/session", token=secret)[1]["principal"] == "user:temp"
    admin.get_by_role("button", name="I have it").click()
    token_id = secret.split("_")[1]
    tokens = admin.get_by_role("region", name="Tokens")
    expect(tokens).to_contain_text(token_id)
    expect(tokens).to_contain_text("soon")
    kept = "JSON.stringify([document.body.innerHTML, {...localStorage}, {...sessionStorage}, location.href])"
    assert secret.split("_")[2] not in admin.evaluate(kept), "the secret is shown once and kept nowhere"

    admin.get_by_role("button", name=f"Revoke {token_id}").click()
    confirm(admin, token_id, "Revoke")
    expect(admin.get_by_text("Tokens: none")).to_be_visible()
    assert secured.call("GET", "/console/session", token=secret)[0] == 401

    admin.get_by_role("button", name="Disable user").click()
    admin.get_by_role("dialog").get_by_role("button", name="Disable", exact=True).click()
    expect(admin.locator("h2.name")).to_contain_text("disabled")
    admin.get_by_role("button", name="Delete user").click()
    confirm(admin, "temp", "Delete")
    expect(admin.get_by_role("table", name="Users")).to_be_visible()
    expect(admin.get_by_role("link", name="temp", exact=True)).to_have_count(0)
    assert "temp" not in [one["user"] for one in secured.must("GET", "/users")["users"]]


def test_grant_is_added_tested_and_removed(admin: Page, secured: SecuredCluster) -> None:
    secured.must("POST", "/users", {"user": "reader"})
    admin.goto(f"{secured.url}/console#/access/users/reader")
    admin.get_by_role("button", name="Add grant").click()
    dialog = admin.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("ord")
    dialog.get_by_label("All names that begin with it").check()
    expect(dialog).to_contain_text("user:reader may read topics ord*.")
    dialog.get_by_role("button", name="Add", exact=True).click()
    expect(admin.get_by_role("region", name="Grants")).to_contain_text("topics ord*")

    admin.get_by_role("link", name="Test what reader may do").click()
    admin.get_by_label("Name", exact=True).fill("orders")
    admin.get_by_role("button", name="Test", exact=True).click()
    verdict = admin.locator(".verdict")
    expect(verdict).to_contain_text("reader may read topic orders: user:reader may read topics ord*")
    admin.get_by_label("Wants to").select_option("delete")
    expect(verdict).to_have_count(0)
    admin.get_by_role("button", name="Test", exact=True).click()
    expect(verdict).to_contain_text("reader may not delete topic orders: no grant allows user:reader to")

    admin.get_by_role("link", name="Grants", exact=True).click()
    admin.get_by_role("button", name="Remove grant: user:reader may read topics ord*").click()
    confirm(admin, "user:reader", "Remove")
    expect(admin.get_by_role("button", name="Remove grant: user:reader")).to_have_count(0)
    assert secured.must("GET", "/acls?subject=user:reader")["grants"] == []


def test_role_and_quota_are_set_and_taken_away(admin: Page, secured: SecuredCluster) -> None:
    secured.must("POST", "/users", {"user": "driver"})
    admin.goto(f"{secured.url}/console#/access/roles")
    admin.get_by_role("button", name="Create role").click()
    admin.get_by_label("Name").fill("night-shift")
    admin.get_by_role("dialog").get_by_role("button", name="Create", exact=True).click()
    expect(admin.get_by_role("region", name="Roles")).to_contain_text("night-shift")
    admin.goto(f"{secured.url}/console#/access/users/driver")
    admin.get_by_role("button", name="Give a role").click()
    admin.get_by_label("Role", exact=True).select_option("night-shift")
    admin.get_by_role("dialog").get_by_role("button", name="Give", exact=True).click()
    admin.get_by_role("button", name="Take away role night-shift").click()
    confirm(admin, "driver", "Take away")
    expect(admin.get_by_text("Roles: none")).to_be_visible()

    admin.get_by_role("link", name="Quotas").click()
    admin.get_by_role("button", name="Set quota").click()
    admin.get_by_label("Subject").fill("user:driver")
    admin.get_by_label("Bytes in per second").fill("1MiB")
    admin.get_by_label("Topics owned").fill("3")
    admin.get_by_role("dialog").get_by_role("button", name="Set", exact=True).click()
    quotas = admin.get_by_role("region", name="Quotas")
    expect(quotas).to_contain_text("Bytes in per second: 1.00 MiB; Topics owned: 3")
    (quota,) = secured.must("GET", "/quotas?subject=user:driver")["quotas"]
    assert quota["limits"] == {"bytes_in_per_second": 1 << 20, "topics_max": 3}
    admin.get_by_role("button", name="Remove quota of user:driver").click()
    confirm(admin, "user:driver", "Remove")
    expect(quotas).to_have_count(0)
    admin.get_by_role("link", name="Roles", exact=True).click()
    admin.get_by_role("button", name="Delete role night-shift").click()
    confirm(admin, "night-shift", "Delete")
    expect(admin.get_by_role("region", name="Roles")).not_to_contain_text("night-shift")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_of_access_are_accessible_and_fit_on_a_phone(admin: Page, secured: SecuredCluster, theme: Any) -> None:
    axe = find_axe()
    if not axe:
        pytest.skip("axe-core cannot be had from the package registry: install npm, or check the connection")
    admin.emulate_media(color_scheme=theme)
    admin.set_viewport_size({"width": 360, "height": 740})
    for tab in ("users", "users/admin", "tokens", "roles", "grants", "quotas", "test/admin"):
        admin.goto(f"{secured.url}/console#/access/{tab}")
        expect(admin.locator("main h1")).to_have_text("Access")
        expect(admin.locator(".loading")).to_have_count(0)
        expect(admin.locator("main h2").first).to_be_visible()
        admin.evaluate(axe)
        options = {"runOnly": {"type": "tag", "values": LEVELS}}
        result = admin.evaluate("options => axe.run(document, options)", options)
        assert [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in result["violations"]] == [], tab
        wide = admin.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{tab} is {wide} pixels too wide"


def test_who_is_no_administrator_sees_what_is_missing_and_tests_itself(page: Page, secured: SecuredCluster) -> None:
    _, token = add_user(secured, "intern", verb="read", kind="topic", name="orders")
    log_in(page, token)
    page.goto(f"{secured.url}/console#/access")
    expect(alert(page, "may not admin the cluster")).to_be_visible()
    page.get_by_role("link", name="Test access").click()
    page.get_by_label("User").fill("intern")
    page.get_by_label("Name", exact=True).fill("orders")
    page.get_by_role("button", name="Test", exact=True).click()
    expect(page.locator(".verdict")).to_contain_text("intern may read topic orders")
    page.get_by_label("User").fill("admin")
    page.get_by_role("button", name="Test", exact=True).click()
    expect(alert(page, "may not")).to_be_visible()


def test_stream_ends_when_its_token_is_revoked(secured: SecuredCluster) -> None:
    token_id, token = add_user(secured, "guard", verb="read", kind="cluster")
    tls = ssl.create_default_context(cafile=secured.ca_file)
    address, patience_s = urlsplit(secured.url).netloc, PATIENCE_MS / 1000
    with closing(http.client.HTTPSConnection(address, timeout=patience_s, context=tls)) as connection:
        connection.request("GET", "/console/events", headers={"Authorization": f"Bearer {token}"})
        with connection.getresponse() as response:
            assert response.status == 200
            assert response.readline().startswith(b"event: history")
            secured.must("DELETE", f"/tokens/{token_id}")
            events = list(islice((line for line in response if line.startswith(b"event:")), EVENTS_MAX))
    assert len(events) < EVENTS_MAX, "the stream ends"
    status, _ = secured.call("GET", "/console/events", token=token)
    assert status == 401


def test_strangers_get_the_page_and_nothing_else(secured: SecuredCluster) -> None:
    for path in ("/console/session", "/console/topics", "/console/events", "/topics/orders/records", "/pipelines"):
        assert secured.call("GET", path, token="")[0] == 401, path
    for path in ("/deleted_topics", "/consumers", "/cluster/settings", "/cluster/events", "/cluster/holds"):
        assert secured.call("GET", path, token="")[0] == 401, path
    status, answer = secured.call("POST", "/consumers/1/reset", {"topic": "orders", "to": "earliest"}, token="")
    assert (status, answer["code"]) == (401, "unauthenticated")
