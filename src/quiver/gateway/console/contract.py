"""The HTTP contract of the calls that the console needs beside those of clients; see `quiver.gateway.contract`.

None of them is the console's alone: a program may look at records, reset a consumer or read the settings as well.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quiver.gateway.console.events import ConsoleEvent
from quiver.gateway.contract import Answer, Id, MessageItem, Number, Parameters, RetentionBody, Shared, TopicName
from quiver.metadata.topics import PARTITIONS_MAX

RECORDS_MAX = 10_000
"""Most records in one answer."""
SCANNED_MAX = 100_000
"""Most records of a partition that one call looks at."""
RECORDS_DEFAULT = 100
SCANNED_DEFAULT = 10_000

Text = Annotated[str, Meta(max_length=1_000)]
RecordFormat = Literal["json", "jsonl", "csv", "arrow", "parquet"]
FILE_TYPES: Final = {
    "jsonl": "application/x-ndjson",
    "csv": "text/csv; charset=utf-8",
    "arrow": "application/vnd.apache.arrow.stream",
    "parquet": "application/vnd.apache.parquet",
}
"""The content types of the formats that are files."""


# -- the console -------------------------------------------------------------------------------------


class AssetQuery(Parameters, frozen=True):
    """A file of the console, in the path."""

    file: str


class SessionAnswer(Answer, frozen=True):
    """Who the caller is, and where."""

    principal: Annotated[str, Meta(description="Empty: nobody is known, and nobody needs to be.")]
    node: int
    cluster_id: str
    nodes: Annotated[list[str], Meta(description="HTTP addresses of all nodes, for a page whose node fails.")]


class TopicSummaryItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A topic in a list; what only leaders know is null if one of them does not answer."""

    topic: str
    partitions: int
    replicas: int
    retention: RetentionBody
    records: int | None = None
    bytes: int | None = None
    records_per_second: float | None = None
    under_replicated: int = 0
    leaderless: int = 0
    created_ms: int = 0
    encrypted: bool = False


class TopicSummariesAnswer(Answer, frozen=True):
    """All topics that the caller may see, by name; computed at most once a second for all callers."""

    time_ms: int
    topics: list[TopicSummaryItem]


# -- topics ------------------------------------------------------------------------------------------


class ConfigureTopicBody(Parameters, frozen=True):
    """A change of a topic's configuration; what is not given stays."""

    topic: TopicName
    retention: Annotated[
        RetentionBody | None, Meta(description="The whole retention: a limit that is not in it no longer exists.")
    ] = None
    partitions: Annotated[
        Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)] | None,
        Meta(description="More than there are; keys are then spread differently."),
    ] = None


class DeletedTopicItem(msgspec.Struct, frozen=True, kw_only=True):
    """A deleted topic that can be restored until it is purged."""

    topic: str
    partitions: int
    purge_ms: int | None


class DeletedTopicsAnswer(Answer, frozen=True):
    """Deleted topics, the one that is purged first at the top."""

    topics: list[DeletedTopicItem]


class RecordsQuery(Parameters, frozen=True):
    """Records to look at; no consumer is needed, and none is moved."""

    topic: TopicName
    partition_id: Annotated[Id | None, Meta(description="Default: all partitions.")] = None
    from_: Annotated[
        Literal["earliest", "latest"] | None,
        Meta(description="`latest` is the default: the last `max` records of a partition."),
    ] = msgspec.field(default=None, name="from")
    offset: Annotated[Id | None, Meta(description="Start at this offset, with `partition_id`.")] = None
    time_ms: Annotated[Id | None, Meta(description="Start at the first record that is not older.")] = None
    max: Annotated[
        Annotated[int, Meta(ge=1, le=RECORDS_MAX)] | None,
        Meta(description=f"Maximum number of records; default: {RECORDS_DEFAULT}."),
    ] = None
    key: Annotated[Text | None, Meta(description="Only records with this key.")] = None
    search: Annotated[Text | None, Meta(description="Only records whose value or key has this text, in any case.")] = (
        None
    )
    scan: Annotated[
        Annotated[int, Meta(ge=1, le=SCANNED_MAX)] | None,
        Meta(description=f"Records of a partition to look at, at most; default: {SCANNED_DEFAULT}."),
    ] = None
    format: Annotated[
        RecordFormat | None,
        Meta(description="Default: `json`, as below. The others are files: JSON lines, CSV, Arrow IPC, Parquet."),
    ] = None


class RecordRangeItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was read of a partition."""

    partition_id: int
    first_offset: Annotated[int, Meta(description="Of the partition.")]
    end_offset: Annotated[int, Meta(description="Of the partition: one past its last record.")]
    start: Annotated[
        int,
        Meta(
            description="Where reading began. Of the newest records: every match from here on is in the answer; it is "
            "later than asked for if the records before it are too large to fit."
        ),
    ]
    next_offset: Annotated[int, Meta(description="Where to go on; `end_offset` if all was read.")]
    error: Annotated[str | UnsetType, Meta(description="Why the partition could not be read.")] = UNSET


class RecordsAnswer(Answer, frozen=True):
    """Records, oldest first; those of one partition are in offset order."""

    records: list[MessageItem]
    partitions: list[RecordRangeItem]
    scanned: int


# -- consumers ---------------------------------------------------------------------------------------

GroupKind = Annotated[
    Literal["stream", "queue"] | None,
    Meta(description="Of the group whose cursors these are, which is reset as a group; null: there is none."),
]


class ConsumerTopicItem(msgspec.Struct, frozen=True, kw_only=True):
    """A topic of a consumer; its lag is null if it is not among the greatest."""

    topic: str
    lag: int | None


class ConsumerItem(msgspec.Struct, frozen=True, kw_only=True):
    """A registered consumer."""

    id: int
    name: Annotated[str, Meta(description="Empty: it registered over HTTP, without one.")]
    is_alive: bool
    last_heartbeat_ms: int | None
    registered_ms: int
    topics: list[ConsumerTopicItem]
    group_kind: GroupKind


class ConsumersAnswer(Answer, frozen=True):
    """All consumers."""

    consumers: list[ConsumerItem]


class ConsumersQuery(Parameters, frozen=True):
    """All consumers."""

    shared: Shared = False


class ConsumerQuery(Parameters, frozen=True):
    """A consumer, in the path."""

    consumer_id: Id
    shared: Shared = False


class CursorItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A consumer's position in a partition; `target` is where a reset sets it."""

    topic: str
    partition_id: int
    cursor: int
    first_offset: int
    end_offset: int
    lag: int
    target: int | UnsetType = UNSET


class CursorsAnswer(Answer, frozen=True):
    """A consumer's positions."""

    cursors: list[CursorItem]
    is_done: Annotated[bool, Meta(description="Whether cursors were moved; false in a dry run.")] = False


class ConsumerAnswer(CursorsAnswer, frozen=True):
    """A consumer and its positions."""

    name: str = ""
    group_kind: GroupKind = None


class ResetBody(Parameters, frozen=True):
    """A reset of a consumer in one topic; give one of `to`, `offset` and `time_ms`."""

    consumer_id: Id
    topic: TopicName
    partition_id: Annotated[Id | None, Meta(description="Default: all that it is registered for.")] = None
    to: Literal["earliest", "latest"] | None = None
    offset: Number | None = None
    time_ms: Annotated[Id | None, Meta(description="To the first record that is not older.")] = None
    dry_run: Annotated[bool, Meta(description="Move nothing; say where the cursors would be.")] = False


# -- pipelines ---------------------------------------------------------------------------------------


class PipelineRunItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run of a pipeline, as it last described itself."""

    run: str
    pipeline: Annotated[str, Meta(description="archive, audit, analyze, ingest, parse or replay.")]
    state: Annotated[str, Meta(description="running, done, passed, failed or stopped; silent: it no longer reports.")]
    started_ms: int
    updated_ms: int
    topics: list[str] = []
    records: int | None = None
    lag: Annotated[int | None, Meta(description="Records of the topic that it has not done yet, if it knows.")] = None
    verdict: str = ""
    report: Annotated[str, Meta(description="The file that it writes its report to, on the machine that runs it.")] = ""
    report_offset: Annotated[
        int | None, Meta(description="Of the record of the topic `_pipeline_reports` that is its report.")
    ] = None


class PipelinesQuery(Parameters, frozen=True):
    """All runs of pipelines."""

    shared: Shared = False


class PipelinesAnswer(Answer, frozen=True):
    """Runs of pipelines, the one that reported last first."""

    runs: list[PipelineRunItem]


# -- the cluster -------------------------------------------------------------------------------------


class EventsQuery(Parameters, frozen=True):
    """Events beyond one."""

    after: Annotated[Id | None, Meta(description="Only events with a greater id.")] = None


class EventsAnswer(Answer, frozen=True):
    """What the answering node saw happen, oldest first; it remembers a few hundred since it started."""

    events: list[ConsoleEvent]


class HoldItem(msgspec.Struct, frozen=True, kw_only=True):
    """A hold on a topic's records."""

    name: str
    topic: str
    owner: str
    placed_ms: int
    expires_ms: int
    offsets: dict[str, int]


class HoldsAnswer(Answer, frozen=True):
    """All holds on topics that the caller may see."""

    holds: list[HoldItem]


class SettingsQuery(Parameters, frozen=True):
    """The node whose settings are returned."""

    node: Annotated[Id | None, Meta(description="Default: the node that answers.")] = None


class SettingItem(msgspec.Struct, frozen=True, kw_only=True):
    """A setting in force."""

    key: str
    value: str
    default: str
    source: Annotated[str, Meta(description="default, or what set it: file, environment or flag.")]
    description: str


class SettingsAnswer(Answer, frozen=True):
    """The settings that nodes share; those that name or locate a node are not among them."""

    node: int
    settings: list[SettingItem]
