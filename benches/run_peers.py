"""Compare Quiver with other systems: `make bench-peers`, or for less

    python benches/run_peers.py [--rounds 5] [--share 1.0] [--only quiver,kafka-3-fsync] [--rows bulk,awaited]

Systems: Kafka, NATS JetStream, Redis Streams, RabbitMQ, PostgreSQL as a queue, and PySyncObj. Each runs with one node
and with three, with and without a sync of the disk before an acknowledgement, on loopback, with data on this disk, and
is loaded through its usual Python client by processes of this machine. A round runs every setup once, from an empty
directory; rounds alternate, and the figures are medians of all rounds with the least and the most. Each measured work
is done once before, in full, to warm up: caches, compilers, connections, files.

* *bulk*: send log lines of 100 bytes until all are acknowledged, then read them as objects (Quiver also as an Arrow
  table); the processor time of all servers while records are sent.
* *awaited*: one record after the other, each acknowledged before the next.
* *paced*: 1,000 records a second from one process, read by another; the time from one application to the other.
* *batches*: a work queue; 16 workers receive and acknowledge 100 records at a time.
* *single*: a work queue; 64 workers receive and acknowledge one record at a time.

Servers and clients are fetched into build/peers (see `peer_fetch.py`); those that cannot be had are named and left out.
The figures are kept in build/peers/results.json after each setup; `--resume` goes on with the rounds that are missing
there, and `--page FILE` writes the page of such a file. The page and its charts go to docs/ only if the run was whole
and the machine idle, otherwise to build/peers.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peer_fetch import Peers, fetch_peers
from peer_page import PEERS, ROWS, Results, objections, write_page
from peer_servers import Servers, Setup, running_servers, setups
from processes import HERE, disk_directory, families_processor_s
from replicas import Replica

REPOSITORY = HERE.parent
PLACE = REPOSITORY / "build" / "peers"
ROUNDS = 5
PER_SECOND = 1_000
COMMAND_TIMEOUT_S = 300
BULK = {
    "quiver": 4_000_000,
    "kafka": 500_000,
    "nats": 50_000,
    "redis": 300_000,
    "rabbitmq": 30_000,
    "postgresql": 300_000,
    "pysyncobj": 50_000,
}
"""Records of each system, so that each takes seconds; rates do not depend on them once the system is warm."""
JOBS = {"quiver": 200_000, "nats": 20_000, "redis": 100_000, "rabbitmq": 30_000, "postgresql": 50_000}
SINGLE_JOBS = 10_000
AWAITED = 1_000
AMOUNT_MIN = 100
PACED = 5_000
SLOW_SYNC = {"nats": 0.2}
"""Share of the records for systems that sync once for each record."""

Figures = dict[str, float]


class Rows:
    """The rows of one setup, whose servers run."""

    def __init__(self, setup: Setup, servers: Servers, peers: Peers, share: float) -> None:
        self._setup = setup
        self._servers = servers
        self._peers = peers
        self._share = share

    def measure(self, row: str) -> Figures:
        """Do the work of a row and return its figures; none if the system has no such thing."""
        if self._servers.replicas:
            return self._measure_library(row)
        rows: dict[str, Callable[[], Figures]] = {"bulk": self._bulk, "awaited": self._awaited, "paced": self._paced}
        return rows[row]() if row in rows else self._jobs(row)

    def _amount(self, whole: int) -> int:
        slow = SLOW_SYNC.get(self._setup.peer, 1.0) if self._setup.is_synced else 1.0
        return max(AMOUNT_MIN, round(whole * self._share * slow))

    @contextmanager
    def _client(self) -> Iterator[Replica]:
        """Run a process that loads the servers."""
        wanted = {
            "peer": self._setup.peer,
            "addresses": self._servers.addresses,
            "nodes": self._setup.nodes,
            "is_synced": self._setup.is_synced,
        }
        python = sys.executable if self._setup.peer == "quiver" else self._peers.python
        client = Replica([json.dumps(wanted)], script="peer_load.py", python=python)
        try:
            answer(client)
            yield client
        finally:
            client.stop()

    def _bulk(self) -> Figures:
        records = self._amount(BULK[self._setup.peer])
        figures: Figures = {}
        with self._client() as client:
            for topic in ("bulkwarm", "bulk"):
                ask(client, "create", topic=topic)
                before_s = families_processor_s(self._servers.pids)
                figures["produce"] = records / ask(client, "produce", topic=topic, records=records)["seconds"]
                used_s = families_processor_s(self._servers.pids) - before_s
                figures["server_cpu"] = 1e6 * used_s / records
                figures["consume"] = records / ask(client, "consume", topic=topic, records=records)["seconds"]
                if self._setup.peer == "quiver":
                    seconds = ask(client, "consume_arrow", topic=topic, records=records)["seconds"]
                    figures["consume_arrow"] = records / seconds
        return figures

    def _awaited(self) -> Figures:
        with self._client() as client:
            ask(client, "create", topic="awaited")
            found = ask(client, "awaited", topic="awaited", records=self._amount(AWAITED))
        return {"awaited_p50": found["p50"], "awaited_p99": found["p99"]}

    def _paced(self) -> Figures:
        records = self._amount(PACED)
        with self._client() as sender, self._client() as reader:
            ask(sender, "create", topic="paced")
            reader.begin("tail", topic="paced", records=records)
            answer(reader)
            ask(sender, "pace", topic="paced", records=records, per_s=PER_SECOND)
            found = answer(reader)
        return {"paced_p50": found["p50"], "paced_p99": found["p99"]}

    def _jobs(self, part: str) -> Figures:
        is_alone = self._setup.peer == "rabbitmq" and not self._setup.is_synced  # a classic queue is not replicated
        if self._setup.peer not in JOBS or (is_alone and self._setup.nodes > 1):
            return {}
        records = self._amount(SINGLE_JOBS if part == "single" else JOBS[self._setup.peer])
        with self._client() as client:
            for queue in (f"{part}warm", part):
                ask(client, "fill", queue=queue, records=records)
                seconds = ask(client, part, queue=queue, records=records)["seconds"]
        return {part: records / seconds}

    def _measure_library(self, row: str) -> Figures:
        """Measure PySyncObj, whose nodes are the clients: what is read is in their memory."""
        if row not in ("bulk", "awaited", "paced"):
            return {}
        replicas = self._servers.replicas
        (leader,) = (replica for replica in replicas if ask(replica, "status")["leads"])
        if row == "bulk":
            records = self._amount(BULK[self._setup.peer])
            for _ in range(2):
                before_s = families_processor_s(self._servers.pids)
                found = ask(leader, "load", entries=records, in_flight=min(5_000, records), value_bytes=100)
                used_s = families_processor_s(self._servers.pids) - before_s
                if found["entries"] < records:
                    raise RuntimeError(f"{found['entries']} of {records} values were written")
            return {"produce": records / found["seconds"], "server_cpu": 1e6 * used_s / records}
        if row == "awaited":
            records = self._amount(AWAITED // 4)  # each takes the 100 ms of its batching
            for _ in range(2):
                found = ask(leader, "single", entries=records, value_bytes=100)
            return {"awaited_p50": 1000 * found["p50_s"], "awaited_p99": 1000 * found["p99_s"]}
        records = self._amount(PACED)
        reader = next((replica for replica in replicas if replica is not leader), leader)
        ask(reader, "watch")
        ask(leader, "pace", entries=2 * records, per_s=PER_SECOND)
        found = ask(reader, "ages", entries=2 * records)
        return {"paced_p50": found["p50"], "paced_p99": found["p99"]}


@contextmanager
def bounded(process: Replica) -> Iterator[None]:
    """Kill a process that does not answer in time; who waits for it then learns that it ended."""
    timer = threading.Timer(COMMAND_TIMEOUT_S, process.process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def ask(process: Replica, command: str, **arguments: Any) -> dict[str, Any]:
    """Return a process's answer to a command, within its time."""
    process.begin(command, **arguments)
    return answer(process)


def answer(process: Replica) -> dict[str, Any]:
    """Return a process's next answer, within its time."""
    with bounded(process):
        found = process.read()
    if "error" in found:
        raise RuntimeError(found["error"])
    return found


# -- the run -----------------------------------------------------------------------------------------


class Run:
    """All rounds, and what they found."""

    def __init__(self, wanted: Sequence[Setup], rows: Sequence[str], peers: Peers, results: Results) -> None:
        self._wanted = wanted
        self._rows = rows
        self._peers = peers
        self.results = results

    def run(self, keep: Callable[[], None]) -> None:
        for number in range(len(self.results.sync_ms) + 1, self.results.rounds + 1):
            synced_ms = sync_ms()
            for setup in self._wanted:
                if [number, setup.name] in self.results.finished:
                    continue
                begun = time.monotonic()
                print(f"round {number}/{self.results.rounds}: {setup.name}", end=" ", flush=True)
                self._run_setup(setup)
                print(f"{time.monotonic() - begun:.0f} s", flush=True)
                self.results.finished.append([number, setup.name])
                keep()
            self.results.sync_ms.append(synced_ms)

    def _run_setup(self, setup: Setup) -> None:
        try:
            with running_servers(setup, self._peers) as servers:
                rows = Rows(setup, servers, self._peers, self.results.share)
                for row in self._rows:
                    self._run_row(setup, row, rows)
        except Exception as error:  # noqa: BLE001 - of one system: the others are measured all the same
            self._fail(setup, "servers", error)

    def _run_row(self, setup: Setup, row: str, rows: Rows) -> None:
        try:
            figures = rows.measure(row)
        except Exception as error:  # noqa: BLE001 - of one row: the others are measured all the same
            self._fail(setup, row, error)
            return
        for name, figure in figures.items():
            self.results.figures.setdefault(setup.name, {}).setdefault(name, []).append(figure)

    def _fail(self, setup: Setup, row: str, error: Exception) -> None:
        print(f"[{row} FAILED: {type(error).__name__}: {error}]", end=" ", flush=True)
        self.results.failures.append(f"{setup.name}, {row}: {type(error).__name__}: {error}"[:500])


def sync_ms() -> float:
    """Return the median of a write of 4 KiB and its fdatasync on this disk."""
    times_s = []
    with disk_directory() as directory:
        file = os.open(directory / "raw", os.O_WRONLY | os.O_CREAT)
        for _ in range(100):
            begun = time.perf_counter()
            os.write(file, bytes(4096))
            os.fdatasync(file)
            times_s.append(time.perf_counter() - begun)
        os.close(file)
    return 1000 * statistics.median(times_s)


class OtherLoad:
    """The processor time that programs which are no part of the run take."""

    def __init__(self, results: Results) -> None:
        self._begun = time.monotonic()
        self._before_s = results.seconds
        self._others_before_s = results.other_load * results.seconds
        self._all_s, self._own_s = self._processor_s()

    def _processor_s(self) -> tuple[float, float]:
        fields = Path("/proc/stat").read_text().split()
        busy = sum(int(fields[at]) for at in (1, 2, 3))  # user, nice, system
        return busy / os.sysconf("SC_CLK_TCK"), families_processor_s([os.getpid()])

    def read(self) -> tuple[float, float]:
        """Return their share of all cores during the run, and the run's seconds, with those before it was resumed."""
        all_s, own_s = self._processor_s()
        others_s = max(0.0, all_s - self._all_s - (own_s - self._own_s)) / (os.cpu_count() or 1)
        seconds = self._before_s + time.monotonic() - self._begun
        return (self._others_before_s + others_s) / seconds, seconds


def resume(before: Results, wanted: Results) -> Results:
    """Return the results to go on with, if they are of the same run as the wanted ones."""
    for name in ("machine", "share", "rows", "setups", "versions", "missing"):
        if getattr(before, name) != getattr(wanted, name):
            raise SystemExit(f"error: the run to resume had other {name}; begin again without --resume")
    before.rounds = max(before.rounds, wanted.rounds)
    return before


def describe_machine() -> str:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    system = f"{platform.platform()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores ({model}), {memory_gib:.0f} GiB, {system}"


def quiver_version() -> str:
    """Return the version, with the commit where there is one."""
    version = importlib.metadata.version("quivermq")
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return version
    return f"{version} ({commit})"


def choose(only: str) -> list[Setup]:
    """Return the setups that are named, or of named systems; all without a name."""
    everything = [setup for peer in PEERS for setup in setups(peer)]
    names = {name for name in only.split(",") if name}
    if unknown := names - {setup.name for setup in everything} - set(PEERS):
        known = ", ".join([*PEERS, *(setup.name for setup in everything)])
        raise SystemExit(f"error: unknown: {', '.join(sorted(unknown))}; there are {known}")
    return [setup for setup in everything if not names or {setup.name, setup.peer} & names]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare Quiver with other systems.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--share", type=float, default=1.0, help="Share of the records, for a quicker run.")
    parser.add_argument("--only", default="", help="Systems (kafka) or setups (kafka-3-fsync), separated by commas.")
    parser.add_argument("--rows", default=",".join(ROWS), help="Some of the rows, separated by commas.")
    parser.add_argument(
        "--resume", action="store_true", help="Go on with the run that was ended before its last round."
    )
    parser.add_argument("--page", type=Path, help="Measure nothing: write the page of this file of results.")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # like Ctrl-C: the servers are ended on the way out
    if options.page is not None:
        return finish(Results.load(options.page))
    rows = options.rows.split(",")
    if unknown := set(rows) - set(ROWS):
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if options.rounds < 1 or not 0 < options.share <= 1:
        parser.error("--rounds is at least 1, and --share more than 0 and at most 1")
    wanted = choose(options.only)
    names = sorted({setup.peer for setup in wanted} - {"quiver"})
    print(f"getting {', '.join(names) or 'nothing'} into {PLACE}", flush=True)
    peers = fetch_peers(names, PLACE)
    for name, reason in peers.missing.items():
        print(f"{name} is left out: {reason}", flush=True)
    results = Results(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=describe_machine(),
        command=" ".join(["python", "benches/run_peers.py", *sys.argv[1:]]),
        rounds=options.rounds,
        share=options.share,
        rows=rows,
        setups=[setup.name for setup in wanted],
        versions={"quiver": quiver_version(), **peers.versions},
        missing=peers.missing,
    )
    if options.resume:
        results = resume(Results.load(PLACE / "results.json"), results)
    others = OtherLoad(results)

    def keep() -> None:
        results.other_load, results.seconds = others.read()
        results.save(PLACE / "results.json")

    there = [setup for setup in wanted if setup.peer == "quiver" or setup.peer in peers.programs]
    Run(there, rows, peers, results).run(keep)
    keep()
    return finish(results)


def finish(results: Results) -> int:
    """Write the page; return 1 if something could not be measured."""
    against = objections(results)
    directory = PLACE if against else REPOSITORY / "docs"
    for path in write_page(results, directory):
        print(f"written: {path}")
    if against:
        print(f"not into docs/: {'; '.join(against)}")
    for failure in results.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
