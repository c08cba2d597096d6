"""A little of everything that the console shows, for its pictures: topics, consumers, a group, a work queue, pipelines.

Whatever goes on does so in threads of its own until the load is closed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import quiver
from quiver.spark.pipelines.registration import RunRegistration
from quiver.wire.messages import RetentionInfo

DAY_MS = 24 * 3_600_000
TOPICS = {"orders": 6, "payments": 3, "clicks": 12, "emails": 2, "shipments": 3, "returns": 1}
"""Topics and their partitions."""
USERS = ("ada", "grace", "barbara", "linus", "guido", "margaret")
TURN_S = 0.25
"""Time between two batches of records."""
PAST_RECORDS = 30_000
"""Records of `orders` that are there when the load begins, so that sizes, lags and moves are not zero."""
REPORT = """# Audit of orders

| source | partitions | records | digest |
|---|---|---|---|
| leader | 6 | 30,000 | equal |
| replicas | 6 × 3 | 90,000 | equal |
| archive | 6 | 30,000 | equal |

All sources agree.
"""


class Load:
    """Clients of a cluster; use as ``with``."""

    def __init__(self, address: str, directory: Path) -> None:
        self._address = address
        self._report = directory / "audit.md"
        self._report.write_text(REPORT)
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._kept = ExitStack()

    def __enter__(self) -> Self:
        cluster = self._kept.enter_context(quiver.connect(self._address))
        for topic, partitions in TOPICS.items():
            retention = RetentionInfo(ms=7 * DAY_MS) if topic in ("orders", "payments") else RetentionInfo()
            cluster.create_topic(topic, partitions=partitions, retention=retention)
        with cluster.producer("orders", name="import") as producer:
            for number in range(PAST_RECORDS):
                send_order(producer, number)
        cluster.hold("orders", "nightly-report", {0: 500, 1: 700}, lasting=3600.0, owner="report on Spark")
        self._register_pipelines(cluster)
        for work in (self._produce, self._archive, self._consume, self._consume_in_group, self._send_mails):
            thread = threading.Thread(target=self._run, args=(work,))
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self._kept.close()

    def _register_pipelines(self, cluster: quiver.Cluster) -> None:
        with RunRegistration(lambda: cluster, "audit", topics=("orders",), report=str(self._report)) as audit:
            audit.note(state="passed", verdict="all sources agree", records=PAST_RECORDS)
        with RunRegistration(lambda: cluster, "analyze", topics=("clicks",)) as analyze:
            analyze.note(state="done", verdict="no unusual window", records=4_096, lag=0)

    def _run(self, work: Callable[[quiver.Cluster], None]) -> None:
        with quiver.connect(self._address) as cluster:
            work(cluster)

    def _produce(self, cluster: quiver.Cluster) -> None:
        producers = {topic: cluster.producer(topic, name=f"shop-{topic}") for topic in TOPICS}
        for turn in count():
            if self._is_over.wait(TURN_S):
                break
            for number in range(40 + turn % 20):
                send_order(producers["orders"], PAST_RECORDS + turn * 60 + number)
                producers["clicks"].send(f"GET /items/{number}", key=USERS[number % len(USERS)])
            producers["payments"].send_json({"order": turn, "paid": True}, key=f"u{turn % 60}")
            producers["emails"].send_json({"to": f"{USERS[turn % len(USERS)]}@example.com", "order": turn})
        for producer in producers.values():
            producer.close()

    def _archive(self, cluster: quiver.Cluster) -> None:
        """Describe a run that goes on."""
        with RunRegistration(lambda: cluster, "archive", topics=("orders",)) as archive:
            for turn in count():
                if self._is_over.wait(1):
                    break
                archive.note(records=PAST_RECORDS + turn * 200, lag=300 + turn % 7 * 60)

    def _consume(self, cluster: quiver.Cluster) -> None:
        """Read slowly: its lag grows."""
        with cluster.consumer("orders", name="report", auto_commit=0.5) as consumer:
            while not self._is_over.wait(2 * TURN_S):
                consumer.poll(20, timeout=0.1)

    def _consume_in_group(self, cluster: quiver.Cluster) -> None:
        members = [
            cluster.consumer("orders", group="billing", instance=f"billing-{number}", auto_commit=0.5)
            for number in (1, 2)
        ]
        while not self._is_over.wait(TURN_S):
            for member in members:
                member.poll(5_000, timeout=0.05)
        for member in members:
            member.close()

    def _send_mails(self, cluster: quiver.Cluster) -> None:
        """Work on a queue: every eighth job is a dead letter, and a few are always under way."""
        with cluster.queue("emails", "mailer", lease=300.0, max_attempts=3) as queue:
            held: list[quiver.Job] = []
            while not self._is_over.wait(TURN_S):
                held += queue.receive(4, timeout=0.1)
                while len(held) > 6:
                    job = held.pop(0)
                    if (job.offset or 0) % 8 == 5:
                        job.reject("mailbox unavailable: the address does not exist")
                    else:
                        job.ack()


def send_order(producer: quiver.Producer, number: int) -> None:
    user = {"name": USERS[number % len(USERS)], "plan": "pro" if number % 3 else "free"}
    items = [{"sku": f"q-{number % 40}", "count": 1 + number % 3}]
    value = {"id": number, "user": user, "items": items, "total": round(9.99 + number % 70, 2)}
    producer.send(json.dumps(value), key=f"u{number % 60}", headers={"trace": f"{number:08x}"})
