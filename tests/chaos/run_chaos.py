"""Break a real cluster for a while and find out whether anybody was told anything untrue.

    python tests/chaos/run_chaos.py --kills 100

Three nodes, each on a host of its own in a network of the kernel's making; clients over HTTP and the SDK; a nemesis.
Then everything heals and is read from the beginning. Exit code 1 if the history checker finds anything, if an answer
was not of the contract, or if a node failed by itself. The history, the nemesis's log and what the nodes said stay in
the directory when something is found.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from chaos_clients import (
    Client,
    CursorConsumer,
    EndWatcher,
    OffsetReader,
    PlainProducer,
    SequencedProducer,
    TopicMaker,
    Workload,
)
from chaos_cluster import Cluster, running_cluster
from chaos_http import HttpClient, wait_for
from chaos_namespace import is_inside, run_inside
from chaos_nemesis import Nemesis
from chaos_network import Network
from chaos_sdk import SdkConsumer, SdkProducer
from chaos_settlement import settle, verify_files, verify_metadata
from chaos_shared import MemberKeeper, WorkerKeeper, merge_histories, record_queue

from quiver.testing.history import CheckResult, Recorder, check_history

TOPIC = "chaos"
PARTITIONS = 3

LONE_CLIENTS: tuple[tuple[type[Client], int], ...] = (
    (SequencedProducer, 2),
    (PlainProducer, 2),
    (SdkProducer, 1),
    (OffsetReader, 1),
    (CursorConsumer, 2),
    (SdkConsumer, 1),
    (EndWatcher, 1),
    (TopicMaker, 2),
)
"""Who is at work, and how many of each."""
CLIENTS: tuple[tuple[type[Client], int], ...] = (*LONE_CLIENTS, (WorkerKeeper, 2), (MemberKeeper, 3))
"""The same with those that share a topic."""


@dataclass
class Report:
    """What came of a run."""

    verdict: CheckResult
    surprises: list[str]
    failed_requests: list[str]
    """Calls that a client which retries had to give up."""
    counts: dict[str, int] = field(default_factory=dict)
    slowest_send_s: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        return self.verdict.is_clean and not self.surprises and bool(self.metadata.get("is_equal", True))

    def __str__(self) -> str:
        parts = [str(self.verdict), f"slowest retried send: {self.slowest_send_s:.2f} s"]
        parts += [f"{name}: {count}" for name, count in sorted(self.counts.items())]
        parts += [f"SURPRISE {surprise}" for surprise in self.surprises]
        parts += [f"GIVEN UP {failure}" for failure in self.failed_requests]
        return "\n".join(parts)


class Run:
    """One cluster under load, from the creation of the topic to the history check."""

    def __init__(self, cluster: Cluster, seed: int, clients: Sequence[tuple[type[Client], int]] = CLIENTS) -> None:
        self.cluster = cluster
        self.path = cluster.directory / "history.jsonl"
        self._stream = self.path.open("w")
        self._processes = cluster.directory / "processes"
        self._processes.mkdir()
        self.workload = Workload(Recorder(self._stream), cluster.http_addresses, TOPIC, PARTITIONS, self._processes)
        self._seed = seed
        self._clients = clients

    @property
    def _has_workers(self) -> bool:
        return any(kind is WorkerKeeper for kind, _ in self._clients)

    def begin(self) -> None:
        """Create the topic and let the clients loose."""
        client = HttpClient(self.cluster.http_addresses)
        wait_for(
            "the topic", lambda: client.post("/topics", topic=TOPIC, partitions=PARTITIONS).status in (201, 409), 60
        )
        client.close()
        self.workload.start(
            [
                kind(self.workload, f"{kind.__name__}-{number}", self._seed)
                for kind, count in self._clients
                for number in range(count)
            ]
        )

    def finish(self, nemesis: Nemesis | None = None, database: str = "") -> Report:
        """Heal, drain, compare, check the history."""
        settle(self.cluster, self.workload, record_queue if self._has_workers else None)
        self._stream.close()
        verdict = check_history(merge_histories([self.path, *sorted(self._processes.glob("*.jsonl"))]))
        verify_files(self.cluster)
        report = Report(verdict, self.workload.surprises, self.workload.sdk_failures)
        report.metadata = verify_metadata(self.cluster, database)
        report.slowest_send_s = self.workload.slowest_send_s
        report.counts = {**self.workload.counts, **(nemesis.counts if nemesis else {})}
        return report


def run_chaos(
    directory: Path,
    *,
    kills: int,
    seed: int,
    settings: Sequence[str] = (),
    database: str = "",
    network: Network | None = None,
) -> Report:
    """Run a cluster, break it until so many processes were killed, and check the history."""
    if database:
        settings = (*settings, "--metadata-db", database)
    with running_cluster(directory, settings=settings, network=network) as cluster:
        run = Run(cluster, seed)
        run.begin()
        nemesis = Nemesis(cluster, TOPIC, seed)
        try:
            nemesis.run(kills)
            report = run.finish(nemesis, database)
            report.surprises += [f"node {node.id}: {line}" for node in cluster.nodes for line in node.complaints()]
            return report
        finally:
            (directory / "nemesis.log").write_text("\n".join(nemesis.log))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="how many processes to kill")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the faults and the load")
    parser.add_argument("--directory", type=Path, help="where everything is kept; default: a temporary one")
    parser.add_argument("--metadata-db", default="", help="URL of a PostgreSQL server for the metadata")
    parser.add_argument("--no-cuts", action="store_true", help="do not cut links: run without namespaces of its own")
    options = parser.parse_args()
    if not options.no_cuts and not is_inside():
        return run_inside(__file__, sys.argv[1:])
    directory = options.directory or Path(mkdtemp(prefix="quiver-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}, {directory}", flush=True)
    began = time.monotonic()
    network = None if options.no_cuts else Network(3)
    report = run_chaos(directory, kills=options.kills, seed=options.seed, database=options.metadata_db, network=network)
    print(report)
    print(f"{time.monotonic() - began:.0f} s")
    if report.is_clean:
        if options.directory is None:
            shutil.rmtree(directory)
        return 0
    (directory / "verdict.json").write_text(json.dumps(report.verdict.to_json(), indent=2))
    print(f"all there is to see is in {directory}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
