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
from datetime import UTC, datetime
from ssl import PEM_cert_to_DER_cert

from quiver.metrics import Histogram, MetricFamily, counter, gauge, histogram, now_s

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
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read()
        first = text[text.index("-----BEGIN CERTIFICATE-----") :]
        end = first.index("-----END CERTIFICATE-----") + len("-----END CERTIFICATE-----")
        return _find_end(PEM_cert_to_DER_cert(first[:end]))
    except (OSError, ValueError, IndexError):
        return None


def _find_end(der: bytes) -> float:
    """Return the `notAfter` of a certificate (RFC 5280, 4.1): Certificate, TBSCertificate, validity."""
    _, start, _ = _read_element(der, 0)
    _, at, _ = _read_element(der, start)
    tag, _, end = _read_element(der, at)
    if tag == 0xA0:  # the version, which is optional
        at = end
    for _ in range(3):  # serial number, signature algorithm, issuer
        at = _read_element(der, at)[2]
    _, start, _ = _read_element(der, at)
    tag, start, end = _read_element(der, _read_element(der, start)[2])
    text = der[start:end].decode("ascii")
    if tag == 0x17:  # UTCTime has two digits of the year
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _read_element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of a DER element, and where its content starts and ends."""
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, start = int.from_bytes(der[start : start + size], "big"), start + size
    return tag, start, start + length
