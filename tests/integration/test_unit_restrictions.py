"""A node works under the restrictions of its systemd unit, which are applied here without systemd."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from reading import read_to_end

import quiver

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
UNIT = ROOT / "deploy" / "systemd" / "quiver.service"

pytestmark = pytest.mark.skipif(
    ctypes.util.find_library("seccomp") is None
    or shutil.which("systemd-analyze") is None
    or os.uname().machine != "x86_64",
    reason="needs libseccomp and systemd-analyze (Debian and Ubuntu: libseccomp2, systemd)",
)


def restricted(*command: str) -> list[str]:
    return [sys.executable, str(HERE / "unit_restrictions.py"), str(UNIT), *command]


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """End a process that a failed test left running, which its own context would wait for."""
    try:
        yield
    finally:
        process.kill()


def test_node_serves(tmp_path: Path) -> None:
    command = restricted(sys.executable, "-m", "quiver", "node", "--id", "1", "--data", str(tmp_path / "data"))
    command += ["--wire", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as node,
        ended(node),
    ):
        assert node.stdout is not None
        ready = dict(part.split("=") for part in node.stdout.readline().split()[1:])
        assert ready, (tmp_path / "log").read_text()
        status = Path(f"/proc/{node.pid}/status").read_text()
        assert "\nNoNewPrivs:\t1\n" in status
        assert "\nSeccomp:\t2\n" in status
        assert "\nCapEff:\t0000000000000000\n" in status
        if os.geteuid() == 0:  # others may not take capabilities from the set, and have none of them
            assert "\nCapBnd:\t0000000000000000\n" in status
        with quiver.connect(ready["wire"]) as cluster:
            cluster.create_topic("logs", partitions=2)
            with cluster.producer("logs", compression="zstd") as producer:
                producer.send_many(f"line {number}" for number in range(10_000)).result()
            with cluster.consumer("logs") as consumer:
                assert len(read_to_end(consumer)) == 10_000
        with urllib.request.urlopen(f"http://{ready['http']}/metrics", timeout=30) as answer:
            assert b"process_resident_memory_bytes" in answer.read()
        os.kill(node.pid, signal.SIGTERM)
        assert node.wait(60) == 0
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "data").rglob("*")} == {0}


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "import os; os.chroot('/')",
        "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
        "import os; os.sched_setaffinity(0, {0})",
    ],
    ids=["family", "privileged", "clock", "resources"],
)
def test_what_a_node_does_not_need_is_refused(program: str) -> None:
    done = subprocess.run(restricted(sys.executable, "-c", program), capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr
