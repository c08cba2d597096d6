"""Measure latency: an awaited record, a record's way to a consumer, and an awaited HTTP produce.

    python bench_latency.py [--rounds 3] [--share 1.0] [--nodes 1 3] [--against SRC]

Nodes and clients are processes on loopback, one partition with a replica on every node, fsync on. The sender and the
reader of the rows *end to end* are two processes; a record's time begins when it was due, and ends when the reader's
loop has it. Rounds alternate between the numbers of nodes, and with `--against` between this program and another one
(a directory to import `quiver` from, such as `src` of an older checkout); figures are medians of the rounds. The raw
limit of an awaited record is twice an fdatasync of the same run, 0.5 ms after the one before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench_http import load, post, produce_request
from processes import HERE, Nodes, connect, disk_directory, wait_alive
from table import Row, show

TOPIC = "logs"
SHARES = ("p50", "p99", "p99.9")
SYNCS = 300
RECORD_BYTES = 220
"""Bytes that a log writes for a record of 100 bytes in a batch of its own."""
AWAITED, RATE, FAST_RATE, RATE_S, FAST_S, HTTP_S = 1000, 1_000, 50_000, 3.0, 1.5, 2.0

Name = tuple[str, int]
"""A kind of load and the number of nodes."""
TARGETS: dict[Name, tuple[float | None, ...]] = {
    ("awaited send", 1): (0.5, 1.5),
    ("awaited send", 3): (1.0, 2.5),
    ("end to end at 1,000/s", 1): (0.8, 3.0, 8.0),
    ("end to end at 1,000/s", 3): (1.5, 4.0, 8.0),
    ("end to end at 50,000/s", 1): (None, None),
    ("end to end at 50,000/s", 3): (None, 15.0),
    ("HTTP produce awaited, one connection", 1): (1.2,),
    ("HTTP produce awaited, one connection", 3): (None,),
}
"""What each load is to reach, in milliseconds: p50, p99, p99.9."""


@dataclass
class Program:
    """A program that is measured: its clusters by number of nodes, and the figures of each round."""

    source: Path
    clusters: dict[int, Nodes] = field(default_factory=dict)
    figures: dict[tuple[Name, str], list[float]] = field(default_factory=dict)

    def note(self, name: Name, found_ms: list[float]) -> None:
        for share_name, found in zip(SHARES[: len(TARGETS[name])], found_ms, strict=False):
            self.figures.setdefault((name, share_name), []).append(found)

    def median(self, name: Name, share_name: str) -> float:
        return statistics.median(self.figures[name, share_name])


# -- load --------------------------------------------------------------------------------------------


def start_client(program: Program, kind: str, nodes: Nodes, records: int, rate: int = 0) -> subprocess.Popen[str]:
    addresses = ",".join(node.wire for node in nodes.nodes)
    command = [sys.executable, str(HERE / "latency_load.py"), kind, addresses, TOPIC, str(rate), str(records)]
    environment = {**os.environ, "PYTHONPATH": str(program.source)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def run_client(program: Program, kind: str, nodes: Nodes, records: int, rate: int = 0) -> list[float]:
    return read_result(start_client(program, kind, nodes, records, rate))


def read_result(client: subprocess.Popen[str]) -> list[float]:
    assert client.stdout is not None
    output = client.stdout.read()  # not `communicate`: a line of it may have been read
    if client.wait():
        raise RuntimeError(f"a client ended with {client.returncode}")
    found: list[float] = json.loads(output.splitlines()[-1])
    return found


def end_to_end(program: Program, nodes: Nodes, rate: int, seconds: float) -> list[float]:
    records = round(rate * seconds)
    with start_client(program, "tail", nodes, records) as tail:
        assert tail.stdout is not None
        tail.stdout.readline()  # it is ready
        run_client(program, "pace", nodes, records, rate)
        return read_result(tail)


def http_produce_ms(nodes: Nodes, seconds: float) -> list[float]:
    node = nodes.nodes[0]
    producer_id = post(node.http, "/producer/register", topic=TOPIC)["producer_id"]
    load(node.http, [produce_request(producer_id)], seconds / 4)
    return [load(node.http, [produce_request(producer_id)], seconds)["p50_ms"]]


def measure_round(program: Program, count: int, share: float) -> None:
    nodes = program.clusters[count]
    program.note(("awaited send", count), run_client(program, "awaited", nodes, round(AWAITED * share)))
    program.note(("end to end at 1,000/s", count), end_to_end(program, nodes, RATE, RATE_S * share))
    program.note(("end to end at 50,000/s", count), end_to_end(program, nodes, FAST_RATE, FAST_S * share))
    program.note(("HTTP produce awaited, one connection", count), http_produce_ms(nodes, HTTP_S * share))


def sync_ms(directory: Path) -> float:
    """Return the median of an append with fdatasync, as often as awaited records make it."""
    times_ms = []
    with (directory / "raw").open("wb", buffering=0) as file:
        for _ in range(SYNCS):
            time.sleep(0.0005)
            file.write(b"x" * RECORD_BYTES)
            begun = time.perf_counter()
            os.fdatasync(file.fileno())
            times_ms.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times_ms)


# -- clusters ----------------------------------------------------------------------------------------


@contextmanager
def running_programs(sources: list[Path], counts: list[int]) -> Iterator[list[Program]]:
    """Run all clusters of all programs; those that are not measured are idle."""
    programs = [Program(source) for source in sources]
    with ExitStack() as stack:
        for program in programs:
            for count in counts:
                program.clusters[count] = start_nodes(stack, program.source, count)
        yield programs


def start_nodes(stack: ExitStack, source: Path, count: int) -> Nodes:
    nodes = Nodes(stack.enter_context(disk_directory()), count)
    stack.callback(nodes.close)
    for node in nodes.nodes:
        node.program = source
    nodes.start()
    with connect(nodes) as cluster:
        wait_alive(cluster, count)
        cluster.create_topic(TOPIC, partitions=1, replicas=count)
    return nodes


def make_rows(program: Program, raw_ms: float) -> list[Row]:
    rows = []
    for name in (name for name in TARGETS if (name, "p50") in program.figures):
        for share_name, target in zip(SHARES, TARGETS[name], strict=False):
            raw = 2 * raw_ms if name == ("awaited send", 1) and share_name == "p50" else None
            what = f"{name[0]}, {name[1]} node{'s' * (name[1] > 1)}, {share_name}"
            rows.append(Row(what, program.median(name, share_name), "ms", raw, target))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure latency.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of the records and times of a round")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--against", type=Path, help="directory to import another program from")
    options = parser.parse_args()
    sources = [HERE.parent / "src", *([options.against] if options.against else [])]
    syncs_ms = []
    with running_programs(sources, options.nodes) as programs, disk_directory() as directory:
        for number in range(options.rounds):
            for count in options.nodes:
                syncs_ms.append(sync_ms(directory))
                for program in programs[:: -1 if number % 2 else 1]:
                    measure_round(program, count, options.share)
    raw_ms = statistics.median(syncs_ms)
    print(f"an append's fdatasync: {raw_ms:.3f} ms")
    for program in programs[1:]:
        show(make_rows(program, raw_ms), title=f"Latency of the program in {program.source}")
    return show(make_rows(programs[0], raw_ms), title="Latency: one partition, a replica on each node, fsync on")


if __name__ == "__main__":
    sys.exit(main())
