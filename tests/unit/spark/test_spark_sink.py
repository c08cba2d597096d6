"""The exactly-once sink against a cluster in memory: killed at every request, replayed, raced by its own ghost."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from quiver.client.cluster import AsyncCluster
from quiver.client.options import ClusterOptions
from quiver.client.sync import Cluster
from quiver.clock import SystemClock
from quiver.errors import ConflictError, FencedError, QuiverError, RequestError
from quiver.model import Buffer
from quiver.spark.ledger import TRANSACTIONS, Journal, StagedPart, ledger_of_query, open_ledger
from quiver.spark.sink import ExactlyOnceSink, publish_unnamed
from quiver.testing import Latency
from quiver.testing.memory_cluster import MemoryCluster
from quiver.wire.requests import Request

LEDGER = ledger_of_query("q")


class Guillotine:
    """A way to the cluster that ends after so many requests: before the last is carried out, or before its answer."""

    def __init__(self, memory: MemoryCluster, requests: int | None, *, is_last_done: bool = False) -> None:
        self._memory, self._left, self._is_last_done = memory, requests, is_last_done
        self.asked = 0

    async def call(
        self, address: str, request: Request[Any], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[Any, memoryview]:
        self.asked += 1
        if self._left is not None and self.asked >= self._left:
            if self._is_last_done and self.asked == self._left:
                await self._memory.call(address, request, payload, timeout_ms=timeout_ms)
            raise RequestError("the process was killed")
        return await self._memory.call(address, request, payload, timeout_ms=timeout_ms)


def connect(transport: Any, memory: MemoryCluster) -> Cluster:
    options = ClusterOptions(timeout_ms=10_000)
    rng = random.Random(2)
    return Cluster(AsyncCluster(memory.addresses, transport=transport, clock=SystemClock(), rng=rng, options=options))


@pytest.fixture
def memory() -> MemoryCluster:
    return MemoryCluster(clock=SystemClock(), rng=random.Random(1), latency=Latency())


@pytest.fixture
def cluster(memory: MemoryCluster) -> Iterator[Cluster]:
    with connect(memory, memory) as cluster:
        cluster.create_topic("out", partitions=2)
        open_ledger(cluster, LEDGER)
        yield cluster


def stage(cluster: Cluster, label: str, *counts: int, ledger: str = LEDGER) -> list[StagedPart]:
    """Stage rows as tasks do: for each partition of the target so many, in several batches."""
    parts: list[StagedPart] = []
    with cluster.producer(ledger, batch_bytes=60) as producer:
        for partition, count in enumerate(counts):
            place = 1 + partition % 2
            sent = [
                producer.send(f"{label}-{partition}-{n}", partition=place, timestamp=n).result() for n in range(count)
            ]
            parts.append(StagedPart("out", partition, tuple((place, at.offset, at.offset + 1) for at in sent)))
    return parts


def rows(label: str, *counts: int) -> list[list[bytes]]:
    return [[f"{label}-{partition}-{n}".encode() for n in range(count)] for partition, count in enumerate(counts)]


def content(memory: MemoryCluster) -> list[list[bytes | None]]:
    return [memory.partition("out", partition).values() for partition in range(2)]


def test_batches_are_published_in_order(cluster: Cluster, memory: MemoryCluster) -> None:
    sink = ExactlyOnceSink(cluster, LEDGER, "q")
    sink.commit(0, stage(cluster, "a", 3, 2))
    sink.commit(1, stage(cluster, "b", 1, 0))
    sink.commit(2, [])
    assert content(memory) == [rows("a", 3)[0] + rows("b", 1)[0], rows("a", 3, 2)[1]]


def test_published_records_are_what_was_staged(cluster: Cluster, memory: MemoryCluster) -> None:
    with cluster.producer(LEDGER) as producer:
        at = producer.send("v", key="k", partition=1, timestamp=123, headers=[("h", b"x")]).result()
    ExactlyOnceSink(cluster, LEDGER, "q").commit(0, [StagedPart("out", 1, ((1, at.offset, at.offset + 1),))])
    (record,) = memory.partition("out", 1).batches[0].records()
    assert (record.value, record.key, record.timestamp, list(record.headers or ())) == (b"v", b"k", 123, [("h", b"x")])


def test_replayed_batch_is_no_op_in_the_same_process_and_in_the_next(cluster: Cluster, memory: MemoryCluster) -> None:
    sink = ExactlyOnceSink(cluster, LEDGER, "q")
    sink.commit(0, stage(cluster, "a", 2, 2))
    sink.commit(0, stage(cluster, "again", 2, 2))
    ExactlyOnceSink(cluster, LEDGER, "q").commit(0, stage(cluster, "again", 5, 0))
    sink = ExactlyOnceSink(cluster, LEDGER, "q")
    sink.commit(1, stage(cluster, "b", 1, 1))
    sink.commit(0, stage(cluster, "older", 1, 1))
    assert content(memory) == [rows("a", 2)[0] + rows("b", 1)[0], rows("a", 2, 2)[1] + rows("b", 1, 1)[1]]


@pytest.mark.parametrize("is_last_done", [False, True])
def test_driver_killed_at_any_request_loses_nothing_and_doubles_nothing(is_last_done: bool) -> None:
    """The batch that is replayed has other rows, as after a restart on other cores: one of the two is there, whole."""
    outcomes = set()
    for requests in range(1, 200):
        memory = MemoryCluster(clock=SystemClock(), rng=random.Random(1), latency=Latency())
        guillotine = Guillotine(memory, None)
        with connect(memory, memory) as cluster, connect(guillotine, memory) as mortal:
            cluster.create_topic("out", partitions=2)
            open_ledger(cluster, LEDGER)
            ExactlyOnceSink(cluster, LEDGER, "q").commit(0, stage(cluster, "first", 2, 1))
            staged = stage(cluster, "killed", 3, 2)
            guillotine.__init__(memory, requests, is_last_done=is_last_done)  # type: ignore[misc] # from here on
            is_killed = kill_during_commit(mortal, staged)
            ExactlyOnceSink(cluster, LEDGER, "q").commit(1, stage(cluster, "replay", 2, 3))
            ExactlyOnceSink(cluster, LEDGER, "q").commit(2, stage(cluster, "last", 1, 1))
            found = content(memory)
        killed = merge(rows("first", 2, 1), rows("killed", 3, 2), rows("last", 1, 1))
        replay = merge(rows("first", 2, 1), rows("replay", 2, 3), rows("last", 1, 1))
        assert found in (killed, replay), f"killed at request {requests}"
        outcomes.add("killed" if found == killed else "replay")
        if not is_killed:
            break
    assert outcomes == {"killed", "replay"}


def kill_during_commit(mortal: Cluster, staged: list[StagedPart]) -> bool:
    try:
        ExactlyOnceSink(mortal, LEDGER, "q").commit(1, staged)
    except QuiverError:
        return True
    return False


def merge(*batches: list[list[bytes]]) -> list[list[bytes]]:
    return [[value for batch in batches for value in batch[partition]] for partition in range(2)]


def test_driver_that_was_replaced_can_neither_decide_nor_publish(cluster: Cluster, memory: MemoryCluster) -> None:
    ghost = ExactlyOnceSink(cluster, LEDGER, "q")
    ghost.commit(0, stage(cluster, "a", 1, 1))
    heir = ExactlyOnceSink(cluster, LEDGER, "q")
    with pytest.raises(FencedError):
        ghost.commit(1, stage(cluster, "ghost", 2, 2))
    heir.commit(1, stage(cluster, "b", 1, 1))
    assert content(memory) == merge(rows("a", 1, 1), rows("b", 1, 1))


def test_transactions_share_a_ledger_and_each_happens_once(cluster: Cluster, memory: MemoryCluster) -> None:
    open_ledger(cluster, TRANSACTIONS)
    for transaction in ("x", "y", "x", "y"):
        parts = stage(cluster, transaction, 2, 0, ledger=TRANSACTIONS)
        ExactlyOnceSink(cluster, TRANSACTIONS, transaction).commit(0, parts)
    assert content(memory) == [rows("x", 2)[0] + rows("y", 2)[0], []]


def test_write_without_a_name_is_published_and_forgotten(cluster: Cluster, memory: MemoryCluster) -> None:
    open_ledger(cluster, TRANSACTIONS)
    for label in ("a", "b"):
        publish_unnamed(cluster, TRANSACTIONS, stage(cluster, label, 1, 1, ledger=TRANSACTIONS))
    assert content(memory) == merge(rows("a", 1, 1), rows("b", 1, 1))
    assert memory.partition(TRANSACTIONS, 0).values() == []


def test_writer_whose_decisions_are_gone_is_told_so(cluster: Cluster, memory: MemoryCluster) -> None:
    ExactlyOnceSink(cluster, LEDGER, "q").commit(0, stage(cluster, "a", 1, 1))
    memory.partition(LEDGER, 0).trim(1)
    with pytest.raises(ConflictError) as caught:
        Journal(cluster, LEDGER, "q")
    assert caught.value.code == "ledger_expired"


def test_topic_made_anew_between_decision_and_publication_is_an_error(cluster: Cluster) -> None:
    sink = ExactlyOnceSink(cluster, LEDGER, "q")
    staged = stage(cluster, "a", 1, 1)
    topic_id = cluster.offsets("out", {}).topic_id
    sink._journal.decide(0, staged, {"out": topic_id})
    cluster.delete_topic("out")
    cluster.create_topic("out", partitions=2)
    with pytest.raises(ConflictError) as caught:
        ExactlyOnceSink(cluster, LEDGER, "q").commit(0, staged)
    assert caught.value.code == "topic_recreated"


def test_retention_may_take_what_is_published_but_not_the_last_decision(
    cluster: Cluster, memory: MemoryCluster
) -> None:
    sink = ExactlyOnceSink(cluster, LEDGER, "q")
    for batch in range(3):
        sink.commit(batch, stage(cluster, f"{batch}", 2, 2))
    (cursors,) = [set(memory.partition(LEDGER, place).cursors.values()) for place in (0,)]
    assert cursors == {2}
    assert set(memory.partition(LEDGER, 1).cursors.values()) == {6}
