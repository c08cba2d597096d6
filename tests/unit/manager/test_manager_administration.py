"""Administration: any node answers, the primary does, and what is said about a request is true."""

from __future__ import annotations

import asyncio
from typing import Any

import metadata_cluster
import msgspec
import pytest
from manager_world import World, run
from metadata_world import NOW_MS, change_state, init_cluster, register_broker

from quiver.config import EncryptionSettings
from quiver.errors import (
    ConflictError,
    DecodeError,
    NotAllowedError,
    NotFoundError,
    NotLeaderError,
    OutcomeUnknownError,
    OutOfRangeError,
    QuiverError,
    RequestError,
    UnavailableError,
)
from quiver.features import LEVEL_MAX
from quiver.metadata import BeginMove, BrokerState, CommandDone, TopicState
from quiver.metadata.commands import CommandResult, NodeLevel, RaiseLevel, encode_payload
from quiver.model import ConsumerId, Index, NodeId, Offset, PartitionId, ProducerId, TopicId
from quiver.wire.admin_messages import ListClients, ListHolds, ListMoves, PlaceHoldRequest, ReleaseHoldRequest
from quiver.wire.messages import (
    AddPartitionsRequest,
    BrokerHeartbeatRequest,
    ConfigureTopicRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    DrainBroker,
    ForgetClientRequest,
    GetMetadata,
    MetadataFound,
    RebalanceBrokers,
    RegisterConsumerRequest,
    RegisterProducerRequest,
    RemoveBroker,
    RestoreTopicRequest,
    RetentionInfo,
    Selection,
    SubmitCommand,
)
from quiver.wire.requests import Request

A_NODE = NodeId(7)


def address(manager: metadata_cluster.Manager) -> str:
    return f"host{manager.id}:9002"


async def refusal(world: World, request: Request[Any], **options: Any) -> QuiverError:
    with pytest.raises(QuiverError) as caught:
        await world.ask(request, **options)
    return caught.value


async def current(world: World) -> MetadataFound:
    return await world.ask(GetMetadata(is_linearizable=True))


# -- reads -------------------------------------------------------------------------------------------


def test_any_node_tells_nodes_and_topics_and_who_is_primary() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        created = await world.ask(CreateTopicRequest(topic="logs", partitions=2, replicas=3))
        for number in (1, 2, 3):
            found = await world.ask(GetMetadata(known_index=created.index), of=number)
            assert found.cluster_id == "c1"
            assert found.index >= created.index
            assert found.primary == (await world.primary()).id
            assert [(node.node, node.wire_address, node.state) for node in found.nodes] == [
                (1, "host1:9002", "alive"),
                (2, "host2:9002", "alive"),
                (3, "host3:9002", "alive"),
            ]
            (topic,) = found.topics
            assert (topic.topic, topic.replicas, len(topic.partitions)) == ("logs", 3, 2)
            assert sorted(topic.partitions[0].replicas) == [1, 2, 3]
        some = await world.ask(GetMetadata(topics=("nothing", "logs", "logs"), known_index=created.index))
        assert [topic.topic for topic in some.topics] == ["logs"]

    run(test)


def test_removed_broker_is_not_shown() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        await world.submit(change_state(3, BrokerState.DEAD))
        await world.ask(RemoveBroker(broker=NodeId(3)))
        assert [node.node for node in (await current(world)).nodes] == [1, 2]

    run(test)


def test_answer_waits_until_the_node_knows_as_much_as_the_asker() -> None:
    async def test(world: World) -> None:
        await world.wait_equal()
        replica = await world.replica()
        index = Index(replica.store.applied_index + 1)
        asking = asyncio.ensure_future(world.ask(GetMetadata(known_index=index), of=replica.id))
        await asyncio.sleep(1)
        assert not asking.done()
        await world.join(1)
        assert (await asking).index >= index
        error = await refusal(world, ListClients(known_index=Index(10_000)), timeout_ms=500)
        assert (type(error), error.code) == (UnavailableError, "behind")

    run(test)


def test_linearizable_read_is_answered_by_the_primary_alone() -> None:
    async def test(world: World) -> None:
        primary, replica = await world.primary(), await world.replica()
        await world.join(1, 2, 3)
        await world.ask(GetMetadata(is_linearizable=True), of=replica.id)
        assert world.wire.asked[-1] == (address(primary), "get_metadata")
        for manager in world.managers.values():
            if manager is not replica:
                manager.kill()
        error = await refusal(world, GetMetadata(is_linearizable=True), of=replica.id, timeout_ms=2_000)
        assert isinstance(error, UnavailableError)

    run(test)


def test_clients_are_listed_by_kind_and_topic_and_alive_while_they_were_heard_of() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        await world.ask(RegisterProducerRequest(topics=(Selection(topic="logs"),), name="web"))
        consumer = await world.ask(RegisterConsumerRequest(topics=(Selection(topic="logs"),), request_id="report"))
        await world.ask(CreateTopicRequest(topic="other"))
        later = consumer.index
        found = (await world.ask(ListClients(known_index=later))).clients
        assert [(item.kind, item.id, item.name, item.topics, item.is_alive) for item in found] == [
            ("producer", 1, "web", ("logs",), True),
            ("consumer", 1, "report", ("logs",), True),
        ]
        assert [item.kind for item in (await world.ask(ListClients(kind="consumer"))).clients] == ["consumer"]
        assert (await world.ask(ListClients(topic="other"))).clients == ()
        await asyncio.sleep(61)
        assert {item.is_alive for item in (await world.ask(ListClients())).clients} == {False}

    run(test)


def test_moves_are_listed() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        await world.ask(CreateTopicRequest(topic="logs", partitions=1, replicas=2))
        command = BeginMove(now_ms=5, topic_id=TopicId(1), partition_id=PartitionId(0), target=NodeId(3))
        await world.submit(command)
        await world.wait_equal()
        (move,) = (await world.ask(ListMoves())).moves
        assert (move.topic, move.target, move.source, move.state, move.begun_ms) == ("logs", 3, None, "begun", 5)

    run(test)


def test_holds_are_placed_listed_and_released_through_any_node() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        created = await world.ask(CreateTopicRequest(topic="logs", partitions=2))
        offsets = ((PartitionId(1), Offset(4)), (PartitionId(0), Offset(9)))
        request = PlaceHoldRequest(topic_id=created.topic_id, name="q", offsets=offsets, lasting_ms=60_000, owner="me")
        done = await world.ask(request)
        (hold,) = (await world.ask(ListHolds(known_index=done.index))).holds
        assert (hold.name, hold.topic, hold.topic_id, hold.owner) == ("q", "logs", 1, "me")
        assert hold.offsets == tuple(sorted(offsets))
        assert hold.expires_ms - hold.placed_ms == 60_000
        with pytest.raises(OutOfRangeError) as caught:
            await world.ask(msgspec.structs.replace(request, lasting_ms=0))
        assert caught.value.code == "bad_hold"
        done = await world.ask(ReleaseHoldRequest(name="q"))
        assert (await world.ask(ListHolds(known_index=done.index))).holds == ()

    run(test)


# -- writes ------------------------------------------------------------------------------------------


def test_topics_live_through_any_node() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        created = await world.ask(CreateTopicRequest(topic="logs"))
        assert (created.topic_id, created.partitions) == (1, 3)
        await world.ask(ConfigureTopicRequest(topic="logs", retention=RetentionInfo(ms=5, until_consumed=True)))
        await world.ask(AddPartitionsRequest(topic="logs", partitions=5))
        (topic,) = (await current(world)).topics
        assert (len(topic.partitions), topic.replicas) == (5, 3)
        assert topic.retention == RetentionInfo(ms=5, until_consumed=True)
        done = await world.ask(DeleteTopicRequest(topic="logs"))
        assert (await world.ask(GetMetadata(known_index=done.index))).topics == ()
        await world.ask(RestoreTopicRequest(topic="logs"))
        assert [topic.topic for topic in (await current(world)).topics] == ["logs"]

    run(test)


@pytest.mark.parametrize("is_default", [False, True])
def test_topic_is_encrypted_if_its_creator_asks_or_the_primary_is_set_up_so(*, is_default: bool) -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        nodes = tuple(NodeLevel(NodeId(number), LEVEL_MAX) for number in (1, 2, 3))
        await world.submit(RaiseLevel(now_ms=NOW_MS, feature_level=LEVEL_MAX, nodes=nodes))
        for topic, asked in (("yes", True), ("no", False), ("unsaid", None)):
            made = await world.ask(CreateTopicRequest(topic=topic, is_encrypted=asked, request_id=topic))
            again = await world.ask(CreateTopicRequest(topic=topic, is_encrypted=asked, request_id=topic))
            assert made.is_encrypted == again.is_encrypted == (is_default if asked is None else asked)
        found = await current(world)
        shown = {topic.topic: topic.is_encrypted for topic in found.topics}
        assert shown == {"yes": True, "no": False, "unsaid": is_default}

    run(test, encryption=EncryptionSettings(key_file="keys", encrypt_new_topics=is_default))


def test_newest_deleted_topic_of_a_name_is_restored() -> None:
    async def test(world: World) -> None:
        await world.join(1)
        for _ in range(2):
            await world.ask(CreateTopicRequest(topic="logs", partitions=1))
            await world.ask(DeleteTopicRequest(topic="logs"))
        await world.ask(RestoreTopicRequest(topic="logs"))
        view = (await world.primary()).store.view()
        assert [topic.state for topic in view.topics.values()] == [TopicState.DELETED, TopicState.ACTIVE]
        deleted = view.topics[TopicId(1)]
        assert deleted.purge_ms is not None
        assert deleted.purge_ms - deleted.created_ms >= world.manager_settings.purge_delay_ms

    run(test)


@pytest.mark.parametrize(
    ("request_", "kind", "code"),
    [
        (CreateTopicRequest(topic="logs"), ConflictError, "topic_exists"),
        (CreateTopicRequest(topic="a/b"), OutOfRangeError, "bad_topic_name"),
        (CreateTopicRequest(topic=".."), OutOfRangeError, "bad_topic_name"),
        (CreateTopicRequest(topic="x" * 201), OutOfRangeError, "bad_topic_name"),
        (CreateTopicRequest(topic="x", partitions=0), OutOfRangeError, "bad_partition_count"),
        (CreateTopicRequest(topic="x", partitions=2**53), OutOfRangeError, "bad_partition_count"),
        (CreateTopicRequest(topic="x", replicas=0), OutOfRangeError, "bad_replica_count"),
        (CreateTopicRequest(topic="x", replicas=16), OutOfRangeError, "bad_replica_count"),
        (CreateTopicRequest(topic="x", replicas=4), ConflictError, "too_few_brokers"),
        (CreateTopicRequest(topic="x", retention=RetentionInfo(ms=0)), OutOfRangeError, "bad_retention"),
        (CreateTopicRequest(topic="x", is_encrypted=True), ConflictError, "no_encryption_key"),
        (AddPartitionsRequest(topic="logs", partitions=3), OutOfRangeError, "bad_partition_count"),
        (AddPartitionsRequest(topic="logs", partitions=2**40), OutOfRangeError, "bad_partition_count"),
        (AddPartitionsRequest(topic="none", partitions=3), NotFoundError, "unknown_topic"),
        (ConfigureTopicRequest(topic="none", retention=RetentionInfo()), NotFoundError, "unknown_topic"),
        (DeleteTopicRequest(topic="none"), NotFoundError, "unknown_topic"),
        (RestoreTopicRequest(topic="logs"), NotFoundError, "unknown_topic"),
        (RegisterConsumerRequest(topics=(Selection(topic="none"),)), NotFoundError, "unknown_topic"),
        (RegisterConsumerRequest(topics=()), OutOfRangeError, "no_topics"),
        (RegisterConsumerRequest(topics=(Selection(topic="logs", partitions=(PartitionId(3),)),)), NotFoundError, None),
        (RegisterProducerRequest(topics=(Selection(topic="a b"),)), OutOfRangeError, "bad_topic_name"),
        (
            RegisterProducerRequest(topics=(Selection(topic="new"),), producer_id=ProducerId(9)),
            NotFoundError,
            "unknown_producer",
        ),
        (ForgetClientRequest(kind="consumer", id=9), NotFoundError, "unknown_consumer"),
        (DrainBroker(broker=NodeId(9)), NotFoundError, "unknown_broker"),
        (DrainBroker(broker=NodeId(9), is_undone=True), NotFoundError, "unknown_broker"),
        (DrainBroker(broker=NodeId(1)), ConflictError, "too_few_brokers"),
        (RemoveBroker(broker=NodeId(1)), ConflictError, "not_drained"),
    ],
)
def test_refusal_has_its_class_and_code_on_every_node(
    request_: Request[Any], kind: type[RequestError], code: str | None
) -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        await world.ask(CreateTopicRequest(topic="logs"))
        for node in (await world.primary(), await world.replica()):
            error = await refusal(world, request_, of=node.id)
            assert isinstance(error, kind)
            assert code in (None, error.code)
            assert error.outcome == "not_done"
        assert [topic.topic for topic in (await current(world)).topics] == ["logs"]

    run(test)


def test_replicas_are_as_many_as_there_are_brokers_up_to_three() -> None:
    async def test(world: World) -> None:
        assert (await refusal(world, CreateTopicRequest(topic="a"), timeout_ms=300)).code == "no_brokers"
        await world.join(1, 2)
        await world.ask(CreateTopicRequest(topic="a"))
        await world.ask(CreateTopicRequest(topic="two", replicas=2))
        view = await current(world)
        assert {topic.topic: topic.replicas for topic in view.topics} == {"a": 3, "two": 2}, "manager 3 is starting"
        await world.join(3, 4)
        await world.ask(CreateTopicRequest(topic="b"))
        assert {topic.topic: topic.replicas for topic in (await current(world)).topics} == {"a": 3, "two": 2, "b": 3}

    run(test)


@pytest.mark.parametrize("seed", range(1, 9))
def test_topics_created_together_are_placed_evenly(seed: int) -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3, 4)
        requests = [CreateTopicRequest(topic=f"t{number}", partitions=1, replicas=1) for number in range(20)]
        await asyncio.gather(*(world.ask(request) for request in requests))
        view = (await world.primary()).store.view()
        assert {len(view.partitions_on(NodeId(number))) for number in (1, 2, 3, 4)} == {5}

    run(test, seed=seed)


def test_topics_created_together_share_transactions() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        store = (await world.primary()).store
        before = store.status().transactions
        await asyncio.gather(*(world.ask(CreateTopicRequest(topic=f"t{number}")) for number in range(20)))
        assert len(store.view().topics) == 20
        assert store.status().transactions - before < 10

    run(test)


def test_partitions_added_at_the_same_time_are_added_one_request_after_the_other() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        await world.ask(CreateTopicRequest(topic="logs", partitions=1))
        requests = [AddPartitionsRequest(topic="logs", partitions=number) for number in (2, 4, 7)]
        await asyncio.gather(*map(world.ask, requests), return_exceptions=True)  # too late for those behind the 7
        (topic,) = (await current(world)).topics
        assert len(topic.partitions) == 7

    run(test)


def test_producer_creates_its_topic_and_keeps_its_id_under_its_name() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        request = RegisterProducerRequest(topics=(Selection(topic="new"),), name="web")
        first, second = await world.ask(request), await world.ask(request)
        assert (first.producer_id, first.epoch, second.producer_id, second.epoch) == (1, 0, 1, 1)
        (topic,) = (await current(world)).topics
        assert (topic.topic, len(topic.partitions), topic.replicas) == ("new", 3, 3)
        both = RegisterProducerRequest(topics=(Selection(topic="newer"),))
        found = await asyncio.gather(world.ask(both), world.ask(both))
        assert sorted(item.producer_id for item in found) == [2, 3]

    run(test)


def test_consumer_covers_more_topics_under_one_id_and_can_be_forgotten() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        await world.ask(CreateTopicRequest(topic="a"))
        await world.ask(CreateTopicRequest(topic="b"))
        first = await world.ask(RegisterConsumerRequest(topics=(Selection(topic="a"),), start="latest"))
        more = RegisterConsumerRequest(topics=(Selection(topic="b"),), consumer_id=first.consumer_id)
        assert (await world.ask(more)).consumer_id == first.consumer_id == ConsumerId(1)
        view = (await world.primary()).store.view()
        assert len(view.consumers[first.consumer_id].registrations) == 2
        done = await world.ask(ForgetClientRequest(kind="consumer", id=first.consumer_id))
        assert (await world.ask(ListClients(known_index=done.index))).clients == ()

    run(test)


def test_drain_can_be_asked_for_twice_and_undone() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        for _ in range(2):
            await world.ask(DrainBroker(broker=NodeId(3)))
        assert (await current(world)).nodes[2].is_draining
        await world.ask(DrainBroker(broker=NodeId(3), is_undone=True))
        node = (await current(world)).nodes[2]
        assert (node.state, node.is_draining) == ("alive", False)
        await world.ask(RebalanceBrokers())
        assert (await world.primary()).store.view().counters.is_rebalancing

    run(test)


def test_topic_is_placed_again_if_a_broker_is_drained_meanwhile() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3, 4)
        await world.ask(CreateTopicRequest(topic="grown", replicas=3))
        for number in range(4):
            # Both are in flight together: the placement does not know of the drain.
            drain = world.ask(DrainBroker(broker=NodeId(number + 1)))
            create = world.ask(CreateTopicRequest(topic=f"t{number}", partitions=4, replicas=3))
            grow = world.ask(AddPartitionsRequest(topic="grown", partitions=4 * (number + 2)))
            await asyncio.gather(drain, create, grow)
            await world.ask(DrainBroker(broker=NodeId(number + 1), is_undone=True))
        assert len((await current(world)).topics) == 5

    run(test)


# -- between nodes -----------------------------------------------------------------------------------


def test_command_is_carried_out_for_nodes_alone_wherever_it_is_brought() -> None:
    async def test(world: World) -> None:
        replica = await world.replica()
        data = encode_payload(register_broker(4))
        assert isinstance(await refusal(world, SubmitCommand(), payload=data), NotAllowedError)
        node = NodeId(4)
        submitted, payload = await world.wire.port(node).call(
            f"host{replica.id}:9002", SubmitCommand(), [data], timeout_ms=1000
        )
        assert submitted.index <= (await world.primary()).store.applied_index
        assert msgspec.msgpack.decode(payload, type=CommandResult) == CommandDone(2)
        again = encode_payload(register_broker(4, identity="other"))
        error = await refusal(world, SubmitCommand(), payload=again, caller=node)
        assert (type(error), error.code) == (ConflictError, "broker_exists")
        garbage = await refusal(world, SubmitCommand(), payload=b"\x01garbage", caller=A_NODE)
        assert isinstance(garbage, DecodeError)

    run(test)


def test_heartbeat_is_taken_by_managers_that_have_somebody_to_take_it() -> None:
    async def test(world: World) -> None:
        beat = BrokerHeartbeatRequest(node=NodeId(1), identity="identity-1")
        assert isinstance(await refusal(world, beat), NotAllowedError)
        assert isinstance(await refusal(world, beat, caller=NodeId(1), timeout_ms=300), UnavailableError)
        assert isinstance(await refusal(world, beat, caller=A_NODE, timeout_ms=300), NotAllowedError)

    run(test)


def test_request_is_forwarded_once() -> None:
    async def test(world: World) -> None:
        await world.join(1)
        primary, replica = await world.primary(), await world.replica()
        await world.wait(lambda: replica.store.primary)
        error = await refusal(world, CreateTopicRequest(topic="a", is_forwarded=True), of=replica.id)
        assert isinstance(error, NotLeaderError)
        assert (error.leader, error.code) == (primary.id, "not_primary")
        assert world.wire.asked == [(address(replica), "create_topic")]

    run(test)


def test_request_waits_for_the_next_primary() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        (await world.primary()).kill()
        survivor = next(manager for manager in world.managers.values() if manager.is_up)
        created = await world.ask(CreateTopicRequest(topic="logs"), of=survivor.id)
        assert created.topic_id == 1

    run(test)


def test_request_fails_in_time_when_there_is_no_primary() -> None:
    async def test(world: World) -> None:
        replica = await world.replica()
        for manager in world.managers.values():
            if manager is not replica:
                manager.kill()
        before = world.loop.time()
        error = await refusal(world, DeleteTopicRequest(topic="logs"), of=replica.id, timeout_ms=2_000)
        assert isinstance(error, UnavailableError)
        assert world.loop.time() - before < 2.1

    run(test)


def test_lost_answer_leaves_the_outcome_open() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        await world.ask(CreateTopicRequest(topic="logs"))
        world.wire.loses_answer = lambda request: request.is_forwarded
        error = await refusal(world, DeleteTopicRequest(topic="logs"))
        assert error.outcome == "unknown"
        assert world.wire.asked.count((address(await world.primary()), "delete_topic")) == 1

    run(test)


@pytest.mark.parametrize(
    "request_",
    [
        CreateTopicRequest(topic="new", request_id="r"),
        RegisterConsumerRequest(topics=(Selection(topic="logs"),), request_id="r"),
        RegisterProducerRequest(topics=(Selection(topic="logs"),), name="web"),
        DrainBroker(broker=NodeId(3)),
    ],
)
def test_request_that_bears_it_is_tried_again_when_its_answer_was_lost(request_: Request[Any]) -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        await world.ask(CreateTopicRequest(topic="logs", replicas=2))
        lost: list[Request[Any]] = []

        def loses(request: Request[Any]) -> bool:
            if request.is_forwarded and len(lost) < 2:
                lost.append(request)
                return True
            return False

        world.wire.loses_answer = loses
        await world.ask(request_)
        assert len(lost) == 2
        view = (await world.primary()).store.view()
        made = (len(view.topics) - 1, len(view.consumers), len(view.producers))
        assert sum(made) == (not isinstance(request_, DrainBroker)), made

    run(test)


def test_what_was_perhaps_done_is_never_said_to_be_not_done() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        answered: list[Request[Any]] = []

        def loses_answer(request: Request[Any]) -> bool:
            if request.is_forwarded:
                answered.append(request)
            return request.is_forwarded

        world.wire.loses_answer = loses_answer
        world.wire.loses_request = lambda request: bool(answered)
        replica = await world.replica()
        with pytest.raises(OutcomeUnknownError):
            await world.ask(CreateTopicRequest(topic="new", request_id="r"), of=replica.id, timeout_ms=1_000)
        assert (await world.primary()).store.view().topic("new") is not None

    run(test)


def test_metadata_of_a_cluster_that_is_not_formed_is_empty() -> None:
    async def test(world: World) -> None:
        found = await world.ask(GetMetadata())
        assert (found.cluster_id, found.nodes) == ("", ())
        error = await refusal(world, CreateTopicRequest(topic="x"), timeout_ms=300)
        assert (type(error), error.code) == (UnavailableError, "not_formed")
        early = asyncio.ensure_future(
            world.ask(SubmitCommand(), payload=encode_payload(register_broker(1)), caller=NodeId(1))
        )
        await asyncio.sleep(0.5)
        await (await world.primary()).store.submit(init_cluster())
        await early  # who came too early has waited
        assert [node.node for node in (await current(world)).nodes] == [1]
        assert (await current(world)).cluster_id == "c1"

    run(test, formed=False)


def test_request_repeated_after_its_topic_was_deleted_makes_no_second_one() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        request = CreateTopicRequest(topic="logs", request_id="r")
        created = await world.ask(request)
        await world.ask(DeleteTopicRequest(topic="logs"))
        assert (await world.ask(request)).topic_id == created.topic_id
        assert (await current(world)).topics == ()

    run(test)


def test_primary_that_hangs_does_not_use_up_the_time_of_what_can_be_repeated() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        primary, replica = await world.primary(), await world.replica()
        world.wire.hanging.add(address(primary))
        request = CreateTopicRequest(topic="logs", request_id="r")
        asking = asyncio.ensure_future(world.ask(request, of=replica.id, timeout_ms=10_000))
        await asyncio.sleep(1)
        primary.kill()
        world.wire.hanging.clear()
        await asking
        assert [topic.name for topic in (await world.primary()).store.view().active_topics()] == ["logs"]

    run(test)
