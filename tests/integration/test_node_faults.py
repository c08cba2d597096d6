"""Real nodes and faults: an error of the node's own ends it with a sentence, a bad row in the metadata ends none."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import quiver
from quiver.storage.data_directory import metadata_database
from quiver.testing import LocalCluster

FAULTS = {
    "callback": "loop.call_soon(fail)",
    "task": "self._tasks_of_the_test = loop.create_task(fail_later())\n    await asyncio.sleep(0)",
}
PROGRAM = """
import asyncio, sys
from quiver.cli import main
from quiver.node import Node

def fail():
    raise KeyError("the defect of this test")

async def fail_later():
    fail()

async def become_ready(self):
    loop = asyncio.get_running_loop()
    %s
    self._tasks_of_the_test = None

Node._become_ready = become_ready
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", FAULTS)
def test_error_that_escapes_the_nodes_own_code_ends_it_with_70_and_a_sentence(tmp_path: Path, kind: str) -> None:
    arguments = [
        "node",
        "--id",
        "1",
        "--data",
        str(tmp_path / "node"),
        "--wire",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
    ]
    command = [sys.executable, "-c", PROGRAM % FAULTS[kind], *arguments, "--join", "1@127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 70, done.stderr
    assert "error defect: KeyError: 'the defect of this test'" in done.stderr
    assert "error escaped, node stops" in done.stderr


@pytest.mark.parametrize("address", ["[::1]", "no port", ""])
def test_nodes_come_up_on_a_bad_broker_row_that_an_older_program_let_in_and_show_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    with LocalCluster(nodes=3, directory=str(tmp_path)) as cluster:
        with cluster.connect() as client:
            client.create_topic("logs", partitions=2)
        for node in cluster.nodes:
            cluster.stop(node)
        for node in cluster.nodes:
            put_broker(metadata_database(str(tmp_path / f"node-{node}")), 9, address)
        for node in cluster.nodes:
            cluster.start(node, wait=False)
        cluster.wait_ready()
        for url in cluster.addresses:
            with quiver.connect(url) as client:
                shown = {int(node.node): node.wire_address for node in client.status().nodes}
                assert shown[9] == address
                with client.producer("logs") as producer:
                    producer.send("after").result()
        assert all(cluster.is_running(node) for node in (1, 2, 3))
    assert sum(record.message == "peer has a bad address" for record in caplog.records) >= 3


def put_broker(path: str, node: int, address: str) -> None:
    """Write a copy of node 1's row under another id, with an address that this program would refuse."""
    with closing(sqlite3.connect(path)) as database, database:
        found = database.execute("SELECT * FROM brokers WHERE broker_id = 1")
        names = [column[0] for column in found.description]
        row = dict(zip(names, found.fetchone(), strict=True))
        row |= {"broker_id": node, "identity": "bad", "wire_address": address, "http_address": address}
        marks = ", ".join("?" * len(names))
        database.execute(f"INSERT INTO brokers ({', '.join(names)}) VALUES ({marks})", list(row.values()))
