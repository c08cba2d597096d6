"""A formed cluster of metadata, and commands with everything filled in: what the metadata's tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quiver.features import LEVEL_MIN
from quiver.metadata.apply import ApplyOutcome, apply
from quiver.metadata.commands import (
    AnyCommand,
    ChangeBrokerState,
    CommandResult,
    CreateTopicCommand,
    InitCluster,
    RegisterBroker,
    RegisterConsumerCommand,
    RegisterProducerCommand,
    TopicSelection,
    encode_command,
)
from quiver.metadata.rows import BrokerState
from quiver.metadata.state import MetadataState
from quiver.model import Index, NodeId, Offset, PartitionId, Term
from quiver.record import Batch, stamp

NOW_MS = 1_000_000


def init_cluster(cluster_id: str = "c1", *, feature_level: int = LEVEL_MIN) -> InitCluster:
    return InitCluster(now_ms=NOW_MS, cluster_id=cluster_id, feature_level=feature_level)


def register_broker(number: int, **fields: Any) -> RegisterBroker:
    given: dict[str, Any] = {
        "now_ms": NOW_MS,
        "identity": f"identity-{number}",
        "wire_address": f"host{number}:9002",
        "http_address": f"host{number}:8002",
    } | fields
    return RegisterBroker(broker_id=NodeId(number), **given)


def change_state(number: int, state: BrokerState, now_ms: int = NOW_MS) -> ChangeBrokerState:
    return ChangeBrokerState(now_ms=now_ms, broker_id=NodeId(number), state=state)


def create_topic(topic: str = "logs", *assignments: Sequence[int], **fields: Any) -> CreateTopicCommand:
    placed = tuple(tuple(NodeId(n) for n in assignment) for assignment in assignments or ((1, 2), (2, 3)))
    given: dict[str, Any] = {"now_ms": NOW_MS, "replicas": 2} | fields
    return CreateTopicCommand(topic=topic, assignments=placed, **given)


def select(topic: str, *partitions: int) -> TopicSelection:
    return TopicSelection(topic, tuple(PartitionId(n) for n in partitions))


def register_producer(*topics: TopicSelection, **fields: Any) -> RegisterProducerCommand:
    given: dict[str, Any] = {"now_ms": NOW_MS} | fields
    return RegisterProducerCommand(topics=topics or (select("logs"),), **given)


def register_consumer(*topics: TopicSelection, **fields: Any) -> RegisterConsumerCommand:
    given: dict[str, Any] = {"now_ms": NOW_MS} | fields
    return RegisterConsumerCommand(topics=topics or (select("logs"),), **given)


def formed_state(*, feature_level: int = LEVEL_MIN) -> MetadataState:
    """Return a cluster of three brokers and one topic of two partitions."""
    state = MetadataState()
    commands: list[AnyCommand] = [
        init_cluster(feature_level=feature_level),
        *map(register_broker, (1, 2, 3)),
        create_topic(),
    ]
    for command in commands:
        do(state, command)
    return state


def do(state: MetadataState, command: AnyCommand) -> CommandResult:
    """Apply a command that must not be refused."""
    outcome = apply(state, command)
    assert outcome.refusal is None, outcome.refusal
    assert outcome.result is not None
    return outcome.result


def refused(state: MetadataState, command: AnyCommand) -> str:
    """Apply a command that must be refused and change nothing; return the refusal's code."""
    before = state.view().encode()
    outcome = apply(state, command)
    assert outcome.refusal is not None, outcome
    assert outcome == ApplyOutcome(refusal=outcome.refusal)
    assert state.view().encode() == before
    assert outcome.refusal.error().code == outcome.refusal.code
    assert outcome.refusal.message.startswith("not done: ")
    return outcome.refusal.code


def entry(data: bytes, index: int, term: int = 1) -> Batch:
    """Return a batch as it is in the log."""
    return Batch.decode(stamp(data, term=Term(term), index=Index(index), base_offset=Offset(0), append_timestamp=index))


def log(*commands: AnyCommand, first_index: int = 1) -> list[Batch]:
    """Return commands as they are in the log."""
    return [entry(encode_command(command), index) for index, command in enumerate(commands, start=first_index)]
