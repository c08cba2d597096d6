"""The HTTP contract as structs: one for the parameters of each call, one for its answer.

Parameters end in `Body` (of a POST) or `Query` (of a GET or DELETE), answers in `Answer`, their parts in `Item`. Field
names are the contract with existing scripts and never change; the OpenAPI document and the reference are generated from
them. Decoding is lenient, as scripts rely on it: numbers may be strings of digits, unknown fields are ignored. A
successful answer has `"status": "success"`; any other is a `FailureAnswer`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quiver.client.batching import DELAY_S_MAX
from quiver.client.explanation import PartitionExplanation
from quiver.metadata.topics import PARTITIONS_MAX, REPLICAS_MAX
from quiver.model import TOPIC_NAME_LENGTH_MAX, TOPIC_NAME_PATTERN
from quiver.record.delay import DELIVER_AT_MS_END

NUMBER_MAX = 2**53
"""Largest integer that every JSON reader represents exactly."""
MESSAGES_MAX = 10_000
"""Most messages in one call, produced or consumed."""
WAIT_MS_MAX = 600_000

Id = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Positive = Annotated[int, Meta(ge=1, le=NUMBER_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=300, extra_json_schema={"pattern": r"^[^\x00-\x1f\x7f]*$"})]
Moment = Annotated[int, Meta(ge=0, lt=DELIVER_AT_MS_END)]
Delay = Annotated[int, Meta(ge=0, le=DELAY_S_MAX * 1000)]
Base64 = Annotated[
    str,
    Meta(
        extra_json_schema={"pattern": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"},
    ),
]
"""The pattern is for readers of the schema, as that of `TopicName`."""
TopicName = Annotated[
    str,
    Meta(
        max_length=TOPIC_NAME_LENGTH_MAX,
        description=f"1 to {TOPIC_NAME_LENGTH_MAX} of letters, digits, `.`, `_` and `-`; not `.` or `..`.",
        examples=["logs"],
        extra_json_schema={"minLength": 1, "pattern": f"^{TOPIC_NAME_PATTERN}$"},
    ),
]
"""The pattern is for readers of the schema: what creates topics enforces it, and says so in better words."""


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parameters; by itself, of a call without parameters. A name that is not known is refused."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="status", tag="success"):
    """Base of all answers; by itself, success without further fields."""


class FailureAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="status", tag="failure"):
    """A failed call."""

    code: Annotated[str, Meta(description="Stable error code, for programs.")]
    message: Annotated[str, Meta(description="Explanation, for people.")]
    outcome: Annotated[
        Literal["not_done", "unknown"] | UnsetType,
        Meta(description="`not_done`: safe to retry; `unknown`: the call may have taken effect."),
    ] = UNSET


# -- topics ------------------------------------------------------------------------------------------


class RetentionBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Retention of a topic: records are deleted as soon as any given limit allows it."""

    ms: Annotated[Positive | None, Meta(description="Maximum age in milliseconds.")] = None
    bytes: Annotated[Positive | None, Meta(description="Maximum bytes of a partition.")] = None
    until_consumed: Annotated[bool, Meta(description="Delete records that every registered consumer has consumed.")] = (
        False
    )


class CreateTopicBody(Parameters, frozen=True):
    """A topic to create; its name may be given in either field."""

    topic_name: TopicName | None = None
    topic: TopicName | None = None
    partitions: Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)] | None = None
    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=REPLICAS_MAX)] | None,
        Meta(description="Default: 3, or the number of brokers if there are fewer."),
    ] = None
    retention: RetentionBody | None = None
    encrypted: Annotated[
        bool | None,
        Meta(description="Whether its replicas encrypt their files. Default: as the cluster is set up."),
    ] = None


class TopicQuery(Parameters, frozen=True):
    """A topic, in the path or as a parameter."""

    topic: TopicName


Shared = Annotated[
    bool,
    Meta(
        description="An answer that this node made for another caller in the last second is enough; if answers are "
        "expensive, one of the last 10 seconds. For what many callers repeat."
    ),
]


class TopicDetailQuery(TopicQuery, frozen=True):
    """A topic that is described."""

    shared: Shared = False


class TopicsAnswer(Answer, frozen=True):
    """The names of all topics, sorted."""

    topics: list[str]


class TopicCreatedAnswer(Answer, frozen=True):
    """A created topic."""

    topic: str
    partitions: int


class PartitionItem(msgspec.Struct, frozen=True, kw_only=True):
    """A partition and the nodes with its replicas."""

    partition_id: int
    leader: int | None
    replicas: list[int]


class PartitionsAnswer(Answer, frozen=True):
    """A topic's partitions, in order."""

    topic: str
    partitions: list[PartitionItem]


class PartitionDetailItem(msgspec.Struct, frozen=True, kw_only=True):
    """A partition as its leader reports it; the leader's own fields are null while there is no leader."""

    partition_id: int
    leader: int | None
    replicas: list[int]
    in_sync_replicas: list[int] | None
    first_offset: int | None
    end_offset: int | None
    bytes: int | None


class TopicConfigurationItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The configuration of a topic; `encrypted` is there if it is."""

    partitions: int
    replicas: int
    retention: RetentionBody
    encrypted: bool = False


class TopicAnswer(Answer, frozen=True):
    """A topic and its partitions."""

    topic: str
    configuration: TopicConfigurationItem
    partitions: list[PartitionDetailItem]


# -- producers ---------------------------------------------------------------------------------------


class RegisterProducerBody(Parameters, frozen=True):
    """A producer and its topic, which is created if it does not exist."""

    topic: TopicName
    partition_id: Annotated[Id | None, Meta(description="The only partition it writes to; default: all.")] = None
    prod_name: Annotated[
        Name | None,
        Meta(description="A durable name: a restarted producer gets its id and sequences back, and a new epoch."),
    ] = None


class ProducerRegisteredAnswer(Answer, frozen=True):
    """A producer's id, epoch and next sequences."""

    producer_id: int
    epoch: int
    sequences: Annotated[
        dict[str, int], Meta(description="By partition, the next expected sequence; empty for a new producer.")
    ]


class ProduceBody(Parameters, frozen=True):
    """One message."""

    topic: TopicName
    producer_id: Id
    message: Annotated[str | None, Meta(description="Text; or give `message_b64`.")] = None
    message_b64: Annotated[Base64 | None, Meta(description="Bytes, in base64.")] = None
    partition_id: Annotated[Id | None, Meta(description="Default: by the hash of `key`, else round robin.")] = None
    key: Annotated[str | None, Meta(description="Text; or give `key_b64`.")] = None
    key_b64: Annotated[Base64 | None, Meta(description="Bytes, in base64.")] = None
    timestamp: Annotated[Id | None, Meta(description="Milliseconds since 1970-01-01 UTC; default: now.")] = None
    headers: Annotated[dict[str, str | None] | None, Meta(description="Headers of text, by name.")] = None
    headers_b64: Annotated[dict[str, Base64] | None, Meta(description="Headers of bytes, in base64, by name.")] = None
    deliver_at: Annotated[
        Moment | None,
        Meta(description="Work queues deliver it no earlier: milliseconds since 1970-01-01 UTC."),
    ] = None
    delay_ms: Annotated[Delay | None, Meta(description="Work queues deliver it after this time.")] = None
    sequence: Annotated[
        Id | None,
        Meta(description="0, 1, 2 … per producer and partition; a repeated call returns the first call's offset."),
    ] = None
    epoch: Annotated[Id | None, Meta(description="As registered; default: the newest. An older epoch is fenced.")] = (
        None
    )


class ProducedAnswer(Answer, frozen=True):
    """The position of a message."""

    partition_id: int
    offset: int


Messages = Annotated[list[str], Meta(min_length=1, max_length=MESSAGES_MAX)]
EncodedMessages = Annotated[list[Base64], Meta(min_length=1, max_length=MESSAGES_MAX)]


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a batch with what it has of its own; the rest is that of the batch."""

    message: Annotated[
        str | UnsetType | None, Meta(description="Text, or null for a record without a value; or give `message_b64`.")
    ] = UNSET
    message_b64: Annotated[Base64 | UnsetType, Meta(description="Bytes, in base64.")] = UNSET
    key: Annotated[str | None, Meta(description="Text; or give `key_b64`.")] = None
    key_b64: Annotated[Base64 | None, Meta(description="Bytes, in base64.")] = None
    timestamp: Annotated[Id | None, Meta(description="Milliseconds since 1970-01-01 UTC.")] = None
    headers: Annotated[dict[str, str | None] | None, Meta(description="Headers of text, by name.")] = None
    headers_b64: Annotated[dict[str, Base64] | None, Meta(description="Headers of bytes, in base64, by name.")] = None
    deliver_at: Annotated[
        Moment | None,
        Meta(description="Work queues deliver it no earlier: milliseconds since 1970-01-01 UTC."),
    ] = None
    delay_ms: Annotated[Delay | None, Meta(description="Work queues deliver it after this time.")] = None


class ProduceBatchBody(Parameters, frozen=True):
    """Messages for one partition, all or none."""

    topic: TopicName
    producer_id: Id
    messages: Annotated[Messages | None, Meta(description="Texts; or give `messages_b64` or `records`.")] = None
    messages_b64: Annotated[EncodedMessages | None, Meta(description="Bytes, each in base64.")] = None
    records: Annotated[
        Annotated[list[BatchRecord], Meta(min_length=1, max_length=MESSAGES_MAX)] | None,
        Meta(description="Messages with keys, timestamps or headers of their own."),
    ] = None
    partition_id: Annotated[
        Id | None,
        Meta(description="Default: by the hash of the key that all messages have, else round robin."),
    ] = None
    key: Annotated[str | None, Meta(description="The key of every message without its own; or give `key_b64`.")] = None
    key_b64: Annotated[Base64 | None, Meta(description="Bytes, in base64.")] = None
    timestamp: Annotated[
        Id | None,
        Meta(description="Of every message without its own: milliseconds since 1970-01-01; default: now."),
    ] = None
    headers: Annotated[
        dict[str, str | None] | None, Meta(description="Headers of text, by name, of every message without its own.")
    ] = None
    headers_b64: Annotated[dict[str, Base64] | None, Meta(description="Headers of bytes, in base64, by name.")] = None
    deliver_at: Annotated[
        Moment | None,
        Meta(description="As of one message, for all without their own."),
    ] = None
    delay_ms: Annotated[
        Delay | None,
        Meta(description="As of one message, for all without their own."),
    ] = None
    sequence: Annotated[Id | None, Meta(description="Sequence of the first message; the others follow it.")] = None
    epoch: Annotated[Id | None, Meta(description="As registered; default: the newest. An older epoch is fenced.")] = (
        None
    )


class BatchProducedAnswer(Answer, frozen=True):
    """The position of messages: `count` of them, the first at `offset`."""

    partition_id: int
    offset: int
    count: int


# -- consumers ---------------------------------------------------------------------------------------


class RegisterConsumerBody(Parameters, frozen=True):
    """A consumer and its topic."""

    topic: TopicName
    partition_id: Annotated[Id | None, Meta(description="The only partition it reads; default: all.")] = None
    from_: Annotated[
        Literal["earliest", "latest"] | None, Meta(description="Where it starts; default: `earliest`.")
    ] = msgspec.field(default=None, name="from")
    consumer_id: Annotated[
        Id | None, Meta(description="An existing consumer that also reads this topic from now on.")
    ] = None
    group: Annotated[
        Name | None,
        Meta(description="Consume in this group: all that register with it get its id, and share its messages."),
    ] = None


class ConsumerRegisteredAnswer(Answer, frozen=True):
    """A consumer's id."""

    consumer_id: int


class ConsumeQuery(Parameters, frozen=True):
    """The next message of a consumer."""

    topic: TopicName
    consumer_id: Id
    partition_id: Annotated[Id | None, Meta(description="Default: round robin.")] = None
    offset: Annotated[
        Id | None,
        Meta(description="With `partition_id`: return this record and move the cursor past it. Safe to repeat."),
    ] = None
    wait_ms: Annotated[
        Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] | None,
        Meta(description="How long to wait if there is no message yet."),
    ] = None


class ConsumeBatchQuery(ConsumeQuery, frozen=True):
    """The next messages of a consumer."""

    max: Annotated[
        Annotated[int, Meta(ge=1, le=MESSAGES_MAX)] | None,
        Meta(description="Maximum number of messages; default: 100."),
    ] = None


Headers = Annotated[dict[str, str | None], Meta(description="Headers of text, by name; of a repeated name, the last.")]
HeadersBase64 = Annotated[dict[str, str], Meta(description="Headers of other bytes, in base64, by name.")]


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record; its value is in `message` if it is text, else in `message_b64`."""

    partition_id: int
    offset: int
    timestamp: Annotated[int, Meta(description="Milliseconds since 1970-01-01 UTC.")]
    message: str | UnsetType | None = UNSET
    message_b64: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_b64: str | UnsetType = UNSET
    headers: Headers | UnsetType = UNSET
    headers_b64: HeadersBase64 | UnsetType = UNSET


class ConsumedAnswer(Answer, frozen=True):
    """A record; its value is in `message` if it is text, else in `message_b64`."""

    partition_id: int
    offset: int
    timestamp: Annotated[int, Meta(description="Milliseconds since 1970-01-01 UTC.")]
    message: str | UnsetType | None = UNSET
    message_b64: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_b64: str | UnsetType = UNSET
    headers: Headers | UnsetType = UNSET
    headers_b64: HeadersBase64 | UnsetType = UNSET


class BatchConsumedAnswer(Answer, frozen=True):
    """Records; those of one partition are in offset order."""

    messages: list[MessageItem]


class SizeQuery(Parameters, frozen=True):
    """A consumer whose unread messages are counted."""

    topic: TopicName
    consumer_id: Id
    partition_id: Annotated[Id | None, Meta(description="Default: all partitions that it is registered for.")] = None


class SizeAnswer(Answer, frozen=True):
    """The number of messages that a consumer has not consumed yet."""

    size: int


# -- the cluster -------------------------------------------------------------------------------------


class BannerAnswer(Answer, frozen=True):
    """The service banner."""

    message: str


class NodeStatusAnswer(Answer, frozen=True):
    """The node that answers."""

    node: int
    roles: list[str]
    version: str
    message: str
    uptime_ms: int
    is_ready: bool
    problems: list[ReplicaProblemItem] = []
    """Replicas on this node that do not serve, and its copy of the metadata if that has stopped."""


class ReplicaProblemItem(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that does not serve; without a topic it is the node's copy of the metadata."""

    state: str
    """needs_upgrade: a newer program wrote the next entry. stopped: an error stopped it; it is reopened. unusable."""
    problem: str
    topic: str | None = None
    partition: int | None = None


class BrokerHealthItem(msgspec.Struct, frozen=True, kw_only=True):
    """A broker, its last heartbeat, and whether it counts as alive."""

    broker_id: int
    last_heartbeat_ms: int | None
    is_alive: bool


class ClientHealthItem(msgspec.Struct, frozen=True, kw_only=True):
    """A producer or consumer, its last sign of life, and whether it counts as alive."""

    id: int
    name: str
    topics: list[str]
    last_heartbeat_ms: int | None
    is_alive: bool


class HealthAnswer(Answer, frozen=True):
    """Brokers and clients; times are milliseconds since 1970-01-01 UTC."""

    brokers: list[BrokerHealthItem]
    producers: list[ClientHealthItem]
    consumers: list[ClientHealthItem]


class BrokerItem(msgspec.Struct, frozen=True, kw_only=True):
    """A broker."""

    broker_id: int
    wire_address: str
    http_address: str
    rack: str
    state: str
    is_draining: bool
    last_heartbeat_ms: int | None
    partitions: Annotated[int, Meta(description="Replicas on it, including those being created.")]
    leads: Annotated[int, Meta(description="Partitions that it leads, as last reported.")]


class BrokersAnswer(Answer, frozen=True):
    """All brokers."""

    brokers: list[BrokerItem]


class BrokerQuery(Parameters, frozen=True):
    """A broker, in the path."""

    id: Id


class ManagerItem(msgspec.Struct, frozen=True, kw_only=True):
    """A manager; its applied index is null if it is unreachable."""

    node: int
    http_address: str
    role: Annotated[
        Literal["primary", "replica", "standby"], Meta(description="A standby has the role manager and does not vote.")
    ]
    applied_index: int | None


class ManagerQuery(Parameters, frozen=True):
    """A node, in the path."""

    id: Id


class ManagersAnswer(Answer, frozen=True):
    """The managers: the metadata Raft group."""

    primary: int | None
    replicas: list[int]
    managers: list[ManagerItem]


class UpgradeBody(Parameters, frozen=True):
    """An upgrade of the cluster's feature level."""

    level: Annotated[
        Annotated[int, Meta(ge=1, le=0xFFFF)] | None, Meta(description="Default: the highest that the primary knows.")
    ] = None
    dry_run: Annotated[bool, Meta(description="Change nothing; say whether it would be refused.")] = False


class NodeProgramItem(msgspec.Struct, frozen=True, kw_only=True):
    """The program of a node; the level is null if the node has not reported it."""

    node: int
    version: str
    level_max: int | None


class UpgradeAnswer(Answer, frozen=True):
    """The cluster's feature level before and after, and each node's program."""

    level: int
    level_before: int
    nodes: list[NodeProgramItem]
    refusal: Annotated[str, Meta(description="In a dry run: why the upgrade would be refused; else empty.")]


class NodeItem(msgspec.Struct, frozen=True, kw_only=True):
    """A node and its addresses."""

    node: int
    wire_address: str
    http_address: str
    roles: list[str]
    state: str


class MetadataAnswer(Answer, frozen=True):
    """All nodes with their addresses, for clients that connect to them directly."""

    cluster_id: str
    primary: int | None
    nodes: list[NodeItem]


class MetricsQuery(Parameters, frozen=True):
    """The node whose metrics are returned."""

    node: Annotated[Id | None, Meta(description="Default: the node that answers. For nodes without a gateway.")] = None


class ReadyQuery(Parameters, frozen=True):
    """What a node waits for before it is ready."""

    in_sync_within_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=86_400_000,
            description="For so long after its start, a node is ready only once all its replicas have been in sync: "
            "a rolling update that asks for it stops no node while another still catches up. 0: do not wait.",
        ),
    ] = 0


class ExplainQuery(Parameters, frozen=True):
    """A partition, and perhaps one of its records."""

    topic: TopicName
    partition_id: Id
    offset: Annotated[Id | None, Meta(description="Also say whether this record can be read.")] = None


class ExplanationAnswer(Answer, frozen=True):
    """Who leads a partition, how far each replica is, and why it does not accept or deliver records."""

    explanation: PartitionExplanation
