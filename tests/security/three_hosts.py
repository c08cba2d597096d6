"""Follow docs/operations/cluster.md on hosts of their own: network namespaces, usable only by a program inside them.

    python tests/security/three_hosts.py DIRECTORY

The settings file is the one of the document, with other addresses and paths. Exit code 0 if everything worked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))

from chaos_cluster import NodeProcess
from chaos_namespace import is_inside, run_inside
from chaos_network import Network

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations" / "cluster.md"
QUIVER = (sys.executable, "-m", "quiver")
HTTP_PORT, WIRE_PORT = 8002, 9002


def quiver(*arguments: str, environment: dict[str, str] | None = None, prefix: tuple[str, ...] = ()) -> str:
    """Run a command, which must succeed; return what it prints."""
    done = subprocess.run(
        (*prefix, *QUIVER, *arguments),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    if done.returncode:
        raise AssertionError(f"quiver {' '.join(arguments)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


class Hosts:
    """Three hosts, and one that joins."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.network = Network(4)
        self.address = self.network.address
        self.nodes: list[NodeProcess] = []
        self.security = directory / "quiver-security"
        self.client = {
            "QUIVER_URL": f"https://{self.address(1)}:{HTTP_PORT}",
            "QUIVER_CA_FILE": str(self.security / "ca.pem"),
            "QUIVER_TOKEN_FILE": str(self.security / "admin.token"),
        }

    def start(self, number: int, security: Path) -> None:
        (toml,) = re.findall(r"```toml\n(\[node\]\nid = 1\n.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
        for before, after in (
            ("id = 1\n", f"id = {number}\n"),
            ('wire = "10.0.0.1:', f'wire = "{self.address(number)}:'),
            ('http = "10.0.0.1:', f'http = "{self.address(number)}:'),
            ("/var/lib/quiver", str(self.directory / f"data-{number}")),
            ("/etc/quiver/security", str(security)),
            *((f"{one}@10.0.0.{one}:", f"{one}@{self.address(one)}:") for one in (1, 2, 3)),
        ):
            assert before in toml, before
            toml = toml.replace(before, after)
        settings = self.directory / f"quiver-{number}.toml"
        settings.write_text(toml)
        roles = () if number <= 3 else ("--roles", "broker,gateway")
        node = NodeProcess(
            number,
            self.directory / f"data-{number}",
            f"{self.address(number)}:{HTTP_PORT}",
            f"{self.address(number)}:{WIRE_PORT}",
            ("--settings-file", str(settings), *roles),
            self.network.prefix(number),
        )
        node.start()
        self.nodes.append(node)

    def run(self) -> None:
        quiver(
            "security", "init", *(f"{one}@{self.address(one)}" for one in (1, 2, 3)), "--directory", str(self.security)
        )
        for number in (1, 2, 3):
            own = self.directory / f"host-{number}"
            shutil.copytree(self.security / f"node-{number}", own)
            self.start(number, own)
        for node in self.nodes:
            node.wait_ready()
        status = quiver("status", environment=self.client)
        assert all(f"{self.address(one)}:{HTTP_PORT}" in status for one in (1, 2, 3)), status
        quiver("topic", "create", "logs", environment=self.client)
        self.join()
        anonymous = {**os.environ, **self.client, "QUIVER_TOKEN_FILE": ""}
        refused = subprocess.run((*QUIVER, "topic", "list"), env=anonymous, capture_output=True, text=True, check=False)
        assert "unauthenticated" in refused.stderr, refused
        assert "logs" in quiver("topic", "list", environment=self.client)

    def join(self) -> None:
        """Add a fourth node with a join token, from its own host."""
        token, own = self.directory / "join.token", self.directory / "host-4"
        quiver("security", "join-token", f"4@{self.address(4)}", "--out", str(token), environment=self.client)
        manager = f"{self.address(1)}:{WIRE_PORT}"
        quiver("security", "join", str(token), manager, "--directory", str(own), prefix=self.network.prefix(4))
        self.start(4, own)
        self.nodes[-1].wait_ready()

    def close(self) -> None:
        for node in self.nodes:
            if node.is_running:
                node.kill()


def main() -> int:
    directory = Path(sys.argv[1])
    if not is_inside():
        return run_inside(__file__, [str(directory)])
    hosts = Hosts(directory)
    try:
        hosts.run()
    finally:
        hosts.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
