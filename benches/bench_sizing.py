"""The memory of a node, and what each replica adds to it: figures that `quiver size` calculates with.

    python bench_sizing.py [--partitions 500]

One real node, one topic whose partitions each get a record. Resident memory before and after.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import quiver
from table import Row, show

PAGE_BYTES = 4096
MIB = 1 << 20


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, default=500)
    partitions = parser.parse_args().partitions
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, "-m", "quiver", "node", "--id", "1", "--data", data]
        command += ["--wire", "127.0.0.1:0", "--http", "127.0.0.1:0", "--logging-level", "error"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:
            assert node.stdout is not None
            ready = dict(part.split("=") for part in node.stdout.readline().split()[1:])
            base = resident_bytes(node.pid)
            with quiver.connect(ready["wire"]) as cluster:
                cluster.create_topic("logs", partitions=partitions, replicas=1)
                with cluster.producer("logs") as producer:
                    for number in range(partitions):
                        producer.send(b"x" * 100, partition=number)
                    producer.flush()
                used = resident_bytes(node.pid)
            node.terminate()
            node.wait(60)
    rows = [
        Row("a node without topics", base / MIB, "MiB"),
        Row(f"each of {partitions} replicas adds", (used - base) / partitions / 1024, "KiB"),
    ]
    return show(rows, title="resident memory of one node")


if __name__ == "__main__":
    sys.exit(main())
