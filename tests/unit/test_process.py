"""The process as the operating system sees it, and the end of a certificate."""

from __future__ import annotations

import gc
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from quiver.metrics import MetricReader
from quiver.node_metrics import describe_certificate
from quiver.process import GC_PAUSES, describe_process, measure_gc, read_certificate_end


def test_process_uses_memory_time_and_descriptors() -> None:
    found = MetricReader(describe_process())
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "process_max_fds"):
        assert (found.total(name) or 0) > 0, name


def test_pauses_of_the_garbage_collector_are_measured_once() -> None:
    measure_gc()
    measure_gc()
    before = sum(GC_PAUSES.pauses[2].counts)
    gc.collect()
    assert sum(GC_PAUSES.pauses[2].counts) == before + 1


@pytest.mark.parametrize("days", [3, 400, 20_000])
def test_end_of_a_certificate_is_read(tmp_path: Path, days: int) -> None:
    """The last case ends after 2050, from where on certificates write years with four digits."""
    end = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
    made = trustme.CA().issue_cert("node-1", not_after=end)
    path = tmp_path / "node.pem"
    path.write_bytes(made.cert_chain_pems[0].bytes() + made.private_key_pem.bytes())
    assert read_certificate_end(str(path)) == end.timestamp()


def test_file_that_is_no_certificate_has_no_end(tmp_path: Path) -> None:
    path = tmp_path / "node.pem"
    assert read_certificate_end(str(path)) is None
    for text in ("nothing", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        path.write_text(text)
        assert read_certificate_end(str(path)) is None
    assert list(describe_certificate(None)) == []
