"""Fill the disk of one broker under load, free it again, and find out whether anything was lost.

    python tests/chaos/run_full_disk.py DIRECTORY refuses|waits

Either the broker sees in time that room is short: it refuses new records until there is room again; or it has no
reserve, and what does not fit waits for room. In both cases it keeps running, transfers what it leads to brokers that
have room, and catches up when it has room again.

The broker's directory is a small file system of its own, mounted where nobody else sees it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from chaos_clients import CursorConsumer, EndWatcher, OffsetReader, PlainProducer, SequencedProducer
from chaos_cluster import Cluster, NodeProcess
from chaos_namespace import is_inside, run_inside, run_ip
from run_chaos import Report, Run

import quiver

MIB = 1024 * 1024
DISK_BYTES = 64 * MIB
ROOM = {"refuses": (16 * MIB, 8 * MIB), "waits": (0, 256 * 1024)}
"""The room below which a broker refuses records, and what is left of it when the disk is filled."""
FULL_S = 12
HANDED_OVER_WITHIN_S = 20
"""Within this time a broker leads nothing: its disk fills up, it checks the disk and balances every second."""

CLIENTS = ((SequencedProducer, 3), (PlainProducer, 1), (OffsetReader, 1), (CursorConsumer, 1), (EndWatcher, 1))


def run_full_disk(directory: Path, behaviour: str) -> Report:
    free_bytes_min, left_bytes = ROOM[behaviour]
    settings = ("--log-free-bytes-min", str(free_bytes_min), "--log-free-check-interval-ms", "100")
    cluster = Cluster(directory, 3, settings)
    victim = cluster.node(3)
    victim.directory.mkdir(parents=True)
    subprocess.check_call(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(victim.directory)])
    try:
        cluster.start()
        run = Run(cluster, seed=1, clients=CLIENTS)
        run.begin()
        time.sleep(3)
        before = run.workload.counts["send ok"]
        ballast = fill(victim.directory, left_bytes)
        wait_handed_over(cluster, victim)
        time.sleep(FULL_S)
        during = run.workload.counts["send ok"] - before
        ballast.unlink()
        print(f"{during} sends were acknowledged while the disk was full; the node {describe(victim)}", flush=True)
        if not victim.is_running:
            raise AssertionError(f"node 3 {describe(victim)}:\n{victim.last_words()}")
        report = run.finish()
    finally:
        cluster.close()
    if not during:
        report.surprises.append("no send was acknowledged while one disk of three was full")
    return report


def wait_handed_over(cluster: Cluster, victim: NodeProcess) -> None:
    """Wait until the full broker leads no partition any more."""
    begun = time.monotonic()
    with quiver.connect(*(node.wire for node in cluster.nodes)) as connection:
        while led := [
            (topic.topic, partition.partition)
            for topic in map(connection.describe_topic, connection.list_topics())
            for partition in topic.partitions
            if partition.leader == victim.id
        ]:
            if time.monotonic() - begun > HANDED_OVER_WITHIN_S:
                raise AssertionError(f"the full node {victim.id} still leads {led}")
            time.sleep(0.1)
    print(f"the full node led nothing after {time.monotonic() - begun:.1f} s", flush=True)


def fill(directory: Path, left_bytes: int) -> Path:
    """Take all of a file system but a little; return the file that takes it."""
    found = os.statvfs(directory)
    ballast = directory / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - left_bytes)
    return ballast


def describe(node: NodeProcess) -> str:
    return "kept running" if node.is_running else f"ended with {node.exit_code()}"


def main() -> int:
    if not is_inside():
        return run_inside(__file__, sys.argv[1:])
    run_ip("link", "set", "lo", "up")
    report = run_full_disk(Path(sys.argv[1]), sys.argv[2])
    print(report)
    return 0 if report.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
