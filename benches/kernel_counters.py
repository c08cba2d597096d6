"""What the kernel counts of a process: context switches and times of its threads, and its system calls by strace."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ATTACH_S = 0.5
"""Time in which strace attaches to all threads of a process."""


class ThreadCounts(NamedTuple):
    """Counts of one thread since its start, or between two moments."""

    voluntary: int
    """Context switches because it waited: as many as it was woken."""
    involuntary: int
    """Context switches because others had to run."""
    cpu_ns: int
    waited_ns: int
    """Time in which it could run and had no processor."""

    def minus(self, other: ThreadCounts) -> ThreadCounts:
        return ThreadCounts(*(now - before for now, before in zip(self, other, strict=True)))

    def plus(self, other: ThreadCounts) -> ThreadCounts:
        return ThreadCounts(*(one + another for one, another in zip(self, other, strict=True)))


NOTHING = ThreadCounts(0, 0, 0, 0)


def count_threads(pid: int) -> dict[int, ThreadCounts]:
    """Return the counts of all threads of a process, by their ids."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        cpu_ns, waited_ns, _ = map(int, (task / "schedstat").read_text().split())
        switches = int(lines["voluntary_ctxt_switches"]), int(lines["nonvoluntary_ctxt_switches"])
        found[int(task.name)] = ThreadCounts(*switches, cpu_ns, waited_ns)
    return found


def since(before: dict[int, ThreadCounts], now: dict[int, ThreadCounts]) -> dict[int, ThreadCounts]:
    return {thread: counts.minus(before.get(thread, NOTHING)) for thread, counts in now.items()}


# -- system calls ------------------------------------------------------------------------------------


def has_strace() -> bool:
    return shutil.which("strace") is not None


@contextmanager
def counting_calls(pids: Sequence[int], directory: Path) -> Iterator[list[dict[str, int]]]:
    """Count the system calls of processes by strace; the list is filled at the end, in the order of the processes.

    It slows the processes down by much: their times mean nothing meanwhile.
    """
    counts: list[dict[str, int]] = []
    files = [directory / f"strace-{pid}" for pid in pids]
    tracers = [
        subprocess.Popen(
            ["strace", "-c", "-f", "-o", str(file), "-p", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for pid, file in zip(pids, files, strict=True)
    ]
    time.sleep(ATTACH_S)
    try:
        yield counts
    finally:
        for tracer in tracers:
            tracer.send_signal(signal.SIGINT)  # it detaches and writes its table
        for tracer in tracers:
            tracer.wait()
        counts.extend(read_calls(file) for file in files)


def read_calls(file: Path) -> dict[str, int]:
    """Return the counts in the table that `strace -c` writes."""
    counts = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        cells = line.split()
        if len(cells) >= 5 and cells[0][0].isdigit() and cells[-1] != "total":
            counts[cells[-1]] = int(cells[3])
    return counts
