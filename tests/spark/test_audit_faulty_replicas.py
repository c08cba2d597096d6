"""One wrong record in one replica's files, all checksums right: the audit finds it and names it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pipeline_commands import run_job
from pyspark.sql import SparkSession

from quiver.record import Batch, build_batch, stamp
from quiver.record.header import MAGIC
from quiver.spark.pipelines import JobResult
from quiver.spark.pipelines.audit import Audit
from quiver.storage.frames import encode_mark
from quiver.testing import LocalCluster

RECORDS = 100
BATCHES = 3
Values = list[bytes | None]


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="quiver-audit-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def three(data: Path) -> Iterator[LocalCluster]:
    # Nothing is kept in memory that is on disk: what is read is what the files hold.
    settings = {"log.tail_cache_bytes_max": "0", "broker.leader_balance_delay_ms": "500"}
    with LocalCluster(nodes=3, directory=str(data), settings=settings) as cluster:
        yield cluster


@pytest.fixture
def topic(three: LocalCluster, topic: str) -> Iterator[str]:
    """A topic that is gone after the test: nobody is to lead on with forged files."""
    yield topic
    with three.connect() as client:
        client.delete_topic(topic)


def fill(three: LocalCluster, topic: str) -> int:
    """Three batches of a hundred records; return a node that follows."""
    with three.connect() as client:
        client.create_topic(topic, partitions=1, replicas=3)
        producer = client.producer(topic)
        for number in range(BATCHES):
            values = [f"{topic}-{at:04}".encode() for at in range(number * RECORDS, (number + 1) * RECORDS)]
            producer.send_many(values).result()
        leader = client.describe_topic(topic).partitions[0].leader
        return next(node for node in three.nodes if node != leader)


def damage(data: Path, node: int, first_value: bytes, change: Callable[[Values], Values]) -> None:
    """Change the records of the batch that begins with a value, in one node's files, leaving nothing to notice."""
    for path in data.rglob("*.log"):
        stored = path.read_bytes()
        at = stored.find(first_value)
        if path.relative_to(data).parts[0] != f"node-{node}" or at < 0:
            continue
        first = stored.rindex(MAGIC, 0, at)
        batch = Batch.decode(stored, first)
        header = batch.header
        made = build_batch(
            change(batch.values()),
            timestamp=header.first_timestamp,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
        )
        forged = stamp(
            made,
            term=header.term,
            index=header.index,
            base_offset=header.base_offset,
            append_timestamp=header.append_timestamp,
        )
        rest = stored[first + len(batch.data) :]
        if len(forged) != len(batch.data):  # the last batch: nothing follows but a mark that says where it ends
            rest = encode_mark(first + len(forged))
            (path.parent / "checkpoint").unlink(missing_ok=True)
        path.write_bytes(stored[:first] + forged + rest)
        return
    raise AssertionError("no file of the node has the batch")


def audit(spark: SparkSession, three: LocalCluster, topic: str) -> JobResult:
    job = Audit(servers=",".join(three.addresses), topic=topic)
    return run_job(spark, job)


def lose_last(values: Values) -> Values:
    return values[:-1]


def double(values: Values) -> Values:
    return [*values[:41], values[40], *values[41:-1]]


def alter(values: Values) -> Values:
    return [*values[:40], (values[40] or b"")[:-1] + b"x", *values[41:]]


def swap(values: Values) -> Values:
    return [*values[:40], values[70], *values[41:70], values[40], *values[71:]]


@pytest.mark.parametrize(
    ("change", "batch", "expected"),
    [
        (alter, 1, [("altered", 140, None)]),
        (swap, 1, [("swapped", 140, 170)]),
        (double, 1, [("doubled", 141, 140), ("lost", 199, None)]),
        (lose_last, 2, [("lost", 299, None)]),
    ],
)
def test_one_wrong_record_in_one_replica_is_found_and_named(
    spark: SparkSession,
    three: LocalCluster,
    data: Path,
    topic: str,
    change: Callable[[Values], Values],
    batch: int,
    expected: list[tuple[str, int, int | None]],
) -> None:
    node = fill(three, topic)
    assert audit(spark, three, topic).facts["verdict"] == "identical"
    three.stop(node)
    damage(data, node, f"{topic}-{batch * RECORDS:04}".encode(), change)
    three.start(node)
    result = audit(spark, three, topic)
    found: Any = result.facts["findings"]
    assert [(own["kind"], own["offset"], own.get("other")) for own in found] == expected
    assert {own["witness"] for own in found} == {f"replica on node {node}"}


def test_leader_that_is_wrong_is_outvoted(spark: SparkSession, three: LocalCluster, data: Path, topic: str) -> None:
    fill(three, topic)
    with three.connect() as client:
        node = client.describe_topic(topic).partitions[0].replicas[0]
        three.stop(node)
        damage(data, node, f"{topic}-0100".encode(), alter)
        three.start(node)
        for _ in range(200):  # leadership comes back to the first of the replicas
            if client.describe_topic(topic).partitions[0].leader == node:
                break
            time.sleep(0.1)
    found: Any = audit(spark, three, topic).facts["findings"]
    assert [(own["kind"], own["offset"]) for own in found] == [("altered", 140)] * 2
    assert {own["witness"] for own in found} == {f"replica on node {node}", "the topic as its leaders serve it"}


def test_rot_is_told_as_what_cannot_be_read(spark: SparkSession, three: LocalCluster, data: Path, topic: str) -> None:
    node = fill(three, topic)
    assert audit(spark, three, topic).facts["verdict"] == "identical"
    for path in (data / f"node-{node}").rglob("*.log"):
        at = path.read_bytes().find(f"{topic}-0250".encode())
        if at >= 0:
            with path.open("r+b") as file:  # one byte, under a node that runs
                file.seek(at)
                file.write(b"T")
    found: Any = audit(spark, three, topic).facts["findings"]
    assert [(own["kind"], own["offset"], own["end_offset"]) for own in found] == [("unreadable", 200, 300)]
    assert found[0]["witness"] == f"replica on node {node}"


def test_node_that_is_down_leaves_nothing_proven(spark: SparkSession, three: LocalCluster, topic: str) -> None:
    node = fill(three, topic)
    three.stop(node)
    try:
        result = audit(spark, three, topic)
    finally:
        three.start(node)
    found: Any = result.facts["findings"]
    assert [(own["kind"], own["witness"]) for own in found] == [("unreachable", f"replica on node {node}")]
    assert not result.is_clean
