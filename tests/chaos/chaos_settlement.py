"""The end of a run: everything heals, all is read from the start, and every copy on disk is compared.

What is found out goes into the history, where the history checker sees it: the drain as polls, each broker's files as
`replica`. The logs and the databases are also checked by the product's own commands.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from chaos_clients import OffsetReader, Workload
from chaos_cluster import Cluster, NodeProcess
from chaos_http import HttpClient, wait_for

from quiver.cli import main

SETTLE_TIMEOUT_S = 120
_CHUNK = 1000


def settle(cluster: Cluster, workload: Workload, record: Callable[[Workload], None] | None = None) -> None:
    """Heal the cluster, end the load, read everything, stop the nodes, and record what they have on disk.

    `record` is called before the nodes stop, to record more.
    """
    cluster.start()
    workload.finish()
    ends = wait_for("all replicas in sync", lambda: _ends_in_sync(cluster, workload), SETTLE_TIMEOUT_S)
    first_values = drain(workload, ends)
    if record is not None:
        record(workload)
    cluster.stop()
    record_replicas(cluster, workload, first_values)


def _ends_in_sync(cluster: Cluster, workload: Workload) -> dict[int, int] | None:
    """Return the end of each partition once every replica of each has all records."""
    client = HttpClient(cluster.http_addresses)
    try:
        answer = client.get(f"/topics/{workload.topic}")
        if not answer.is_ok:
            return None
        ends = {one["partition_id"]: one["end_offset"] for one in answer.body["partitions"]}
        return ends if all(_is_level(client, workload.topic, partition) for partition in ends) else None
    finally:
        client.close()


def _is_level(client: HttpClient, topic: str, partition: int) -> bool:
    """Report whether all replicas of a partition have all records; those in sync may lag a little."""
    answer = client.get(f"/explain?topic={topic}&partition_id={partition}")
    return answer.is_ok and all(one["lag_records"] == 0 for one in answer.body["explanation"]["replicas"])


def drain(workload: Workload, ends: dict[int, int]) -> dict[str, str]:
    """Poll every partition from its beginning to its end with a fresh client; return the first value of each."""
    reader = OffsetReader(workload, f"drain-{time.monotonic_ns()}", 0)
    reader.begin()
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    for partition, end in ends.items():
        while reader.positions[partition] < end:
            if not reader.read(partition) and time.monotonic() > deadline:
                break  # the history checker reports what is missing
        workload.recorder.note(reader.proc, "drain", workload.key(partition), reader.positions[partition])
    reader.http.close()
    return reader.first_values


def record_replicas(cluster: Cluster, workload: Workload, first_values: dict[str, str]) -> None:
    """Record what each stopped broker has on disk of every partition, told apart by its first value."""
    keys = {value: key for key, value in first_values.items()}
    for node in cluster.nodes:
        for directory in _replicas(node):
            records = list(_dump(directory))
            key = keys.get(records[0][1]) if records else None
            for at in range(0, len(records) if key else 0, _CHUNK):
                part = {"replica": f"node-{node.id}", "records": records[at : at + _CHUNK]}
                workload.recorder.note("settlement", "replica", key, part)


def _replicas(node: NodeProcess) -> list[Path]:
    """Return the directories of a node's replicas; one whose making was cut short by the stop is none yet."""
    groups = node.directory / "groups"
    return sorted(path for path in (groups / "groups").iterdir() if (groups / "joined" / path.name).exists())


def _dump(directory: Path) -> Iterator[tuple[int, str]]:
    for line in run_quiver("log", "dump", str(directory), "--values", "--json").splitlines():
        for record in json.loads(line).get("records", ()):
            yield record["offset"], record["value"]


def verify_files(cluster: Cluster) -> None:
    """Let the product check every log of every stopped node."""
    for node in cluster.nodes:
        for directory in (node.directory / "metadata", *_replicas(node)):
            run_quiver("log", "verify", str(directory))


def verify_metadata(cluster: Cluster, database: str = "") -> dict[str, Any]:
    """Demand that the databases of all nodes are equal wherever they can be compared."""
    extra = ("--metadata-db", database) if database else ()
    return dict(json.loads(run_quiver("metadata", "verify", "--data", str(cluster.directory), "--json", *extra)))


def run_quiver(*arguments: str) -> str:
    """Run a command of the product in this process and return what it printed; raise AssertionError if it failed."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = main(arguments)
    if code:
        raise AssertionError(f"quiver {' '.join(arguments)}: {code}\n{output.getvalue()[-2000:]}{errors.getvalue()}")
    return output.getvalue()
