# ruff: noqa: S310, S603, T201 - a demonstration prints, asks its own cluster over HTTP and starts it as children
"""Kill the leader of a cluster on this machine and lose nothing: `make demo`.

1. Start three nodes on free ports and create a topic of three partitions, three replicas each.
2. Produce and consume continuously: two producers and two consumers through the SDK, one of each over plain HTTP.
3. Kill the node that leads most partitions with SIGKILL; later restart it and watch it catch up.
4. Check that every consumer received every message once, in the same order within each partition.
5. On Spark, archive the topic into a Delta table, and audit that the leaders, every replica (also the killed one) and
   the archive have the same records. `make setup` installs Java.
6. Parse the archived records into a table, and write a report of what they say.

Exits with 0 only if all of this held.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

import quiver
from quiver.cli.up import NodePlan, plan_nodes
from quiver.errors import QuiverError, UnavailableError

TOPIC = "orders"
PARTITIONS = 3
PRODUCERS = ("sdk-1", "sdk-2", "http-1")
CONSUMERS = ("report", "archive", "http")
PAUSE_S = 0.002
"""Pause of each producer between two messages: this is a demonstration, not a benchmark."""


# -- nodes -------------------------------------------------------------------------------------------


class Nodes:
    """Three nodes as child processes."""

    def __init__(self, directory: Path) -> None:
        self.plans = plan_nodes(
            3, data=str(directory), host="127.0.0.1", http_port=free_ports(3), wire_port=free_ports(3)
        )
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._ready: dict[int, threading.Event] = {}

    def start(self, node: int) -> None:
        """Start a node; `wait_ready` waits until it serves."""
        plan = self.plan(node)
        Path(plan.directory).mkdir(parents=True, exist_ok=True)
        with open(plan.log_path, "ab") as log:
            self._children[node] = child = subprocess.Popen(plan.command, stdout=subprocess.PIPE, stderr=log)
        self._ready[node] = ready = threading.Event()
        threading.Thread(target=_drain, args=(child, ready), daemon=True).start()

    def wait_ready(self) -> None:
        """Wait until every node has printed that it is ready."""
        for node, ready in self._ready.items():
            if not ready.wait(30):
                raise UnavailableError(f"node {node} did not become ready: see {self.plan(node).log_path}")

    def plan(self, node: int) -> NodePlan:
        """Return the plan of a node."""
        return self.plans[node - 1]

    def is_running(self, node: int) -> bool:
        """Return whether a node's process is running."""
        child = self._children.get(node)
        return child is not None and child.poll() is None

    def kill(self, node: int) -> None:
        """Kill a node with SIGKILL."""
        self._children[node].send_signal(signal.SIGKILL)
        self._children[node].wait()

    def stop(self) -> None:
        """Stop all nodes gracefully."""
        for child in self._children.values():
            child.terminate()
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(20)
            child.kill()

    @property
    def urls(self) -> list[str]:
        """Return the HTTP address of each node."""
        return [f"http://{plan.http}" for plan in self.plans]


def _drain(child: subprocess.Popen[bytes], ready: threading.Event) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(b"ready"):
            ready.set()


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


# -- HTTP, with nothing but the standard library -----------------------------------------------------


class Http:
    """A plain client: send requests to any node, and to the next one if it does not answer."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = list(urls)

    def call(self, method: str, path: str, **parameters: object) -> dict[str, Any] | None:
        """Return the response; None for 204. Retries until there is one, so the request must be idempotent."""
        while True:
            request = urllib.request.Request(
                self._urls[0] + path,
                data=json.dumps(parameters).encode(),
                method=method,
                headers={"Content-Type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    return json.load(answer) if answer.status != 204 else None
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    raise RuntimeError(f"{path}: {error.code} {error.read().decode()}") from None
            except OSError:
                pass
            self._urls.append(self._urls.pop(0))
            time.sleep(0.05)


# -- producers and consumers -------------------------------------------------------------------------


class Traffic:
    """All producers and consumers, and what each has sent or received so far."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.is_over = threading.Event()
        self.sent: Counter[str] = Counter()
        self.got: dict[str, list[tuple[int, int, str]]] = {name: [] for name in CONSUMERS}
        self.failures: list[str] = []
        self._producers = [threading.Thread(target=self._run, args=(self._produce, name)) for name in PRODUCERS]
        self._consumers = [threading.Thread(target=self._run, args=(self._consume, name)) for name in CONSUMERS]

    def start(self) -> None:
        """Start all producers and consumers."""
        for thread in (*self._consumers, *self._producers):
            thread.start()

    def finish(self) -> None:
        """Stop the producers, then wait until every consumer has received everything, or has failed."""
        self.is_over.set()
        for thread in (*self._producers, *self._consumers):
            thread.join()

    @property
    def produced(self) -> int:
        """Return how many messages were acknowledged."""
        return sum(self.sent.values())

    def _run(self, work: Any, name: str) -> None:
        try:
            work(name)
        except Exception as error:  # noqa: BLE001 - reported at the end
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            self.is_over.set()

    def _produce(self, name: str) -> None:
        send = self._http_sender(name) if name.startswith("http") else self._sdk_sender(name)
        with send as put:
            while not self.is_over.is_set():
                put(f"{name} {self.sent[name]}")
                self.sent[name] += 1
                time.sleep(PAUSE_S)

    @contextmanager
    def _sdk_sender(self, name: str) -> Iterator[Any]:
        with quiver.connect(*self.urls) as cluster, cluster.producer(TOPIC, name=name) as producer:
            yield lambda text: producer.send(text).result()

    @contextmanager
    def _http_sender(self, name: str) -> Iterator[Any]:
        """Yield a function that numbers every message per partition, so that a retried call never duplicates it."""
        http = Http(self.urls)
        registered = http.call("POST", "/producer/register", topic=TOPIC, prod_name=name) or {}
        sequences: Counter[int] = Counter()

        def put(text: str) -> None:
            partition = sum(sequences.values()) % PARTITIONS
            http.call(
                "POST",
                "/producer/produce",
                topic=TOPIC,
                producer_id=registered["producer_id"],
                epoch=registered["epoch"],
                partition_id=partition,
                sequence=sequences[partition],
                message=text,
            )
            sequences[partition] += 1

        yield put

    def _consume(self, name: str) -> None:
        source = self._http_records() if name.startswith("http") else self._sdk_records(name)
        for record in source:
            self.got[name].append(record)
            if self._has_all(name):
                return

    def _has_all(self, name: str) -> bool:
        is_drained = self.is_over.is_set() and not any(thread.is_alive() for thread in self._producers)
        return is_drained and len(self.got[name]) >= self.produced

    def _sdk_records(self, name: str) -> Iterator[tuple[int, int, str]]:
        with quiver.connect(*self.urls) as cluster, cluster.consumer(TOPIC, name=name) as consumer:
            while not self._has_all(name):
                for record in consumer.poll(max_records=1000, timeout=0.5):
                    yield record.partition or 0, record.offset, record.text or ""

    def _http_records(self) -> Iterator[tuple[int, int, str]]:
        """Yield records by explicit offsets: a retried call returns what the lost response contained."""
        http = Http(self.urls)
        consumer = (http.call("POST", "/consumer/register", topic=TOPIC) or {})["consumer_id"]
        positions = dict.fromkeys(range(PARTITIONS), 0)
        while not self._has_all("http"):
            for partition, offset in positions.items():
                answer = http.call(
                    "GET",
                    "/consumer/consume_batch",
                    topic=TOPIC,
                    consumer_id=consumer,
                    partition_id=partition,
                    offset=offset,
                    max=1000,
                    wait_ms=50,
                )
                for message in (answer or {"messages": []})["messages"]:
                    positions[partition] = message["offset"] + 1
                    yield partition, message["offset"], message["message"]


# -- the display -------------------------------------------------------------------------------------


class Display:
    """The state of nodes and traffic, drawn a few times a second."""

    def __init__(self, nodes: Nodes, traffic: Traffic) -> None:
        self._nodes = nodes
        self._traffic = traffic
        self._http = Http(nodes.urls)
        self._before = (time.monotonic(), 0)
        self.events: list[str] = []
        self.longest_gap_s = 0.0
        self._last_progress = (time.monotonic(), 0)

    def say(self, event: str) -> None:
        """Add an event line to the display."""
        self.events.append(f"{time.strftime('%H:%M:%S')}  {event}")

    def leaders(self) -> dict[int, int | None]:
        """Return the leader of each partition."""
        answer = self._http.call("GET", "/partitions", topic=TOPIC) or {}
        return {item["partition_id"]: item["leader"] for item in answer["partitions"]}

    def watch_progress(self) -> None:
        """Record the longest time without an acknowledged message."""
        moment, count = self._last_progress
        now, produced = time.monotonic(), self._traffic.produced
        if produced > count:
            self.longest_gap_s = max(self.longest_gap_s, now - moment)
            self._last_progress = (now, produced)

    def draw(self) -> Group:
        """Return the current display."""
        leads = Counter(self.leaders().values())
        now, produced = time.monotonic(), self._traffic.produced
        rate = (produced - self._before[1]) / max(now - self._before[0], 1e-9)
        self._before = (now, produced)
        nodes = Table("node", "http", "runs", "leads", title="Nodes", title_justify="left")
        for plan in self._nodes.plans:
            runs = "yes" if self._nodes.is_running(plan.node) else "[red]killed[/red]"
            nodes.add_row(str(plan.node), plan.http, runs, "●" * leads.get(plan.node, 0))
        title = f"Produced {produced:,} ({rate:,.0f}/s)"
        flow = Table("consumer", "received", "behind", title=title, title_justify="left")
        for name in CONSUMERS:
            received = len(self._traffic.got[name])
            flow.add_row(name, f"{received:,}", f"{max(0, produced - received):,}")
        return Group(nodes, flow, Text("\n".join(self.events)))


# -- the checks --------------------------------------------------------------------------------------


def judge(traffic: Traffic) -> list[str]:
    """Return a sentence for every violation."""
    wrong = list(traffic.failures)
    wanted = {f"{name} {number}" for name, count in traffic.sent.items() for number in range(count)}
    orders = []
    for name, records in traffic.got.items():
        texts = [text for _, _, text in records]
        if set(texts) != wanted or len(texts) != len(wanted):
            missing, doubled = len(wanted - set(texts)), len(texts) - len(set(texts))
            wrong.append(
                f"consumer {name}: {missing} missing, {doubled} duplicated, {len(set(texts) - wanted)} unknown"
            )
        orders.append([[text for at, _, text in records if at == partition] for partition in range(PARTITIONS)])
    if any(order != orders[0] for order in orders):
        wrong.append("consumers saw partitions in different orders")
    return wrong


def run_pipelines(nodes: Nodes, directory: Path, console: Console) -> int:
    """Archive, audit, parse and analyze the topic with the commands of a user; return the exit code."""
    lake, events = str(directory / "lake"), str(directory / "events")
    report = str(Path(tempfile.mkdtemp(prefix="quiver-demo-")) / "report.html")  # stays: it is what the reader opens
    shared = ("--servers", ",".join(plan.http for plan in nodes.plans))
    for command in (
        ("pipeline", "archive", "--topic", TOPIC, "--to", lake, "--once", *shared),
        ("pipeline", "audit", "--topic", TOPIC, "--archive", lake, *shared),
        ("pipeline", "parse", "--topic", TOPIC, "--to", events, "--from-archive", lake, "--once", *shared),
        ("pipeline", "analyze", "--topic", TOPIC, "--table", events, "--report", report, *shared),
    ):
        console.print(f"$ {shlex.join(('quiver', *command))}", markup=False, highlight=False, soft_wrap=True)
        began = time.monotonic()
        code = subprocess.run((sys.executable, "-m", "quiver", *command), check=False).returncode
        if code:
            console.print(f"WRONG: the command exited with code {code}", style="red")
            return code
        console.print(f"({time.monotonic() - began:.0f} s)", style="dim")
    console.print("The archive, the leaders and every replica have the same records. All of it held.")
    console.print(f"The report of what the records say: {report}", soft_wrap=True)
    return 0


def run(seconds: float, directory: Path, console: Console, *, with_spark: bool) -> int:
    """Start the nodes, run the demonstration, and stop them; return the exit code."""
    nodes = Nodes(directory)
    try:
        began = time.monotonic()
        for plan in nodes.plans:
            nodes.start(plan.node)
        nodes.wait_ready()
        with quiver.connect(*nodes.urls) as cluster:
            cluster.create_topic(TOPIC, partitions=PARTITIONS)
        console.print(f"three nodes are up and topic {TOPIC!r} is created: {time.monotonic() - began:.1f} s")
        code = show(seconds, nodes, console)
        if code or not with_spark:
            return code
        return run_pipelines(nodes, directory, console)
    finally:
        nodes.stop()


def show(seconds: float, nodes: Nodes, console: Console) -> int:
    """Produce and consume while a node is killed and restarted."""
    traffic = Traffic(nodes.urls)
    display = Display(nodes, traffic)
    began = time.monotonic()
    traffic.start()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        victim = None
        is_back = False
        while (passed := time.monotonic() - began) < seconds and not traffic.failures:
            if victim is None and passed > seconds / 3:
                victim = Counter(leader for leader in display.leaders().values() if leader).most_common(1)[0][0]
                nodes.kill(victim)
                display.say(f"node {victim}, which led most partitions, was killed with SIGKILL")
            elif victim is not None and not is_back and passed > seconds * 2 / 3:
                nodes.start(victim)
                is_back = True
                display.say(f"node {victim} was restarted and catches up")
            display.watch_progress()
            live.update(display.draw(), refresh=True)
            time.sleep(0.2)
        traffic.finish()
        display.say("producers stopped; every consumer read to the end")
        live.update(display.draw(), refresh=True)
    return summarize(traffic, display, time.monotonic() - began, console)


def summarize(traffic: Traffic, display: Display, seconds: float, console: Console) -> int:
    """Print the result; return the exit code."""
    wrong = judge(traffic)
    for sentence in wrong:
        console.print(f"WRONG: {sentence}", style="red")
    if wrong:
        return 1
    console.print(
        f"{traffic.produced:,} messages in {seconds:.0f} s, each on a majority of disks before it was acknowledged; "
        f"the longest time without an acknowledgement, while the leader was killed: {display.longest_gap_s:.2f} s."
    )
    console.print(f"All {len(CONSUMERS)} consumers received every message once, in the same order. All of it held.")
    return 0


def main() -> int:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20, help="how long to produce and consume")
    parser.add_argument("--no-spark", action="store_true", help="end without archive, audit and report")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quiver-demo-", ignore_cleanup_errors=True) as directory:
        try:
            return run(arguments.seconds, Path(directory), Console(), with_spark=not arguments.no_spark)
        except QuiverError as error:
            print(f"error {error.code}: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
