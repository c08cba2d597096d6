"""What pages of the web console ask for again and again, where they lead, and that their parts are level."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from console_page import Console, draw, table
from playwright.sync_api import expect

BIG = "12345678901234567890"


@pytest.fixture(scope="module")
def group_id(call: Callable[..., Any], orders: str) -> int:
    """Return the id of the consumer that has the cursors of a work queue, `cooks`."""
    call("POST", "/queue/receive", {"topic": orders, "group": "cooks", "max": 1, "wait_ms": 60_000})
    consumers = call("GET", "/consumers")["consumers"]
    return next(int(one["id"]) for one in consumers if one["name"] == "cooks")


@pytest.mark.parametrize(
    ("route", "paths"),
    [
        ("topics/orders", ["/topics/orders"]),
        ("topics/orders/consumers", ["/consumers"]),
        ("consumers", ["/consumers", "/groups"]),
        ("consumers/consumer/1", ["/consumers/1"]),
        ("consumers/group/cooks", ["/groups/cooks", "/groups/cooks/lag", "/groups/cooks/queue"]),
        ("pipelines", ["/pipelines"]),
    ],
)
def test_what_a_page_repeats_is_shared_with_other_consoles(
    console: Console, group_id: int, route: str, paths: list[str]
) -> None:
    asked: Counter[str] = Counter()
    page = console.page

    def handle(request: Any) -> None:
        url = urlsplit(request.url)
        if url.path in paths:
            asked[url.path if url.query == "shared=true" else f"not shared: {request.url}"] += 1

    page.on("request", handle)
    console.open(route)
    while any(asked[path] < 3 for path in paths):
        page.wait_for_timeout(100)
    assert sorted(asked) == paths


def test_page_that_changed_something_asks_for_itself(console: Console, call: Callable[..., Any], orders: str) -> None:
    page = draw(console, "topics/orders")
    page.get_by_role("button", name="Produce record").click()
    page.get_by_label("Value").fill("x")
    page.get_by_role("button", name="Produce", exact=True).click()
    expect(page.locator(".messages")).to_contain_text("Produced to partition")
    with page.expect_request(lambda request: urlsplit(request.url).path == "/topics/orders") as found:
        pass
    assert urlsplit(found.value.url).query == ""


def test_cursors_of_a_work_queue_lead_to_its_page_and_are_not_reset(console: Console, group_id: int) -> None:
    page = draw(console, "consumers")
    row = table(page, "Consumers").get_by_role("row").filter(has_text="cooks")
    expect(row).to_contain_text("work queue")
    row.get_by_role("link", name="cooks").click()
    expect(page.locator("main h1")).to_have_text("Group cooks")
    page = console.open(f"consumers/consumer/{group_id}")
    expect(page.get_by_text("These are the cursors of the work queue")).to_be_visible()
    expect(page.get_by_role("button", name="Preview")).to_have_count(0)
    page.locator("main").get_by_role("link", name="cooks").click()
    expect(page.locator("main h1")).to_have_text("Group cooks")


def test_numbers_of_a_record_are_shown_as_they_are_written(console: Console, call: Callable[..., Any]) -> None:
    call("POST", "/topics", {"topic_name": "numbers", "partitions": 1})
    producer = call("POST", "/producer/register", {"topic": "numbers"})["producer_id"]
    message = f'{{"id": {BIG}, "price": 1.10}}'
    call("POST", "/producer/produce", {"topic": "numbers", "producer_id": producer, "message": message})
    page = console.open("topics/numbers/records")
    page.get_by_role("button", name="Show record 0/0").click()
    detail = page.locator(".detail")
    # A browser that cannot say how a number is written shows the text instead.
    expect(detail.locator(".json, pre")).to_contain_text(BIG)
    expect(detail.locator(".json, pre")).to_contain_text("1.10")


def test_parts_of_a_page_are_level_and_apart(console: Console, orders: str) -> None:
    page = draw(console, "topics/orders/records")
    tops = "fields => fields.map(field => Math.round(field.querySelector('label').getBoundingClientRect().top))"
    assert len(set(page.locator("form.filters .field").evaluate_all(tops))) == 1
    page.get_by_role("button", name="Show record").first.click()
    list_box, detail_box = page.locator(".scroll-x").bounding_box(), page.locator(".detail").bounding_box()
    assert list_box is not None
    assert detail_box is not None
    assert detail_box["y"] - (list_box["y"] + list_box["height"]) >= 8
    page = draw(console, "")
    expect(page.locator(".chart canvas")).to_have_count(6)
    plots = "plots => plots.map(plot => Math.round(plot.getBoundingClientRect().top))"
    assert len(set(page.locator(".plot").evaluate_all(plots))) == 2, "two rows of three charts"
