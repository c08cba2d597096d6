"""What HTTP clients send and get, as values: one struct for the parameters of each call, one for its answer.

Names of fields are the contract with everybody's scripts and never change; the OpenAPI document and the reference page
are made from them. Parameters are read leniently, as scripts have always sent them: numbers as strings of digits,
fields that mean nothing here ignored. An answer always says `"status": "success"`; a failure is a `FailureAnswer`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

NUMBER_MAX = 2**53
"""Greatest number that JSON carries exactly to every reader."""
PARTITIONS_MAX = 10_000
MESSAGES_MAX = 10_000
"""Most messages of one call, in or out."""
WAIT_MS_MAX = 600_000

Id = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=300)]
TopicName = Annotated[
    str,
    Meta(
        max_length=300, description="1 to 200 of letters, digits, `.`, `_` and `-`; not `.` or `..`.", examples=["logs"]
    ),
]


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """What all parameters share; by itself: a call that has none."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="status", tag="success"):
    """What all answers share; by itself: nothing but success."""


class FailureAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="status", tag="failure"):
    """Why a call did not succeed."""

    code: Annotated[str, Meta(description="Stable: for programs.")]
    message: Annotated[str, Meta(description="For people.")]
    outcome: Annotated[
        Literal["not_done", "unknown"] | UnsetType,
        Meta(description="`not_done`: safe to try again; `unknown`: perhaps done."),
    ] = UNSET


# -- topics ------------------------------------------------------------------------------------------


class RetentionBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When records may go: as soon as any of the bounds that are given allows it."""

    ms: Annotated[Number | None, Meta(description="Age in milliseconds.")] = None
    bytes: Annotated[Number | None, Meta(description="Bytes of a partition.")] = None
    until_consumed: Annotated[bool, Meta(description="Whether what every registered consumer has consumed may go.")] = (
        False
    )


class CreateTopicBody(Parameters, frozen=True):
    """A topic to be made; its name may be given as either."""

    topic_name: TopicName | None = None
    topic: TopicName | None = None
    partitions: Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)] | None = None
    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=100)] | None,
        Meta(description="Default: 3, or the number of brokers if that is less."),
    ] = None
    retention: RetentionBody | None = None


class TopicQuery(Parameters, frozen=True):
    """A topic, named in the path or as a parameter."""

    topic: TopicName


class TopicsAnswer(Answer, frozen=True):
    """The names of all topics, sorted."""

    topics: list[str]


class TopicCreatedAnswer(Answer, frozen=True):
    """A topic that was made."""

    topic: str
    partitions: int


class PartitionItem(msgspec.Struct, frozen=True, kw_only=True):
    """A partition and the nodes that hold it."""

    partition_id: int
    leader: int | None
    replicas: list[int]


class PartitionsAnswer(Answer, frozen=True):
    """A topic's partitions, in order."""

    topic: str
    partitions: list[PartitionItem]


class PartitionDetailItem(msgspec.Struct, frozen=True, kw_only=True):
    """A partition as its leader sees it; what the leader alone knows is null while there is none."""

    partition_id: int
    leader: int | None
    replicas: list[int]
    in_sync_replicas: list[int] | None
    first_offset: int | None
    end_offset: int | None
    bytes: int | None


class TopicConfigurationItem(msgspec.Struct, frozen=True, kw_only=True):
    """What a topic was asked to be."""

    partitions: int
    replicas: int
    retention: RetentionBody


class TopicAnswer(Answer, frozen=True):
    """A topic and its partitions."""

    topic: str
    configuration: TopicConfigurationItem
    partitions: list[PartitionDetailItem]


# -- producers ---------------------------------------------------------------------------------------


class RegisterProducerBody(Parameters, frozen=True):
    """Who will produce what. The topic is made if it does not exist."""

    topic: TopicName
    partition_id: Annotated[Id | None, Meta(description="The only partition it will write to; default: all.")] = None
    prod_name: Annotated[
        Name | None,
        Meta(description="A name that lasts: a restarted producer gets its id and sequences back, and a new epoch."),
    ] = None


class ProducerRegisteredAnswer(Answer, frozen=True):
    """A producer's id, and where it is in each partition."""

    producer_id: int
    epoch: int
    sequences: Annotated[
        dict[str, int], Meta(description="By partition, the next sequence expected; empty for a new producer.")
    ]


class ProduceBody(Parameters, frozen=True):
    """One message."""

    topic: TopicName
    producer_id: Id
    message: Annotated[str | None, Meta(description="Text; or give `message_b64`.")] = None
    message_b64: Annotated[str | None, Meta(description="Bytes, in base64.")] = None
    partition_id: Annotated[
        Id | None, Meta(description="Default: by the hash of `key`, else partitions take turns.")
    ] = None
    key: str | None = None
    sequence: Annotated[
        Id | None,
        Meta(description="0, 1, 2 … per producer and partition: a repeated call returns the first call's offset."),
    ] = None
    epoch: Annotated[Id | None, Meta(description="As registered; default: the newest. An older one is fenced off.")] = (
        None
    )


class ProducedAnswer(Answer, frozen=True):
    """Where a message is."""

    partition_id: int
    offset: int


Messages = Annotated[list[str], Meta(min_length=1, max_length=MESSAGES_MAX)]


class ProduceBatchBody(Parameters, frozen=True):
    """Messages for one partition, together or not at all."""

    topic: TopicName
    producer_id: Id
    messages: Annotated[Messages | None, Meta(description="Texts; or give `messages_b64`.")] = None
    messages_b64: Annotated[Messages | None, Meta(description="Bytes, each in base64.")] = None
    partition_id: Annotated[
        Id | None, Meta(description="Default: by the hash of `key`, else partitions take turns.")
    ] = None
    key: Annotated[str | None, Meta(description="The key of all of them.")] = None
    sequence: Annotated[Id | None, Meta(description="That of the first message; the others follow it.")] = None
    epoch: Annotated[Id | None, Meta(description="As registered; default: the newest. An older one is fenced off.")] = (
        None
    )


class BatchProducedAnswer(Answer, frozen=True):
    """Where messages are: `count` of them from `offset` on."""

    partition_id: int
    offset: int
    count: int


# -- consumers ---------------------------------------------------------------------------------------


class RegisterConsumerBody(Parameters, frozen=True):
    """Who will consume what."""

    topic: TopicName
    partition_id: Annotated[Id | None, Meta(description="The only partition it will read; default: all.")] = None
    from_: Annotated[
        Literal["earliest", "latest"] | None, Meta(description="Where it begins; default: `earliest`.")
    ] = msgspec.field(default=None, name="from")
    consumer_id: Annotated[Id | None, Meta(description="A registered consumer that is to read this topic, too.")] = None


class ConsumerRegisteredAnswer(Answer, frozen=True):
    """A consumer's id."""

    consumer_id: int


class ConsumeQuery(Parameters, frozen=True):
    """The next message of a consumer."""

    topic: TopicName
    consumer_id: Id
    partition_id: Annotated[Id | None, Meta(description="Default: partitions take turns.")] = None
    offset: Annotated[
        Id | None,
        Meta(description="With `partition_id`: this record, and the cursor ends just past it. Safe to repeat."),
    ] = None
    wait_ms: Annotated[
        Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] | None, Meta(description="How long to wait if there is nothing yet.")
    ] = None


class ConsumeBatchQuery(ConsumeQuery, frozen=True):
    """The next messages of a consumer."""

    max: Annotated[
        Annotated[int, Meta(ge=1, le=MESSAGES_MAX)] | None, Meta(description="Most messages; default: 100.")
    ] = None


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record; its value is `message` if it is text, else `message_b64`."""

    partition_id: int
    offset: int
    timestamp: Annotated[int, Meta(description="Milliseconds since 1970-01-01 UTC.")]
    message: str | UnsetType | None = UNSET
    message_b64: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_b64: str | UnsetType = UNSET


class ConsumedAnswer(Answer, frozen=True):
    """A record; its value is `message` if it is text, else `message_b64`."""

    partition_id: int
    offset: int
    timestamp: Annotated[int, Meta(description="Milliseconds since 1970-01-01 UTC.")]
    message: str | UnsetType | None = UNSET
    message_b64: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_b64: str | UnsetType = UNSET


class BatchConsumedAnswer(Answer, frozen=True):
    """Records, those of a partition in its order."""

    messages: list[MessageItem]


class SizeQuery(Parameters, frozen=True):
    """How much a consumer has left."""

    topic: TopicName
    consumer_id: Id
    partition_id: Annotated[Id | None, Meta(description="Default: all that it is registered for.")] = None


class SizeAnswer(Answer, frozen=True):
    """How many messages a consumer has not consumed yet."""

    size: int


# -- the cluster -------------------------------------------------------------------------------------


class BannerAnswer(Answer, frozen=True):
    """A line of welcome."""

    message: str
    version: str


class NodeStatusAnswer(Answer, frozen=True):
    """The node that was asked."""

    node: int
    roles: list[str]
    version: str
    message: str
    uptime_ms: int
    is_ready: bool


class BrokerHealthItem(msgspec.Struct, frozen=True, kw_only=True):
    """A broker, when it was last heard of, and whether it counts as alive."""

    broker_id: int
    last_heartbeat_ms: int | None
    is_alive: bool


class ClientHealthItem(msgspec.Struct, frozen=True, kw_only=True):
    """A producer or consumer, when it was last heard of, and whether it counts as alive."""

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
    partitions: Annotated[int, Meta(description="How many replicas it holds or is about to hold.")]
    leads: Annotated[int, Meta(description="How many partitions it was last said to lead.")]


class BrokersAnswer(Answer, frozen=True):
    """All brokers."""

    brokers: list[BrokerItem]


class BrokerQuery(Parameters, frozen=True):
    """A broker, named in the path."""

    id: Id


class ManagerItem(msgspec.Struct, frozen=True, kw_only=True):
    """A manager; its applied index is null if it cannot be reached."""

    node: int
    http_address: str
    role: Literal["primary", "replica"]
    applied_index: int | None


class ManagersAnswer(Answer, frozen=True):
    """The metadata's group."""

    primary: int | None
    replicas: list[int]
    managers: list[ManagerItem]


class NodeItem(msgspec.Struct, frozen=True, kw_only=True):
    """A node and where it is found."""

    node: int
    wire_address: str
    http_address: str
    roles: list[str]
    state: str


class MetadataAnswer(Answer, frozen=True):
    """Where everything is, for clients that want the short way."""

    cluster_id: str
    primary: int | None
    nodes: list[NodeItem]
