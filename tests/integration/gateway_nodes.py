"""Real nodes in processes of their own, and a client of plain HTTP that knows nothing of Quiver."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PATIENCE_S = 120
"""How long is waited for what must happen; nothing is said about speed."""


class NodeProcess:
    """One node, started again under the same name as often as is wished."""

    def __init__(self, directory: Path, number: int, *, wire: str, http: str, join: str) -> None:
        self.http = http
        self._log = directory / f"node-{number}.log"
        self._command = [sys.executable, "-m", "quiver", "node", "--id", str(number), "--wire", wire, "--http", http]
        self._command += ["--join", join, "--data", str(directory / f"data-{number}")]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def wait_ready(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            try:
                if ask(self.http, "GET", "/readyz")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise TimeoutError(self._log.read_text()[-3000:])

    def kill(self) -> None:
        """End it as a power cut does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        """Ask it to end, and return its exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=PATIENCE_S)


@contextmanager
def running_nodes(directory: Path, count: int) -> Iterator[list[NodeProcess]]:
    """Run a cluster of so many nodes, each with all roles."""
    ports = free_ports(2 * count)
    wires = [f"127.0.0.1:{port}" for port in ports[:count]]
    join = ",".join(f"{number}@{wire}" for number, wire in enumerate(wires, start=1))
    nodes = [
        NodeProcess(directory, number, wire=wire, http=f"127.0.0.1:{port}", join=join)
        for number, (wire, port) in enumerate(zip(wires, ports[count:], strict=True), start=1)
    ]
    with ExitStack() as stack:
        for node in nodes:
            node.start()
            stack.callback(node.stop)
        for node in nodes:
            node.wait_ready()
        yield nodes


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]


def ask(address: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
    """Send one request with a JSON body; return the status and the decoded answer."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    is_json = (response.getheader("Content-Type") or "").startswith("application/json")
    return response.status, json.loads(data) if data and is_json else {}
