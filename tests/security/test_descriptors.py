"""Out of file descriptors: the log goes on, the node stays up, and topics that need more are refused."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver.config import Settings
from quiver.config.descriptors import PER_REPLICA, fit_to_descriptors
from quiver.errors import ConflictError
from quiver.storage import SystemDisk
from quiver.storage.descriptors import SpareDescriptors
from quiver.testing import LocalCluster


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
