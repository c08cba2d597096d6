"""The command that gives a topic, producer or consumer to another user."""

from __future__ import annotations

import pytest
from metadata_world import NOW_MS, create_topic, do, formed_state, refused, register_consumer, register_producer

from quiver.features import level_of
from quiver.metadata.commands import ChangeOwnerCommand, SetQuotaCommand
from quiver.metadata.rows import OwnedKind, Table
from quiver.metadata.state import MetadataState
from quiver.model import ConsumerId, ProducerId, TopicId
from quiver.security.limits import QuotaLimits

ALICE, BOB = "user:alice", "user:bob"


@pytest.fixture
def state() -> MetadataState:
    found = formed_state(feature_level=2)
    do(found, register_producer(name="p", principal=ALICE))
    do(found, register_consumer(request_id="c", principal=ALICE))
    return found


def give(kind: OwnedKind, owner: str, id_: int = 1) -> ChangeOwnerCommand:
    return ChangeOwnerCommand(now_ms=NOW_MS, principal="user:root", owned=kind, id=id_, owner=owner)


def test_new_owner_uses_its_clients_and_the_earlier_one_does_not(state: MetadataState) -> None:
    for kind in OwnedKind:
        do(state, give(kind, BOB))
    view = state.view()
    assert view.topics[TopicId(1)].owner == BOB
    assert view.producers[ProducerId(1)].owner == view.consumers[ConsumerId(1)].owner == BOB
    assert state.owned == {
        (Table.TOPICS, BOB): 1,
        (Table.PARTITIONS, BOB): 2,
        (Table.PRODUCERS, BOB): 1,
        (Table.CONSUMERS, BOB): 1,
    }
    do(state, register_producer(name="p", principal=BOB))
    do(state, register_consumer(request_id="c", principal=BOB))
    assert refused(state, register_producer(name="p", principal=ALICE)) == "not_owner"
    assert refused(state, register_consumer(request_id="c", principal=ALICE)) == "not_owner"
    assert MetadataState.decode(view.encode()).view().encode() == view.encode()


def test_client_of_nobody_belongs_to_the_first_who_uses_its_name(state: MetadataState) -> None:
    do(state, give(OwnedKind.PRODUCER, ""))
    do(state, register_producer(name="p", principal=BOB))
    assert refused(state, register_producer(name="p", principal=ALICE)) == "not_owner"


def test_owner_is_a_user_and_what_it_gets_exists(state: MetadataState) -> None:
    for owner in ("alice", "user:", "role:ops", "node:1", "anonymous"):
        assert refused(state, give(OwnedKind.TOPIC, owner)) == "bad_name"
    for kind in OwnedKind:
        assert refused(state, give(kind, BOB, 9)) == f"unknown_{kind.value}"
    do(state, give(OwnedKind.PRODUCER, ALICE))  # as it was


def test_quota_of_the_new_owner_refuses_only_what_it_makes_itself(state: MetadataState) -> None:
    do(state, SetQuotaCommand(now_ms=NOW_MS, subject="default", limits=QuotaLimits(topics_max=1)))
    do(state, create_topic("more", [1], principal=BOB))
    do(state, give(OwnedKind.TOPIC, BOB))
    assert state.owned[Table.TOPICS, BOB] == 2
    assert refused(state, create_topic("other", [1], principal=BOB)) == "quota_topics"


def test_command_is_refused_below_the_level_that_knows_owners() -> None:
    state = formed_state(feature_level=1)
    assert level_of(give(OwnedKind.TOPIC, BOB)) == 2
    assert refused(state, give(OwnedKind.TOPIC, BOB)) == "feature_level"
