"""Upgrade a real cluster node by node under load, from the program of the feature level before this one, and back.

    python tests/chaos/run_upgrade.py [--base COMMIT]

Three nodes of the earlier program are replaced one by one by this program, then by the earlier one again, then by this
one; each time clients over HTTP and the SDK go on. Then the cluster is upgraded. Exit code 1 if the history checker
finds anything, if a client had to give up, or if an older node is not refused as it must be.

The earlier program is by default the last one before feature levels. One of this program's level can be chosen, too:
then there is nothing to raise, and no node is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from chaos_cluster import Cluster, NodeProcess
from run_chaos import LONE_CLIENTS, Report, Run

from quiver.features import LEVEL_MAX

BASE = "e45a0d469aee29da806edea8408814a331f3976d"
"""The newest commit of the feature level before this program's: released programs of one level replicate the same."""
ROOT = Path(__file__).parents[2]
LOAD_S = 1.0
"""How long clients work between two steps."""
REFUSED_TIMEOUT_S = 60
UNDECIDED = (3, 5)
"""Exit codes of a command that did not reach the primary, or got no answer."""


class NoBaseError(Exception):
    """The earlier program cannot be had: this is no clone with its history."""


def find_base(cache: Path, commit: str = BASE) -> Path:
    """Return the folder with the earlier program, built as a wheel once."""
    program = cache / f"program-{commit}"
    if (program / "quiver").is_dir():
        return program
    find_commit(commit)
    source, wheels = cache / f"source-{commit}", cache / f"wheels-{commit}"
    for folder in (source, wheels):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", str(source)], input=archive, check=True)
    made = cache / f"installed-{commit}"
    shutil.rmtree(made, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(source)], check=False)
    if built.returncode:  # without a package index there is no build backend; the wheel has the same files
        shutil.copytree(source / "src", made)
    else:
        (wheel,) = wheels.glob("*.whl")
        subprocess.run([*pip, "install", "--no-deps", "--target", str(made), str(wheel)], check=True)
    made.rename(program)
    return program


def find_commit(revision: str) -> str:
    """Return the hash of a commit."""
    command = ["git", "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        raise NoBaseError(f"commit {revision} is not here: {found.stderr.strip()}")
    return found.stdout.strip()


def read_level(program: Path) -> int:
    """Return the highest feature level that a program knows; 1 if it was made before there were any."""
    if not (program / "quiver" / "features.py").exists():
        return 1
    command = [sys.executable, "-c", "from quiver.features import LEVEL_MAX; print(LEVEL_MAX)"]
    environment = {**os.environ, "PYTHONPATH": str(program)}
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


class Upgrade:
    """One cluster under load whose nodes change their program."""

    def __init__(self, directory: Path, base: Path) -> None:
        self._base = base
        self._level = read_level(base)
        self.cluster = Cluster(directory, 3)
        self.steps: list[str] = []
        for node in self.cluster.nodes:
            node.program = base

    def run(self, *, with_downgrade: bool) -> Report:
        self.cluster.start()
        run = Run(self.cluster, seed=1, clients=LONE_CLIENTS)  # the earlier program has no groups
        try:
            run.begin()
            is_older = self._level < LEVEL_MAX
            self._roll(None, self._expect_refusal if is_older else lambda: None)
            if with_downgrade:
                self._roll(self._base)
                self._roll(None)
            if is_older:
                self._raise_level()
                self._check_old_program_is_refused(self.cluster.nodes[-1])
            report = run.finish()
        finally:
            self.cluster.close()
        surprises = [f"node {node.id}: {line}" for node in self.cluster.nodes for line in node.complaints()]
        report.surprises += [line for line in surprises if "is of version 2" not in line]
        report.surprises += [f"a client gave up: {failure}" for failure in report.failed_requests]
        return report

    def _roll(self, program: Path | None, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Replace the program of all nodes, one by one; call `meanwhile` when some have it and some do not."""
        for node in self.cluster.nodes:
            self._replace(node, program)
            if node is not self.cluster.nodes[-1]:
                meanwhile()

    def _replace(self, node: NodeProcess, program: Path | None) -> None:
        code = node.stop()
        if code:
            raise AssertionError(f"node {node.id} ended with {code}:\n{node.last_words()}")
        node.program = program
        node.start()
        node.wait_ready()
        self.steps.append(f"node {node.id} runs {'this program' if program is None else 'the earlier program'}")
        print(self.steps[-1], flush=True)
        time.sleep(LOAD_S)

    def _expect_refusal(self) -> None:
        """The level cannot be raised while a node runs the earlier program; the answer names such a node."""
        answer = self._quiver("cluster", "upgrade", "--yes")
        end = time.monotonic() + REFUSED_TIMEOUT_S
        while answer.returncode in UNDECIDED and time.monotonic() < end:  # there is no primary at the moment
            answer = self._quiver("cluster", "upgrade", "--yes")
        old = [node.id for node in self.cluster.nodes if node.program is not None]
        is_named = any(f"node {number}" in answer.stderr for number in old) or "unknown_request" in answer.stderr
        if answer.returncode == 0 or not is_named:
            raise AssertionError(f"upgraded too early: {answer}")

    def _raise_level(self) -> None:
        status = self._status()
        levels = {node["level_max"] for node in status["nodes"]}
        if (status["feature_level"], levels) != (self._level, {LEVEL_MAX}):
            raise AssertionError(f"before the upgrade: {status}")
        for arguments in (("--dry-run",), ("--yes",), ("--yes",)):
            answer = self._quiver("cluster", "upgrade", *arguments)
            if answer.returncode:
                raise AssertionError(f"not upgraded: {answer}")
        if self._status()["feature_level"] != LEVEL_MAX:
            raise AssertionError("the level is not raised")
        time.sleep(LOAD_S)

    def _check_old_program_is_refused(self, node: NodeProcess) -> None:
        node.stop()
        node.program = self._base
        node.start()
        code = node.exit_code()
        if not code or "upgrade it" not in node.last_words():
            raise AssertionError(
                f"the earlier program started, or ended without a reason ({code}): {node.last_words()}"
            )
        self._replace_stopped(node)

    def _replace_stopped(self, node: NodeProcess) -> None:
        node.program = None
        node.start()
        node.wait_ready()
        time.sleep(LOAD_S)

    def _status(self) -> dict[str, Any]:
        answer = self._quiver("status", "--json")
        if answer.returncode:
            raise AssertionError(f"no status: {answer}")
        found: dict[str, Any] = json.loads(answer.stdout)
        return found

    def _quiver(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        url = next(node.http for node in self.cluster.nodes if node.program is None)
        command = [sys.executable, "-m", "quiver", *arguments, "--url", f"http://{url}"]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where everything is kept; default: a temporary one")
    parser.add_argument("--base", default=BASE, metavar="COMMIT", help="the earlier program; default: %(default)s")
    options = parser.parse_args()
    try:
        base = find_base(ROOT / "build", find_commit(options.base))
    except NoBaseError as error:
        parser.error(str(error))
    directory = options.directory or Path(mkdtemp(prefix="quiver-upgrade-"))
    directory.mkdir(parents=True, exist_ok=True)
    report = Upgrade(directory, base).run(with_downgrade=True)
    print(report)
    if report.is_clean and options.directory is None:
        shutil.rmtree(directory)
    return 0 if report.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
