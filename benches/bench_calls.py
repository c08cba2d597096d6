"""How much Python one awaited request costs the leader of its partition: function calls and processor time.

    python bench_calls.py [--requests 300] [--top 0]

Three nodes in this process, each on its own thread and loop, three replicas, fsync on. One client sends one request at
a time and waits for its answer. A profile hook on the thread of the leading node counts calls of Python functions
(a resumed coroutine counts as one, as it costs one) and calls of C functions; processor time is measured in rounds
without the hook. Calls hardly vary between machines and runs, which makes them a better guard than a clock; the
smallest count of several rounds is shown, since on a busy machine more of the node's timers fall into a round.
`--top 30` lists the functions that are called most.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import quiver
from quiver.testing import LocalCluster
from table import Row, show

TOPIC = "logs"
VALUE = b"x" * 100
ROUNDS = 3


class Calls:
    """Count the calls on the thread of one node's loop."""

    def __init__(self, cluster: LocalCluster, node: int) -> None:
        self._loop = cluster._threads[node]._loop
        self.python: Counter[str] = Counter()
        self.builtin: Counter[str] = Counter()

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """Run something on the node's thread and return its result."""
        done, results = threading.Event(), []

        def run() -> None:
            results.append(work())
            done.set()

        self._loop.call_soon_threadsafe(run)
        done.wait()
        return results[0]

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            if "quiver/testing/" in code.co_filename:
                return  # the harness that can cut a node off is not part of a node
            self.python[f"{code.co_filename.rpartition('quiver/')[2]}:{code.co_qualname}"] += 1
        elif event == "c_call":
            self.builtin[f"{argument.__module__ or ''}.{argument.__qualname__}"] += 1

    def start(self) -> None:
        self.python.clear()
        self.builtin.clear()
        self.on_loop(lambda: sys.setprofile(self._count))

    def stop(self) -> None:
        self.on_loop(lambda: sys.setprofile(None))

    def thread_s(self) -> float:
        """Return the processor time of the node's thread so far."""
        spent: float = self.on_loop(time.thread_time)
        return spent


def leader_of(cluster: quiver.Cluster) -> int:
    leader = cluster.describe_topic(TOPIC).partitions[0].leader
    assert leader is not None
    return leader


def measure(calls: Calls, request: Callable[[], object], count: int) -> tuple[float, float, float]:
    """Return calls of Python functions, of C functions, and microseconds of the leader's thread, for each request."""
    for _ in range(count // 4):
        request()
    seen: list[tuple[Counter[str], Counter[str]]] = []
    for _ in range(ROUNDS):
        calls.start()
        for _ in range(count):
            request()
        calls.stop()
        seen.append((calls.python.copy(), calls.builtin.copy()))
    calls.python, calls.builtin = min(seen, key=lambda counted: counted[0].total())
    spent = []
    for _ in range(ROUNDS):
        before = calls.thread_s()
        for _ in range(count):
            request()
        spent.append(calls.thread_s() - before)
    python, builtin = calls.python.total() / count, calls.builtin.total() / count
    return python, builtin, statistics.median(spent) / count * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--top", type=int, default=0)
    arguments = parser.parse_args()
    rows: list[Row] = []
    with LocalCluster(nodes=3) as local, local.connect() as cluster:
        cluster.create_topic(TOPIC, partitions=1)
        producer = cluster.producer(TOPIC)
        producer.send(VALUE).result()
        leader = leader_of(cluster)
        calls = Calls(local, leader)
        host, port = local.urls[leader - 1].removeprefix("http://").split(":")
        http_client = http.client.HTTPConnection(host, int(port))

        def post(path: str, body: dict[str, Any] | None = None, method: str = "POST") -> dict[str, Any]:
            http_client.request(method, path, None if body is None else json.dumps(body))
            answer = http_client.getresponse()
            content = answer.read()
            assert answer.status == 200, content
            found: dict[str, Any] = json.loads(content)
            return found

        number = post("/producer/register", {"topic": TOPIC})["producer_id"]
        reader = post("/consumer/register", {"topic": TOPIC})["consumer_id"]
        body = {"topic": TOPIC, "producer_id": number, "message": VALUE.decode()}
        for what, request, python_max in (
            ("SDK send", lambda: producer.send(VALUE).result(), 405),
            ("HTTP produce", lambda: post("/producer/produce", body), 522),
            ("HTTP consume", lambda: post(f"/consumer/consume?topic={TOPIC}&consumer_id={reader}", None, "GET"), 528),
        ):
            python, builtin, spent_us = measure(calls, request, arguments.requests)
            rows.append(Row(f"{what}: calls of Python functions", python, "calls", target=python_max))
            rows.append(Row(f"{what}: calls of C functions", builtin, "calls"))
            rows.append(Row(f"{what}: leader's thread", spent_us, "µs"))
            for name, seen in calls.python.most_common(arguments.top):
                print(f"  {seen / arguments.requests:7.2f}  {name}")
    return show(rows, title="one awaited request on the leader, three replicas, fsync on")


if __name__ == "__main__":
    sys.exit(main())
