"""Nodes as processes, with data on the repository's disk that is removed at the end, and their CPU time.

Wall-clock figures depend on other programs; the CPU time of a process does not, and it bounds what the same program
reaches on idle cores. A bench that drives nodes shows both.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "chaos"))

import chaos_cluster
import postgresql_server

import quiver

Nodes = chaos_cluster.Cluster
NodeProcess = chaos_cluster.NodeProcess
running_server = postgresql_server.running_server
ServerMissingError = postgresql_server.ServerMissingError
find_binaries = postgresql_server.find_binaries
PostgresqlServer = postgresql_server.Server

HERE = Path(__file__).parent
VALUE = b"x" * 100
FORMING_TIMEOUT_S = 60
_CPU_CLOCK = 2
"""With a process id, the number of the clock that counts its processor time (`clock_getcpuclockid` of Linux)."""


@contextmanager
def disk_directory() -> Iterator[Path]:
    """Yield a directory on the repository's file system, since /tmp may be in memory; remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=HERE.parent, ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@contextmanager
def running_nodes(count: int, settings: Sequence[str] = ()) -> Iterator[Nodes]:
    """Run a cluster whose nodes are all ready and known to each other."""
    with disk_directory() as directory, chaos_cluster.running_cluster(directory, count, settings) as nodes:
        with connect(nodes) as cluster:
            wait_alive(cluster, count)
        yield nodes


def connect(nodes: Nodes) -> quiver.Cluster:
    return quiver.connect(*(node.wire for node in nodes.nodes))


def wait_alive(cluster: quiver.Cluster, count: int) -> None:
    """Wait until this many brokers are alive and eligible for replicas."""
    wait_until(lambda: sum(node.state == "alive" for node in cluster.brokers()) >= count, what=f"{count} live brokers")


def wait_until(condition: Callable[[], bool], *, what: str, timeout_s: float = FORMING_TIMEOUT_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {timeout_s} s for {what}")
        time.sleep(0.02)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of all values does not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]


# -- processor time ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """The cost of some work: wall-clock time, CPU time of this process and of the busiest of the given ones."""

    seconds: float
    own_s: float
    node_s: float


def measure(work: Callable[[], object], pids: Sequence[int]) -> Effort:
    """Do the work once and return its cost."""
    before, begun_own, begun = [processor_s(pid) for pid in pids], own_processor_s(), time.perf_counter()
    work()
    seconds, own_s = time.perf_counter() - begun, own_processor_s() - begun_own
    nodes_s = [processor_s(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
    return Effort(seconds, own_s, max(nodes_s, default=0.0))


def own_processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def families_processor_s(pids: Sequence[int]) -> float:
    """Return the processor time of processes and of all their descendants, those that have ended included."""
    children: dict[int, list[int]] = {}
    ended_ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        pid = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        ended_ticks[pid] = int(fields[13]) + int(fields[14])
    seconds, left = 0.0, list(pids)
    while left:
        pid = left.pop()
        left += children.get(pid, ())
        seconds += ended_ticks.get(pid, 0) / os.sysconf("SC_CLK_TCK")
        with contextlib.suppress(OSError):
            seconds += processor_s(pid)
    return seconds


def kernel_s(pid: int) -> float:
    """Return the part of another process's processor time that it spent in the kernel, to a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[12]) / os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> float:
    """Return the processor time of another process, all its threads."""
    return time.clock_gettime(~pid << 3 | _CPU_CLOCK)
