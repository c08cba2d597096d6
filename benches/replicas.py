"""Three replica processes on loopback, started, asked, killed and cleaned up by a bench."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent


class Replica:
    """One child process."""

    def __init__(self, arguments: list[str], *, script: str = "replica.py", python: str = sys.executable) -> None:
        self._command = [python, str(HERE / script), *arguments]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a replica process ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def begin(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.begin(command, **arguments)
        return self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.process = self._start()
        self.read()

    def stop(self) -> None:
        if self.is_alive:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # of a command that an ended process did not read
                    stream.close()


class Replicas:
    """Three replicas; a context manager that removes its processes and files."""

    def __init__(self, *, groups: int = 1) -> None:
        # On the repository's own file system: a temporary directory may be in memory.
        self._directory = Path(tempfile.mkdtemp(prefix="bench-", dir=HERE.parent))
        ports = [str(port) for port in free_ports(3)]
        self.all = [
            Replica([str(node), str(groups), str(self._directory / f"node-{node}"), *ports]) for node in (1, 2, 3)
        ]

    def __enter__(self) -> Replicas:
        try:
            for replica in self.all:
                replica.read()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for replica in self.all:
            replica.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def wait_leader(self, *, groups: int = 1, timeout_s: float = 60) -> Replica:
        """Return a leader once all groups have one."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            leads = {replica: replica.ask("status")["leads"] for replica in self.all if replica.is_alive}
            if sum(leads.values()) >= groups:
                return max(leads, key=lambda replica: leads[replica])
            time.sleep(0.02)
        raise TimeoutError("no leader")


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(server.getsockname()[1]) for server in sockets]
    for server in sockets:
        server.close()
    return ports
