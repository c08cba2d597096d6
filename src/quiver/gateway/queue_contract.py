"""The part of the HTTP contract about work queues; see `contract`."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from quiver.gateway.contract import (
    MESSAGES_MAX,
    WAIT_MS_MAX,
    Answer,
    MessageItem,
    Name,
    Parameters,
    TopicName,
)
from quiver.groups.settings import DELAY_MS_MAX, LEASE_MS_MAX
from quiver.wire.queue_messages import REASON_CHARACTERS_MAX

QUEUE_BATCH_MAX = 1_000
"""Most jobs of one call."""
RECEIPT_LENGTH_MIN = 8
RECEIPT_LENGTH_MAX = 100
GroupName = Annotated[Name, Meta(description="The group whose workers share the topic's messages.")]
Receipt = Annotated[
    str,
    Meta(
        max_length=RECEIPT_LENGTH_MAX,
        description="As `/queue/receive` returned it; valid until the lease ends.",
        extra_json_schema={"minLength": RECEIPT_LENGTH_MIN, "pattern": "^[A-Za-z0-9_-]+$"},
    ),
]
Receipts = Annotated[list[Receipt], Meta(min_length=1, max_length=MESSAGES_MAX)]


class ReceiveBody(Parameters, frozen=True):
    """The next jobs of a queue; its group is created if it does not exist."""

    topic: TopicName
    group: GroupName
    max: Annotated[
        Annotated[int, Meta(ge=1, le=QUEUE_BATCH_MAX)] | None, Meta(description="Maximum number of jobs; default: 1.")
    ] = None
    wait_ms: Annotated[
        Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] | None,
        Meta(description="How long to wait if there is no job yet."),
    ] = None


class JobItem(MessageItem, frozen=True):
    """A leased message; its value is in `message` if it is text, else in `message_b64`."""

    receipt: Receipt
    attempt: Annotated[int, Meta(description="How often it has been delivered, this time included.")]
    lease_ms: Annotated[int, Meta(description="Time until it is delivered again unless it is acknowledged.")]


class JobsAnswer(Answer, frozen=True):
    """Leased messages; those of one partition are in offset order, as far as leases allow."""

    jobs: list[JobItem]


class SettleBody(Parameters, frozen=True):
    """Jobs of a queue, by their receipts."""

    topic: TopicName
    group: GroupName
    receipt: Annotated[Receipt | None, Meta(description="Of one job; or give `receipts`.")] = None
    receipts: Annotated[Receipts | None, Meta(description="Of several jobs.")] = None


class NackBody(SettleBody, frozen=True):
    """Jobs to deliver again."""

    delay_ms: Annotated[
        Annotated[int, Meta(ge=0, le=DELAY_MS_MAX)] | None,
        Meta(description="Time until then; default: the group's backoff for the job's attempts."),
    ] = None


class ExtendBody(SettleBody, frozen=True):
    """Jobs whose leases are to end later."""

    lease_ms: Annotated[
        Annotated[int, Meta(ge=1, le=LEASE_MS_MAX)] | None,
        Meta(description="Time from now until the leases end; default: the group's lease."),
    ] = None


class RejectBody(SettleBody, frozen=True):
    """Jobs that become dead letters."""

    reason: Annotated[
        Annotated[str, Meta(max_length=REASON_CHARACTERS_MAX)] | None,
        Meta(description="For the dead letter's header `quiver-dead-reason`."),
    ] = None


class SettledAnswer(Answer, frozen=True):
    """The number of jobs for which it was done, and the receipts for which it was not."""

    count: int
    stale: Annotated[
        list[str] | UnsetType,
        Meta(description="Receipts of jobs that other workers have, or that are settled; nothing was done for them."),
    ] = UNSET
    settled_before: Annotated[
        list[str] | UnsetType,
        Meta(
            description="Of what was to be acknowledged or rejected, receipts of jobs that were settled before this "
            "call: by an earlier attempt of it, or, if there was none, by another worker or as dead letters."
        ),
    ] = UNSET
