"""A managed cluster under seeded crashes, cuts, lost requests and drains: acknowledged records are on all replicas."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest
from broker_cluster import Cluster, simulate

from quiver.errors import QuiverError
from quiver.metadata import BrokerState
from quiver.model import NodeId, TopicId
from quiver.wire.messages import CreateTopicRequest, DrainBroker

ROUNDS = 12


async def write(cluster: Cluster, topic_id: TopicId, acknowledged: list[bytes]) -> None:
    """Produce one value after the other, for ever."""
    number = 0
    while True:
        value = b"%d" % number
        await cluster.produce(topic_id, value)
        acknowledged.append(value)
        number += 1
        await asyncio.sleep(0.02)


async def trouble(cluster: Cluster, rng: random.Random) -> None:
    """Do one bad thing, and undo it a while later."""
    node = cluster[rng.randrange(len(cluster.nodes)) + 1]
    match rng.randrange(3):
        case 0:
            node.kill(loses_power=rng.random() < 0.5)
            await asyncio.sleep(rng.random() * 2)
            node.start()
            await cluster.wait(lambda: node.is_up or None)
        case 1:
            cluster.network.isolate(node.id)
            await asyncio.sleep(rng.random() * 3)
            cluster.network.heal()
        case _:
            is_drained = cluster.view().brokers[node.id].is_draining
            with suppress(QuiverError):
                await cluster.ask(1, DrainBroker(broker=node.id, is_undone=is_drained))
            await asyncio.sleep(rng.random())


def is_settled(cluster: Cluster, topic_id: TopicId) -> bool:
    """Tell whether nothing moves and everybody is well."""
    view = cluster.view()
    states = {broker.state for broker in view.brokers.values()}
    return not view.moves and states == {BrokerState.ALIVE} and len(view.partitions_of(topic_id)[0].replicas) == 3


@pytest.mark.parametrize("seed", range(3))
def test_acknowledged_records_survive_on_every_replica(seed: int) -> None:
    async def test(cluster: Cluster) -> None:
        rng = random.Random(seed)
        made, _ = await cluster.ask(
            5, CreateTopicRequest(topic="logs", partitions=1, replicas=3, request_id="make logs")
        )
        cluster.known_index = made.index
        topic_id, acknowledged = made.topic_id, list[bytes]()
        cluster.transport.rates.p_break_before = cluster.transport.rates.p_break_after = 0.02
        writing = asyncio.ensure_future(write(cluster, topic_id, acknowledged))
        for _ in range(ROUNDS):
            await trouble(cluster, rng)
        cluster.transport.rates.p_break_before = cluster.transport.rates.p_break_after = 0.0
        for node in cluster.nodes:
            if cluster.view().brokers[node].is_draining:
                await cluster.ask(1, DrainBroker(broker=NodeId(node), is_undone=True))
        await cluster.wait(lambda: is_settled(cluster, topic_id) or None)
        writing.cancel()
        await asyncio.wait([writing])
        values = await cluster.fetch(topic_id)
        seen = [value for value in dict.fromkeys(values) if value in set(acknowledged)]
        assert seen == acknowledged
        await cluster.wait_equal(topic_id, *cluster.view().partitions_of(topic_id)[0].replicas)

    simulate(test, nodes=5, is_managed=True, seed=seed)
