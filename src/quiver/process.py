"""The process of this node as the operating system sees it: processor time, memory, file descriptors, GC pauses.

The names of its metrics are those that all Prometheus clients use. What a system does not offer is left out: macOS has
no `/proc`, so memory and open descriptors are Linux only. `GcPauses` is installed once per process, however many nodes
run in it, as in tests.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Iterator
from contextlib import suppress

from quiver.errors import ConfigError
from quiver.metrics import Histogram, MetricFamily, counter, gauge, histogram, now_s
from quiver.security.bootstrap import read_text
from quiver.security.certificates import expiry_s

_STARTED_S = time.time()


class GcPauses:
    """Measure the pauses of the garbage collector, during which nothing else runs."""

    def __init__(self) -> None:
        self.pauses = tuple(Histogram() for _ in range(3))
        """By generation."""
        self._began_s = 0.0

    def handle(self, phase: str, info: dict[str, int]) -> None:
        """Handle a call of `gc.callbacks`."""
        if phase == "start":
            self._began_s = now_s()
        else:
            self.pauses[info["generation"]].observe(now_s() - self._began_s)


GC_PAUSES = GcPauses()
"""The pauses of this process."""


def measure_gc() -> None:
    """Begin to measure the pauses of this process; idempotent."""
    if GC_PAUSES.handle not in gc.callbacks:
        gc.callbacks.append(GC_PAUSES.handle)


def describe_process() -> Iterator[MetricFamily]:
    """Yield the metrics of this process."""
    times = os.times()
    yield counter("process_cpu_seconds_total", "Processor time of the process.", times.user + times.system)
    yield gauge("process_start_time_seconds", "When the process started, in seconds since 1970.", _STARTED_S)
    with suppress(OSError):
        with open("/proc/self/statm", encoding="ascii") as file:
            virtual, resident = file.read().split()[:2]
        page_bytes = resource.getpagesize()
        yield gauge("process_virtual_memory_bytes", "Virtual memory.", int(virtual) * page_bytes)
        yield gauge("process_resident_memory_bytes", "Resident memory.", int(resident) * page_bytes)
        yield gauge("process_open_fds", "Open file descriptors.", len(os.listdir("/proc/self/fd")))
    yield gauge("process_max_fds", "Limit of open file descriptors.", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield histogram(
        "quiver_gc_pause_seconds",
        "Pauses of Python's garbage collector by generation.",
        {(("generation", str(number)),): one for number, one in enumerate(GC_PAUSES.pauses)},
    )


def read_certificate_end(path: str) -> float | None:
    """Return when the first certificate of a PEM file expires, in seconds since 1970; None if it cannot be read."""
    try:
        return expiry_s(read_text(path))
    except ConfigError:
        return None
