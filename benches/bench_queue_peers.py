"""Work queues against Redis Streams groups, RabbitMQ quorum queues and NATS JetStream, in alternating rounds.

    python benches/bench_queue_peers.py [--rounds 2] [--peers redis,rabbitmq,nats] [--python PYTHON]

Each round runs every system once, one after the other, on one node with fsync on: Redis with `appendfsync always`, a
quorum queue of RabbitMQ, JetStream with `sync_interval: always`. Records have 100 bytes and are there before the clock
starts. *batches*: 16 workers of one process receive 100 records and acknowledge them together. *single*: 64 workers
each receive one record, acknowledge it, and await that (RabbitMQ's protocol does not confirm it).

Servers are taken from the PATH (`apt-get install redis-server rabbitmq-server`, `go install
github.com/nats-io/nats-server/v2@latest`); those that are missing are left out. Their clients run in a process of
`--python`, which has redis, aio-pika and nats-py; without it, a virtual environment is made for the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import bench_queue
from peer_fetch import RABBITMQ
from peer_servers import running_process
from processes import disk_directory, measure, running_nodes
from replicas import free_ports
from table import Row, show

HERE = Path(__file__).parent
CLIENTS = ("redis", "aio-pika", "nats-py")
RECORDS = {"batches": {"quiver": 200_000, "redis": 100_000, "rabbitmq": 50_000, "nats": 20_000}}
RECORDS["single"] = dict.fromkeys(RECORDS["batches"], 10_000)
WORKERS = {"batches": (bench_queue.BATCH_WORKERS, bench_queue.BATCH), "single": (bench_queue.SINGLE_WORKERS, 1)}


def run_quiver(part: str, records: int) -> float:
    """Return the records per second of one node."""
    workers, records_max = WORKERS[part]
    with running_nodes(1) as nodes:
        addresses = [node.wire for node in nodes.nodes]
        asyncio.run(bench_queue.prepare(addresses, records, replicas=1))
        effort = measure(
            lambda: asyncio.run(bench_queue.drain(addresses, workers, records_max, records)),
            [node.pid for node in nodes.nodes],
        )
    return records / effort.seconds


def run_peer(peer: str, part: str, records: int, python: str) -> float:
    """Return the records per second of one server."""
    with disk_directory() as directory:
        port, second = free_ports(2)

        def load(what: str) -> str:
            command = [python, str(HERE / "queue_peer_load.py"), peer, str(port), what, str(records)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the workers of {peer} failed: {done.stderr[-2000:]}")
            return done.stdout

        if peer == "nats":  # filling with a sync for each record would take minutes
            for what in ("fill", part):
                with running_process(
                    nats_command(directory, port, is_syncing=what != "fill"), directory=directory, port=port
                ):
                    answer = load(what)
        else:
            command, environment = (
                redis_command(directory, port) if peer == "redis" else rabbit_command(directory, port, second)
            )
            with (
                stopped_epmd(environment),
                running_process(command, directory=directory, port=port, environment=environment),
            ):
                load("fill")
                answer = load(part)
    return records / float(json.loads(answer)["seconds"])


def redis_command(directory: Path, port: int) -> tuple[list[str], dict[str, str]]:
    options = ["--port", str(port), "--dir", str(directory), "--appendonly", "yes", "--save", ""]
    return ["redis-server", *options, "--appendfsync", "always"], {}


def rabbit_command(directory: Path, port: int, epmd_port: int) -> tuple[list[str], dict[str, str]]:
    (distribution,) = free_ports(1)
    environment = {
        "HOME": str(directory),
        "RABBITMQ_NODENAME": "bench@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        "ERL_EPMD_PORT": str(epmd_port),
    }
    (directory / "plugins").write_text("[].\n")
    return [str(RABBITMQ)], environment


@contextmanager
def stopped_epmd(environment: dict[str, str]) -> Iterator[None]:
    """Stop Erlang's port mapper at the end, if the server started one: it leaves the server's process group."""
    try:
        yield
    finally:
        if "ERL_EPMD_PORT" in environment:
            variables = {**os.environ, **environment, "ERL_EPMD_RELAXED_COMMAND_CHECK": "1"}
            subprocess.run(["epmd", "-kill"], env=variables, check=False, capture_output=True)


def nats_command(directory: Path, port: int, *, is_syncing: bool) -> list[str]:
    store = f'store_dir: "{directory / "store"}"'
    syncing = ", sync_interval: always" if is_syncing else ""
    (directory / "nats.conf").write_text(f"listen: 127.0.0.1:{port}\njetstream {{ {store}{syncing} }}\n")
    return ["nats-server", "-c", str(directory / "nats.conf")]


def make_python(directory: Path) -> str:
    """Return a Python with the clients of the peers."""
    venv.create(directory / "venv", with_pip=True)
    python = directory / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *CLIENTS], check=True)
    return str(python)


def is_installed(peer: str) -> bool:
    return RABBITMQ.exists() if peer == "rabbitmq" else shutil.which(f"{peer}-server") is not None


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure work queues against their peers.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peers", default="redis,rabbitmq,nats")
    parser.add_argument("--python", default="", help="Python with redis, aio-pika and nats-py.")
    parser.add_argument("--share", type=float, default=1.0, help="Share of the records, for a quicker run.")
    options = parser.parse_args()
    peers = [peer for peer in options.peers.split(",") if is_installed(peer)]
    for peer in sorted(set(options.peers.split(",")) - set(peers)):
        print(f"{peer}: no server is installed, it is left out", file=sys.stderr)
    with disk_directory() as directory:
        python = options.python or (make_python(directory) if peers else "")
        rows = [row for part in RECORDS for row in compare(part, peers, python, options.rounds, options.share)]
    return show(rows, title="work queues and their peers, one node, fsync on: median of alternating rounds")


def compare(part: str, peers: Sequence[str], python: str, rounds: int, share: float) -> list[Row]:
    """Return the median of each system; the target of Quiver is the best of the others."""
    measured: dict[str, list[float]] = {name: [] for name in ("quiver", *peers)}
    for _ in range(rounds):
        for name, figures in measured.items():
            records = max(1_000, round(RECORDS[part][name] * share))
            figures.append(run_quiver(part, records) if name == "quiver" else run_peer(name, part, records, python))
    medians = {name: statistics.median(figures) for name, figures in measured.items()}
    best = max((medians[peer] for peer in peers), default=None)
    return [
        Row(f"{part}: {name}", figure, "records/s", target=best if name == "quiver" else None)
        for name, figure in medians.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
