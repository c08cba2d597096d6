"""What commands do to producers, consumers and heartbeats."""

from __future__ import annotations

import msgspec
from metadata_world import NOW_MS, create_topic, do, formed_state, refused, register_consumer, register_producer, select

from quiver.features import LEVEL_MAX
from quiver.metadata.commands import (
    Beat,
    CommandDone,
    ExpireClients,
    ForgetClientCommand,
    RecordHeartbeats,
    RecoverCluster,
    RegisterConsumerResult,
    RegisterProducerResult,
    SilentClient,
)
from quiver.metadata.rows import ALL_PARTITIONS, EntityKind, Registration, StartFrom, Table
from quiver.metadata.state import MetadataState
from quiver.model import ConsumerId, NodeId, PartitionId, ProducerId, TopicId

LOGS, AUDIT = TopicId(1), TopicId(2)


def two_topics() -> MetadataState:
    state = formed_state()
    state.counters = msgspec.structs.replace(state.counters, feature_level=LEVEL_MAX)
    do(state, create_topic("audit"))
    return state


def test_producers_get_ids_in_order() -> None:
    state = two_topics()
    assert do(state, register_producer()) == RegisterProducerResult(ProducerId(1), 0)
    assert do(state, register_producer()) == RegisterProducerResult(ProducerId(2), 0)
    assert state.view().last_seen_ms(EntityKind.PRODUCER, 2) == NOW_MS


def test_known_name_keeps_its_id_and_gets_a_new_epoch() -> None:
    state = two_topics()
    assert do(state, register_producer(name="p")) == RegisterProducerResult(ProducerId(1), 0)
    assert do(state, register_producer(name="q")) == RegisterProducerResult(ProducerId(2), 0)
    assert do(state, register_producer(select("audit", 1), name="p")) == RegisterProducerResult(ProducerId(1), 1)
    assert do(state, register_producer(name="p")) == RegisterProducerResult(ProducerId(1), 2)
    producer = state.view().producers[state.names[Table.PRODUCERS]["p"]]
    covered = [(item.topic_id, item.partition_id) for item in producer.registrations]
    assert covered == [(LOGS, ALL_PARTITIONS), (AUDIT, 1)]


def test_producer_registers_again_by_id() -> None:
    state = two_topics()
    do(state, register_producer(name="p"))
    again = register_producer(producer_id=ProducerId(1))
    assert do(state, again) == RegisterProducerResult(ProducerId(1), 1)
    assert do(state, register_producer(producer_id=ProducerId(1), name="p")) == RegisterProducerResult(ProducerId(1), 2)
    assert refused(state, register_producer(producer_id=ProducerId(1), name="q")) == "bad_name"
    assert refused(state, register_producer(producer_id=ProducerId(9))) == "unknown_producer"


def test_clients_register_for_what_there_is() -> None:
    state = two_topics()
    for register in (register_producer, register_consumer):
        assert refused(state, register(select("none"))) == "unknown_topic"
        assert refused(state, register(select("logs"), select("audit", 0, 2))) == "unknown_partition"
        assert refused(state, register().__class__(now_ms=NOW_MS, topics=())) == "no_topics"


def test_consumer_covers_more_and_more_under_one_id() -> None:
    state = two_topics()
    assert do(state, register_consumer()) == RegisterConsumerResult(ConsumerId(1))
    more = register_consumer(
        select("audit", 1, 0), consumer_id=ConsumerId(1), start=StartFrom.LATEST, now_ms=NOW_MS + 1
    )
    assert do(state, more) == RegisterConsumerResult(ConsumerId(1))
    found = state.view().consumers[ConsumerId(1)].registrations
    assert found == (
        Registration(topic_id=LOGS, start=StartFrom.EARLIEST),
        Registration(topic_id=AUDIT, partition_id=PartitionId(0), start=StartFrom.LATEST),
        Registration(topic_id=AUDIT, partition_id=PartitionId(1), start=StartFrom.LATEST),
    )
    assert state.view().last_seen_ms(EntityKind.CONSUMER, 1) == NOW_MS + 1
    assert [set(state.view().consumers_on(AUDIT, PartitionId(n))) for n in (0, 1, 2)] == [{1}, {1}, set()]
    assert [found[1].covers(AUDIT, PartitionId(n)) for n in (0, 1)] == [True, False]
    assert [found[0].covers(topic, PartitionId(7)) for topic in (LOGS, AUDIT)] == [True, False]


def test_where_a_consumer_began_stays() -> None:
    state = two_topics()
    do(state, register_consumer(start=StartFrom.LATEST))
    do(state, register_consumer(consumer_id=ConsumerId(1), start=StartFrom.EARLIEST))
    assert state.view().consumers[ConsumerId(1)].registrations[0].start is StartFrom.LATEST


def test_repeated_request_finds_the_consumer_it_made() -> None:
    state = two_topics()
    assert do(state, register_consumer(request_id="r")) == RegisterConsumerResult(ConsumerId(1))
    assert do(state, register_consumer(request_id="r")) == RegisterConsumerResult(ConsumerId(1))
    assert do(state, register_consumer(request_id="s")) == RegisterConsumerResult(ConsumerId(2))
    assert do(state, register_consumer()) == RegisterConsumerResult(ConsumerId(3))
    assert do(state, register_consumer()) == RegisterConsumerResult(ConsumerId(4))


def test_unknown_consumer_is_refused() -> None:
    assert refused(two_topics(), register_consumer(consumer_id=ConsumerId(1))) == "unknown_consumer"


def forget(kind: EntityKind, number: int) -> ForgetClientCommand:
    return ForgetClientCommand(now_ms=NOW_MS, kind=kind, id=number)


def test_forgotten_clients_are_waited_for_no_longer() -> None:
    state = two_topics()
    do(state, register_consumer(request_id="r"))
    do(state, register_producer(name="p"))
    do(state, forget(EntityKind.CONSUMER, 1))
    do(state, forget(EntityKind.PRODUCER, 1))
    view = state.view()
    assert not view.has_consumers(LOGS)
    assert not view.consumers_on(LOGS, PartitionId(0))
    assert (state.names[Table.PRODUCERS], state.names[Table.CONSUMERS]) == ({}, {})
    assert [key for key in view.heartbeats if key[0] is not EntityKind.BROKER] == []
    assert refused(state, forget(EntityKind.CONSUMER, 1)) == "unknown_consumer"
    assert refused(state, forget(EntityKind.PRODUCER, 1)) == "unknown_producer"
    assert refused(state, forget(EntityKind.BROKER, 1)) == "unknown_producer"
    assert do(state, register_producer(name="p")) == RegisterProducerResult(ProducerId(2), 0)


def test_newest_heartbeat_of_those_known_is_kept() -> None:
    state = two_topics()
    do(state, register_consumer())
    beats = (
        Beat(EntityKind.CONSUMER, 1, NOW_MS + 7),
        Beat(EntityKind.CONSUMER, 1, NOW_MS + 5),
        Beat(EntityKind.CONSUMER, 2, NOW_MS + 9),
        Beat(EntityKind.PRODUCER, 1, NOW_MS + 9),
        Beat(EntityKind.BROKER, 3, NOW_MS - 1),
        Beat(EntityKind.BROKER, 2, NOW_MS + 1),
    )
    assert do(state, RecordHeartbeats(now_ms=NOW_MS, beats=beats)) == CommandDone(2)
    view = state.view()
    assert view.last_seen_ms(EntityKind.CONSUMER, 1) == NOW_MS + 7
    assert [view.last_seen_ms(EntityKind.BROKER, n) for n in (1, 2, 3)] == [NOW_MS, NOW_MS + 1, NOW_MS]
    assert view.last_seen_ms(EntityKind.CONSUMER, 2) is None


def silent(state: MetadataState, kind: EntityKind, number: int, *, epoch: int = 0) -> SilentClient:
    return SilentClient(kind, number, state.view().last_seen_ms(kind, number) or 0, epoch)


def test_silent_clients_expire_together_with_their_heartbeats() -> None:
    state = two_topics()
    for _ in range(3):
        do(state, register_producer())
        do(state, register_consumer())
    gone = (silent(state, EntityKind.PRODUCER, 2), silent(state, EntityKind.CONSUMER, 1))
    assert do(state, ExpireClients(now_ms=NOW_MS, clients=(*gone, *gone))) == CommandDone(4)
    view = state.view()
    assert (sorted(view.producers), sorted(view.consumers)) == ([1, 3], [2, 3])
    assert view.last_seen_ms(EntityKind.PRODUCER, 2) is None
    assert (view.gone_producers(map(ProducerId, range(1, 6))), view.gone_consumers([ConsumerId(1)])) == ([2], [1])
    assert do(state, register_producer()) == RegisterProducerResult(ProducerId(4), 0)  # an id is never reused
    assert do(state, ExpireClients(now_ms=NOW_MS, clients=gone)) == CommandDone(0)


def test_client_that_showed_life_after_the_decision_stays() -> None:
    state = two_topics()
    do(state, register_producer(name="p"))
    do(state, register_consumer())
    old = (silent(state, EntityKind.PRODUCER, 1), silent(state, EntityKind.CONSUMER, 1))
    do(state, register_producer(name="p"))  # a new epoch; the time of the heartbeat is the same
    do(state, RecordHeartbeats(now_ms=NOW_MS, beats=(Beat(EntityKind.CONSUMER, 1, NOW_MS + 1),)))
    broker = SilentClient(EntityKind.BROKER, 1, NOW_MS)
    unknown = SilentClient(EntityKind.CONSUMER, 77, NOW_MS)
    assert do(state, ExpireClients(now_ms=NOW_MS, clients=(*old, broker, unknown))) == CommandDone(0)
    assert (sorted(state.view().producers), sorted(state.view().consumers)) == ([1], [1])


def test_only_chosen_names_count_as_names() -> None:
    state = two_topics()
    for name in ("", "p"):
        do(state, register_producer(name=name))
    for request_id in ("", "http-00000000000000ff", "http-me", "report"):
        do(state, register_consumer(request_id=request_id))
    view = state.view()
    assert [row.is_named for row in view.producers.values()] == [False, True]
    assert [row.is_named for row in view.consumers.values()] == [False, False, True, True]


def test_ids_that_lost_commands_assigned_are_not_assigned_again_after_a_recovery() -> None:
    survivor, lost = two_topics(), two_topics()
    for _ in range(50):  # commands that the survivor lacks; partitions have state and files under these ids
        do(lost, register_producer())
        do(lost, register_consumer())
    do(lost, create_topic("new"))
    do(survivor, RecoverCluster(now_ms=NOW_MS, lost=(NodeId(3),)))
    before, after = lost.counters, survivor.counters
    assert after.next_producer_id >= before.next_producer_id
    assert after.next_consumer_id >= before.next_consumer_id
    assert after.next_topic_id >= before.next_topic_id
    assert after.next_group_id >= before.next_group_id
    unknown = [ProducerId(one) for one in range(1, 51)]
    assert survivor.view().gone_producers(unknown) == unknown  # partitions drop what is left of them
