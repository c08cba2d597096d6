"""The web console in a real browser, against three real processes: every page, live, also when a node is killed."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chaos_cluster import Cluster
from chromium import find_axe
from console_page import PATIENCE_MS, ROUTES, Console, alert, draw, table, wait_message
from playwright.sync_api import Route, expect
from waiting import wait_until

import quiver

LEVELS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


# -- every page --------------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_is_drawn_and_accessible(console: Console, orders: str, theme: Any) -> None:
    axe = find_axe()
    if not axe:
        pytest.skip("axe-core cannot be had from the package registry: install npm, or check the connection")
    console.page.emulate_media(color_scheme=theme)
    found = {}
    for route in ROUTES:
        page = draw(console, route)
        page.evaluate(axe)
        # What differs between the themes is the colours.
        options = {"runOnly": {"type": "tag", "values": LEVELS} if theme == "light" else ["color-contrast"]}
        result = page.evaluate("options => axe.run(document, options)", options)
        if problems := [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in result["violations"]]:
            found[route] = problems
    assert found == {}


def test_browser_at_the_root_is_sent_to_the_console_and_programs_are_not(
    console: Console, call: Callable[..., Any]
) -> None:
    console.page.goto(f"http://{console.address}/")
    expect(console.page).to_have_url(re.compile("/console$"))
    console.page.goto(f"http://{console.address}/console/")
    expect(console.page).to_have_url(re.compile("/console$"))
    assert "Quiver is running" in call("GET", "/")["message"]


def test_console_is_used_by_keyboard_alone(console: Console, orders: str) -> None:
    page = draw(console, "")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    for _ in range(3):
        page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Topics", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main h1")).to_have_text("Topics")
    page.get_by_role("button", name="Create topic").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Create topic")).to_be_focused()


def test_pages_fit_on_a_phone(console: Console, orders: str) -> None:
    console.page.set_viewport_size({"width": 360, "height": 740})
    for route in ROUTES:
        page = draw(console, route)
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{route} is {wide} pixels too wide"


def test_address_of_nothing_says_so_and_leads_back(console: Console, orders: str) -> None:
    for route in ("nothing", "topics/orders/nothing", "cluster/nothing", "access/nothing", "nothing/%E0%A4"):
        page = console.open(route)
        expect(page.locator("main")).to_contain_text("There is nothing at this address")
        page.get_by_role("link", name="Go to the overview").click()
        expect(page.locator(".health")).to_be_visible()
    page = console.open("topics/%E0%A4")
    expect(alert(page, "topic")).to_be_visible()
    expect(page.get_by_role("button", name="Delete topic")).to_have_count(0)


# -- live --------------------------------------------------------------------------------------------


def test_overview_follows_the_cluster(console: Console, call: Callable[..., Any], orders: str) -> None:
    page = draw(console, "")
    expect(page.locator(".health")).to_contain_text("3 nodes up")
    expect(page.locator(".chart canvas")).to_have_count(6)
    shown = page.locator(".numbers div", has=page.get_by_text("Topics", exact=True)).locator("dd")

    def wait_shown() -> int:
        """Return the number of topics once the page has it: its first update may be older than the last test's end."""
        wait_until(lambda: int(shown.inner_text()) == len(call("GET", "/topics")["topics"]))
        return int(shown.inner_text())

    before = wait_shown()
    call("POST", "/topics", {"topic_name": "appears", "partitions": 1})
    try:
        expect(page.locator(".events")).to_contain_text("topic appears was created")
        assert wait_shown() == before + 1
    finally:
        call("DELETE", "/topics/appears")
    expect(page.locator(".events")).to_contain_text("topic appears was deleted")
    assert wait_shown() == before


def test_fresh_page_has_the_history_of_the_nodes(console: Console, orders: str) -> None:
    page = draw(console, "")
    points = "import('/console/state.js').then(state => state.history.cluster.times.length)"
    page.wait_for_function(f"() => {points}.then(count => count > 2)")
    first = page.evaluate(points)
    page.reload()
    expect(page.locator(".chart canvas")).to_have_count(6)
    page.wait_for_function(f"() => {points}.then(count => count > 1)")
    assert first > 2


def test_records_are_followed_live(console: Console, call: Callable[..., Any], orders: str) -> None:
    call("POST", "/topics", {"topic_name": "live", "partitions": 3})
    producer = call("POST", "/producer/register", {"topic": "live"})["producer_id"]
    page = console.open("topics/live/records")
    page.get_by_label("Follow live").check()
    to_live = {"topic": "live", "producer_id": producer}
    for at in range(2):
        for partition in range(3):
            call("POST", "/producer/produce", {**to_live, "partition_id": partition, "message": f"{at}-{partition}"})
            expect(table(page, "Records")).to_contain_text(f"{at}-{partition}")
    page.get_by_label("Search").fill("found")
    page.get_by_role("button", name="Read", exact=True).click()
    expect(page.get_by_text("0 records, 6 looked at")).to_be_visible()
    for partition, text in enumerate(("lost", "found", "lost")):
        call("POST", "/producer/produce", {**to_live, "partition_id": partition, "message": text})
    expect(table(page, "Records")).to_contain_text("found")
    expect(page.get_by_text("1 records,")).to_be_visible()


# -- work --------------------------------------------------------------------------------------------


def test_topic_is_created_filled_browsed_deleted_and_restored(console: Console, orders: str) -> None:
    page = draw(console, "topics")
    page.get_by_role("button", name="Create topic").click()
    page.get_by_label("Name").fill("parcels")
    page.get_by_label("Partitions", exact=True).fill("2")
    page.get_by_label("Keep for").fill("7d")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.locator("main h1")).to_have_text("parcels")
    expect(page.locator(".map tbody tr")).to_have_count(2)
    expect(page.locator(".map .cell.leader")).to_have_count(2)
    expect(page.locator(".numbers")).to_contain_text("7 d")

    page.get_by_role("button", name="Produce record").click()
    page.get_by_label("Value").fill('{"weight": 3, "to": {"city": "<b>Bonn</b>"}}')
    page.get_by_label("Key").fill("p-1")
    page.get_by_label("Headers").fill("trace: abc")
    page.get_by_role("button", name="Produce", exact=True).click()
    expect(page.get_by_role("dialog")).to_have_count(0)

    page.get_by_role("link", name="Records", exact=True).click()
    page.get_by_role("button", name=re.compile(r"Show record")).click()
    detail = page.locator(".detail")
    expect(detail.locator(".json")).to_contain_text('"<b>Bonn</b>"')
    expect(detail.locator(".json b").filter(has_text="weight")).to_have_count(1)
    expect(detail).to_contain_text("trace")
    assert detail.locator("b", has_text="Bonn").count() == 0, "a record is text, whatever is in it"
    detail.get_by_role("button", name="Bytes").click()
    expect(detail.locator("pre")).to_contain_text("7b 22 77 65 69 67 68 74")

    page.get_by_role("link", name="Configuration").click()
    page.get_by_label("Partitions", exact=True).fill("4")
    page.get_by_role("button", name="Add partitions").click()
    page.get_by_role("link", name="Partitions", exact=True).click()
    expect(page.locator(".map tbody tr")).to_have_count(4)

    page.get_by_role("button", name="Delete topic").click()
    delete = page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True)
    expect(delete).to_be_disabled()
    page.get_by_label("Type parcels to confirm").fill("parcel")
    expect(delete).to_be_disabled()
    page.get_by_label("Type parcels to confirm").fill("parcels")
    delete.click()
    expect(page.locator("main h1")).to_have_text("Topics")
    expect(page.get_by_role("link", name="parcels")).to_have_count(0)

    page.get_by_role("button", name="Deleted topics").click()
    page.get_by_role("button", name="Restore parcels").click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("link", name="parcels")).to_be_visible()


@pytest.mark.parametrize("is_lost", [True, False])
def test_deletion_of_unknown_outcome_ends_once_the_topic_is_gone(
    console: Console, call: Callable[..., Any], *, is_lost: bool
) -> None:
    topic = "lost" if is_lost else "doubtful"
    call("POST", "/topics", {"topic_name": topic, "partitions": 1})
    unknown = {"status": "failure", "message": "may have been done", "code": "timed_out", "outcome": "unknown"}

    def answer(route: Route) -> None:
        if route.request.method != "DELETE":
            route.fallback()
        elif route.fetch(timeout=PATIENCE_MS).ok and is_lost:
            route.abort()
        else:
            route.fulfill(status=504, json=unknown)

    page = console.open(f"topics/{topic}")
    page.route(f"**/topics/{topic}", answer)
    page.get_by_role("button", name="Delete topic").click()
    page.get_by_label(f"Type {topic} to confirm").fill(topic)
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("main h1")).to_have_text("Topics")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.unroute_all(behavior="ignoreErrors")


def test_records_are_found_by_offset_key_and_text(console: Console, orders: str) -> None:
    page = draw(console, "topics/orders/records")
    page.get_by_label("Partition", exact=True).select_option("1")
    page.get_by_label("From").select_option("offset")
    page.get_by_label("Offset", exact=True).fill("500")
    page.get_by_role("button", name="Read", exact=True).click()
    expect(page.get_by_role("button", name="Show record 1/500")).to_be_visible()
    page.get_by_label("From").select_option("earliest")
    page.get_by_label("Key").fill("k777")
    page.get_by_role("button", name="Read", exact=True).click()
    expect(page.get_by_role("button", name="Show record 1/777")).to_be_visible()
    expect(page.get_by_text("1 records, 1,000 looked at")).to_be_visible()
    page.get_by_label("Key").fill("")
    page.get_by_label("Partition", exact=True).select_option("")
    page.get_by_label("Search").fill('"ORDER": 42,')
    page.get_by_role("button", name="Read", exact=True).click()
    expect(page.get_by_text("3 records, 3,000 looked at")).to_be_visible()


def test_records_are_found_by_time(console: Console, call: Callable[..., Any]) -> None:
    call("POST", "/topics", {"topic_name": "diary", "partitions": 1})
    producer = call("POST", "/producer/register", {"topic": "diary"})["producer_id"]
    for text in ("early", "late"):
        call("POST", "/producer/produce", {"topic": "diary", "producer_id": producer, "message": f"{text} entry"})
        time.sleep(1.1)  # the page asks for whole seconds
    late_ms = call("GET", "/topics/diary/records?from=earliest")["records"][1]["timestamp"]
    page = console.open("topics/diary/records")
    page.get_by_label("From").select_option("time")
    seconds = "ms => new Date(ms - new Date(ms).getTimezoneOffset() * 60000).toISOString().slice(0, 19)"
    shown = page.evaluate(seconds, late_ms)
    page.get_by_label("Time", exact=True).fill(shown)
    page.get_by_role("button", name="Read", exact=True).click()
    expect(table(page, "Records")).to_contain_text("late entry")
    expect(table(page, "Records")).not_to_contain_text("early entry")


@pytest.mark.parametrize("name", ["jsonl", "csv", "arrow", "parquet"])
def test_records_are_downloaded(console: Console, orders: str, name: str, tmp_path: Any) -> None:
    page = draw(console, "topics/orders/records")
    page.get_by_label("Download as").select_option(name)
    with page.expect_download() as started:
        page.get_by_role("button", name="Download").click()
    path = tmp_path / started.value.suggested_filename
    started.value.save_as(path)
    assert path.name == f"orders.{name}"
    assert count_rows(path.read_bytes(), name) == 3000


def count_rows(data: bytes, name: str) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if name == "jsonl":
        return len([json.loads(line) for line in data.splitlines()])
    if name == "csv":
        return data.count(b"\r\n") - 1
    table = pq.read_table(pa.BufferReader(data)) if name == "parquet" else pa.ipc.open_stream(data).read_all()
    assert table.column_names == ["topic", "partition", "offset", "timestamp", "key", "value", "headers"]
    return int(table.num_rows)


def test_consumer_is_reset_after_a_preview(console: Console, call: Callable[..., Any], orders: str) -> None:
    consumer = call("POST", "/consumer/register", {"topic": orders})["consumer_id"]
    call("GET", f"/consumer/consume_batch?topic=orders&consumer_id={consumer}&partition_id=2&max=300")
    page = console.open(f"consumers/consumer/{consumer}")
    expect(table(page, "Positions")).to_contain_text("300")
    page.get_by_label("To", exact=True).select_option("offset")
    page.get_by_label("Offset", exact=True).fill("100")
    page.get_by_role("button", name="Preview").click()
    expect(table(page, "Preview")).to_contain_text("200 records again")
    expect(table(page, "Preview")).to_contain_text("100 records skipped")
    cursors = call("GET", f"/consumers/{consumer}")["cursors"]
    assert sorted(one["cursor"] for one in cursors) == [0, 0, 300], "a preview moves nothing"
    page.get_by_role("button", name=f"Reset {consumer}").click()
    wait_message(page, "was reset")
    cursors = call("GET", f"/consumers/{consumer}")["cursors"]
    assert [one["cursor"] for one in cursors] == [100, 100, 100]


def test_members_of_a_group_are_shown_and_its_reset_waits_until_they_leave(
    console: Console, cluster: Cluster, call: Callable[..., Any]
) -> None:
    call("POST", "/topics", {"topic_name": "shared", "partitions": 4})
    producer = call("POST", "/producer/register", {"topic": "shared"})["producer_id"]
    body = {"topic": "shared", "producer_id": producer, "partition_id": 1, "messages": ["x"] * 10}
    call("POST", "/producer/produce_batch", body)
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read_in_group, cluster.nodes[0].wire, "shared", "readers", is_over)
        try:
            page = console.open("consumers/group/readers")
            members = table(page, "Members").locator("tbody tr")
            expect(members).to_have_count(2)
            expect(members.first).to_contain_text(re.compile(r"shared/\d, shared/\d"))
            row = table(page, "Positions").get_by_role("row").nth(2)
            expect(row.get_by_role("cell").nth(2)).to_have_text("10")
            page.get_by_role("button", name="Preview").click()
            expect(table(page, "Preview")).to_contain_text("10 records again")
            page.get_by_role("button", name="Reset readers").click()
            expect(alert(page, "group_active")).to_be_visible()
        finally:
            is_over.set()
            reading.result()
    expect(members).to_have_count(0)
    page.get_by_role("button", name="Reset readers").click()
    wait_message(page, "readers was reset")
    assert call("GET", "/groups/readers/lag")["lag"] == 10


def read_in_group(address: str, topic: str, group: str, is_over: threading.Event) -> None:
    """Run two members until `is_over`; a pause of the machine does not end their membership."""
    with quiver.connect(address) as connected:
        members = [connected.consumer(topic, group=group, auto_commit=0.1, session_timeout=300.0) for _ in range(2)]
        while not is_over.is_set():
            for member in members:
                member.poll(timeout=0.1)
        for member in members:
            member.close()


def test_dead_letters_are_shown_and_requeued(console: Console, cluster: Cluster, call: Callable[..., Any]) -> None:
    call("POST", "/topics", {"topic_name": "chores", "partitions": 1})
    producer = call("POST", "/producer/register", {"topic": "chores"})["producer_id"]
    body = {"topic": "chores", "producer_id": producer, "messages": ["wash", "iron", "fold"]}
    call("POST", "/producer/produce_batch", body)
    queue = {"topic": "chores", "group": "maids"}
    open_queue(cluster, "chores", "maids", lease=3600.0)  # longer than the page takes to show it
    jobs = call("POST", "/queue/receive", {**queue, "max": 3, "wait_ms": 60_000})["jobs"]
    receipts = [job["receipt"] for job in jobs]
    page = console.open("consumers/group/maids")
    leased = table(page, "Jobs").locator("tbody tr").first.get_by_role("cell").nth(3)
    expect(leased).to_have_text("3")
    assert call("POST", "/queue/reject", {**queue, "receipts": receipts, "reason": "no soap"})["count"] == 3
    expect(leased).to_have_text("0")
    expect(table(page, "Dead letters")).to_contain_text("no soap")
    expect(table(page, "Dead letters").locator("tbody tr")).to_have_count(3)
    open_queue(cluster, "chores.maids.dead", "maids.dead", lease=3600.0)
    page.get_by_role("button", name="Requeue all").click()
    wait_message(page, "3 dead letters were requeued")
    expect(page.get_by_role("status").filter(has_text="left of")).to_contain_text("0 left of 3")
    records = call("GET", "/topics/chores/records")["records"]
    assert [one["message"] for one in records][3:] == [job["message"] for job in jobs]


def test_dead_letters_are_found_where_the_queue_says(
    console: Console, cluster: Cluster, call: Callable[..., Any]
) -> None:
    call("POST", "/topics", {"topic_name": "letters", "partitions": 1})
    producer = call("POST", "/producer/register", {"topic": "letters"})["producer_id"]
    call("POST", "/producer/produce_batch", {"topic": "letters", "producer_id": producer, "messages": ["torn"]})
    queue = {"topic": "letters", "group": "post"}
    open_queue(cluster, "letters", "post", lease=3600.0, dead_letter_topic="graveyard")
    (job,) = call("POST", "/queue/receive", {**queue, "max": 1, "wait_ms": 60_000})["jobs"]
    call("POST", "/queue/reject", {**queue, "receipts": [job["receipt"]], "reason": "no address"})
    assert call("GET", "/groups/post")["group"]["dead_letter_topics"] == {"letters": "graveyard"}
    page = console.open("consumers/group/post")
    expect(table(page, "Dead letters")).to_contain_text("no address")
    page.get_by_role("button", name="Requeue all").click()
    wait_message(page, "1 dead letters were requeued")


def open_queue(cluster: Cluster, topic: str, group: str, **settings: Any) -> None:
    """Create the group of a work queue."""

    def create() -> None:
        with quiver.connect(cluster.nodes[0].wire) as connected, connected.queue(topic, group, **settings):
            pass

    # In a thread of its own: playwright's event loop runs in this one, and the SDK needs one, too.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(create).result()


def test_run_of_a_pipeline_shows_its_lag_and_its_report(
    console: Console, call: Callable[..., Any], tmp_path: Path
) -> None:
    topics = {"_pipelines": "", "_pipeline_reports": "# Audit\n\n<script>all sources agree</script>"}
    for topic, report in topics.items():
        call("POST", "/topics", {"topic_name": topic, "partitions": 1})
        producer = call("POST", "/producer/register", {"topic": topic})["producer_id"]
        run = {"started_ms": 1, "updated_ms": 2, "topics": ["orders"], "report": "/srv/reports/audit.md"}
        runs = [
            json.dumps({**run, "run": "audit orders 1", "pipeline": "audit", "state": "passed", "report_offset": 0}),
            json.dumps({**run, "run": "archive orders 2", "pipeline": "archive", "state": "done", "lag": 12_345}),
        ]
        body = {"topic": topic, "producer_id": producer, "partition_id": 0, "messages": [report] if report else runs}
        call("POST", "/producer/produce_batch", body)
    page = draw(console, "pipelines")
    expect(page.get_by_role("row").filter(has_text="archive orders 2")).to_contain_text("12,345")
    assert page.get_by_role("button", name="audit.md of archive orders 2").count() == 0, "it was not copied"
    page.get_by_role("button", name="audit.md of audit orders 1").click()
    expect(page.get_by_role("dialog").locator("pre")).to_have_text(topics["_pipeline_reports"])
    with page.expect_download() as started:
        page.get_by_role("button", name="Save audit.md").click()
    started.value.save_as(tmp_path / "saved")
    assert (tmp_path / "saved").read_text() == topics["_pipeline_reports"]


def test_settings_say_what_set_them_and_a_partition_is_explained(console: Console, orders: str) -> None:
    page = draw(console, "cluster/settings")
    page.get_by_label("Filter").fill("log.index_interval_bytes")
    row = page.locator(".long-row")
    expect(row).to_have_count(1)
    expect(row.get_by_role("cell").nth(1)).to_have_text("32768")
    expect(row.get_by_role("cell").nth(3)).to_contain_text("--log-index-interval-bytes")
    page = draw(console, "cluster/explain/orders/0")
    expect(table(page, "Replicas").locator("tbody tr")).to_have_count(3)

    def is_healthy() -> bool:
        """Ask again: the page explains what was at that moment."""
        with page.expect_response(lambda response: "/explain?" in response.url):
            page.get_by_role("button", name="Explain", exact=True).click()
        return page.get_by_text("nothing is in the way").count() == 2

    wait_until(is_healthy)
    expect(page.locator(".events")).to_contain_text(re.compile(r"node \d follows node \d, epoch \d+"))


def test_holds_are_shown_with_what_they_keep(console: Console, cluster: Cluster, orders: str) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(place_hold, cluster.nodes[0].wire, orders).result()
    page = draw(console, "cluster/holds")
    row = table(page, "Holds").get_by_role("row").filter(has_text="nightly-report")
    expect(row).to_contain_text("orders")
    expect(row).to_contain_text("1: 500")


def place_hold(address: str, topic: str) -> None:
    with quiver.connect(address) as connected:
        connected.hold(topic, "nightly-report", {1: 500}, lasting=600.0, owner="test")


def test_failure_is_shown_in_the_words_of_the_node(console: Console, orders: str) -> None:
    page = draw(console, "topics")
    page.get_by_role("button", name="Create topic").click()
    page.get_by_label("Name").fill("orders")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(alert(page.get_by_role("dialog"), "topic_exists")).to_be_visible()


# -- sizes -------------------------------------------------------------------------------------------


def test_ten_thousand_topics_are_a_few_rows(console: Console, orders: str) -> None:
    topics = [
        {"topic": f"topic-{at:05}", "partitions": 3, "replicas": 3, "retention": {}, "records": at, "bytes": at}
        for at in range(10_000)
    ]
    answer = {"status": "success", "time_ms": 0, "topics": topics}
    console.page.route("**/console/topics", lambda route: route.fulfill(json=answer))
    page = draw(console, "topics")
    expect(page.get_by_text("10,000 of 10,000 topics")).to_be_visible()
    assert page.locator(".long-row").count() < 60
    page.locator(".long-body").evaluate("body => { body.scrollTop = body.scrollHeight / 2; }")
    expect(page.get_by_role("link", name="topic-05000")).to_be_attached()
    page.get_by_role("button", name="Records").click()
    page.locator(".long-body").evaluate("body => { body.scrollTop = 0; }")
    expect(page.get_by_role("link", name="topic-09999")).to_be_visible()
    page.get_by_label("Filter").fill("0777")
    expect(page.get_by_text("11 of 10,000 topics")).to_be_visible()
    assert page.locator(".long-row").count() == 11


def test_million_records_are_read_in_pages(console: Console, call: Callable[..., Any]) -> None:
    call("POST", "/topics", {"topic_name": "million", "partitions": 1})
    producer = call("POST", "/producer/register", {"topic": "million"})["producer_id"]
    body = {"topic": "million", "producer_id": producer, "messages": ["x"] * 10_000}
    for _ in range(100):
        call("POST", "/producer/produce_batch", body)
    page = console.open("topics/million/records")
    page.get_by_label("At most").select_option("10000")
    page.get_by_role("button", name="Read", exact=True).click()
    expect(page.get_by_text("10,000 records")).to_be_visible()
    assert page.locator(".long-row").count() < 60
    page.get_by_label("Partition", exact=True).select_option("0")
    page.get_by_label("From").select_option("offset")
    page.get_by_label("Offset", exact=True).fill("500000")
    page.get_by_role("button", name="Read", exact=True).click()
    expect(page.get_by_role("button", name="Show record 0/500000")).to_be_visible()
