"""A replica that needs an upgrade, and one that an error stopped, as clients and operators see them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

import pytest
from broker_cluster import Cluster, Node, simulate

from quiver.broker import Broker
from quiver.broker.replica_table import HostedReplica
from quiver.errors import OutcomeUnknownError, StorageError, UnavailableError, UnknownVersionError
from quiver.model import PartitionId, TopicId
from quiver.record import Batch, build_batch
from quiver.wire.messages import Produce


def hosted(node: Node, cluster: Cluster, topic_id: TopicId) -> HostedReplica:
    assert node.broker is not None
    found = node.broker._table.get_group(cluster.group_of(topic_id))
    assert found is not None
    return found


def fail_apply(node: Node, cluster: Cluster, topic_id: TopicId, error: Exception) -> None:
    """Make the partition's state machine on one node fail at the next entry, until it is opened again."""

    def apply(batches: Sequence[Batch]) -> None:
        raise error

    replica = hosted(node, cluster, topic_id).replica
    assert replica is not None
    replica.state.apply = apply  # type: ignore[method-assign] # as an older program would


def test_leader_that_needs_an_upgrade_hands_over_shows_it_and_catches_up_after_a_restart() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (1, 2, 3))
        await cluster.produce(topic_id, b"a")
        old = await cluster.wait_leader(topic_id)
        fail_apply(old, cluster, topic_id, UnknownVersionError("entry 9 has an unknown version; upgrade this node"))
        await cluster.produce(topic_id, b"b")
        leader = await cluster.wait_leader(topic_id)
        assert leader is not old
        assert old.broker is not None
        (info,) = old.broker.describe_replicas(topic_id)
        assert (info.role, info.is_ready) == ("needs_upgrade", False)
        assert "unknown version" in info.problem
        (problem,) = old.broker.describe_problems()
        assert (problem.state, problem.topic, problem.partition_id) == ("needs_upgrade", "logs", 0)
        old.kill()
        old.start()
        await cluster.produce(topic_id, b"c")
        await cluster.wait_equal(topic_id, 1, 2, 3)
        await cluster.wait(lambda: (old.broker is not None and not old.broker.describe_problems()) or None)

    simulate(test)


def test_only_replica_that_needs_an_upgrade_refuses_with_a_clear_error() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (2,))
        await cluster.produce(topic_id, b"a")
        node = await cluster.wait_leader(topic_id)
        fail_apply(node, cluster, topic_id, UnknownVersionError("entry 9 has an unknown version; upgrade this node"))
        request = Produce(topic_id=topic_id, partition_id=PartitionId(0), known_index=cluster.known_index)
        with pytest.raises(OutcomeUnknownError, match="unknown version"):
            await cluster.ask(2, request, [bytes(build_batch([b"b"], timestamp=1))])
        with pytest.raises(UnavailableError, match=r"not done.*unknown version") as refused:
            await cluster.ask(2, request, [bytes(build_batch([b"c"], timestamp=1))])
        assert refused.value.code == "needs_upgrade"

    simulate(test)


def test_stopped_replica_is_shown_and_reopened_after_a_pause() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (1, 2, 3))
        await cluster.produce(topic_id, b"a")
        stopped = await cluster.wait_leader(topic_id)
        broker = stopped.broker
        assert broker is not None
        stopped.replicator._on_fault = broker.handle_fault
        fail_apply(stopped, cluster, topic_id, KeyError("no such thing"))
        sending = asyncio.ensure_future(cluster.produce(topic_id, b"b"))
        (problem,) = await cluster.wait(broker.describe_problems)
        await sending
        assert problem.state == "stopped"
        assert "KeyError" in problem.problem
        assert broker.status().stops == 1
        await cluster.wait(lambda: not hosted(stopped, cluster, topic_id).problem or None)
        await cluster.produce(topic_id, b"c")
        await cluster.wait_equal(topic_id, 1, 2, 3)

    simulate(test)


def test_task_that_fails_while_the_node_stops_ends_it_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[BaseException] = []
    leave = Broker.__aexit__

    async def watch(
        broker: Broker, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await leave(broker, kind, error, trace)
        except BaseException as failure:
            ended.append(failure)
            raise

    monkeypatch.setattr(Broker, "__aexit__", watch)

    async def test(cluster: Cluster) -> None:
        topic_id = await cluster.create_topic("logs", (1, 2, 3))
        broker = (await cluster.wait_leader(topic_id)).broker
        assert broker is not None
        transfer_all = broker._balancer.transfer_all

        async def fail() -> None:
            raise StorageError("the data directory is unusable")

        async def transfer() -> None:
            broker._tasks.create_task(fail())
            await transfer_all()
            await asyncio.sleep(60)

        monkeypatch.setattr(broker._balancer, "transfer_all", transfer)
        (await cluster.wait_leader(topic_id))._stop.set()
        await cluster.wait(lambda: ended or None)
        (failure,) = ended
        assert isinstance(failure, ExceptionGroup)
        assert "unusable" in str(failure.exceptions[0])

    simulate(test)
