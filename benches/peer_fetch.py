"""Get the servers and clients that `run_peers.py` compares with Quiver, by their names, from the usual registries.

Everything goes into one directory that git ignores, and is fetched once: Kafka's jars by Maven, NATS by Go, Redis by
`apt-get download` if the machine has none, the clients by pip into a virtual environment. RabbitMQ, whose Erlang has
fixed paths, and PostgreSQL are used as the machine has them. What cannot be had is named with the reason, and left out.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kafka_peer import NEWEST, fetch_jars
from processes import ServerMissingError, find_binaries

NATS = "github.com/nats-io/nats-server/v2@latest"
CLIENTS = {
    "kafka": "confluent-kafka",
    "nats": "nats-py",
    "redis": "redis",
    "rabbitmq": "aio-pika",
    "postgresql": "psycopg",
}
REQUIREMENTS = ("confluent-kafka", "nats-py", "redis[hiredis]", "aio-pika", "psycopg[binary]")
"""PySyncObj runs in Quiver's own environment: its nodes are processes of the benches."""
REDIS_PACKAGES = ("redis-server", "redis-tools", "libjemalloc2", "liblua5.1-0", "liblzf1", "libatomic1")
RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""The server itself: the program on the PATH of Debian changes the user."""
FETCH_TIMEOUT_S = 900


class PeerMissingError(Exception):
    """A peer cannot be had here; the message says why and how to get it."""


@dataclass
class Peers:
    """What is there."""

    directory: Path
    programs: dict[str, Path] = field(default_factory=dict)
    """Of each peer that is there: its server, its jars, or the directory of its binaries."""
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """What a fetched Redis needs to find its libraries."""
    python: str = sys.executable
    """The Python that has the clients."""


def fetch_peers(names: list[str], directory: Path) -> Peers:
    """Fetch what is missing of these peers, and find the rest."""
    directory.mkdir(parents=True, exist_ok=True)
    peers = Peers(directory)
    fetchers: dict[str, Callable[[Peers], None]] = {
        "kafka": _fetch_kafka,
        "nats": _fetch_nats,
        "redis": _fetch_redis,
        "rabbitmq": _find_rabbitmq,
        "postgresql": _find_postgresql,
        "pysyncobj": _find_pysyncobj,
    }
    for name in names:
        try:
            fetchers[name](peers)
        except (PeerMissingError, subprocess.SubprocessError, OSError) as error:
            peers.missing[name] = _reason(error)
            peers.programs.pop(name, None)
    if set(peers.programs) - {"pysyncobj"}:
        _fetch_clients(peers)
    return peers


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None)
    return f"{error}: {said.decode(errors='replace').strip()[-300:]}" if said else str(error)


def _run(*command: str, cwd: Path | None = None, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        check=True,
        capture_output=True,
        timeout=FETCH_TIMEOUT_S,
    )
    return (done.stdout + done.stderr).decode(errors="replace")


def _need(program: str, how: str) -> None:
    if shutil.which(program) is None:
        raise PeerMissingError(f"{program} is not installed; {how}")


def _version(said: str) -> str:
    found = re.search(r"\d+\.\d+(\.\d+)*", said)
    return found[0] if found else "unknown"


def _fetch_kafka(peers: Peers) -> None:
    _need("java", "install a Java runtime of version 17 or newer")
    jars = peers.directory / "kafka"
    if not jars.exists():
        _need("mvn", "install Maven, which fetches Kafka")
        unfinished = peers.directory / "kafka.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        fetch_jars(unfinished, NEWEST).rename(jars)
    (clients,) = jars.glob("kafka-clients-*.jar")
    peers.programs["kafka"] = jars
    peers.versions["kafka"] = _version(clients.stem)


def _fetch_nats(peers: Peers) -> None:
    built, installed = peers.directory / "bin" / "nats-server", shutil.which("nats-server")
    if not built.exists() and installed is None:
        _need("go", "install Go, which builds NATS, or put nats-server on the PATH")
        _run("go", "install", NATS, environment={"GOBIN": str(built.parent)})
    program = built if built.exists() else Path(str(installed))
    peers.programs["nats"] = program
    peers.versions["nats"] = _version(_run(str(program), "--version"))


def _fetch_redis(peers: Peers) -> None:
    installed, extracted = shutil.which("redis-server"), peers.directory / "redis"
    if installed is None and not extracted.exists():
        _need("apt-get", "put redis-server on the PATH")
        _extract(REDIS_PACKAGES, extracted)
    program = Path(installed or extracted / "usr" / "bin" / "redis-server")
    if installed is None:
        libraries = sorted({str(path.parent) for path in extracted.glob("usr/lib/*/lib*.so*")})
        peers.environment["LD_LIBRARY_PATH"] = ":".join(libraries)
    peers.programs["redis"] = program
    peers.versions["redis"] = _version(_run(str(program), "--version", environment=peers.environment))


def _extract(packages: tuple[str, ...], directory: Path) -> None:
    """Download packages and unpack them into a directory, without installing anything."""
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    _run("apt-get", "download", *packages, cwd=unfinished)
    for package in unfinished.glob("*.deb"):
        _run("dpkg-deb", "--extract", str(package), str(unfinished))
    unfinished.rename(directory)


def _find_rabbitmq(peers: Peers) -> None:
    if not RABBITMQ.exists():
        raise PeerMissingError(f"there is no {RABBITMQ}; apt-get install rabbitmq-server, and stop its service")
    peers.programs["rabbitmq"] = RABBITMQ
    applications = RABBITMQ.parents[1].glob("lib/rabbitmq_server-*")  # the program is a link to a script of Debian
    peers.versions["rabbitmq"] = next((_version(path.name) for path in applications), "unknown")


def _find_postgresql(peers: Peers) -> None:
    try:
        binaries = find_binaries()
    except ServerMissingError as error:
        raise PeerMissingError(str(error)) from error
    peers.programs["postgresql"] = binaries
    peers.versions["postgresql"] = _version(_run(str(binaries / "postgres"), "--version"))


def _find_pysyncobj(peers: Peers) -> None:
    try:
        peers.versions["pysyncobj"] = importlib.metadata.version("pysyncobj")
    except importlib.metadata.PackageNotFoundError as error:
        raise PeerMissingError("the package pysyncobj is not installed; pip install 'quivermq[bench]'") from error
    peers.programs["pysyncobj"] = Path(sys.executable)


def _fetch_clients(peers: Peers) -> None:
    """Make the environment of the clients; a client that cannot be had makes its peer a missing one."""
    environment = peers.directory / "venv"
    peers.python = str(environment / "bin" / "python")
    if not Path(peers.python).exists():
        venv.create(environment, with_pip=True)
    for requirement in REQUIREMENTS:
        package = requirement.partition("[")[0]
        (peer,) = (name for name, client in CLIENTS.items() if client == package)
        if peer not in peers.programs:
            continue
        try:
            version = _client_version(peers, package)
            if version is None:
                _run(peers.python, "-m", "pip", "install", "--quiet", requirement)
                version = _client_version(peers, package)
        except (subprocess.SubprocessError, OSError) as error:
            peers.missing[peer] = f"its client {requirement} cannot be installed: {_reason(error)}"
            del peers.programs[peer]
        else:
            peers.versions[package] = version or "unknown"


def _client_version(peers: Peers, package: str) -> str | None:
    asking = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        return _run(peers.python, "-c", asking).strip()
    except subprocess.CalledProcessError:
        return None
