"""Real nodes as processes: started on free ports, killed, paused, stopped, and started again on what they left.

Nothing of the product is imported: a node is the command `quiver node`, its addresses and its directory.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from chaos_network import Network

READY_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60
_POLL_S = 0.02
_PORTS = range(10_000, 20_000)
"""Below those that Linux takes for connections: one of these stays free until its node starts, and starts again.

Above them are those that other tests choose by the number of their worker."""
_RANDOM = random.SystemRandom()


class NodeLostError(Exception):
    """A node ended by itself, or did not become ready; the message shows what it said last."""


@dataclass
class NodeProcess:
    """One node: what it is started with, and its process while it runs."""

    id: int
    directory: Path
    http: str
    wire: str
    arguments: tuple[str, ...]
    prefix: tuple[str, ...] = ()
    """What the command is started by, if it does not run here."""
    program: Path | None = None
    """The folder with the program that it runs; None for the one under test."""
    is_paused: bool = False
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _said: int = 0

    @property
    def is_running(self) -> bool:
        """Tell whether there is a process, paused or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def output(self) -> Path:
        """Return the file that takes all that the node says."""
        return self.directory.parent / f"node-{self.id}.log"

    def start(self) -> None:
        """Start it; it goes on with what is in its directory."""
        assert not self.is_running
        self._said = self.output.stat().st_size if self.output.exists() else 0
        command = [
            *self.prefix,
            sys.executable,
            "-m",
            "quiver",
            "node",
            "--id",
            str(self.id),
            "--data",
            str(self.directory),
        ]
        command += ["--http", self.http, "--wire", self.wire, *self.arguments]
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._environment()
            )

    def _environment(self) -> dict[str, str]:
        return dict(os.environ) if self.program is None else {**os.environ, "PYTHONPATH": str(self.program)}

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return when it says that it is ready."""
        end = time.monotonic() + timeout_s
        while not any(line.startswith("ready") for line in self._said_since_start().splitlines()):
            if not self.is_running:
                raise NodeLostError(f"node {self.id} ended with {self.exit_code()}:\n{self.last_words()}")
            if time.monotonic() > end:
                raise NodeLostError(f"node {self.id} is not ready after {timeout_s} s:\n{self.last_words()}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Kill it at once, also if it is paused."""
        self._signal(signal.SIGKILL)
        self.exit_code()
        self.is_paused = False

    def pause(self) -> None:
        """Let it stand still; the others see it as one that does not answer."""
        self._signal(signal.SIGSTOP)
        self.is_paused = True

    def resume(self) -> None:
        """Let it go on as if no time had passed."""
        self._signal(signal.SIGCONT)
        self.is_paused = False

    def stop(self) -> int:
        """Ask it to stop, wait until it has, and return its exit code."""
        self.resume()
        self._signal(signal.SIGTERM)
        return self.exit_code()

    def exit_code(self) -> int:
        """Wait for its end."""
        assert self._process is not None
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            words = self.last_words()
            self._signal(signal.SIGKILL)
            self._process.wait()
            raise NodeLostError(f"node {self.id} did not stop within {STOP_TIMEOUT_S} s:\n{words}") from None

    def last_words(self) -> str:
        return "\n".join(self._said_since_start().splitlines()[-30:])

    def complaints(self) -> list[str]:
        """Return what it has ever said that nobody should have to say, whatever is done to it from outside."""
        lines = self.output.read_text(errors="replace").splitlines()
        return [line for line in lines if " ERROR " in line or " CRITICAL " in line or line.startswith("error defect")]

    def _said_since_start(self) -> str:
        with self.output.open("rb") as output:
            output.seek(self._said)
            return output.read().decode(errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            os.kill(self.pid, number)


class Cluster:
    """Some nodes; the first three (or the only one) are its managers, and all are brokers and gateways."""

    def __init__(
        self, directory: Path, nodes: int, settings: Sequence[str] = (), network: Network | None = None
    ) -> None:
        self.directory = directory
        self.network = network
        # The hosts of a network of its own have no loopback addresses; what is tested there is not their protection.
        self._settings = (*settings, *(("--insecure",) if network else ()))
        wires = [self._free_address(number) for number in range(1, nodes + 1)]
        managers = 3 if nodes >= 3 else 1
        self._join = ",".join(f"{at + 1}@{wire}" for at, wire in enumerate(wires[:managers]))
        self.nodes: list[NodeProcess] = []
        for at, wire in enumerate(wires):
            self._add(at + 1, wire, "manager,broker,gateway" if at < managers else "broker,gateway")

    def _free_address(self, number: int) -> str:
        host = self.network.address(number) if self.network else "127.0.0.1"
        (port,) = free_ports(1)
        return f"{host}:{port}"

    def _add(self, number: int, wire: str, roles: str, join: str | None = None) -> NodeProcess:
        arguments = ("--roles", roles, "--join", join or self._join, *self._settings)
        prefix = self.network.prefix(number) if self.network else ()
        node = NodeProcess(
            number, self.directory / f"node-{number}", self._free_address(number), wire, arguments, prefix
        )
        self.nodes.append(node)
        return node

    def add_broker(self, number: int) -> NodeProcess:
        """Return a new node that is no manager, not started yet."""
        return self._add(number, self._free_address(number), "broker,gateway")

    def add_standby(self, number: int, join: Sequence[int]) -> NodeProcess:
        """Return a new node that may become a manager, not started yet; it knows these nodes."""
        known = ",".join(f"{one}@{self.node(one).wire}" for one in join)
        return self._add(number, self._free_address(number), "manager,broker,gateway", known)

    def node(self, number: int) -> NodeProcess:
        return next(node for node in self.nodes if node.id == number)

    @property
    def http_addresses(self) -> list[str]:
        return [node.http for node in self.nodes]

    def start(self) -> None:
        """Start what does not run, let everything go on that is paused, and wait until all are ready."""
        for node in self.nodes:
            if node.is_running:
                node.resume()
            else:
                node.start()
        for node in self.nodes:
            node.wait_ready()

    def stop(self) -> None:
        """Stop all as an operator does; raise NodeLostError if one fails at it."""
        for node in self.nodes:
            node.resume()
            if node.is_running:
                os.kill(node.pid, signal.SIGTERM)
        codes = {node.id: node.exit_code() for node in self.nodes}
        if any(codes.values()):
            words = "\n".join(self.node(number).last_words() for number, code in codes.items() if code)
            raise NodeLostError(f"nodes ended with {codes}:\n{words}")

    def close(self) -> None:
        for node in self.nodes:
            if node.is_running:
                node.kill()


@contextmanager
def running_cluster(
    directory: Path, nodes: int = 3, settings: Sequence[str] = (), network: Network | None = None
) -> Iterator[Cluster]:
    """Run a cluster for as long as the block lasts; whatever is left of it then is killed."""
    cluster = Cluster(directory, nodes, settings, network)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now, and that the system takes for no connection."""
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            port, one = _RANDOM.choice(_PORTS), stack.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                ports.append(port)
    return ports
