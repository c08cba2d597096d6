"""Measure what security costs: a plain cluster next to one with TLS, a token and grants, on the same work.

    python bench_security.py [--nodes 1] [--records 500000] [--seconds 2] [--rounds 5] [--only bulk|awaited|http]

*plain* runs in development mode: no credentials, no TLS. *secure* runs as `quiver security init` sets it up: TLS on
every port and between nodes, and a client that is no administrator; its token and its two grants are checked as any
user's. Both clusters run all the time and take turns, in an order that alternates too, so that other programs and a
disk that gets slower disturb both alike.

A rate is the best of the rounds. `kept` is how much of the plain throughput is left: the ratio of the best rates, or
for a latency the inverse ratio of the medians. On a busy machine rates say little. The CPU time of client and nodes,
the least of the rounds, hardly depends on other programs; `by CPU` is what is left of the throughput if the busier of
the two has a core for itself and is what limits it. HTTP connections are opened before the clocks start and are kept
alive; bulk work opens its own client, handshake included, as a program does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import ssl
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import quiver
from bench_http import consume_request, produce_request
from processes import (
    HERE,
    VALUE,
    Nodes,
    disk_directory,
    own_processor_s,
    processor_s,
    quantile,
    wait_alive,
)
from quiver.client.cluster import AsyncCluster
from quiver.client.connection import connect_async
from quiver.errors import NotAllowedError, UnavailableError
from quiver.security.bootstrap import initialize, node_directory
from quiver.security.files import CA_NAME, TOKEN_NAME
from quiver.security.permissions import Grant, ResourceKind, Verb
from quiver.security.secrets import write_secret
from table import MISSED

TOPIC = "logs"
AWAITED_TOPIC = "awaited"
COMPRESSED_TOPIC = "compressed"
TOPICS = (TOPIC, AWAITED_TOPIC, COMPRESSED_TOPIC)
USER = "bench"
CONNECTIONS = 64
BULK_KEPT, AWAITED_KEPT = 0.85, 0.80
"""Goals: the share of the plain throughput that is left with security."""


# -- the two clusters --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One cluster and how its client reaches it."""

    name: str
    nodes: Nodes
    ca_file: str = ""
    token_file: str = ""

    @property
    def pids(self) -> list[int]:
        return [node.pid for node in self.nodes.nodes]

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that authenticate an HTTP request."""
        return {"Authorization": f"Bearer {Path(self.token_file).read_text().strip()}"} if self.token_file else {}

    def connect(self) -> quiver.Cluster:
        return quiver.connect(self._addresses, ca_file=self.ca_file, token_file=self.token_file)

    def connect_async(self) -> AsyncCluster:
        return connect_async(self._addresses, ca_file=self.ca_file, token_file=self.token_file)

    @property
    def _addresses(self) -> list[str]:
        return [node.wire for node in self.nodes.nodes]


@contextmanager
def running_plain(count: int) -> Iterator[Side]:
    """Run a cluster in development mode, with its topics."""
    with disk_directory() as directory, _running(Nodes(directory, count)) as nodes:
        side = Side("plain", nodes)
        with side.connect() as cluster:
            _make_topics(cluster, count)
        yield side


@contextmanager
def running_secure(count: int) -> Iterator[Side]:
    """Run a cluster with TLS, with its topics, and a user who may only read and write."""
    with disk_directory() as directory:
        files = directory / "security"
        initialize(str(files), {number: ["127.0.0.1", "localhost"] for number in range(1, count + 1)})
        nodes = Nodes(directory, count, ("--security-mode", "secure"))
        for node in nodes.nodes:
            node.arguments += ("--security-directory", node_directory(str(files), node.id))
        with _running(nodes):
            admin = Side("secure", nodes, str(files / CA_NAME), str(files / TOKEN_NAME))
            with _connect_first_admin(admin) as cluster:
                _make_topics(cluster, count)
                _add_user(cluster, files / f"{USER}.token")
            yield replace(admin, token_file=str(files / f"{USER}.token"))


@contextmanager
def _running(nodes: Nodes) -> Iterator[Nodes]:
    try:
        nodes.start()
        yield nodes
    finally:
        nodes.close()


def _connect_first_admin(side: Side) -> quiver.Cluster:
    """Connect when the primary has created the first administrator; refusals are limited, so ask slowly."""
    while True:
        cluster = side.connect()
        try:
            cluster.access.users()
        except (NotAllowedError, UnavailableError):
            cluster.close()
            time.sleep(0.5)
        else:
            return cluster


def _make_topics(cluster: quiver.Cluster, count: int) -> None:
    wait_alive(cluster, count)
    for topic in TOPICS:
        cluster.create_topic(topic, partitions=3)


def _add_user(cluster: quiver.Cluster, token_file: Path) -> None:
    cluster.access.create_user(USER)
    for topic in TOPICS:
        for verb in (Verb.READ, Verb.WRITE):
            cluster.access.add_grant(
                Grant(subject=f"user:{USER}", verb=verb, kind=ResourceKind.TOPIC, name=topic, is_prefix=True)
            )
    write_secret(str(token_file), cluster.access.create_token(USER).secret)


# -- what is measured --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One round of work on one side."""

    done: int
    seconds: float
    client_s: float
    """CPU time of the client."""
    nodes_s: float
    """CPU time of all nodes."""
    p50_ms: float = 0.0

    @property
    def rate(self) -> float:
        return self.done / self.seconds

    @property
    def client_us(self) -> float:
        return 1e6 * self.client_s / self.done

    @property
    def nodes_us(self) -> float:
        return 1e6 * self.nodes_s / self.done


Work = Callable[[Side], Turn]


def clocked(side: Side, done: int, work: Callable[[], list[float] | None]) -> Turn:
    """Do the work in this process; it returns the latencies in milliseconds of its requests, if it has them."""
    nodes_s, client_s, begun = _nodes_s(side), own_processor_s(), time.perf_counter()
    times_ms = work()
    seconds, client_s = time.perf_counter() - begun, own_processor_s() - client_s
    p50_ms = quantile(times_ms, 0.5) if times_ms else 0.0
    return Turn(done, seconds, client_s, _nodes_s(side) - nodes_s, p50_ms)


def _nodes_s(side: Side) -> float:
    return sum(map(processor_s, side.pids))


def send_many(records: int, side: Side) -> Turn:
    values = [VALUE] * records

    def work() -> None:
        with side.connect() as cluster, cluster.producer(TOPIC) as producer:
            producer.send_many(values)

    return clocked(side, records, work)


def send_compressed(records: int, side: Side) -> Turn:
    values = log_lines(records)

    def work() -> None:
        with side.connect() as cluster, cluster.producer(COMPRESSED_TOPIC, compression="lz4") as producer:
            producer.send_many(values)

    return clocked(side, records, work)


@cache
def log_lines(records: int) -> list[bytes]:
    """Return lines of about 100 bytes whose numbers differ, as those of a web server do: LZ4 makes a third of them."""
    rng = random.Random(1)
    return [
        b'10.0.%d.%d - - [16/Nov/2026:12:%02d:%02d +0000] "GET /api/orders/%d HTTP/1.1" 200 %d "-" "curl/8.5.0"'
        % (
            rng.randrange(256),
            rng.randrange(256),
            *divmod(number // 500 % 3600, 60),
            rng.randrange(10**6),
            number % 9999,
        )
        for number in range(records)
    ]


def fetch_arrow(topic: str, records: int, side: Side) -> Turn:
    def work() -> None:
        with side.connect() as cluster, cluster.consumer(topic) as consumer:
            assert consumer.fetch_arrow(records, timeout=60).num_rows == records

    return clocked(side, records, work)


def iterate(records: int, side: Side) -> Turn:
    def work() -> None:
        with side.connect() as cluster, cluster.consumer(TOPIC) as consumer:
            for count, _ in enumerate(consumer, start=1):
                if count == records:
                    return

    return clocked(side, records, work)


def awaited_sends(outstanding: int, records: int, side: Side) -> Turn:
    """Send records from as many tasks as sends are outstanding; each task awaits its record before the next."""

    async def send(producer: Any, times_ms: list[float], count: int) -> None:
        for _ in range(count):
            begun = time.perf_counter()
            await producer.send(VALUE)
            times_ms.append((time.perf_counter() - begun) * 1000)

    async def run() -> Turn:
        times_ms: list[float] = []
        async with side.connect_async() as cluster, await cluster.producer(AWAITED_TOPIC) as producer:
            await send(producer, [], 20)  # every partition has its leader and its connection
            nodes_s, client_s, begun = _nodes_s(side), own_processor_s(), time.perf_counter()
            await asyncio.gather(*(send(producer, times_ms, records // outstanding) for _ in range(outstanding)))
            seconds, client_s = time.perf_counter() - begun, own_processor_s() - client_s
        return Turn(len(times_ms), seconds, client_s, _nodes_s(side) - nodes_s, quantile(times_ms, 0.5))

    return asyncio.run(run())


class HttpLoad:
    """Connections with one request in flight each, from a process of their own, for some seconds."""

    def __init__(self, requests: Mapping[str, Sequence[str]], seconds: float) -> None:
        """`requests` has one for each connection, by the name of the side."""
        self._requests = requests
        self._seconds = seconds

    def __call__(self, side: Side) -> Turn:
        host, _, port = side.nodes.nodes[0].http.rpartition(":")
        order = {
            "host": host,
            "port": int(port),
            "requests": [_with_headers(request, side) for request in self._requests[side.name]],
            "seconds": self._seconds,
            "ca_file": side.ca_file,
            "pids": side.pids,
        }
        command = [sys.executable, str(HERE / "http_load.py")]
        done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, check=True)
        answers = json.loads(done.stdout)
        if set(answers["statuses"]) != {"200"}:
            raise RuntimeError(f"{side.name} answered {answers['statuses']}")
        return Turn(
            answers["answers"],
            answers["seconds"],
            answers["processor_s"],
            answers["servers_s"],
            answers["p50_ms"],
        )


def _with_headers(request: str, side: Side) -> str:
    head, _, rest = request.partition("\r\n")
    return "\r\n".join([head, *(f"{name}: {value}" for name, value in side.headers.items()), rest])


def register(side: Side, kind: str) -> int:
    """Register a producer or consumer of the topic over HTTP, as the side's client; return its id."""
    scheme, context = ("https", ssl.create_default_context(cafile=side.ca_file)) if side.ca_file else ("http", None)
    headers = {"Content-Type": "application/json", **side.headers}
    url = f"{scheme}://{side.nodes.nodes[0].http}/{kind}/register"
    request = urllib.request.Request(url, json.dumps({"topic": TOPIC}).encode(), headers)
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        found: int = json.load(answer)[f"{kind}_id"]
        return found


# -- turns and their table ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One work, done on both sides in turns."""

    what: str
    plain: list[Turn]
    secure: list[Turn]
    goal: float | None
    is_latency: bool = False

    @property
    def figures(self) -> tuple[float, float]:
        if self.is_latency:
            return self._medians(lambda turn: turn.p50_ms)
        return max(turn.rate for turn in self.plain), max(turn.rate for turn in self.secure)

    @property
    def kept(self) -> float:
        plain, secure = self.figures
        return plain / secure if self.is_latency else secure / plain

    @property
    def passed(self) -> bool:
        return self.goal is None or self.kept >= self.goal

    @property
    def kept_by_cpu(self) -> float:
        (plain_client, client), (plain_nodes, nodes) = self._client_us, self._nodes_us
        return max(plain_client, plain_nodes) / max(client, nodes)

    @property
    def _client_us(self) -> tuple[float, float]:
        return min(turn.client_us for turn in self.plain), min(turn.client_us for turn in self.secure)

    @property
    def _nodes_us(self) -> tuple[float, float]:
        return min(turn.nodes_us for turn in self.plain), min(turn.nodes_us for turn in self.secure)

    def _medians(self, figure: Callable[[Turn], float]) -> tuple[float, float]:
        return statistics.median(map(figure, self.plain)), statistics.median(map(figure, self.secure))

    def cells(self) -> tuple[str, ...]:
        unit = "ms" if self.is_latency else "/s"
        by_cpu = "" if self.is_latency else f"{self.kept_by_cpu:.0%}"
        client, nodes = _pair(*self._client_us), _pair(*self._nodes_us)
        goal = "" if self.goal is None else f"≥ {self.goal:.0%}"
        verdict = "" if self.goal is None else "pass" if self.passed else "FAIL"
        return (self.what, *map(_number, self.figures), unit, f"{self.kept:.0%}", goal, verdict, by_cpu, client, nodes)


HEADINGS = ("what", "plain", "secure", "unit", "kept", "goal", "", "by CPU", "client µs", "nodes µs")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _pair(plain: float, secure: float) -> str:
    return f"{plain:.3g} → {secure:.3g}"


def take_turns(what: str, work: Work, sides: Sequence[Side], *, rounds: int, goal: float | None) -> Comparison:
    """Do the work on both sides in every round; who begins alternates. A first round is not counted."""
    turns: dict[str, list[Turn]] = {side.name: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            turn = work(side)
            if number:
                turns[side.name].append(turn)
    print(f"  measured: {what}", file=sys.stderr, flush=True)
    return Comparison(what, turns["plain"], turns["secure"], goal)


def show(comparisons: Sequence[Comparison], *, title: str) -> int:
    """Print the comparisons as a table; return the exit status of a bench."""
    lines = [HEADINGS, *(comparison.cells() for comparison in comparisons)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEADINGS))]
    print(f"\n{title}")
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells).rstrip())
    return 0 if all(comparison.passed for comparison in comparisons) else MISSED


# -- parts -------------------------------------------------------------------------------------------


def bulk(sides: Sequence[Side], options: argparse.Namespace) -> list[Comparison]:
    records, rounds = options.records, options.rounds
    return [
        take_turns(what, work, sides, rounds=rounds, goal=BULK_KEPT)
        for what, work in (
            ("bulk produce, send_many", partial(send_many, records)),
            ("bulk consume, Arrow", partial(fetch_arrow, TOPIC, records)),
            ("bulk consume, objects", partial(iterate, records // 2)),
            ("bulk produce, log lines, LZ4", partial(send_compressed, records)),
            ("bulk consume, Arrow, log lines, LZ4", partial(fetch_arrow, COMPRESSED_TOPIC, records)),
        )
    ]


def awaited(sides: Sequence[Side], options: argparse.Namespace) -> list[Comparison]:
    found = []
    for outstanding, share in ((1, 500), (64, 50)):
        work = partial(awaited_sends, outstanding, options.records // share)
        rates = take_turns(
            f"awaited send, {outstanding} outstanding", work, sides, rounds=options.rounds, goal=AWAITED_KEPT
        )
        times = Comparison(
            f"awaited send, {outstanding} outstanding: p50", rates.plain, rates.secure, None, is_latency=True
        )
        found += [rates, times]
    return found


def http(sides: Sequence[Side], options: argparse.Namespace) -> list[Comparison]:
    for side in sides:
        send_many(options.records, side)  # a backlog for consumers
    produced = HttpLoad(
        {side.name: [produce_request(register(side, "producer"))] * CONNECTIONS for side in sides}, options.seconds
    )
    consumed = HttpLoad(
        {side.name: [consume_request(register(side, "consumer")) for _ in range(CONNECTIONS)] for side in sides},
        options.seconds,
    )
    return [
        take_turns("HTTP produce", produced, sides, rounds=options.rounds, goal=AWAITED_KEPT),
        take_turns("HTTP consume", consumed, sides, rounds=options.rounds, goal=AWAITED_KEPT),
    ]


PARTS = {"bulk": bulk, "awaited": awaited, "http": http}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what security costs.")
    parser.add_argument("--nodes", type=int, choices=[1, 3], default=1)
    parser.add_argument("--records", type=int, default=500_000)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(PARTS), action="append")
    options = parser.parse_args()
    with running_plain(options.nodes) as plain, running_secure(options.nodes) as secure:
        comparisons = [
            comparison for name in options.only or PARTS for comparison in PARTS[name]((plain, secure), options)
        ]
    nodes = "one node" if options.nodes == 1 else "three nodes, three replicas"
    title = (
        f"TLS, token and grants: {nodes}, 100-byte values, three partitions, {CONNECTIONS} HTTP connections, fsync on"
    )
    return show(comparisons, title=title)


if __name__ == "__main__":
    sys.exit(main())
