"""Two of five nodes are left: each partition goes on with what its survivors have, or begins again."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

import quiver
from quiver.client.explanation import ExplainedReplica
from quiver.errors import ConfigError, ConflictError
from quiver.operations.recover import RecoveryPlan, carry_out, check_name, make_plan
from quiver.operations.survivors import StoppedNodes
from quiver.storage.data_directory import replicas as replicas_of
from quiver.storage.groups import GROUPS_FOLDER, JOINED_FOLDER
from quiver.testing import LocalCluster

LOST = (3, 4, 5)
QUICK = {
    "manager.heartbeat_interval_ms": "200",
    "manager.suspect_after_ms": "600",
    "manager.dead_after_ms": "1200",
    "manager.rebuild_after_ms": "500",
}


def fill(client: quiver.Cluster) -> None:
    for topic, replicas in (("logs", 3), ("single", 1)):
        client.create_topic(topic, partitions=5, replicas=replicas)
        with client.producer(topic) as producer:
            for partition in range(5):
                for number in range(10):
                    producer.send(f"{topic}-{partition}-{number}", partition=partition)
    # A majority has acknowledged them. What a survivor does not have, it cannot go on with.
    wait_until(lambda: all(replica.lag_records == 0 for replica in replicas_in(client)))


def replicas_in(client: quiver.Cluster) -> Iterator[ExplainedReplica]:
    for topic in ("logs", "single"):
        for partition in range(5):
            yield from client.explain(topic, partition).replicas


def read(client: quiver.Cluster, topic: str, partition: int) -> list[str | None]:
    end = client.offsets(topic, "latest").offsets[partition]
    return [record.text for batch in client.read_range(topic, partition, 0, end) for record in batch.records()]


async def recover(directories: list[str], name: str | None) -> RecoveryPlan:
    async with StoppedNodes() as nodes:
        plan = await make_plan(nodes, directories)
        if name is not None:
            check_name(plan, name)
            await carry_out(nodes, plan, directories, now_ms=time.time_ns() // 1_000_000)
        return plan


def make_unknown_group(data: Path) -> Path:
    """Make a group that a lost command created; return the folder that keeps its files after a recovery."""
    groups, joined = Path(replicas_of(str(data)), GROUPS_FOLDER), Path(replicas_of(str(data)), JOINED_FOLDER)
    known = next(iter(groups.iterdir()))
    shutil.copytree(known, groups / "1000")
    (joined / "1000").touch()
    return groups / "1000.unknown"


def wait_leaders(client: quiver.Cluster) -> None:
    def have_ends() -> bool:
        found = [part for topic in client.status().topics for part in topic.partitions]
        return all(part.end_offset is not None for part in found)

    wait_until(have_ends)


def test_partitions_go_on_with_what_their_survivors_have(tmp_path: Path) -> None:
    with LocalCluster(nodes=5, directory=str(tmp_path), settings=QUICK) as cluster:
        with cluster.connect() as client:
            fill(client)
            replicas = {
                (topic, part.partition): set(part.replicas)
                for topic in ("logs", "single")
                for part in client.describe_topic(topic).partitions
            }
        everywhere = [f"{tmp_path}/node-{number}" for number in cluster.nodes]
        for node in cluster.nodes:
            cluster.kill(node)
        with pytest.raises(ConflictError, match="majority of the managers and of every partition"):
            asyncio.run(recover(everywhere, None))
        for number in LOST:
            shutil.rmtree(tmp_path / f"node-{number}")
        survivors = everywhere[:2]
        unknown = make_unknown_group(tmp_path / "node-1")

        plan = asyncio.run(recover(survivors, None))
        assert (plan.survivors, plan.lost, plan.has_managers) == ((1, 2), LOST, False)
        planned = {(one.topic, one.partition): one for one in plan.partitions}
        for key, nodes in replicas.items():
            left = nodes.difference(LOST)
            assert (key in planned) == (len(left) <= len(nodes) // 2), key
            if key in planned and left:
                assert set(planned[key].replicas) == left
            elif key in planned:
                assert "ALL records" in planned[key].may_lose
        with pytest.raises(ConfigError, match="--yes-lose-data names"):
            asyncio.run(recover(survivors, "wrong"))
        asyncio.run(recover(survivors, plan.cluster))
        with pytest.raises(ConflictError, match="majority of the managers and of every partition"):
            asyncio.run(recover(survivors, plan.cluster))  # it is done, also where a partition begins again

        for number in (1, 2):
            cluster.start(number, wait=False)
        cluster.wait_ready()
        with quiver.connect(*cluster.addresses[:2]) as client:
            wait_leaders(client)
            for (topic, partition), nodes in replicas.items():
                kept = [f"{topic}-{partition}-{number}" for number in range(10)] if nodes.difference(LOST) else []
                assert read(client, topic, partition) == kept
            with client.producer("single") as producer:
                for number in range(5):
                    producer.send("again", partition=number).result()
            assert [node.node for node in client.brokers()] == [1, 2]
            # One that was connected before, and has seen metadata that only lost managers had, need not wait for it.
            assert client._cluster._cache.known_index > plan.metadata.last_index + 9_000
            assert unknown.exists(), "nobody knows whose records these are: they are kept"
            client.add_manager(2 if plan.manager == 1 else 1)
