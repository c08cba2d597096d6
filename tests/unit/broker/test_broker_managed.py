"""Managers and brokers together: topics are created by request, brokers drained, dead brokers replaced."""

from __future__ import annotations

import asyncio

import pytest
from broker_cluster import Cluster, simulate

from quiver.metadata import BrokerState
from quiver.model import NodeId, TopicId
from quiver.wire.messages import CreateTopicRequest, DrainBroker


async def make_topic(cluster: Cluster, *, partitions: int = 4) -> TopicId:
    """Create a topic by a request to a node that is no manager, and put something into it."""
    request = CreateTopicRequest(topic="logs", partitions=partitions, replicas=3, request_id="make logs")
    made, _ = await cluster.ask(5, request)
    cluster.known_index = made.index
    for number in range(10):
        await cluster.produce(made.topic_id, b"%d" % number)
    return made.topic_id


def holders(cluster: Cluster, topic_id: TopicId) -> list[set[NodeId]]:
    return [set(row.replicas) for row in cluster.view().partitions_of(topic_id)]


def is_whole(cluster: Cluster, topic_id: TopicId, *, without: NodeId) -> bool:
    """Tell whether nothing moves any more, and every partition has its three replicas elsewhere."""
    held = holders(cluster, topic_id)
    return not cluster.view().moves and all(len(nodes) == 3 and without not in nodes for nodes in held)


@pytest.mark.parametrize("victim", [None, 1, 2, 4])
def test_drained_broker_is_emptied_despite_any_crash(victim: int | None) -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await make_topic(cluster)
        await cluster.ask(4, DrainBroker(broker=NodeId(3)))
        if victim is not None:
            await asyncio.sleep(0.3)
            cluster[victim].kill(loses_power=True)
            await asyncio.sleep(0.7)
            cluster[victim].start()
        await cluster.wait(lambda: is_whole(cluster, topic_id, without=NodeId(3)) or None)
        await cluster.wait(lambda: cluster.view().brokers[NodeId(3)].state is BrokerState.DRAINED or None)
        await cluster.wait_equal(topic_id, *holders(cluster, topic_id)[0])
        broker = cluster[3].broker
        assert broker is not None
        await cluster.wait(lambda: not broker.describe_replicas() or None)
        assert await cluster.fetch(topic_id) == [b"%d" % number for number in range(10)]

    simulate(test, nodes=5, is_managed=True, seed=victim or 9)


def test_replicas_of_a_dead_broker_are_rebuilt_and_its_files_removed_when_it_returns() -> None:
    async def test(cluster: Cluster) -> None:
        topic_id = await make_topic(cluster)
        dead = next(iter(holders(cluster, topic_id)[0]))
        cluster[dead].kill(loses_power=True)
        await cluster.wait(lambda: is_whole(cluster, topic_id, without=dead) or None)
        cluster[dead].start()
        await cluster.wait_equal(topic_id, *holders(cluster, topic_id)[0])
        await cluster.wait(lambda: cluster.view().brokers[dead].state is BrokerState.ALIVE or None)

    simulate(test, nodes=5, is_managed=True)
