"""Attacks on the memory of a node by answers over HTTP: records of 2 kB as stored that are 190 MiB as JSON."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self
from urllib.parse import urlencode

import chaos_cluster
import pytest

import quiver

MIB = 1024 * 1024
RECORDS = 20
PARTITIONS = 4
RECORD_BYTES = 32 * MIB
RSS_MIB_MAX = 512
READERS = 3
"""Workers, and people who look at records."""
CONSUMES: tuple[tuple[str, dict[str, int]], ...] = (
    ("/consumer/consume", {}),
    ("/consumer/consume", {"wait_ms": 500}),
    ("/consumer/consume_batch", {"max": 2}),
)
"""One consumer for each way to consume."""
PATIENCE_S = 240
HEAD = re.compile(rb'"partition_id":(\d+),"offset":(\d+)')
RECEIPT = re.compile(rb'"receipt":"([^"]+)"')


@pytest.fixture
def node(tmp_path: Path) -> Iterator[chaos_cluster.NodeProcess]:
    """Run a node with its default settings; it must end well."""
    cluster = chaos_cluster.Cluster(tmp_path, 1, ["--log-durability", "none"])
    (running,) = cluster.nodes
    try:
        cluster.start()
        yield running
        cluster.stop()
        assert not running.complaints()
    finally:
        cluster.close()


class Answer:
    """The status of an answer, its first bytes and its size: the rest is read and dropped."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.first = response.read(4096)
        self.size = len(self.first)
        while piece := response.read(MIB):
            self.size += len(piece)


class Caller:
    """One connection. Use as ``with``."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, path: str, **query: object) -> Answer:
        self._connection.request("GET", f"{path}?{urlencode(query)}")
        return Answer(self._connection.getresponse())

    def post(self, path: str, **body: object) -> Answer:
        self._connection.request("POST", path, json.dumps(body))
        return Answer(self._connection.getresponse())


class Delivered:
    """What readers of one kind got."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()
        self.end = time.monotonic() + PATIENCE_S

    @property
    def is_complete(self) -> bool:
        assert time.monotonic() < self.end, f"{len(self.seen)} of {RECORDS} records in {PATIENCE_S} s"
        return len(self.seen) == RECORDS

    def add(self, answer: Answer) -> None:
        found = HEAD.search(answer.first)
        assert found is not None, answer.first[:200]
        assert answer.size > 6 * RECORD_BYTES
        with self._lock:
            self.seen[int(found[1]), int(found[2])] += 1


def fill(wire: str) -> None:
    with quiver.connect(wire) as client:
        client.create_topic("bombs", partitions=PARTITIONS)
        with client.producer("bombs", compression="zstd") as producer:
            for number in range(RECORDS):
                producer.send(bytes(RECORD_BYTES), partition=number % PARTITIONS).result()


def consume(address: str, consumer_id: int, path: str, query: dict[str, int], delivered: Delivered) -> None:
    with Caller(address) as caller:
        while not delivered.is_complete:
            answer = caller.ask(path, topic="bombs", consumer_id=consumer_id, **query)
            if answer.status == 200:
                delivered.add(answer)
            else:
                assert answer.status in (204, 503), answer.first  # nothing now, or not done: no record is lost
                time.sleep(0.1)


def work(address: str, delivered: Delivered) -> None:
    with Caller(address) as caller:
        while not delivered.is_complete:
            answer = caller.post("/queue/receive", topic="bombs", group="workers")
            if answer.status != 200:
                assert answer.status in (204, 503), answer.first
                time.sleep(0.1)
                continue
            receipt = RECEIPT.search(answer.first)
            assert receipt is not None
            settled = caller.post("/queue/ack", topic="bombs", group="workers", receipt=receipt[1].decode())
            assert settled.status == 200, settled.first
            delivered.add(answer)


def browse(address: str, readers: Sequence[Future[None]]) -> None:
    with Caller(address) as caller:
        while not all(one.done() for one in readers):
            answer = caller.ask("/topics/bombs/records", **{"from": "earliest", "max": 10})
            assert answer.status in (200, 503), answer.first
            time.sleep(1)


def rss_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def test_records_that_are_large_as_json_fit_into_the_memory_of_a_node(node: chaos_cluster.NodeProcess) -> None:
    fill(node.wire)
    with Caller(node.http) as caller:
        registered = json.loads(caller.post("/consumer/register", topic="bombs").first)
    consumed, worked = Delivered(), Delivered()
    peak_mib = rss_mib(node.pid)
    with ThreadPoolExecutor(3 * READERS) as pool:
        consumer_id = registered["consumer_id"]
        readers = [pool.submit(consume, node.http, consumer_id, path, query, consumed) for path, query in CONSUMES]
        readers += [pool.submit(work, node.http, worked) for _ in range(READERS)]
        others = [pool.submit(browse, node.http, readers) for _ in range(READERS)]
        while not all(one.done() for one in readers):
            peak_mib = max(peak_mib, rss_mib(node.pid))
            time.sleep(0.02)
        for call in (*readers, *others):
            call.result()
    assert set(consumed.seen.values()) == set(worked.seen.values()) == {1}, "every record exactly once"
    assert peak_mib < RSS_MIB_MAX, f"{peak_mib:.0f} MiB"
