"""The smoke test of an installed package: python .ci/smoke.py VERSION, with the Python of its environment.

It uses nothing of the sources: a cluster of three nodes by `quiver up`, records in and out by the command line and the
SDK, the files for operators, and an orderly end.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

QUIVER = str(Path(sys.executable).parent / "quiver")
LIMIT_S = 120
EXPECTED = (
    "docker/Dockerfile",
    "grafana/quiver.json",
    "kubernetes/quiver/Chart.yaml",
    "prometheus/rules.yml",
    "systemd/quiver.service",
)
SDK = """
import sys, quiver
with quiver.connect(sys.argv[1]) as cluster:
    with cluster.producer("logs") as producer:
        producer.send_many(f"sdk {number}" for number in range(1000)).result()
    with cluster.consumer("logs", idle_timeout=2) as consumer:
        values = {record.text for record in consumer}
assert {f"sdk {number}" for number in range(1000)} <= values
assert {f"cli {number}" for number in range(1000)} <= values
"""


def main(version: str) -> int:
    """Run it; a step that fails raises."""
    assert run("--version") == f"quiver, version {version}\n"
    names = run("deploy", "list")
    for name in EXPECTED:
        assert name in names, name
    with tempfile.TemporaryDirectory() as data:
        http = free_ports(6)
        command = [QUIVER, "up", "--nodes", "3", "--data", data, "--http-port", str(http), "--wire-port", str(http + 3)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as up:
            try:
                check_cluster(up, f"http://127.0.0.1:{http}", data)
            except BaseException:
                up.kill()
                raise
    print("smoke test: passed")
    return 0


def check_cluster(up: subprocess.Popen[str], url: str, data: str) -> None:
    """Use a cluster that starts, and stop it."""
    assert up.stdout is not None
    for line in up.stdout:
        if line.startswith("ready"):
            break
    else:
        raise AssertionError("the cluster did not become ready")
    run("topic", "create", "logs", "--partitions", "3", "--url", url)
    run("produce", "logs", "--url", url, text="".join(f"cli {number}\n" for number in range(1000)))
    subprocess.run([sys.executable, "-c", SDK, url], cwd=data, check=True, timeout=LIMIT_S)
    assert run("consume", "logs", "--from", "earliest", "--url", url).count("\n") == 2000
    end = time.monotonic() + LIMIT_S
    while "healthy" not in run("doctor", "--at-least", "critical", "--url", url, codes=(0, 1)):
        assert time.monotonic() < end, "not healthy"
        time.sleep(0.5)
    up.send_signal(signal.SIGTERM)
    up.stdout.read()
    assert up.wait(LIMIT_S) == 0


def run(*arguments: str, text: str = "", codes: tuple[int, ...] = (0,)) -> str:
    """Run a command of the installed program; return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("QUIVER_", "PYTHON"))}
    done = subprocess.run(
        [QUIVER, *arguments], input=text, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode in codes, (arguments, done.returncode, done.stdout, done.stderr)
    return done.stdout


def free_ports(count: int) -> int:
    """Return the first of some consecutive free ports."""
    for first in range(20_000, 60_000, 97):
        sockets = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        else:
            return first
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no free ports")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
