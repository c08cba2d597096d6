"""The web console while nodes die, join and leave.

It has a cluster of its own: whatever a failure leaves behind here, the tests of the other files do not meet it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from chaos_cluster import Cluster
from console_page import Console, alert, draw, table
from playwright.sync_api import Browser, Page, expect
from waiting import wait_until

SETTINGS = ("--manager-moves-max", "100", "--manager-broker-moves-max", "100")
"""All replicas move at once: how long a drain takes does not depend on how many there are."""


def test_page_goes_on_when_the_node_that_served_it_is_killed(
    browser: Browser, cluster: Cluster, call: Callable[..., Any], orders: str
) -> None:
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    console = Console(context.new_page(), cluster.nodes[0].http)
    try:
        page = console.open("")
        expect(page.locator(".health")).to_contain_text("nodes up")
        cluster.nodes[0].kill()
        expect(alert(page, f"{cluster.nodes[0].http} does not answer; connected to")).to_be_visible()
        expect(page.locator(".health")).to_contain_text("node 1 does not answer", ignore_case=True)
        page.goto(page.url.split("#")[0] + "#/cluster/events")
        expect(page.locator(".events")).to_contain_text(re.compile(r"node 1 is (suspect|dead)"))
        page.get_by_role("link", name="Topics", exact=True).click()
        expect(page.get_by_role("link", name="orders")).to_be_visible()
        page.get_by_role("button", name="Create topic").click()
        page.get_by_label("Name").fill("after-the-crash")
        page.get_by_role("button", name="Create", exact=True).click()
        expect(page.locator("main h1")).to_have_text("after-the-crash")
        assert call("GET", "/topics/after-the-crash")["topic"] == "after-the-crash"
    finally:
        context.close()
        cluster.start()
    assert [one for one in console.problems if "ERR_CONNECTION_REFUSED" not in one] == []


def submit(page: Page, name: str) -> None:
    """Press the button of a dialog until it is done, again if a pause of the machine is in the way."""
    dialog = page.get_by_role("dialog")
    button = dialog.get_by_role("button", name=name, exact=True)

    def is_done() -> bool:
        if alert(dialog, re.compile("was sent and not answered|is suspect")).count():
            button.click()
        return dialog.count() == 0

    button.click()
    wait_until(is_done)


def test_node_joins_gets_replicas_is_drained_and_removed(
    console: Console, cluster: Cluster, call: Callable[..., Any], orders: str
) -> None:
    call("POST", "/topics", {"topic_name": "deleted", "partitions": 3})
    call("DELETE", "/topics/deleted")  # its replicas move, too, as it may be restored
    page = draw(console, "cluster")
    page.get_by_role("button", name="Drain node 3").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain node 3").click()
    expect(alert(page.get_by_role("dialog"), "add a broker first")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Add a node").click()
    expect(page.get_by_role("dialog")).to_contain_text("quiver node --id 4")
    page.keyboard.press("Escape")
    joined = cluster.add_broker(4)
    try:
        joined.start()
        joined.wait_ready()
        expect(page.get_by_role("button", name="Drain node 4")).to_be_visible()
        page.get_by_role("button", name="Rebalance").click()
        submit(page, "Rebalance")
        row = table(page, "Nodes").get_by_role("row").filter(has=page.get_by_role("button", name="node 4"))
        expect(row.get_by_role("cell").nth(5)).to_have_text(re.compile(r"^[1-9]"))
        page.get_by_role("button", name="Drain node 4").click()
        submit(page, "Drain node 4")
        expect(row.get_by_role("cell").nth(1)).to_contain_text("drained")  # a node that is silent can be removed, too
        page.get_by_role("button", name="Remove node 4").click()
        page.get_by_label("Type node 4 to confirm").fill("node 4")
        submit(page, "Remove")
        expect(page.get_by_role("button", name="node 4")).to_have_count(0)
    finally:
        joined.kill()
        cluster.nodes.remove(joined)
        # A page that looks for another node knows of node 4, and may not ask it: it was served before node 4 joined.
        console.problems = [one for one in console.problems if joined.http not in one]
    page.get_by_role("link", name="Events").click()
    expect(page.locator(".events")).to_contain_text("node 4 was removed")
    console.hosts.discard(joined.http)
