"""Run the servers of one system for one part of `run_peers.py`: on loopback, from nothing, and gone at the end.

Each function runs one or three nodes, with or without a sync of the disk before a record is acknowledged, in the way
that the system's manual recommends; `SETTINGS` says so in words for the page. Every process is ended by its id.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kafka_peer import Kafka
from peer_fetch import Peers
from processes import PostgresqlServer, disk_directory, running_nodes, wait_until
from replicas import Replica, free_ports

STOPPING_TIMEOUT_S = 30
STARTING_TIMEOUT_S = 120


@dataclass(frozen=True)
class Setup:
    """One system with its number of nodes, synced or not."""

    peer: str
    nodes: int
    is_synced: bool

    @property
    def name(self) -> str:
        return f"{self.peer}-{self.nodes}-{'fsync' if self.is_synced else 'nosync'}"


@dataclass(frozen=True)
class Servers:
    """What runs."""

    addresses: tuple[str, ...]
    pids: tuple[int, ...]
    replicas: tuple[Replica, ...] = ()
    """The nodes of a library that has no server: they are the clients, too."""


SETTINGS = {
    "quiver": "defaults, 3 partitions; with fsync: `log.durability = fsync` (the default), without: `interval`",
    "kafka": "KRaft, combined roles, the Java options of its start script with 1 GiB of heap, 3 partitions, "
    "`acks=all`, `min.insync.replicas` of a majority; with fsync: `log.flush.interval.messages=1`, without: defaults",
    "nats": "JetStream in files, `num_replicas` = nodes; with fsync: `sync_interval: always`, without: its default of "
    "2 minutes",
    "redis": "streams, `appendonly yes`, `save ''`; with fsync: `appendfsync always`, without: `everysec`; three "
    "nodes: a master with two replicas and `WAIT 1`, which does not wait for the disk of a replica",
    "rabbitmq": "publisher confirms; with fsync: quorum queues, without: a stream for the first rows and a classic "
    "queue with transient messages for work queues",
    "postgresql": "a table with a serial key, COPY, `SKIP LOCKED`, `LISTEN`; with fsync: `synchronous_commit=on`, "
    "without: `off`; three nodes: two standbys, `synchronous_standby_names = 'ANY 1 (*)'` with fsync, asynchronous "
    "without",
    "pysyncobj": "journal file, default batching; it has no setting that syncs the journal before it acknowledges",
}


def setups(peer: str) -> list[Setup]:
    """Return the ways in which a system can be run."""
    synced = (False,) if peer == "pysyncobj" else (True, False)
    return [Setup(peer, nodes, is_synced) for nodes in (1, 3) for is_synced in synced]


@contextmanager
def running_servers(setup: Setup, peers: Peers) -> Iterator[Servers]:
    """Run the servers of a setup until the end of the context."""
    if setup.peer == "quiver":
        settings = () if setup.is_synced else ("--log-durability", "interval")
        with running_nodes(setup.nodes, settings) as nodes:
            yield Servers(tuple(node.wire for node in nodes.nodes), tuple(node.pid for node in nodes.nodes))
        return
    with disk_directory() as directory, ExitStack() as stack:
        yield _START[setup.peer](setup, peers, directory, stack)


# -- one process -------------------------------------------------------------------------------------


@contextmanager
def running_process(
    command: Sequence[str], *, directory: Path, port: int, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Run a server until the end of the context, and yield its process id; it is there when its port is."""
    directory.mkdir(exist_ok=True)
    output = directory / "server.log"
    with output.open("ab") as log:
        server = subprocess.Popen(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        wait_until(lambda: server.poll() is not None or is_open(port), what=command[0], timeout_s=STARTING_TIMEOUT_S)
        if server.poll() is not None:
            raise RuntimeError(f"{command[0]} ended: {output.read_text(errors='replace')[-2000:]}")
        yield server.pid
    finally:
        _stop(server)


def _stop(server: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        try:
            server.wait(STOPPING_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
        return


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


# -- the systems -------------------------------------------------------------------------------------


def _start_kafka(setup: Setup, peers: Peers, directory: Path, stack: ExitStack) -> Servers:
    settings = {"log.flush.interval.messages": "1"} if setup.is_synced else {}
    kafka = Kafka(directory, jars=peers.programs["kafka"], nodes=setup.nodes, settings=settings)
    stack.enter_context(kafka.running())
    return Servers(kafka.addresses, kafka.pids)


def _start_nats(setup: Setup, peers: Peers, directory: Path, stack: ExitStack) -> Servers:
    ports, routes = free_ports(setup.nodes), free_ports(setup.nodes)
    pids = []
    for at, (port, route) in enumerate(zip(ports, routes, strict=True)):
        place = directory / f"node-{at}"
        place.mkdir()
        sync = ", sync_interval: always" if setup.is_synced else ""
        lines = [f"listen: 127.0.0.1:{port}", f"server_name: n{at}"]
        lines.append(f'jetstream {{ store_dir: "{place / "store"}"{sync} }}')
        if setup.nodes > 1:
            others = ", ".join(f'"nats://127.0.0.1:{other}"' for other in routes)
            lines.append(f"cluster {{ name: bench, listen: 127.0.0.1:{route}, routes: [{others}] }}")
        (place / "nats.conf").write_text("\n".join(lines) + "\n")
        command = [str(peers.programs["nats"]), "-c", str(place / "nats.conf")]
        pids.append(stack.enter_context(running_process(command, directory=place, port=port)))
    return Servers(tuple(f"127.0.0.1:{port}" for port in ports), tuple(pids))


def _start_redis(setup: Setup, peers: Peers, directory: Path, stack: ExitStack) -> Servers:
    ports, pids = free_ports(setup.nodes), []
    for at, port in enumerate(ports):
        place = directory / f"node-{at}"
        place.mkdir()
        command = [str(peers.programs["redis"]), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(place)]
        command += ["--appendonly", "yes", "--save", "", "--appendfsync", "always" if setup.is_synced else "everysec"]
        if at:
            command += ["--replicaof", "127.0.0.1", str(ports[0])]
        running = running_process(command, directory=place, port=port, environment=peers.environment)
        pids.append(stack.enter_context(running))
    return Servers(tuple(f"127.0.0.1:{port}" for port in ports), tuple(pids))


def _start_rabbitmq(setup: Setup, peers: Peers, directory: Path, stack: ExitStack) -> Servers:
    (mapper,) = free_ports(1)
    ports, distribution, pids = free_ports(setup.nodes), free_ports(setup.nodes), []
    names = [f"bench{at}@localhost" for at in range(setup.nodes)]
    stack.callback(_stop_mapper, mapper, directory)
    for at, name in enumerate(names):
        place = directory / f"node-{at}"
        place.mkdir()
        (place / "plugins").write_text("[].\n")
        lines = ["vm_memory_high_watermark.relative = 0.4", "cluster_formation.peer_discovery_backend = classic_config"]
        lines += [f"cluster_formation.classic_config.nodes.{number} = {one}" for number, one in enumerate(names, 1)]
        (place / "rabbitmq.conf").write_text("\n".join(lines) + "\n")
        environment = {
            "HOME": str(directory),  # the cookie in it is what makes them one cluster
            "RABBITMQ_NODENAME": name,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(ports[at]),
            "RABBITMQ_DIST_PORT": str(distribution[at]),
            "RABBITMQ_MNESIA_BASE": str(place / "data"),
            "RABBITMQ_LOG_BASE": str(place / "log"),
            "RABBITMQ_CONFIG_FILE": str(place / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(place / "plugins"),
            "ERL_EPMD_PORT": str(mapper),
        }
        command = [str(peers.programs["rabbitmq"])]
        running = running_process(command, directory=place, port=ports[at], environment=environment)
        pids.append(stack.enter_context(running))
    _check_cluster(peers.programs["rabbitmq"].with_name("rabbitmqctl"), environment, setup.nodes)
    return Servers(tuple(f"127.0.0.1:{port}" for port in ports), tuple(pids))


def _check_cluster(control: Path, environment: Mapping[str, str], nodes: int) -> None:
    """Raise an error unless the nodes are one cluster: nodes that did not find each other run on their own."""
    command = [str(control), "-n", environment["RABBITMQ_NODENAME"], "cluster_status", "--formatter", "json"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, check=True, capture_output=True, timeout=STARTING_TIMEOUT_S
    )
    found = json.loads(done.stdout)["running_nodes"]
    if len(found) != nodes:
        raise RuntimeError(f"{nodes} nodes of RabbitMQ were started, and the cluster has {', '.join(found)}")


def _stop_mapper(port: int, directory: Path) -> None:
    """Stop Erlang's port mapper, which a server started and which left its process group."""
    variables = {**os.environ, "HOME": str(directory), "ERL_EPMD_PORT": str(port)}
    variables["ERL_EPMD_RELAXED_COMMAND_CHECK"] = "1"
    if shutil.which("epmd"):
        subprocess.run(["epmd", "-kill"], env=variables, check=False, capture_output=True, timeout=STOPPING_TIMEOUT_S)


def _start_postgresql(setup: Setup, peers: Peers, directory: Path, stack: ExitStack) -> Servers:
    directory.chmod(0o755)  # root runs it as another user
    settings = ["fsync=on", f"synchronous_commit={'on' if setup.is_synced else 'off'}"]
    servers: list[PostgresqlServer] = []
    for at, port in enumerate(free_ports(setup.nodes)):
        is_waiting = at == 0 and setup.nodes > 1 and setup.is_synced
        server = PostgresqlServer(
            peers.programs["postgresql"],
            folder=directory,
            port=port,
            settings=[*settings, "synchronous_standby_names=ANY 1 (*)"] if is_waiting else settings,
            standby_of=servers[0] if servers else None,
        )
        stack.callback(server.close)
        server.start()
        servers.append(server)
    return Servers(tuple(server.client_url for server in servers), tuple(server.pid for server in servers))


def _start_pysyncobj(setup: Setup, _: Peers, directory: Path, stack: ExitStack) -> Servers:
    ports = [str(port) for port in free_ports(setup.nodes)]
    replicas = []
    for at, port in enumerate(ports):
        others = [other for other in ports if other != port]
        replica = Replica([str(directory / f"node-{at}"), port, *others], script="pysyncobj_peer.py")
        stack.callback(replica.stop)
        replicas.append(replica)
    for replica in replicas:
        replica.read()
    wait_until(lambda: all(replica.ask("status")["ready"] for replica in replicas), what="PySyncObj")
    addresses = tuple(f"127.0.0.1:{port}" for port in ports)
    return Servers(addresses, tuple(replica.process.pid for replica in replicas), tuple(replicas))


_START: dict[str, Callable[[Setup, Peers, Path, ExitStack], Servers]] = {
    "kafka": _start_kafka,
    "nats": _start_nats,
    "redis": _start_redis,
    "rabbitmq": _start_rabbitmq,
    "postgresql": _start_postgresql,
    "pysyncobj": _start_pysyncobj,
}
