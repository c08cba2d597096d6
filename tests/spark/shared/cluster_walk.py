"""Follow docs/operations/cluster.md word for word, on hosts of their own.

    python tests/spark/shared/cluster_walk.py ENVIRONMENT DIRECTORY

A host is a network namespace with the address that the page names, and its own /etc, /opt, /var/lib and home. A block
of the page says on which hosts it is run, `console host-1 host-2`, and what the commands print: an ellipsis stands for
anything. A block `python host-3 NAME` is a file there. Nothing is replaced. ENVIRONMENT has Quiver installed, from a
wheel; it is /opt/quiver of each host. The exit code is 0 if every command did what the page says.
"""

# ruff: noqa: E402 - the folders of what is imported are added first
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[2]
for _folder in ("chaos", "integration"):
    sys.path.insert(0, str(TESTS / _folder))

from chaos_namespace import is_inside, run_inside
from chaos_network import Network
from host_stand_ins import provide

PAGE = TESTS.parent / "docs/operations/cluster.md"
HOSTS = 4
COMMAND_S = 900
_BLOCK = re.compile(r"^```(console|python) (host-\d[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
_EXIT = re.compile(r"# exits with (\d+)$")
_OWN = ("/etc", "/opt", "/var/lib")
"""What each host has for itself; below it is what the machine has."""
_WRITTEN = {"/etc": "systemd/system"}
"""Folders below them that the page writes to: those of the machine belong to a user who is nobody here."""


class Step(NamedTuple):
    """A command and what it prints, or a file and its content, on some hosts."""

    hosts: list[int]
    file: str
    text: str
    shown: list[str]


def steps() -> list[Step]:
    """Return what a reader of the page does, in order."""
    found = []
    for match in _BLOCK.finditer(PAGE.read_text()):
        kind, mark, text = match.groups()
        hosts = [int(number) for number in re.findall(r"host-(\d)", mark)]
        if kind == "python":
            found.append(Step(hosts, mark.split()[1], text, []))
        else:
            # A block is done on one host before the next one, as by a person.
            commands = _COMMAND.findall(text)
            found += [Step([host], "", command, shown.splitlines()) for host in hosts for command, shown in commands]
    return found


class Host:
    """One machine: its process keeps the namespaces."""

    def __init__(self, number: int, network: Network, environment: Path, directory: Path) -> None:
        self.address = network.address(number)
        self.run_directory = directory / f"run-{number}"
        self.home = directory / f"home-{number}"
        for made in (self.run_directory, self.home):
            made.mkdir()
        mounts = ["set -e"]
        for path in _OWN:
            upper, work = (self.run_directory / f"{kind}{path}" for kind in ("upper", "work"))
            layers = f"lowerdir={path},upperdir={upper},workdir={work}"
            written = upper / _WRITTEN.get(path, "")
            mounts += [f"mkdir -p {written} {work}", f"mount -t overlay overlay -o {layers} {path}"]
        mounts += ["mkdir /opt/quiver", f"mount --bind {environment} /opt/quiver", "echo made", "exec cat"]
        self._process = subprocess.Popen(
            [*network.prefix(number), "bash", "-c", "\n".join(mounts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "made\n"

    @property
    def process(self) -> int:
        return self._process.pid

    def run(self, command: str, variables: dict[str, str]) -> str:
        """Run a command, which must end as the page says; return what it prints."""
        enter = ["nsenter", "-t", str(self.process), "--net", "--mount", f"--wd={self.home}"]
        done = subprocess.run(
            [*enter, "bash", "-o", "pipefail", "-c", command],
            env={**variables, "HOME": str(self.home), "WALK_RUN": str(self.run_directory)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        expected = int(match[1]) if (match := _EXIT.search(command)) else 0
        assert done.returncode == expected, f"$ {command}\n{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def read(self, path: str) -> str:
        """Return a file of the host."""
        return Path(f"/proc/{self.process}/root{path}").read_text()


class Walk:
    """A reader at four hosts."""

    def __init__(self, environment: Path, directory: Path) -> None:
        self._began = time.monotonic()
        subprocess.check_call(["mount", "-t", "tmpfs", "tmpfs", str(directory)])
        network = Network(HOSTS, network="10.0.0")
        provide(directory / "stand-ins")
        self.hosts = {number: Host(number, network, environment, directory) for number in range(1, HOSTS + 1)}
        known = {host.address: {"process": host.process, "home": str(host.home)} for host in self.hosts.values()}
        kept = {name: value for name, value in os.environ.items() if name in ("LANG", "JAVA_HOME", "TMPDIR")}
        self.variables = kept | {
            "PATH": f"{directory / 'stand-ins'}:/opt/quiver/bin:{os.environ['PATH']}",
            "WALK_HOSTS": json.dumps(known),
        }

    def run(self) -> None:
        """Do what the page says, and look for what it must never show."""
        printed = ""
        for step in steps():
            for number in step.hosts:
                if step.file:
                    (self.hosts[number].home / step.file).write_text(step.text)
                else:
                    printed += self._run(number, step)
        self._check_settings()
        secrets = [path.read_text().strip() for host in self.hosts.values() for path in host.home.rglob("*.token")]
        assert len(secrets) >= 5, "the page makes tokens"
        for secret in secrets:
            assert secret not in printed, "a token was printed"
            for host in self.hosts.values():
                assert secret not in self._log(host), "a token was logged"

    def _run(self, number: int, step: Step) -> str:
        host = self.hosts[number]
        sys.stdout.write(f"{time.monotonic() - self._began:6.1f} s host-{number} $ {step.text}\n")
        try:
            printed = host.run(step.text, self.variables)
            missing = [line for line in step.shown if not _is_shown(line, printed)]
            assert not missing, f"$ {step.text}\nprinted\n{printed}\nand not\n{missing}"
        except (AssertionError, subprocess.TimeoutExpired):
            for one in self.hosts.values():
                sys.stdout.write(f"-- {one.address}\n{self._log(one)[-3000:]}\n")
            raise
        return printed

    def _log(self, host: Host) -> str:
        log = host.run_directory / "quiver.log"
        return log.read_text() if log.exists() else ""

    def _check_settings(self) -> None:
        """Compare the settings file that the page shows with the one that the first host has."""
        (shown,) = re.findall(r"```toml\n(\[node\]\nid = 1\n.*?)```", PAGE.read_text(), flags=re.DOTALL)
        assert tomllib.loads(shown) == tomllib.loads(self.hosts[1].read("/etc/quiver/quiver.toml"))


def _is_shown(line: str, printed: str) -> bool:
    return re.search(".*".join(map(re.escape, line.strip().split("…"))), printed) is not None


def main() -> int:
    environment, directory = map(Path, sys.argv[1:])
    if not is_inside():
        return run_inside(__file__, sys.argv[1:], is_alone=True)
    Walk(environment, directory).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
