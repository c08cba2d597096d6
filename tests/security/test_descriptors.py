"""Out of file descriptors: the log goes on, the node stays up, and topics that need more are refused."""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import chaos_cluster
import pytest

import quiver
from quiver.addresses import parse_address
from quiver.config import Settings
from quiver.config.descriptors import PER_REPLICA, fit_to_descriptors
from quiver.errors import ConflictError
from quiver.storage import SystemDisk
from quiver.storage.descriptors import SpareDescriptors
from quiver.testing import LocalCluster

NODE_LIMIT = 1024
"""What many systems allow a process by default."""
LIMITED = ("sh", "-c", f'ulimit -n {NODE_LIMIT} && exec "$@"', "sh")
IDLE_CONNECTIONS = 1_000


@pytest.fixture
def hoard() -> Iterator[list[int]]:
    """Use up all descriptors of this process but the first free ones, under a low limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 40, hard))
    try:
        yield held
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def use_up(held: list[int]) -> None:
    while True:
        try:
            held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return


@pytest.fixture(autouse=True)
def all_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


def test_log_files_open_from_the_reserve(tmp_path: Path, hoard: list[int]) -> None:
    spares = SpareDescriptors(4)
    disk = SystemDisk(spares)
    use_up(hoard)
    files = [disk.open(f"{tmp_path}/{number}", create=True) for number in range(4)]
    for file in files:
        file.write([b"x"], 0)
        file.close()
    assert spares.left < 4
    for _ in range(10):
        os.close(hoard.pop())
    disk.open(f"{tmp_path}/0").close()
    assert spares.left == 4
    spares.close()


@pytest.mark.parametrize("episodes", [1, 2])
def test_opening_waits_until_somebody_closes_and_logs_each_shortage_once(
    tmp_path: Path, hoard: list[int], caplog: pytest.LogCaptureFixture, episodes: int
) -> None:
    disk = SystemDisk()
    for number in range(episodes):
        wait_for_descriptor(disk, tmp_path / f"log{number}", hoard)
    messages = [record.message for record in caplog.records if "file descriptors" in record.message]
    shortage = ["out of file descriptors, files wait", "file descriptors are available again"]
    assert messages == shortage * episodes


def wait_for_descriptor(disk: SystemDisk, path: Path, hoard: list[int]) -> None:
    use_up(hoard)
    opened = threading.Event()

    def work() -> None:
        disk.open(str(path), create=True).close()
        opened.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not opened.wait(0.1)
    os.close(hoard.pop())
    thread.join()
    assert opened.is_set()


@pytest.mark.parametrize("limit", [256, 1024, 65_536, -1])
def test_limits_fit_the_limit_of_open_files(limit: int) -> None:
    fitted = fit_to_descriptors(Settings(), limit)
    used = (
        fitted.wire.client_connections_max
        + 2 * fitted.wire.connections_max
        + fitted.wire.handshakes_max
        + fitted.gateway.connections_max
        + PER_REPLICA * fitted.manager.replicas_per_broker_max
    )
    assert limit < 0 or used < limit
    assert fitted.manager.replicas_per_broker_max > 0


def test_topic_that_needs_too_many_descriptors_is_refused_and_the_cluster_goes_on() -> None:
    with (
        LocalCluster(nodes=1, settings={"manager.replicas_per_broker_max": "5", "manager.partitions_max": "8"}) as one,
        one.connect() as client,
    ):
        client.create_topic("first", partitions=3)
        with pytest.raises(ConflictError, match="at most 5 are allowed") as refused:
            client.create_topic("second", partitions=3)
        assert refused.value.code == "too_many_replicas"
        with pytest.raises(ConflictError, match="at most 5"):
            client.add_partitions("first", 6)
        with pytest.raises(ConflictError, match="at most 8 are allowed"):
            client.create_topic("third", partitions=6)
        client.create_topic("fourth", partitions=2)


# -- a real node under the limit of many systems -----------------------------------------------------


@pytest.fixture
def limited_node(tmp_path: Path) -> Iterator[chaos_cluster.NodeProcess]:
    """Run a node that may open 1,024 files; it must end well."""
    cluster = chaos_cluster.Cluster(tmp_path, 1, ["--log-durability", "none"])
    (node,) = cluster.nodes
    node.prefix = LIMITED
    try:
        cluster.start()
        yield node
        cluster.stop()
        assert not node.complaints()
    finally:
        cluster.close()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Let this process open as many connections as the attack needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 < hard < 2 * IDLE_CONNECTIONS:
        pytest.skip(f"this system allows a process {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * IDLE_CONNECTIONS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def create_until_refused(client: quiver.Cluster) -> tuple[list[str], str]:
    """Create topics of 20 partitions until one is refused; return the others, and the code of the refusal."""
    made: list[str] = []
    while len(made) < 50:  # a thousand partitions need more descriptors than there are
        try:
            client.create_topic(f"topic-{len(made)}", partitions=20)
        except ConflictError as refusal:
            return made, refusal.code
        made.append(f"topic-{len(made)}")
    return made, ""


def round_trip(client: quiver.Cluster, topics: list[str]) -> None:
    """Write a record to every partition, and read all of them."""
    for topic in topics:
        with client.producer(topic) as producer:
            for sent in [producer.send(b"x", partition=number) for number in range(20)]:
                sent.result()
        with client.consumer(topic) as consumer:
            assert len(list(islice(consumer, 20))) == 20


def connect_idly(stack: ExitStack, node: chaos_cluster.NodeProcess, connections: int) -> None:
    for number in range(connections):
        address = (node.wire, node.http)[number % 2]
        stack.enter_context(socket.create_connection(parse_address(address), timeout=10))


@pytest.mark.usefixtures("many_descriptors")
def test_node_with_few_descriptors_refuses_partitions_and_outlives_idle_connections(
    limited_node: chaos_cluster.NodeProcess,
) -> None:
    with ExitStack() as stack, quiver.connect(limited_node.wire) as client:
        topics, refusal = create_until_refused(client)
        assert topics
        assert refusal == "too_many_replicas"
        connect_idly(stack, limited_node, IDLE_CONNECTIONS)
        round_trip(client, topics)
    with quiver.connect(limited_node.wire) as client:
        round_trip(client, topics)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of another process can be changed on Linux only")
def test_node_that_has_no_descriptor_left_goes_on_and_serves_newcomers_when_there_are_some(
    limited_node: chaos_cluster.NodeProcess,
) -> None:
    with ExitStack() as stack, quiver.connect(limited_node.wire) as client:
        client.create_topic("kept", partitions=20)
        round_trip(client, ["kept"])
        used = len(os.listdir(f"/proc/{limited_node.pid}/fd"))
        resource.prlimit(limited_node.pid, resource.RLIMIT_NOFILE, (used, NODE_LIMIT))
        connect_idly(stack, limited_node, 50)  # the system accepts them; the node cannot
        round_trip(client, ["kept"])
        resource.prlimit(limited_node.pid, resource.RLIMIT_NOFILE, (NODE_LIMIT, NODE_LIMIT))
        with quiver.connect(limited_node.wire) as newcomer:
            round_trip(newcomer, ["kept"])
