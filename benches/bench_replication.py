"""Measure consensus: three processes on loopback, real disks, fsync on.

    python bench_replication.py [--kills 30] [--groups 1000]

The same run measures PySyncObj (with its journal and default batching) and the raw limits of this machine: bytes
copied over loopback to two peers, and three processes that write and sync concurrently.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from memory import touch_memory
from replicas import HERE, Replica, Replicas, free_ports
from table import Row, show

MIB = 1 << 20
ENTRY_BYTES = 1024
IN_FLIGHT = 64


def throughput() -> list[Row]:
    with Replicas() as cluster:
        leader = cluster.wait_leader()
        leader.ask("load", entries=5000, in_flight=IN_FLIGHT, value_bytes=ENTRY_BYTES)
        runs = [leader.ask("load", entries=30_000, in_flight=IN_FLIGHT, value_bytes=ENTRY_BYTES) for _ in range(3)]
        ours = max(30_000 / run["seconds"] for run in runs)
        single = min(
            (leader.ask("load", entries=500, in_flight=1, value_bytes=ENTRY_BYTES) for _ in range(3)),
            key=lambda run: float(run["p50_s"]),
        )
    theirs, their_single_s = pysyncobj()
    return [
        Row("1 KiB entries, 64 in flight", ours, "entries/s", None, 20_000),
        Row("the same by PySyncObj", theirs, "entries/s"),
        Row("ours as a multiple of PySyncObj", ours / theirs, "x/s", None, 10),
        Row("awaited single write, p50", single["p50_s"] * 1000, "ms", None, 3),
        Row("awaited single write, p99", single["p99_s"] * 1000, "ms"),
        Row("the same by PySyncObj, p50", their_single_s * 1000, "ms"),
    ]


def pysyncobj() -> tuple[float, float]:
    """Return PySyncObj's entries per second and its seconds for an awaited write."""
    directory = Path(tempfile.mkdtemp(prefix="bench-", dir=HERE.parent))
    ports = [str(port) for port in free_ports(3)]
    peers = []
    try:
        for own in ports:
            others = [port for port in ports if port != own]
            peers.append(Replica([str(directory / own), own, *others], script="pysyncobj_peer.py"))
        for peer in peers:
            peer.read()
        leader = _wait_pysyncobj_leader(peers)
        leader.ask("load", entries=200, in_flight=IN_FLIGHT, value_bytes=ENTRY_BYTES)
        run = leader.ask("load", entries=3000, in_flight=IN_FLIGHT, value_bytes=ENTRY_BYTES)
        single = leader.ask("single", entries=20, value_bytes=ENTRY_BYTES)
        return run["entries"] / run["seconds"], single["p50_s"]
    finally:
        for peer in peers:
            peer.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _wait_pysyncobj_leader(peers: list[Replica]) -> Replica:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for peer in peers:
            status = peer.ask("status")
            if status["leads"] and status["ready"]:
                return peer
        time.sleep(0.1)
    raise TimeoutError("PySyncObj elected nobody")


def bulk() -> list[Row]:
    """1 MiB batches, three replicas, next to the slower of the two raw limits."""
    entries = 300
    limit = min(loopback_to_two(entries), sync_three_ways(entries))
    with Replicas() as cluster:
        leader = cluster.wait_leader()
        leader.ask("load", entries=30, in_flight=8, value_bytes=MIB)
        runs = []
        for _ in range(3):
            touch_memory(4 * entries * MIB)
            runs.append(leader.ask("load", entries=entries, in_flight=8, value_bytes=MIB))
    limit = max(limit, min(loopback_to_two(entries), sync_three_ways(entries)))
    ours = max(entries * MIB / 1e6 / run["seconds"] for run in runs)
    return [
        Row("1 MiB batches, three replicas", ours, "MB/s", limit, 100),
        Row("the same, share of the slower raw limit", 100 * ours / limit, "%/s", None, 60),
    ]


def loopback_to_two(megabytes: int) -> float:
    """Return MB/s (of payload) of copying the same bytes to two other processes."""
    ports = free_ports(2)
    sinks = [multiprocessing.Process(target=_sink, args=(port,)) for port in ports]
    for sink in sinks:
        sink.start()
    connections = [_connect(port) for port in ports]
    block = os.urandom(MIB)
    start = time.perf_counter()
    threads = [threading.Thread(target=_pour, args=(connection, block, megabytes)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    for sink in sinks:
        sink.join()
    return megabytes * MIB / 1e6 / seconds


def _sink(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        connection, _ = server.accept()
        buffer = bytearray(MIB)
        while connection.recv_into(buffer):
            pass
        connection.close()


def _connect(port: int) -> socket.socket:
    for _ in range(500):
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.01)
    raise TimeoutError("no sink")


def _pour(connection: socket.socket, block: bytes, count: int) -> None:
    for _ in range(count):
        connection.sendall(block)
    connection.close()


def sync_three_ways(megabytes: int) -> float:
    """Return MB/s of three processes that each write the same bytes to their own file, syncing each MiB."""
    touch_memory(4 * megabytes * MIB)
    directory = tempfile.mkdtemp(prefix="bench-", dir=HERE.parent)
    try:
        writers = [multiprocessing.Process(target=_write, args=(f"{directory}/{n}", megabytes)) for n in range(3)]
        start = time.perf_counter()
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        return megabytes * MIB / 1e6 / (time.perf_counter() - start)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _write(path: str, megabytes: int) -> None:
    block = os.urandom(MIB)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for _ in range(megabytes):
        os.write(descriptor, block)
        os.fdatasync(descriptor)
    os.close(descriptor)


def idle(groups: int) -> list[Row]:
    """Measure the cost of hibernating groups on each node."""
    with Replicas(groups=groups) as cluster:
        cluster.wait_leader(groups=groups)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            statuses = [replica.ask("status") for replica in cluster.all]
            if all(status["hibernating"] == groups for status in statuses):
                break
            time.sleep(0.5)
        before = [replica.ask("status") for replica in cluster.all]
        seconds = 10.0
        time.sleep(seconds)
        after = [replica.ask("status") for replica in cluster.all]
    used = [now["cpu_s"] - then["cpu_s"] for then, now in zip(before, after, strict=True)]
    return [
        Row(f"{groups} idle groups, CPU of the busiest node", 100 * max(used) / seconds, "% of a core", None, 5),
        Row(f"{groups} idle groups, memory of the largest node", max(s["rss_bytes"] for s in after) / MIB, "MiB"),
    ]


def failover(kills: int) -> list[Row]:
    """Kill the leader's process; measure until the next write is committed."""
    times: list[float] = []
    with Replicas() as cluster:
        for _ in range(kills):
            leader = cluster.wait_leader()
            leader.ask("probe")
            leader.kill()
            start = time.perf_counter()
            alive = [replica for replica in cluster.all if replica.is_alive]
            while not any(replica.ask("probe")["committed"] for replica in alive):
                time.sleep(0.005)
            times.append(time.perf_counter() - start)
            leader.restart()
    times.sort()
    return [
        Row(f"kill -9 of the leader, {kills} times: next commit, p50", times[len(times) // 2], "s", None, 0.6),
        Row("the same, p99", times[min(int(len(times) * 0.99), len(times) - 1)], "s", None, 1.5),
        Row("the same, slowest", times[-1], "s"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure replication.")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--only", choices=["throughput", "bulk", "idle", "failover"])
    options = parser.parse_args()
    parts: dict[str, Callable[[], list[Row]]] = {
        "throughput": throughput,
        "bulk": bulk,
        "idle": lambda: idle(options.groups),
        "failover": lambda: failover(options.kills),
    }
    rows = [row for name, part in parts.items() if options.only in (None, name) for row in part()]
    return show(rows, title="replication: three processes on loopback, fsync on")


if __name__ == "__main__":
    sys.exit(main())
