"""A client process of `bench_latency`: one kind of load; its last line is p50, p99 and p99.9 in ms, as JSON.

    python latency_load.py KIND ADDRESSES TOPIC RATE RECORDS

`awaited` sends one record after the other and waits for each. `tail` reads records in a loop and says `ready` first;
`pace` sends them at a rate, each with the time at which it was due. The first half of all records warms up and is not
counted.
"""

from __future__ import annotations

import json
import math
import sys
import time

import quiver

VALUE = b"x" * 100
_STAMP = 20
_CATCH_UP_S = 0.001
"""How far ahead of the present the sender looks: a sleep for each record would be longer than their interval."""


def send_awaited(cluster: quiver.Cluster, topic: str, records: int) -> list[float]:
    """Return how long each record took until it was acknowledged."""
    waits_ms: list[float] = []
    with cluster.producer(topic) as producer:
        for _ in range(2 * records):
            begun = time.perf_counter()
            producer.send(VALUE).result()
            waits_ms.append(1000 * (time.perf_counter() - begun))
    return waits_ms[records:]


def send_paced(cluster: quiver.Cluster, topic: str, records: int, rate: float) -> list[float]:
    """Send at a rate; each value begins with the time at which it was due."""
    with cluster.producer(topic, linger_ms=0) as producer:
        producer.send(b"warm-up").result()
        begun = time.perf_counter()
        for number in range(2 * records):
            due = begun + number / rate
            wait_s = due - time.perf_counter()
            if wait_s > 0 and (rate <= 1 / _CATCH_UP_S or wait_s > _CATCH_UP_S):
                time.sleep(wait_s)
            producer.send(b"%0*d" % (_STAMP, round(min(due, time.perf_counter()) * 1e9)) + VALUE[_STAMP:])
    return []


def read_tail(cluster: quiver.Cluster, topic: str, records: int) -> list[float]:
    """Return the age of each record when the application gets it."""
    ages_ms: list[float] = []
    with cluster.consumer(topic, start="latest", idle_timeout=20) as consumer:
        print("ready", flush=True)
        for record in consumer:
            value = record.value or b""
            if value[:_STAMP].isdigit():
                ages_ms.append(1000 * (time.perf_counter() - int(value[:_STAMP]) / 1e9))
                if len(ages_ms) == 2 * records:
                    break
    return ages_ms[records:]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]


def main() -> int:
    kind, addresses, topic, rate, records = sys.argv[1:]
    with quiver.connect(*addresses.split(",")) as cluster:
        if kind == "awaited":
            found = send_awaited(cluster, topic, int(records))
        elif kind == "pace":
            found = send_paced(cluster, topic, int(records), float(rate))
        else:
            found = read_tail(cluster, topic, int(records))
    print(json.dumps([quantile(found, share) for share in (0.5, 0.99, 0.999)] if found else []))
    return 0


if __name__ == "__main__":
    sys.exit(main())
