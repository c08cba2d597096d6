"""Measure how several nodes on one host share its cores: HTTP produce to 1, 2 and 3 nodes on 1 core and on 2.

    python bench_scaling.py [--seconds 4] [--rounds 3]

Nodes and the programs that load them are bound to the same cores, so that one core does both. A topic has one replica:
every record costs one node, and replication does not hide what nodes add. Each node is loaded by a program of its own,
with records for topics that it leads. Rounds alternate; a rate is the median. The processor time per record is that of
all nodes; a host of which nodes have *C* cores accepts at most *C* divided by it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from bench_http import Answers, load, post
from processes import Nodes, connect, processor_s, running_nodes, wait_until
from table import Row, show

CONNECTIONS = 64
"""Of each node: with fewer, its syncs are shared by fewer records."""
TOPICS_PER_NODE = 4
MESSAGE = "x" * 100


@contextmanager
def bound_to(cores: int) -> Iterator[None]:
    """Bind this process, and those that it starts meanwhile, to the first cores that it may use."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def requests_by_node(nodes: Nodes) -> list[list[str]]:
    """Create topics of one partition and register producers; return for each node the requests for what it leads."""
    with connect(nodes) as cluster:
        names = [f"topic-{number}" for number in range(TOPICS_PER_NODE * len(nodes.nodes))]
        for name in names:
            cluster.create_topic(name, partitions=1, replicas=1)

        def leaders() -> dict[str, int | None]:
            return {name: cluster.describe_topic(name).partitions[0].leader for name in names}

        wait_until(lambda: None not in leaders().values(), what="leaders")
        found = leaders()
    requests: list[list[str]] = []
    for node in nodes.nodes:
        led = [name for name in names if found[name] == node.id]
        requests.append([_request(node.http, led[number % len(led)]) for number in range(CONNECTIONS)])
    return requests


def _request(address: str, topic: str) -> str:
    producer = post(address, "/producer/register", topic=topic)["producer_id"]
    body = json.dumps({"topic": topic, "producer_id": producer, "message": MESSAGE})
    head = "POST /producer/produce HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}"


def measure(count: int, cores: int, seconds: float) -> tuple[float, float]:
    """Return the records per second of so many nodes on so many cores, and their processor time per record in µs."""
    with bound_to(cores), running_nodes(count) as nodes, ThreadPoolExecutor(count) as pool:
        requests = requests_by_node(nodes)

        def load_all(duration_s: float) -> list[Answers]:
            addresses = [node.http for node in nodes.nodes]
            return list(pool.map(load, addresses, requests, [duration_s] * count))

        load_all(1)  # warm
        before_s = sum(processor_s(node.pid) for node in nodes.nodes)
        answers = load_all(seconds)
        used_s = sum(processor_s(node.pid) for node in nodes.nodes) - before_s
    return sum(one["rate"] for one in answers), 1e6 * used_s / sum(one["answers"] for one in answers)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure several nodes on one host.")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    available = len(os.sched_getaffinity(0))
    settings = [(count, cores) for cores in sorted({1, available}) for count in (1, 2, 3)]
    found: dict[tuple[int, int], list[tuple[float, float]]] = {setting: [] for setting in settings}
    for _ in range(options.rounds):
        for setting in settings:
            found[setting].append(measure(*setting, options.seconds))
    rows = []
    for (count, cores), figures in found.items():
        what = f"{count} node{'s' if count > 1 else ''}, {cores} core{'s' if cores > 1 else ''}"
        rows.append(Row(what, statistics.median(rate for rate, _ in figures), "records/s"))
        rows.append(
            Row("    processor time of the nodes", statistics.median(cost for _, cost in figures), "µs a record")
        )
    return show(
        rows, title="Several nodes on one host: HTTP produce, one replica, fsync; nodes and load on the same cores"
    )


if __name__ == "__main__":
    raise SystemExit(main())
