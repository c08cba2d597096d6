"""A page of the console in a browser."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Locator, Page, expect

PATIENCE_MS = 120_000
"""How long is waited for anything; nothing is said about speed."""
expect.set_options(timeout=PATIENCE_MS)
KEEP_MESSAGES = """
window.messages = [];
addEventListener("DOMContentLoaded", () => new MutationObserver(() => {
  const text = document.querySelector(".messages")?.textContent;
  if (text) messages.push(text);
}).observe(document.body, { childList: true, subtree: true, characterData: true }));
"""
"""A message is shown for five seconds, in which a busy machine may not look."""
ROUTES = {
    "": "Overview",
    "topics": "Topics",
    "topics/orders": "orders",
    "topics/orders/records": "orders",
    "topics/orders/consumers": "orders",
    "topics/orders/configuration": "orders",
    "consumers": "Consumers",
    "cluster": "Cluster",
    "cluster/moves": "Cluster",
    "cluster/events": "Cluster",
    "cluster/holds": "Cluster",
    "cluster/settings": "Cluster",
    "cluster/explain/orders/0": "Cluster",
    "cluster/audit": "Cluster",
    "access": "Access",
    "pipelines": "Pipelines",
}
"""Every page and its heading."""
DRAWN = {"": "Nodes", "topics": "Topics", "topics/orders/records": "Records", "cluster": "Managers"}
"""What is waited for on a page before it is checked: a table by its label."""


class Console:
    """A page of the console; everything that a page may not do fails the test."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        page.set_default_timeout(PATIENCE_MS)
        page.add_init_script(KEEP_MESSAGES)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("console", self._handle_said)
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def _handle_said(self, said: Any) -> None:
        # A node that was killed, and an answer that is a failure, are the test's business.
        if said.type in ("error", "warning") and "Failed to load resource" not in said.text:
            self.problems.append(f"{said.type}: {said.text}")

    def open(self, route: str = "", address: str = "") -> Page:
        """Open a page of the console."""
        self.page.goto(f"http://{address or self.address}/console#/{route}")
        self.page.wait_for_selector("main h1", state="attached")
        return self.page


def alert(page: Page | Locator, text: str | re.Pattern[str]) -> Locator:
    """Return the alerts with a text: after a pause of the machine, the page also has one that says where it went."""
    return page.get_by_role("alert").filter(has_text=text)


def wait_message(page: Page, text: str) -> None:
    """Return once the page has said that something was done."""
    page.wait_for_function("text => messages.some(message => message.includes(text))", arg=text)


def table(page: Page, label: str) -> Any:
    return page.get_by_role("table", name=label).or_(page.get_by_role("region", name=label, exact=True)).first


def draw(console: Console, route: str) -> Page:
    """Open a page and wait until it is complete."""
    page = console.open(route)
    expect(page.locator("main h1")).to_have_text(ROUTES[route])
    if route in DRAWN:
        expect(table(page, DRAWN[route])).to_be_visible()
    expect(page.locator(".loading")).to_have_count(0)
    return page
