"""Measure HTTP on one node, fsync on, next to the design of Flask, SQLAlchemy and PostgreSQL that it replaces.

    python bench_http.py [--seconds 3] [--rounds 3] [--connections 64]

Both servers run all the time and are measured alternately, so that both see the same load of this machine; the ratio is
the median of the rounds. A connection has one request in flight; a message is 100 characters. A separate process
(`http_load`) generates the load and shares the cores with the server. The node's CPU time per request is independent of
other programs, and bounds the rate on an idle core. The raw limit is the same server answering an empty request
(`GET /healthz`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flask_peer import THREADS, create_tables
from processes import (
    HERE,
    VALUE,
    NodeProcess,
    Nodes,
    ServerMissingError,
    connect,
    processor_s,
    running_nodes,
    running_server,
    wait_until,
)
from replicas import free_ports
from table import Row, show

TOPIC = "logs"
MESSAGE = VALUE.decode()
WORKERS = 2
RATE_TARGET, RATIO_TARGET = 10_000, 5
BACKLOG = 300_000
"""Messages to consume: more than all consumers together consume in a run."""

Answers = dict[str, Any]


# -- requests ----------------------------------------------------------------------------------------


IDLE_REQUEST = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


def produce_request(producer_id: int) -> str:
    body = json.dumps({"topic": TOPIC, "producer_id": producer_id, "message": MESSAGE})
    head = "POST /producer/produce HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}"


def consume_request(consumer_id: int) -> str:
    return f"GET /consumer/consume?topic={TOPIC}&consumer_id={consumer_id} HTTP/1.1\r\nHost: localhost\r\n\r\n"


def load(address: str, requests: list[str], seconds: float) -> Answers:
    """Keep as many connections busy as there are requests; every response must be a success."""
    host, _, port = address.rpartition(":")
    order = json.dumps({"host": host, "port": int(port), "requests": requests, "seconds": seconds})
    done = subprocess.run(
        [sys.executable, str(HERE / "http_load.py")], input=order, capture_output=True, text=True, check=True
    )
    answers: Answers = json.loads(done.stdout)
    if set(answers["statuses"]) != {"200"}:
        raise RuntimeError(f"{address} answered {answers['statuses']}")
    answers["rate"] = answers["answers"] / answers["seconds"]
    return answers


def post(address: str, path: str, **parameters: object) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://{address}{path}", json.dumps(parameters).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


# -- the two servers ---------------------------------------------------------------------------------


@contextmanager
def running_peer(consumers: int) -> Iterator[str | None]:
    """Run the peer as its users would on two cores; yield its address, or None if it is not installed."""
    if importlib.util.find_spec("gunicorn") is None:
        print("the peer was not measured: gunicorn is not installed")
        yield None
        return
    try:
        with running_server() as database:
            create_tables(database.url, consumers)
            yield from _serve(database.url)
    except ServerMissingError as error:
        print(f"the peer was not measured: {error}")
        yield None


def _serve(url: str) -> Iterator[str]:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, "-m", "gunicorn", "--chdir", str(HERE), "--bind", address, "--log-level", "warning"]
    command += ["--workers", str(WORKERS), "--threads", str(THREADS), "--keep-alive", "75", "flask_peer:app"]
    process = subprocess.Popen(command, env={**os.environ, "QUIVER_BENCH_DATABASE": url})
    try:
        wait_until(lambda: _answers(address), what="the peer")
        yield address
    finally:
        process.terminate()
        process.wait()


def _answers(address: str) -> bool:
    try:
        post(address, "/producer/produce", topic="probe", producer_id=1, message="hello")
    except OSError:
        return False
    return True


def fill(nodes: Nodes) -> None:
    with connect(nodes) as cluster, cluster.producer(TOPIC) as producer:
        producer.send_many([VALUE] * BACKLOG)


# -- turns -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns:
    """The results of both servers, measured alternately."""

    mine: list[Answers]
    peers: list[Answers]
    effort_us: float
    """The node's least CPU time per response."""

    @property
    def best(self) -> Answers:
        return max(self.mine, key=lambda answers: float(answers["rate"]))

    def rows(self, what: str, idle: Turns, *, ratio_target: float | None = None) -> list[Row]:
        """Return the figures, next to those of empty requests."""
        effort_limit = idle.effort_us
        rows = [
            Row(what, self.best["rate"], "1/s", idle.best["rate"], RATE_TARGET),
            Row(f"{what}: p50", self.best["p50_ms"], "ms"),
            Row(f"{what}: p99", self.best["p99_ms"], "ms"),
            Row(f"{what}: processor time of the node", self.effort_us, "µs", effort_limit, 1e6 / RATE_TARGET),
        ]
        if not self.peers:
            return rows
        ratios = [ours["rate"] / theirs["rate"] for ours, theirs in zip(self.mine, self.peers, strict=True)]
        ratio = Row(f"{what}, as a multiple of the peer", statistics.median(ratios), "x/s", None, ratio_target)
        peer = max(self.peers, key=lambda answers: float(answers["rate"]))
        return [ratio, *rows, Row(f"{what}: the peer", peer["rate"], "1/s"), Row("its p50", peer["p50_ms"], "ms")]


class Bench:
    """The two servers, and the duration of a round."""

    def __init__(self, node: NodeProcess, peer: str | None, *, seconds: float, rounds: int) -> None:
        self._node = node
        self._peer = peer
        self._seconds = seconds
        self._rounds = rounds

    def take_turns(self, ours: list[str], theirs: list[str] | None = None) -> Turns:
        """Keep one connection per request busy, with one server, then with the other."""
        mine: list[Answers] = []
        peers: list[Answers] = []
        efforts: list[float] = []
        for _ in range(self._rounds):
            begun = processor_s(self._node.pid)
            mine.append(load(self._node.http, ours, self._seconds))
            efforts.append((processor_s(self._node.pid) - begun) / mine[-1]["answers"] * 1e6)
            if theirs is not None and self._peer is not None:
                peers.append(load(self._peer, theirs, self._seconds))
        return Turns(mine, peers, min(efforts))

    def register(self, kind: str) -> int:
        found: int = post(self._node.http, f"/{kind}/register", topic=TOPIC)[f"{kind}_id"]
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure HTTP.")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=64)
    options = parser.parse_args()
    count = options.connections
    with running_nodes(1) as nodes, running_peer(count) as peer:
        bench = Bench(nodes.nodes[0], peer, seconds=options.seconds, rounds=options.rounds)
        idle = bench.take_turns([IDLE_REQUEST] * count)
        producer = bench.register("producer")
        produced = bench.take_turns([produce_request(producer)] * count, [produce_request(1)] * count)
        fill(nodes)
        shared = bench.take_turns([consume_request(bench.register("consumer"))] * count)
        own = bench.take_turns(
            [consume_request(bench.register("consumer")) for _ in range(count)],
            [consume_request(number + 1) for number in range(count)],
        )
    rows = [
        *produced.rows("produce", idle, ratio_target=RATIO_TARGET),
        *own.rows("consume, each connection a consumer", idle),
        *shared.rows("consume, all connections one consumer", idle),
    ]
    return show(rows, title=f"HTTP: one node, {count} connections, fsync on; the peer is Flask, SQLAlchemy, PostgreSQL")


if __name__ == "__main__":
    sys.exit(main())
