"""Measure a whole cluster: start, create topics, register clients, restart, rebuild a replica and fail over.

    python bench_cluster.py [--kills 20] [--restart-gib 1] [--rebuild-gib 0.5] [--only PART] [--full]

Real nodes as processes on loopback, real disks, fsync on, everything through the SDK. `--full` uses the sizes of the
targets: a restart with 10 GiB in 300 partitions, a rebuild of 5 GiB, 100 kills.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import quiver
from memory import touch_memory
from processes import (
    VALUE,
    Nodes,
    ServerMissingError,
    connect,
    disk_directory,
    measure,
    processor_s,
    quantile,
    running_nodes,
    running_server,
    wait_alive,
    wait_until,
)
from quiver.errors import QuiverError
from quiver.wire.messages import RegisterConsumerRequest, RegisterProducerRequest, Selection
from replicas import free_ports
from table import Row, show
from traffic import Traffic, fill

GIB = 1 << 30
MIB = 1 << 20
CALLERS = 64
TOPICS = 100
REGISTERING_S = 3.0
PARTITIONS = 300


# -- starting ----------------------------------------------------------------------------------------


def up() -> list[Row]:
    """Start three nodes by `quiver up`, three times from scratch."""
    times_s, efforts_s = [], []
    for _ in range(3):
        with disk_directory() as directory:
            first = consecutive_ports(6)
            command = [sys.executable, "-m", "quiver", "up", "--nodes", "3", "--data", str(directory)]
            command += ["--http-port", str(first), "--wire-port", str(first + 3)]
            begun = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            pids = wait_up(process)
            times_s.append(time.perf_counter() - begun)
            efforts_s.append(max(map(processor_s, pids)))
            process.terminate()
            process.communicate()
    return [
        Row("three nodes by `quiver up`, until ready", min(times_s), "s", target=3),
        Row("the same: processor time of the busiest node", min(efforts_s), "s"),
    ]


def wait_up(process: subprocess.Popen[str]) -> list[int]:
    """Return the nodes' process ids, from the table that is printed before the line `ready`."""
    assert process.stdout is not None
    pids: list[int] = []
    for line in process.stdout:
        if line.startswith("ready"):
            return pids
        cells = line.split()
        if len(cells) > 1 and cells[0].isdigit():
            pids.append(int(cells[1]))
    raise RuntimeError("quiver up ended before it was ready")


def consecutive_ports(count: int) -> int:
    """Return the first of `count` consecutive ports that are free now."""
    while True:
        (first,) = free_ports(1)
        try:
            with ExitStack() as stack:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
        except (OSError, OverflowError):
            continue
        return first


# -- metadata ----------------------------------------------------------------------------------------


def topics() -> list[Row]:
    """Create topics concurrently, and write to every partition once all are acknowledged."""

    async def run(nodes: Nodes) -> tuple[float, float]:
        async with quiver.connect_async(*(node.wire for node in nodes.nodes)) as cluster:
            begun = time.perf_counter()
            async with asyncio.TaskGroup() as tasks:
                for number in range(TOPICS):
                    tasks.create_task(cluster.create_topic(f"topic-{number}", partitions=3, replicas=3))
            created_s = time.perf_counter() - begun
            await asyncio.gather(*(produce_everywhere(cluster, f"topic-{number}") for number in range(TOPICS)))
            return created_s, time.perf_counter() - begun

    with running_nodes(3) as nodes:
        efforts: list[tuple[float, float]] = []
        effort = measure(lambda: efforts.append(asyncio.run(run(nodes))), [node.pid for node in nodes.nodes])
    ((created_s, serving_s),) = efforts
    return [
        Row(
            f"{TOPICS} topics of 3 partitions × 3 replicas, created concurrently", TOPICS / created_s, "1/s", target=50
        ),
        Row("the same, until each partition has acknowledged a record", TOPICS / serving_s, "1/s"),
        Row("the same: processor time of the busiest node", 1000 * effort.node_s / TOPICS, "ms/topic"),
    ]


async def produce_everywhere(cluster: quiver.AsyncCluster, topic: str) -> None:
    producer = await cluster.producer(topic)
    await asyncio.gather(*(producer.send(VALUE, partition=partition) for partition in range(3)))


def registrations() -> list[Row]:
    """Register producers and consumers through a cluster of three, for each kind of database."""
    rows = registrations_with("SQLite", (), target=2_000)
    try:
        with running_server() as server:
            rows += registrations_with("PostgreSQL", ("--metadata-db", server.url), target=1_000)
    except ServerMissingError as error:
        print(f"PostgreSQL was not measured: {error}")
    return rows


def registrations_with(database: str, settings: tuple[str, ...], *, target: float) -> list[Row]:
    async def run(nodes: Nodes) -> list[tuple[float, float]]:
        pids = [node.pid for node in nodes.nodes]
        async with quiver.connect_async(*(node.wire for node in nodes.nodes)) as cluster:
            await cluster.create_topic("logs", partitions=3, replicas=3)
            wanted = (Selection(topic="logs", partitions=()),)

            async def producer(_: int) -> object:
                return await cluster.router.ask(
                    RegisterProducerRequest(topics=wanted), deadline=cluster.router.deadline()
                )

            async def consumer(number: int) -> object:
                request = RegisterConsumerRequest(topics=wanted, request_id=f"bench-{number}")
                return await cluster.router.ask(request, deadline=cluster.router.deadline())

            return [await rate(call, pids) for call in (producer, consumer)]

    with running_nodes(3, settings) as nodes:
        figures = asyncio.run(run(nodes))
    rows = []
    for kind, (found, effort_us) in zip(("producers", "consumers"), figures, strict=True):
        rows.append(Row(f"{database}: {kind} registered, {CALLERS} at once", found, "1/s", target=target))
        rows.append(Row("the same: processor time of the busiest node", effort_us, "µs"))
    return rows


async def rate(call: Callable[[int], Coroutine[Any, Any, object]], pids: list[int]) -> tuple[float, float]:
    """Return the calls per second of `CALLERS` concurrent callers.

    Also return the CPU time per call of the busiest process, in microseconds.
    """
    done, begun, before = 0, time.perf_counter(), list(map(processor_s, pids))

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() - begun < REGISTERING_S:
            done += 1
            await call(done)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CALLERS):
            tasks.create_task(caller())
    effort_s = max(processor_s(pid) - earlier for pid, earlier in zip(pids, before, strict=True))
    return done / (time.perf_counter() - begun), 1e6 * effort_s / done


# -- restarting --------------------------------------------------------------------------------------


def restart(gib: float) -> list[Row]:
    """Kill a node that holds a whole topic and restart it; it serves when every partition has acknowledged a record."""
    with running_nodes(1) as nodes, connect(nodes) as cluster:
        (node,) = nodes.nodes
        cluster.create_topic("large", partitions=PARTITIONS)
        fill(cluster, "large", gib)
        producer = cluster.producer("large", "prober")
        probe(producer)
        node.kill()
        begun = time.perf_counter()
        node.start()
        node.wait_ready()
        ready_s = time.perf_counter() - begun
        probe(producer)
        serving_s, effort_s = time.perf_counter() - begun, processor_s(node.pid)
    return [
        Row(f"one node, {PARTITIONS} partitions, {gib:g} GiB, back after kill -9: ready", ready_s, "s"),
        Row("the same, until every partition has acknowledged a record", serving_s, "s", target=5),
        Row("the same: processor time of the node", effort_s, "s"),
    ]


def probe(producer: quiver.Producer) -> None:
    for delivery in [producer.send(VALUE, partition=partition) for partition in range(PARTITIONS)]:
        delivery.result()


# -- rebuilding --------------------------------------------------------------------------------------


def rebuild(gib: float) -> list[Row]:
    """Move a large replica to a new broker while records are awaited in the same partition."""
    with running_nodes(3) as nodes, connect(nodes) as cluster:
        cluster.create_topic("large", partitions=1, replicas=3)
        fill(cluster, "large", gib)
        newcomer = nodes.add_broker(4)
        newcomer.start()
        newcomer.wait_ready()
        wait_alive(cluster, 4)
        size_bytes = cluster.describe_topic("large").partitions[0].bytes or 0
        touch_memory(2 * size_bytes)
        os.sync()  # so that the first records do not wait for the data of `fill`
        with Traffic(nodes, "large") as traffic:
            traffic.wait(50)
            traffic.drain()
            traffic.wait(500)
            before_ms, begun = traffic.drain(), time.perf_counter()
            cluster.drain(follower_of(cluster, "large"))
            wait_until(lambda: 4 in in_sync(cluster, "large"), what="the new replica", timeout_s=600)
            seconds, during_ms = time.perf_counter() - begun, traffic.drain()
    p99_before, p99_during = quantile(before_ms, 0.99), quantile(during_ms, 0.99)
    return [
        Row(
            f"rebuild a replica of {size_bytes / GIB:.2g} GiB on a new broker",
            size_bytes / 1e6 / seconds,
            "MB/s",
            None,
            100,
        ),
        Row("awaited send before it, p99", p99_before, "ms"),
        Row("awaited send meanwhile, p50", quantile(during_ms, 0.5), "ms"),
        Row("awaited send meanwhile, p99", p99_during, "ms"),
        Row("p99 meanwhile as a multiple of before", p99_during / p99_before, "x", None, 2),
    ]


def in_sync(cluster: quiver.Cluster, topic: str) -> tuple[int, ...]:
    return cluster.describe_topic(topic).partitions[0].in_sync


def follower_of(cluster: quiver.Cluster, topic: str) -> int:
    partition = cluster.describe_topic(topic).partitions[0]
    return next(node for node in partition.replicas if node != partition.leader)


# -- failing over ------------------------------------------------------------------------------------


def failover(kills: int) -> list[Row]:
    """Kill the leader of a partition; measure until a record sent right after is acknowledged."""
    times_s = []
    with running_nodes(3) as nodes, connect(nodes) as cluster:
        cluster.create_topic("logs", partitions=1, replicas=3)
        producer = cluster.producer("logs")
        for _ in range(kills):
            leader = wait_whole(cluster, "logs")
            producer.send(VALUE).result()
            nodes.node(leader).kill()
            begun = time.perf_counter()
            producer.send(VALUE).result()
            times_s.append(time.perf_counter() - begun)
            nodes.start()
    return [
        Row(
            f"kill -9 of a leader, {kills} times: next acknowledged record, p50", quantile(times_s, 0.5), "s", None, 0.6
        ),
        Row("the same, p99", quantile(times_s, 0.99), "s", None, 1.5),
        Row("the same, mean", statistics.mean(times_s), "s"),
        Row("the same, slowest", max(times_s), "s"),
    ]


def wait_whole(cluster: quiver.Cluster, topic: str) -> int:
    """Return a partition's leader once all its replicas are in sync: the next kill must leave a majority."""
    found: list[int] = []

    def is_whole() -> bool:
        try:
            partition = cluster.describe_topic(topic).partitions[0]
        except QuiverError:
            return False
        found[:] = [] if partition.leader is None else [partition.leader]
        return bool(found) and len(partition.in_sync) == 3

    wait_until(is_whole, what="three replicas in sync")
    return found[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a whole cluster.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--restart-gib", type=float, default=1)
    parser.add_argument("--rebuild-gib", type=float, default=0.5)
    parser.add_argument("--full", action="store_true", help="The sizes of the targets: 10 GiB, 5 GiB, 100 kills.")
    parser.add_argument("--only", choices=["up", "topics", "registrations", "restart", "rebuild", "failover"])
    options = parser.parse_args()
    if options.full:
        options.restart_gib, options.rebuild_gib, options.kills = 10, 5, 100
    parts: dict[str, Callable[[], list[Row]]] = {
        "up": up,
        "topics": topics,
        "registrations": registrations,
        "restart": lambda: restart(options.restart_gib),
        "rebuild": lambda: rebuild(options.rebuild_gib),
        "failover": lambda: failover(options.kills),
    }
    rows = [row for name, part in parts.items() if options.only in (None, name) for row in part()]
    return show(rows, title="a cluster of real nodes on loopback, fsync on")


if __name__ == "__main__":
    sys.exit(main())
