"""The list of clients: in order, and in parts that each take a small step."""

from __future__ import annotations

from typing import Any

from quiver.manager.describe import CLIENTS_PER_STEP, describe_clients
from quiver.metadata import (
    ConsumerRow,
    EntityKind,
    HeartbeatRow,
    ProducerRow,
    Registration,
    Retention,
    TopicRow,
    TopicState,
    View,
)
from quiver.metadata.state import MetadataState
from quiver.model import ConsumerId, ProducerId, TopicId
from quiver.wire.admin_messages import ClientInfo, ListClients

COUNT = CLIENTS_PER_STEP + 10


def topic(number: int) -> TopicRow:
    return TopicRow(
        topic_id=TopicId(number),
        name=f"topic-{number}",
        partitions=1,
        replicas=1,
        retention=Retention(),
        state=TopicState.ACTIVE,
        created_ms=0,
        purge_ms=None,
        request_id="",
    )


def view() -> View:
    """Return metadata whose clients were registered in no order; every tenth one reads another topic."""
    rows: list[Any] = [topic(1), topic(2)]
    for number in reversed(range(COUNT)):
        registrations = (Registration(topic_id=TopicId(2 if number % 10 == 0 else 1)),)
        rows.append(
            ProducerRow(producer_id=ProducerId(number), name="", epoch=0, registered_ms=0, registrations=registrations)
        )
        rows.append(
            ConsumerRow(
                consumer_id=ConsumerId(number), registered_ms=0, registrations=registrations, request_id=f"c-{number}"
            )
        )
        rows.append(HeartbeatRow(kind=EntityKind.CONSUMER, id=number, last_seen_ms=number))
    return MetadataState(rows).view()


def listed(asked: ListClients) -> list[list[ClientInfo]]:
    return list(describe_clients(view(), asked, now_ms=COUNT, alive_ms=10))


def test_clients_are_listed_producers_first_by_id_in_parts() -> None:
    parts = listed(ListClients())
    assert max(map(len, parts)) == CLIENTS_PER_STEP
    found = [(one.kind, one.id) for part in parts for one in part]
    assert found == [(kind, number) for kind in ("producer", "consumer") for number in range(COUNT)]


def test_clients_are_listed_by_kind_and_topic() -> None:
    found = [one for part in listed(ListClients(kind="consumer", topic="topic-2")) for one in part]
    assert [(one.kind, one.id) for one in found] == [("consumer", number) for number in range(0, COUNT, 10)]
    assert [one.id for one in found if one.is_alive] == [
        number for number in range(0, COUNT, 10) if number >= COUNT - 10
    ]
