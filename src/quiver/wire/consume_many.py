"""Consume one record for each of many consumers: the request, and the payload of its answer. Pure.

The answer carries only the consumed records, not their batches: a consumer that reads one message at a time would
otherwise transfer a thousand for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from quiver.errors import DecodeError
from quiver.model import Buffer, ConsumerId, PartitionId, TopicId
from quiver.record import Record
from quiver.wire.requests import Request, Response

CONSUMERS_MAX = 1_000

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[Record | None])


class ManyConsumed(Response, frozen=True):
    """The payload has a record or nil for each requested consumer, in order.

    It may end early, but not before the first consumer; nothing was consumed for the others.
    """


class ConsumeMany(Request[ManyConsumed], frozen=True, tag="take_each"):
    """Consume a record for each consumer at its cursor, in one replicated step; a consumer listed twice gets two."""

    response = ManyConsumed
    _repeatable = False
    waits_for_index = True

    topic_id: TopicId
    partition_id: PartitionId
    consumer_ids: Annotated[tuple[ConsumerId, ...], Meta(min_length=1, max_length=CONSUMERS_MAX)]


def encode_consumed(records: Sequence[Record | None]) -> bytes:
    """Return the payload of an answer."""
    return _encode(records)


def decode_consumed(payload: Buffer) -> list[Record | None]:
    """Return the records that `encode_consumed` encoded; raises `DecodeError`."""
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise DecodeError(f"not a valid payload of consumed records: {error}") from None
