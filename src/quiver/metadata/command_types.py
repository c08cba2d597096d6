"""What all commands share: their base, their results, and the bounds of what they carry. Pure."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

from quiver.metadata.rows import NUMBER_MAX, MoveId, Number, Text
from quiver.model import ConsumerId, PartitionId, ProducerId, TopicId

R = TypeVar("R")

_BOUNDS = Meta(ge=0, le=NUMBER_MAX)
PartitionNumber = Annotated[PartitionId, _BOUNDS]
MoveNumber = Annotated[MoveId, _BOUNDS]
ProducerNumber = Annotated[ProducerId, _BOUNDS]


class CommandDone(msgspec.Struct, frozen=True, tag="done"):
    """The result of a command without a more specific one; `changed` is the number of changed rows."""

    changed: int


class CreateTopicResult(msgspec.Struct, frozen=True, tag="topic_created"):
    """The topic that the command, or an earlier attempt of the same request, created."""

    topic_id: TopicId
    partitions: int


class BeginMoveResult(msgspec.Struct, frozen=True, tag="move_begun"):
    """The id of the begun move."""

    move_id: MoveId


class RegisterProducerResult(msgspec.Struct, frozen=True, tag="producer_registered"):
    """A producer's id, and the epoch that it must use from now on."""

    producer_id: ProducerId
    epoch: int


class RegisterConsumerResult(msgspec.Struct, frozen=True, tag="consumer_registered"):
    """A consumer's id."""

    consumer_id: ConsumerId


class RestartGroupResult(msgspec.Struct, frozen=True, tag="group_restarted"):
    """A restarted group, and a session above all epochs and sessions that it had before."""

    group_id: ConsumerId
    session: int


CommandResult = (
    CommandDone
    | CreateTopicResult
    | BeginMoveResult
    | RegisterProducerResult
    | RegisterConsumerResult
    | RestartGroupResult
)


class Command(
    msgspec.Struct, Generic[R], frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag=True
):
    """The base of all commands; `R` is the result that the proposer gets."""

    now_ms: Number
    """The proposer's wall clock."""
    principal: Text = ""
    """Who asked for it, such as `user:alice`; empty for the cluster itself and for anonymous clients."""


class TopicSelection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A topic by name and some of its partitions; no partitions means all of them."""

    topic: Text
    partitions: tuple[PartitionNumber, ...] = ()
