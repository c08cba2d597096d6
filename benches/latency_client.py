"""The clients of `trace_latency`, each in a process of its own, stamped by `latency_stamps`.

    python latency_client.py KIND STAMPS ADDRESSES TOPIC RECORDS RATE

`awaited` sends one record after the other and waits for each; `paced` sends at a rate and waits for none; `consume`
polls. Each connects and warms up, says `ready`, does its work when it is told a line, says `done`, and ends when it is
told another one, so that its threads can be looked at before and after. The file STAMPS then has the application's own
times of each record: offset, begin and end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import quiver
from latency_stamps import Stamps, hook_consumer, hook_producer

VALUE = b"x" * 100
WARM_UP_RECORDS = 100
IDLE_S_MAX = 5.0

Work = Callable[[], list[tuple[int, int, int]]]


def prepare_awaited(cluster: quiver.Cluster, topic: str, records: int) -> Work:
    producer = cluster.producer(topic)
    for _ in range(WARM_UP_RECORDS):
        producer.send(VALUE).result()

    def work() -> list[tuple[int, int, int]]:
        seen: list[tuple[int, int, int]] = []
        for _ in range(records):
            begun = time.perf_counter_ns()
            offset = producer.send(VALUE).result().offset
            seen.append((offset, begun, time.perf_counter_ns()))
        return seen

    return work


def prepare_paced(cluster: quiver.Cluster, topic: str, records: int, rate: float) -> Work:
    producer = cluster.producer(topic)
    for _ in range(WARM_UP_RECORDS):
        producer.send(VALUE).result()

    def work() -> list[tuple[int, int, int]]:
        sent, start_ns = [], time.perf_counter_ns()
        for number in range(records):
            time.sleep(max(0.0, (start_ns - time.perf_counter_ns()) / 1e9 + number / rate))
            begun = time.perf_counter_ns()
            sent.append((producer.send(VALUE), begun, time.perf_counter_ns()))
        producer.flush()
        return [(delivery.result().offset, begun, ended) for delivery, begun, ended in sent]

    return work


def prepare_consume(cluster: quiver.Cluster, topic: str, records: int) -> Work:
    consumer = cluster.consumer(topic, start="latest")

    def work() -> list[tuple[int, int, int]]:
        seen: list[tuple[int, int, int]] = []
        last_s = time.monotonic()
        while len(seen) < records and time.monotonic() - last_s < IDLE_S_MAX:
            begun = time.perf_counter_ns()
            found = consumer.poll(1000, 0.5)
            ended = time.perf_counter_ns()
            seen.extend((record.offset, begun, ended) for record in found)
            last_s = time.monotonic() if found else last_s
        return seen

    return work


def main() -> int:
    kind, path, addresses, topic, records, rate = sys.argv[1:]
    stamps = Stamps()
    (hook_consumer if kind == "consume" else hook_producer)(stamps)
    with quiver.connect(*addresses.split(",")) as cluster:
        if kind == "paced":
            work = prepare_paced(cluster, topic, int(records), float(rate))
        else:
            work = (prepare_awaited if kind == "awaited" else prepare_consume)(cluster, topic, int(records))
        print("ready", flush=True)
        sys.stdin.readline()
        stamps.all.clear()
        seen = work()
        print("done", flush=True)
        sys.stdin.readline()
        stamps.save(Path(path), seen=seen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
