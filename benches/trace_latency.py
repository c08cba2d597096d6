"""Where the time of one record goes: each stage of an awaited record, and of one that is delivered to a consumer.

    python trace_latency.py [--records 400] [--rate 200] [--seconds 4] [--nodes 1 3] [--no-strace]

Real nodes and clients as processes on loopback, one partition with a replica on every node, fsync on. The processes run
with the stamps of `latency_stamps`: functions of the product are wrapped from the outside, and the product is not
changed. All times are in microseconds. On a busy machine the tenth percentile is closest to what the program takes by
itself: each wait for a processor is in the stage in which it happens, and the second table shows how long they are.

1. the stages, beside an fdatasync and a round trip over loopback of the same run;
2. what the kernel counts for each record: wake-ups (voluntary context switches), preemptions, processor time and time
   without a processor, by thread;
3. system calls for each record, by `strace -c -f` in a run of its own, if strace is installed.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kernel_counters import NOTHING, ThreadCounts, count_threads, counting_calls, has_strace, since
from latency_stages import Stamped, Times, awaited_times, delivered_times, split_nodes
from processes import HERE, Nodes, connect, disk_directory, quantile, wait_alive, wait_until

TOPIC = "logs"
STRACE_RECORDS = 100
RAW_ROUNDS = 150
RAW_BYTES = 256
SHARES = (0.1, 0.5, 0.99)
GROUPS = {
    "futex": ("futex",),
    "epoll_wait": ("epoll_wait", "epoll_pwait", "epoll_pwait2"),
    "send": ("sendto", "sendmsg", "write", "writev"),
    "receive": ("recvfrom", "recvmsg", "read", "readv"),
    "pwritev": ("pwritev", "pwritev2", "pwrite64"),
    "clock": ("clock_gettime", "gettimeofday"),
    "fdatasync": ("fdatasync", "fsync"),
}
"""System calls by what they do; `write` and `read` are those of event descriptors, by which threads wake a loop."""


# -- processes ---------------------------------------------------------------------------------------


class Client:
    """A process of `latency_client`: before and after its work it waits until it is told to go on."""

    def __init__(self, kind: str, nodes: Nodes, directory: Path, *, records: int, rate: float = 0) -> None:
        self._path = directory / f"{kind}-{time.monotonic_ns()}"
        addresses = ",".join(node.wire for node in nodes.nodes)
        command = [sys.executable, str(HERE / "latency_client.py"), kind, str(self._path), addresses, TOPIC]
        self._process = subprocess.Popen(
            [*command, str(records), str(rate)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def __enter__(self) -> Client:
        self.wait("ready")
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)

    def wait(self, word: str) -> None:
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if said != word:
            raise RuntimeError(f"the client said {said!r} instead of {word!r}")

    def end(self) -> Stamped:
        self.go_on()
        self._process.communicate()
        return Stamped.load(self._path)


@contextmanager
def stamped_nodes(count: int, directory: Path) -> Iterator[Nodes]:
    """Run nodes that write their stamps when they are stopped."""
    nodes = Nodes(directory, count)
    for node in nodes.nodes:
        node.prefix = (sys.executable, str(HERE / "latency_stamps.py"), str(stamps_path(directory, node.id)))
    try:
        nodes.start()
        with connect(nodes) as cluster:
            wait_alive(cluster, count)
            cluster.create_topic(TOPIC, partitions=1, replicas=count)
            wait_until(
                lambda: len(cluster.describe_topic(TOPIC).partitions[0].in_sync) == count, what="replicas in sync"
            )
        yield nodes
    finally:
        nodes.close()


def stamps_path(directory: Path, node: int) -> Path:
    return directory / f"stamps-{node}"


# -- raw limits --------------------------------------------------------------------------------------


def sync_times(directory: Path) -> list[float]:
    """Return the microseconds of single appends with an fdatasync."""
    taken = []
    descriptor = os.open(directory / "raw", os.O_CREAT | os.O_WRONLY)
    for number in range(RAW_ROUNDS):
        os.pwrite(descriptor, bytes(RAW_BYTES), number * RAW_BYTES)
        begun = time.perf_counter_ns()
        os.fdatasync(descriptor)
        taken.append((time.perf_counter_ns() - begun) / 1e3)
    os.close(descriptor)
    return taken


def round_trip_times() -> list[float]:
    """Return the microseconds of single round trips over loopback between two processes that block in their reads."""
    echo = "import socket,sys\ns=socket.create_connection(('127.0.0.1',int(sys.argv[1])))\n"
    echo += "s.setsockopt(6,1,1)\nwhile d:=s.recv(4096): s.sendall(d)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = subprocess.Popen([sys.executable, "-S", "-c", echo, str(server.getsockname()[1])])
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        taken = []
        for _ in range(RAW_ROUNDS):
            begun = time.perf_counter_ns()
            connection.sendall(bytes(RAW_BYTES))
            connection.recv(4096)
            taken.append((time.perf_counter_ns() - begun) / 1e3)
        connection.close()
        other.wait()
    return taken


# -- one case ----------------------------------------------------------------------------------------


@dataclass
class Case:
    """What was measured with one number of nodes."""

    nodes: int
    awaited: Times = field(default_factory=dict)
    delivered: Times = field(default_factory=dict)
    raw: Times = field(default_factory=dict)
    counts: dict[str, ThreadCounts] = field(default_factory=dict)
    """By process and thread, for all awaited records."""
    calls: dict[str, Counter[str]] = field(default_factory=dict)
    """System calls by process, for `STRACE_RECORDS` awaited records."""
    notes: list[str] = field(default_factory=list)


def run_case(count: int, *, records: int, rate: float, seconds: float, strace: bool) -> Case:
    case = Case(count)
    with disk_directory() as directory, stamped_nodes(count, directory) as nodes:
        measure_raw(case, directory)
        awaited, counted = send_awaited(nodes, directory, records)
        measure_raw(case, directory)
        sent, received = send_paced(nodes, directory, records=round(rate * seconds), rate=rate)
        called = count_calls(nodes, directory) if strace else []
        nodes.stop()
        stamped = [Stamped.load(stamps_path(directory, node.id), node.id) for node in nodes.nodes]
    leader, _ = split_nodes(stamped)
    names = ["client", *("leader" if node is leader else "followers" for node in stamped)]
    case.awaited = awaited_times(awaited, stamped)
    case.delivered = delivered_times(sent, received, stamped)
    for (pid, counts), name, process in zip(counted.items(), names, [awaited, *stamped], strict=True):
        add_counts(case.counts, name, counts, process.threads, pid)
    for name, calls in zip(names, called, strict=False):
        case.calls.setdefault(name, Counter()).update(calls)
    case.notes.append(f"{len(case.awaited.get('TOTAL', ()))} of {records} awaited records have all stamps")
    case.notes.append(f"{len(case.delivered.get('TOTAL', ()))} of {len(sent.seen)} delivered ones at {rate:g}/s")
    stamps = sum(map(len, awaited.times.values())) / records
    case.notes.append(f"a stamp takes {leader.stamp_ns / 1e3:.2f} µs; the client has {stamps:.0f} for a record")
    return case


def send_awaited(nodes: Nodes, directory: Path, records: int) -> tuple[Stamped, dict[int, dict[int, ThreadCounts]]]:
    """Send awaited records; return the client's stamps, and the counts of threads by process, the client first."""
    with Client("awaited", nodes, directory, records=records) as client:
        pids = [client.pid, *(node.pid for node in nodes.nodes)]
        before = {pid: count_threads(pid) for pid in pids}
        client.go_on()
        client.wait("done")
        counted = {pid: since(before[pid], count_threads(pid)) for pid in pids}
        return client.end(), counted


def send_paced(nodes: Nodes, directory: Path, *, records: int, rate: float) -> tuple[Stamped, Stamped]:
    """Send records at a rate to a consumer; return the stamps of both."""
    with (
        Client("paced", nodes, directory, records=records, rate=rate) as producer,
        Client("consume", nodes, directory, records=records) as consumer,
    ):
        for client in (consumer, producer):
            client.go_on()
        for client in (producer, consumer):
            client.wait("done")
        return producer.end(), consumer.end()


def count_calls(nodes: Nodes, directory: Path) -> list[dict[str, int]]:
    """Return the system calls of client and nodes for `STRACE_RECORDS` awaited records."""
    with Client("awaited", nodes, directory, records=STRACE_RECORDS) as client:
        with counting_calls([client.pid, *(node.pid for node in nodes.nodes)], directory) as counts:
            client.go_on()
            client.wait("done")
        client.end()
    return counts


def measure_raw(case: Case, directory: Path) -> None:
    case.raw.setdefault("raw: fdatasync of an append", []).extend(sync_times(directory))
    case.raw.setdefault("raw: round trip over loopback", []).extend(round_trip_times())


def add_counts(
    counts: dict[str, ThreadCounts],
    process: str,
    found: Mapping[int, ThreadCounts],
    threads: Mapping[int, str],
    pid: int,
) -> None:
    """Add the counts of a process by the purpose of its threads; threads of libraries have no name."""
    for thread, one in found.items():
        name = "loop" if process != "client" and thread == pid else threads.get(thread, "others")
        name = {"main": "application", "quiver-client": "loop"}.get(name, name)
        key = f"{process}: {'disk threads' if name.startswith('quiver-writes') else name}"
        if one.voluntary + one.involuntary:
            counts[key] = counts.get(key, NOTHING).plus(one)


# -- tables ------------------------------------------------------------------------------------------


def show_stages(title: str, cases: Sequence[Case], tables: Sequence[Times]) -> None:
    """Print the quantiles of each stage, one group of columns for each case."""
    stages = ordered([list(table) for table in tables])
    heads = "".join(f"{nodes_name(case.nodes):>27}" for case in cases)
    print(f"\n{title}, µs\n{'':58}{heads}\n{'stage':58}" + f"{'p10':>9}{'p50':>9}{'p99':>9}" * len(cases))
    for stage in stages:
        cells = ""
        for table in tables:
            values = table.get(stage)
            cells += "".join(f"{quantile(values, share):9.0f}" for share in SHARES) if values else " " * 27
        print(f"{stage:58}{cells}")


def ordered(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return all stages, each after those that are before it in its own list."""
    merged: list[str] = []
    for names in reversed(lists):
        at = 0
        for name in names:
            if name in merged:
                at = merged.index(name) + 1
            else:
                merged.insert(at, name)
                at += 1
    return merged


def show_counts(cases: Sequence[Case], records: int) -> None:
    print("\nthreads, for each awaited record")
    print(f"{'':16}{'':28}{'wake-ups':>10}{'preempted':>11}{'cpu µs':>9}{'no cpu µs':>11}")
    for case in cases:
        total = NOTHING
        for name, one in sorted(case.counts.items()):
            total = total.plus(one)
            if max(one.voluntary, one.involuntary) / records >= 0.05:
                print_counts(case, name, one, records)
        print_counts(case, "TOTAL", total, records)


def print_counts(case: Case, name: str, one: ThreadCounts, records: int) -> None:
    switches = f"{one.voluntary / records:10.2f}{one.involuntary / records:11.2f}"
    print(
        f"{nodes_name(case.nodes):16}{name:28}{switches}{one.cpu_ns / records / 1e3:9.0f}"
        f"{one.waited_ns / records / 1e3:11.0f}"
    )


def show_calls(cases: Sequence[Case]) -> None:
    print("\nsystem calls for each awaited record, by strace")
    print(f"{'':16}{'':12}" + "".join(f"{name:>12}" for name in (*GROUPS, "others")))
    for case in cases:
        for name, found in case.calls.items():
            grouped = [sum(found.get(call, 0) for call in calls) for calls in GROUPS.values()]
            cells = [*grouped, sum(found.values()) - sum(grouped)]
            shown = "".join(f"{number / STRACE_RECORDS:12.2f}" for number in cells)
            known = {call for calls in GROUPS.values() for call in calls}
            rest = Counter({call: number for call, number in found.items() if call not in known}).most_common(3)
            named = ", ".join(f"{call} {number / STRACE_RECORDS:.1f}" for call, number in rest)
            print(f"{nodes_name(case.nodes):16}{name:12}{shown}  {named}")


def nodes_name(count: int) -> str:
    return "one node" if count == 1 else f"{count} nodes"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=400)
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--no-strace", action="store_true")
    options = parser.parse_args()
    strace = has_strace() and not options.no_strace
    load = os.getloadavg()[0]
    cases = [
        run_case(count, records=options.records, rate=options.rate, seconds=options.seconds, strace=strace)
        for count in options.nodes
    ]
    show_stages("an awaited record", cases, [case.awaited for case in cases])
    show_stages(f"a record at {options.rate:g}/s to a consumer", cases, [case.delivered for case in cases])
    show_stages("raw limits of the same run", cases, [case.raw for case in cases])
    show_counts(cases, options.records)
    if strace:
        show_calls(cases)
    else:
        print("\nsystem calls were not counted: strace is not installed, or --no-strace was given")
    print(f"\nload average {load:.1f} on {os.cpu_count()} processors at the start")
    for case in cases:
        print(f"{nodes_name(case.nodes)}: {'; '.join(case.notes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
