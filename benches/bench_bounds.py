"""Measure what producers notice of consumers that read cold data at full speed.

    python bench_bounds.py [--gib 2] [--consumers 64] [--rounds 4] [--seconds 6]

Three nodes on loopback, three replicas, fsync on. A producer sends one awaited record after the other. In every other
phase many consumers, in a process of their own, read a topic from random offsets as fast as they get it. The kernel's
page cache is made to forget the topic all the time, and the tail caches hold a small part of it. The figures with and
without consumers alternate within one run, so that other load on the machine counts for both. An election would show
as a partition whose epoch has grown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import quiver
from processes import Nodes, connect, quantile, running_nodes
from quiver.client.overview import find_overview
from table import Row, show
from traffic import Traffic, fill

MIB = 1 << 20
PARTITIONS = 8
SETTLE_S = 1.0
"""Pause after consumers start or stop, before latencies count."""
DROP_INTERVAL_S = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure producers while consumers read cold data.")
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--consumers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--warm", action="store_true", help="Leave the data in the page cache.")
    parser.add_argument("--read", metavar="SERVERS", help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], metavar="FLAG", help="A flag of the nodes.")
    options = parser.parse_args()
    if options.read:
        return asyncio.run(read_all(options.read.split(","), options.consumers))
    settings = [part for flag in options.set for part in f"--{flag}".split("=", 1)]
    return show(measure(options, settings), title=f"{options.consumers} consumers of cold data")


def measure(options: argparse.Namespace, settings: list[str]) -> list[Row]:
    with running_nodes(3, settings) as nodes, connect(nodes) as cluster:
        cluster.create_topic("cold", partitions=PARTITIONS, replicas=3)
        cluster.create_topic("hot", partitions=3, replicas=3)
        fill(cluster, "cold", options.gib)
        os.sync()
        elections: Counter[str] = Counter()
        calm_ms: list[list[float]] = []
        busy_ms: list[list[float]] = []
        rates: list[float] = []
        with Traffic(nodes, "hot") as traffic:
            traffic.wait(100)
            for _ in range(options.rounds):
                time.sleep(SETTLE_S)
                epochs = epochs_of(nodes)
                calm_ms.append(collect(traffic, options.seconds))
                epochs, before_epochs = epochs_of(nodes), epochs
                elections["calm"] += raised(before_epochs, epochs)
                with consumers(nodes, options.consumers, is_cold=not options.warm) as readers:
                    time.sleep(SETTLE_S)
                    before = readers.read_bytes()
                    busy_ms.append(collect(traffic, options.seconds))
                    rates.append((readers.read_bytes() - before) / options.seconds)
                elections["busy"] += raised(epochs, epochs_of(nodes))
    calm, busy = list(chain(*calm_ms)), list(chain(*busy_ms))
    by_round = [(quantile(before, 0.99), quantile(after, 0.99)) for before, after in zip(calm_ms, busy_ms, strict=True)]
    print("p99 by round, ms:", ", ".join(f"{before:.1f} and {after:.1f}" for before, after in by_round))
    return [
        Row("read by all consumers", sum(rates) / len(rates) / 1e6, "MB/s"),
        Row("awaited record without consumers, p50", quantile(calm, 0.5), "ms"),
        Row("awaited record without consumers, p99", quantile(calm, 0.99), "ms"),
        Row("awaited record with consumers, p50", quantile(busy, 0.5), "ms"),
        Row("awaited record with consumers, p99", quantile(busy, 0.99), "ms"),
        Row("p99 with consumers as a multiple", quantile(busy, 0.99) / quantile(calm, 0.99), "x", None, 2),
        Row("elections without consumers", elections["calm"], ""),
        Row("elections with consumers", elections["busy"], "", None, elections["calm"]),
    ]


def collect(traffic: Traffic, seconds: float) -> list[float]:
    traffic.drain()
    time.sleep(seconds)
    return traffic.drain()


def raised(before: dict[tuple[str, int], int], after: dict[tuple[str, int], int]) -> int:
    return sum(after.get(key, epoch) - epoch for key, epoch in before.items())


def epochs_of(nodes: Nodes) -> dict[tuple[str, int], int]:
    """Return the leaders' epochs by partition; each election raises one."""

    async def ask() -> dict[tuple[str, int], int]:
        async with quiver.connect_async(*(node.wire for node in nodes.nodes)) as cluster:
            found = await find_overview(cluster.router)
            return {
                (topic.topic, int(partition.partition)): partition.epoch
                for topic in found.topics
                for partition in topic.partitions
            }

    return asyncio.run(ask())


# -- consumers ---------------------------------------------------------------------------------------


class Consumers:
    """A process of consumers, which prints how many bytes they have read so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._bytes = 0
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def read_bytes(self) -> int:
        return self._bytes

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._bytes = int(line)


@contextmanager
def consumers(nodes: Nodes, count: int, *, is_cold: bool) -> Iterator[Consumers]:
    """Run consumers in a process of their own, and keep the data out of the page cache."""
    servers = ",".join(node.wire for node in nodes.nodes)
    command = [sys.executable, __file__, "--read", servers, "--consumers", str(count)]
    is_ended = threading.Event()
    dropping = threading.Thread(target=keep_cold, args=(nodes, is_ended))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if is_cold:
            dropping.start()
        found = Consumers(process)
        try:
            while not found.read_bytes():
                time.sleep(0.05)
            yield found
        finally:
            is_ended.set()
            if is_cold:
                dropping.join()
            process.kill()


def keep_cold(nodes: Nodes, is_ended: threading.Event) -> None:
    """Drop the segments of all nodes from the page cache again and again."""
    while True:
        for segment in chain(*(Path(node.directory).rglob("*.log") for node in nodes.nodes)):
            with suppress(OSError):
                forget_pages(segment)
        if is_ended.wait(DROP_INTERVAL_S):
            return


def forget_pages(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


async def read_all(servers: list[str], count: int) -> int:
    """Read with many consumers until killed; print the total of bytes ten times a second."""
    totals = [0] * count
    async with quiver.connect_async(*servers) as cluster:
        end_offsets = {
            int(partition.partition): partition.end_offset or 0
            for partition in (await cluster.describe_topic("cold")).partitions
        }
        for number in range(count):
            asyncio.get_running_loop().create_task(read_one(cluster, number, end_offsets, totals))
        while True:
            await asyncio.sleep(0.1)
            print(sum(totals), flush=True)


async def read_one(cluster: quiver.AsyncCluster, number: int, end_offsets: dict[int, int], totals: list[int]) -> None:
    partition = number % PARTITIONS
    consumer = await cluster.consumer("cold", partitions=[partition], prefetch_bytes=4 * MIB)
    rng = random.Random(number)
    while True:
        await consumer.seek(partition, rng.randrange(max(1, end_offsets[partition] * 3 // 4)))
        for _ in range(16):
            found = await consumer.wait_batch()
            if found is None:
                break
            reader, batch = found
            reader.position = batch.header.end_offset
            totals[number] += len(batch.data)


if __name__ == "__main__":
    sys.exit(main())
