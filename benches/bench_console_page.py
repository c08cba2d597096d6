"""What an update of the console costs the browser: time of its main thread, with many topics and many records.

    python bench_console_page.py [--topics 10000] [--records 1000000] [--updates 20]

One real node with all these topics (one partition, one replica each) and a topic with all these records. A real
Chromium is asked for `Performance.getMetrics` after each update. Its clock is the CPU time of the thread, so that other
programs on the machine do not count. An update is what the stream sends about once a second, a list that is loaded
again, or records that are followed. There are no more topics than the limit of open files allows: a node that runs out
of descriptors accepts no connections.
"""

from __future__ import annotations

import argparse
import http.client
import json
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

from processes import NodeProcess, running_nodes
from table import Row, show

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "browser" / "shared"))
from chromium import find_chromium

SCRIPTING_MS_MAX = 100.0
CREATORS = 4
"""Topics that are created at once."""
BATCH = 10_000
SETTLE_MS = 400
"""Time in which an update is drawn."""
PATIENCE_S = 120
DESCRIPTORS_PER_TOPIC = 2
"""Open files of a partition without readers: its active segment and its hard state."""
DESCRIPTORS_SPARE = 1_000
ROUTES = {"overview": "", "topics": "topics", "records": "topics/million/records"}
SCRIPTING = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration")
WATCH = """async () => {
  const { api, update } = await import("/console/state.js");
  window.updates = 0;
  update.watch(() => { window.updates += 1; });
  const call = api.call.bind(api);
  api.call = async (...parts) => {
    const answer = await call(...parts);
    window.updates += 1;
    return answer;
  };
}"""
"""Counts what the page draws: updates of the stream, and answers."""


@dataclass(frozen=True)
class Cost:
    """CPU time of the page's main thread for an update, and for what else comes while it is drawn, in milliseconds."""

    scripting: float
    """Scripts, style and layout."""
    total: float
    """All tasks, among them painting and the parsing of answers."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--updates", type=int, default=20)
    options = parser.parse_args()
    chromium = find_chromium()
    if not chromium:
        print("error: there is no Chromium: apt-get install chromium", file=sys.stderr)
        return 1
    options.topics = min(options.topics, count_topics_max())
    # Partitions without records need fewer descriptors than the limit that is derived from them assumes.
    with running_nodes(1, ["--manager-replicas-per-broker-max", str(options.topics + 10)]) as nodes:
        node = nodes.nodes[0]
        fill(node, options.records)  # first: a topic after thousands of others waits for its leader
        begun = time.monotonic()
        create_topics(node, options.topics)
        print(f"{options.topics:,} topics were created in {time.monotonic() - begun:.0f} s", flush=True)
        wait_opened(node)
        print(f"their partitions were open after {time.monotonic() - begun:.0f} s", flush=True)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            rows = [row for one in ROUTES for row in measure(browser, node, one, options)]
            browser.close()
    title = f"An update of the console in Chromium, {options.topics:,} topics, {options.records:,} records in one"
    return show(rows, title=title)


def measure(browser: Browser, node: NodeProcess, name: str, options: argparse.Namespace) -> list[Row]:
    """Return what updates of a page cost."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(PATIENCE_S * 1000)
    page.goto(f"http://{node.http}/console#/{ROUTES[name]}")
    if name == "overview":
        page.locator(".chart canvas").nth(5).wait_for()
    elif name == "topics":
        page.locator(".long-row").first.wait_for()
    else:
        follow_records(page)
    page.evaluate(WATCH)
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
    costs = watch(page, devtools, node, options.updates, is_produced=name == "records")
    page.close()
    scripting, total = sorted(one.scripting for one in costs), sorted(one.total for one in costs)
    return [
        Row(f"{name}: scripting, median", scripting[len(costs) // 2], "ms per update", target=SCRIPTING_MS_MAX),
        Row(f"{name}: scripting, worst", scripting[-1], "ms per update", target=SCRIPTING_MS_MAX),
        Row(f"{name}: main thread, median", total[len(costs) // 2], "ms per update"),
        Row(f"{name}: main thread, worst", total[-1], "ms per update"),
    ]


def follow_records(page: Page) -> None:
    page.get_by_label("At most").select_option(str(BATCH))
    page.get_by_role("button", name="Read", exact=True).click()
    page.get_by_text(f"{BATCH:,} records").wait_for()
    page.get_by_label("Follow live").check()


def watch(page: Page, devtools: CDPSession, node: NodeProcess, count: int, *, is_produced: bool) -> list[Cost]:
    """Return the costs of the next updates, one by one."""
    costs: list[Cost] = []
    client = http.client.HTTPConnection(node.http)
    producer = call(client, "POST", "/producer/register", {"topic": "million"})["producer_id"]
    body = {"topic": "million", "producer_id": producer, "messages": ["new"] * 100}
    seen, before = wait_for_update(page, -1), read(devtools)
    while len(costs) < count:
        if is_produced:
            call(client, "POST", "/producer/produce_batch", body)
        now = wait_for_update(page, seen)
        after = read(devtools)
        scripting = sum(after[name] - before[name] for name in SCRIPTING)
        costs.append(Cost(1000 * scripting, 1000 * (after["TaskDuration"] - before["TaskDuration"])))
        seen, before = now, after
    return costs


def wait_for_update(page: Page, seen: int) -> int:
    """Wait until more updates were drawn than were seen; return their number."""
    end = time.monotonic() + PATIENCE_S
    while (now := page.evaluate("window.updates")) <= seen:
        if time.monotonic() > end:
            raise TimeoutError("the console gets no updates")
        page.wait_for_timeout(50)
    page.wait_for_timeout(SETTLE_MS)
    return int(now)


def read(devtools: CDPSession) -> dict[str, float]:
    return {one["name"]: one["value"] for one in devtools.send("Performance.getMetrics")["metrics"]}


def create_topics(node: NodeProcess, count: int) -> None:
    """Create the topics over a few connections; what may have been done is repeated."""

    def create(first: int) -> None:
        client = http.client.HTTPConnection(node.http, timeout=PATIENCE_S)
        for number in range(first, count, CREATORS):
            body = {"topic_name": f"topic-{number:05}", "partitions": 1, "replicas": 1}
            while (answer := ask(client, "POST", "/topics", body))[0] in (503, 504):
                time.sleep(0.5)
            if answer[0] not in (201, 409):
                raise RuntimeError(f"topic {number}: {answer[1]}")

    with ThreadPoolExecutor(CREATORS) as pool:
        list(pool.map(create, range(CREATORS)))


def count_topics_max() -> int:
    """Return how many topics of one partition a node can have open."""
    return (resource.getrlimit(resource.RLIMIT_NOFILE)[1] - DESCRIPTORS_SPARE) // DESCRIPTORS_PER_TOPIC


def wait_opened(node: NodeProcess) -> None:
    """Wait until the node has opened the partitions of all topics, which takes longer than to create them."""
    client = http.client.HTTPConnection(node.http, timeout=PATIENCE_S)
    end = time.monotonic() + PATIENCE_S
    while any(topic.get("leaderless") for topic in call(client, "GET", "/console/topics")["topics"]):
        if time.monotonic() > end:
            raise TimeoutError("the node does not open all partitions")
        time.sleep(1)


def fill(node: NodeProcess, records: int) -> None:
    """Create a topic with this many records."""
    client = http.client.HTTPConnection(node.http, timeout=PATIENCE_S)
    call(client, "POST", "/topics", {"topic_name": "million", "partitions": 1, "replicas": 1})
    producer = call(client, "POST", "/producer/register", {"topic": "million"})["producer_id"]
    for _ in range(0, records, BATCH):
        body = {"topic": "million", "producer_id": producer, "messages": ["x" * 20] * BATCH}
        call(client, "POST", "/producer/produce_batch", body)


def call(client: http.client.HTTPConnection, method: str, path: str, body: object = None) -> dict[str, Any]:
    """Return the answer of a call that must succeed."""
    status, answer = ask(client, method, path, body)
    if status >= 300:
        raise RuntimeError(f"{method} {path}: {answer}")
    return answer


def ask(client: http.client.HTTPConnection, method: str, path: str, body: object) -> tuple[int, dict[str, Any]]:
    """Return status and answer of a call."""
    client.request(method, path, None if body is None else json.dumps(body))
    response = client.getresponse()
    return response.status, json.loads(response.read())


if __name__ == "__main__":
    sys.exit(main())
