"""Measure the parse pipeline from end to end: a topic of generated log lines into a Delta table, on `local[2]`.

    python bench_parse_pipeline.py [--lines 10000000] [--profile]

One node, one replica, fsync on, four partitions; node and Spark share this machine's cores. The time is that of the
whole job in a warm session: fetch, learn, join, parse, write, commit. The last lines have a burst, a template that was
never seen before, and one that stops: the analysis of the table must find them. The raw limit is parsing in one process
from memory, times two cores, without fetching and writing. `--profile` prints where that process spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import quiver
import quiver.spark
from processes import connect, disk_directory, running_nodes
from quiver.spark.logs import learn
from quiver.spark.pipelines.analyze import Analyze
from quiver.spark.pipelines.job import JobRun
from quiver.spark.pipelines.parse import Parse
from table import Row, show

PARTITIONS = 4
TARGET = 250_000
CHUNK = 50_000
START = datetime(2026, 11, 15, tzinfo=UTC)
LINES_PER_S = 1000
"""Lines in a second of the log's own time."""
KINDS = (
    ("INFO", "web.RequestHandler", "request {a} from 10.{b}.{c}.7 took {d} ms, status {s}"),
    ("INFO", "web.Session", "user u{a} logged in from 192.168.{b}.{c}"),
    ("DEBUG", "cache.Store", "key session:{a} found in shard {b}, {d} bytes"),
    ("INFO", "db.Pool", "connection {b} returned after {d} ms, {c} idle"),
    ("WARN", "db.Query", "slow query {a} on table orders_{b}: {d} ms"),
    ("INFO", "queue.Consumer", "batch {a} of {c} records committed at offset {d}"),
    ("ERROR", "web.RequestHandler", "request {a} failed: connection to backend-{b} refused"),
    ("INFO", "scheduler.Job", "job nightly-{b} finished in {d} ms with code {s}"),
    ("TRACE", "net.Channel", "sent {d} bytes to peer {b} on channel {c}"),
    ("INFO", "auth.Token", "token {a} renewed for client {b} until {d}"),
)
WEIGHTS = (0.4, 0.15, 0.15, 0.1, 0.02, 0.08, 0.005, 0.005, 0.05, 0.04)
NEW = "failover of shard {b} to replica {c} requested by operator"


def make_lines(count: int) -> Iterator[list[str]]:
    """Yield lines in the order of their times, in chunks."""
    rng = np.random.default_rng(18)
    for first in range(0, count, CHUNK):
        size = min(CHUNK, count - first)
        kinds = rng.choice(len(KINDS), size, p=WEIGHTS)
        kinds[(kinds == 9) & (np.arange(first, first + size) >= count * 0.8)] = 0  # this template stops
        numbers = rng.integers(0, 1_000_000, (4, size)).tolist()
        lines = []
        for at in range(size):
            moment = START + timedelta(seconds=(first + at) / LINES_PER_S)
            level, source, text = KINDS[kinds[at]]
            a, b, c, d = (own[at] for own in numbers)
            said = text.format(a=a, b=b % 250, c=c % 250, d=d % 5000, s=200 + b % 4)
            lines.append(
                f"{moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03} {level} [pool-{c % 16}] {source}: {said}"
            )
        if first <= count * 0.6 < first + size:
            stamp = lines[0][:23]
            lines[1:1] = [
                f"{stamp} ERROR [pool-1] web.RequestHandler: request {at} failed: connection to backend-9 refused"
                for at in range(700)
            ]
            lines[5] = f"{stamp} WARN [main] db.Cluster: {NEW.format(b=3, c=4)}"
        yield lines


def fill(cluster: quiver.Cluster, count: int) -> int:
    """Send all lines, chunk by chunk in turn to each partition; return how many."""
    cluster.create_topic("lines", partitions=PARTITIONS)
    sent = 0
    with cluster.producer("lines") as producer:
        for number, lines in enumerate(make_lines(count)):
            producer.send_many(lines, partition=number % PARTITIONS)
            sent += len(lines)
    return sent


def in_memory_rate(*, is_profiled: bool) -> float:
    """Return the lines that one process parses in a second."""
    lines = pa.array([line for chunk in make_lines(4 * CHUNK) for line in chunk], pa.string())
    parser = learn(lines[:CHUNK]).parser()
    parser.parse(lines[:CHUNK])
    profile = cProfile.Profile()
    begun = time.perf_counter()
    if is_profiled:
        profile.enable()
    for first in range(0, len(lines), 32_768):
        parser.parse(lines[first : first + 32_768])
    profile.disable()
    seconds = time.perf_counter() - begun
    if is_profiled:
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)
    return len(lines) / seconds


def found_faults(facts: dict[str, Any]) -> list[Row]:
    """Return what the analysis found of the planted faults, as counts that have to be 0."""
    bursts, new = facts["bursts"], [own["template"] for own in facts["new"]]
    gone = [own["template"] for own in facts["changes"] if own["change"] == "vanished"]
    is_first = bool(bursts) and bursts[0]["lines"] >= 700 and "refused" in bursts[0]["templates"][0]
    false = len(bursts) + len(new) + len(facts["changes"])
    is_new, is_gone = any("failover" in own for own in new), any("token" in own for own in gone)
    return [
        Row("planted burst of 700 not ranked first", float(not is_first), "", None, 0),
        Row("planted new template not found", float(not is_new), "", None, 0),
        Row("planted end of a template not found", float(not is_gone), "", None, 0),
        Row("false alarms", float(false - is_first - is_new - is_gone), "", None, 5),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the parse pipeline.")
    parser.add_argument("--lines", type=int, default=10_000_000)
    parser.add_argument("--profile", action="store_true", help="print where parsing spends its time")
    options = parser.parse_args()
    limit = 2 * in_memory_rate(is_profiled=options.profile)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(disk_directory()))
        spark = quiver.spark.session("bench", master="local[2]", config={"spark.log.level": "OFF"})
        stack.callback(spark.stop)
        nodes = stack.enter_context(running_nodes(1))
        with connect(nodes) as cluster:
            sent = fill(cluster, options.lines)
        spark.range(1000).rdd.map(lambda row: row.id).count()  # start the workers
        run = JobRun(lambda: spark, report_progress=lambda _: None)
        servers = ",".join(node.wire for node in nodes.nodes)
        table = str(directory / "events")
        begun = time.perf_counter()
        parsed = Parse(servers=servers, topic="lines", to=table).run(run)
        seconds = time.perf_counter() - begun
        assert parsed.facts["records"] == sent, parsed.facts
        begun = time.perf_counter()
        facts = Analyze(topic="lines", table=table).run(run).facts
        analyzed_s = time.perf_counter() - begun
        rows = [
            Row(f"parse {sent:,} lines into Delta", sent / seconds, "lines/s", limit, TARGET),
            Row("analyze the table", sent / analyzed_s, "lines/s"),
            Row("templates", float(str(parsed.facts["templates"])), "", None, len(KINDS) + 1),
            *found_faults(facts),
        ]
        return show(rows, title="The parse pipeline: local[2], one node, four partitions, fsync on")


if __name__ == "__main__":
    sys.exit(main())
