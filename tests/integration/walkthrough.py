"""A newcomer's way through the documentation: console blocks run as they stand, from a wheel in a new environment.

A block says by a word after `console` that it is not run here: `runnable` ones are compared by test_documentation.py,
`spark` ones take long and are run by `make test-spark`, and `elsewhere` means that a block needs root, another host, an
index, or a cluster that is broken on purpose, for which there are other tests. Ports, pids and paths are replaced by
those of this run; `stand_ins` has the programs that a machine may lack. The same client commands are run against a
cluster with TLS, named by the environment alone.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from stand_ins import provide_missing

ROOT = Path(__file__).parents[2]
OPERATIONS = sorted(set((ROOT / "docs/operations").glob("*.md")) - {ROOT / "docs/operations/cli.md"})
PAGES = [ROOT / "README.md", ROOT / "docs/sdk.md", ROOT / "docs/groups.md", ROOT / "docs/queues.md", *OPERATIONS]
SPARK_PAGE = ROOT / "docs/spark.md"
NODES = 3
LASTING = re.compile(
    r"^quiver (tail|up|top)\b|--every\b|^python -m quiver.spark.standalone|pipeline analyze --topic \w+$"
)
"""Commands that run until they are stopped."""
LASTS_S = 20
COMMAND_S = 180
TYPING_S = 2
"""A reader takes so long to type the next command: requests to a node that was just killed may end as unknown."""

BLOCK = re.compile(r"^( *)```console([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^ *\$ ((?:.*\\\n)*.*)$", re.MULTILINE)


def commands(page: Path, mark: str = "") -> list[str]:
    """Return the commands of the blocks with this mark."""
    found = [match for match in BLOCK.finditer(page.read_text()) if match[2].strip() == mark]
    return [command for match in found for command in _COMMAND.findall(match[3])]


def make_environment(directory: Path) -> Path:
    """Return a new virtual environment with Quiver from a wheel; the packages that it needs are those of this one.

    Nothing is downloaded: the wheel is built and installed without an index.
    """
    copy = directory / "checkout"
    skipped = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "quiver-data")
    shutil.copytree(ROOT, copy, ignore=skipped)
    build = f"{sys.executable} -m pip wheel --quiet --no-deps --no-build-isolation --no-index -w {directory} {copy}"
    subprocess.run(build.split(), check=True, cwd=directory)
    [wheel] = directory.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
    python = directory / "venv/bin/python"
    install = f"{python} -m pip install --quiet --no-deps --no-index --disable-pip-version-check {wheel}"
    subprocess.run(install.split(), check=True, cwd=directory)
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    (Path(packages) / "zz-packages.pth").write_text(sysconfig.get_paths()["purelib"])
    return directory / "venv"


class Walk:
    """One reader in one directory with one cluster."""

    def __init__(self, environment: Path, directory: Path, first_port: int, *, variables: dict[str, str]) -> None:
        self.directory = directory
        self.ports = {8002 + at: first_port + at for at in range(NODES)}
        wire_port = first_port + 8
        kept = {name: value for name, value in os.environ.items() if name in ("LANG", "JAVA_HOME", "TMPDIR")}
        self.variables = kept | {
            "HOME": str(directory),
            "PATH": f"{environment / 'bin'}:{os.environ['PATH']}:{directory / 'stand-ins'}",
            "QUIVER_URL": f"http://127.0.0.1:{first_port}",
            **variables,
        }
        self._up = ["quiver", "up", "--http-port", str(first_port), "--wire-port", str(wire_port)]
        self.pids: list[str] = []
        provide_missing(directory / "stand-ins")
        for name in ("app", "lake", "analyze"):
            (directory / name).mkdir()
        (directory / "app/app.log").write_text("".join(f"2026-01-31T12:00:00 INFO line {n}\n" for n in range(50)))
        (directory / "access.log").write_text("one\ntwo\nthree\n")

    @contextmanager
    def cluster(self, *settings: str) -> Iterator[None]:
        """Run three nodes."""
        command = [*self._up, *(("--", *settings) if settings else ())]
        with (self.directory / "up.log").open("w+") as log:
            process = subprocess.Popen(
                command,
                env=self.variables,
                cwd=self.directory,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                self._wait_ready(process, self.directory / "up.log")
                yield
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _wait_ready(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + COMMAND_S
        while "\nready" not in (text := log.read_text()):
            assert process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
        self.pids = re.findall(r"^ *\d+ +(\d+) ", text, re.MULTILINE)

    def run(self, command: str) -> None:
        """Run a command as the page shows it, with the ports, pids and paths of this run."""
        command = command.replace(".venv/bin/quiver", "quiver").replace("4711", self.pids[0])
        for shown, port in self.ports.items():
            command = command.replace(f"127.0.0.1:{shown}", f"127.0.0.1:{port}")
        for place in ("/var/log/app", "/srv/lake", "/srv/analyze"):
            command = command.replace(place, str(self.directory / place.rsplit("/", 1)[1]))
        command = command.replace("/var/lib/quiver", str(self.directory / "quiver-data/node-1"))
        if LASTING.search(command.split(" #")[0].strip()):
            self._run_for_a_while(command)
            return
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            env=self.variables,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
        if command.startswith("kill "):
            time.sleep(TYPING_S)
        if command.startswith("curl"):
            assert '"status":"success"' in done.stdout, f"$ {command}\n{done.stdout}"

    def _run_for_a_while(self, command: str) -> None:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            env=self.variables,
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LASTS_S if "pipeline" in command else 3)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=COMMAND_S)
            assert process.returncode in (0, 130, -signal.SIGINT), f"$ {command}\n{output}"
        else:
            pytest.fail(f"$ {command} ended by itself\n{output}")
