"""Requests for administration: a node's state, clients, replica moves, retention holds, the feature level. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quiver.features import LEVEL_MIN
from quiver.metrics import MetricFamily
from quiver.model import GroupId, Index, NodeId, Offset, PartitionId, TopicId
from quiver.wire.explain_messages import ExplainReplica
from quiver.wire.requests import RESULTS_MAX, Count, Done, FeatureLevelNumber, Name, PartitionNumber, Request, Response

PROBLEMS_MAX = 200
"""Replicas that do not serve that a node describes at most."""
LAGS_MAX = 200
"""Consumer lags that a node reports at most: they become metric labels."""


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica on the node that answers; only the leader knows the last three fields."""

    topic_id: TopicId
    partition_id: PartitionId
    group: GroupId
    role: str
    epoch: int
    leader: NodeId | None = None
    first_offset: Offset = Offset(0)
    end_offset: Offset = Offset(0)
    """The high watermark."""
    bytes: int = 0
    is_ready: bool = True
    in_sync: tuple[NodeId, ...] = ()
    voters: tuple[NodeId, ...] = ()
    learners: tuple[NodeId, ...] = ()
    problem: str = ""
    """Why it does not serve; empty if it does, or is only being opened."""


class ProblemInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A replica on the answering node that does not serve, or that node's copy of the metadata (no topic)."""

    state: str
    """`needs_upgrade`, `stopped` or `unusable`."""
    problem: str
    group: GroupId
    topic: str = ""
    partition_id: PartitionId | None = None


class LagInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer's unread records, in the partitions of a topic that the answering node leads."""

    consumer: str
    """Its name, or its id if it has none."""
    topic: str
    records: int


class HistorySample(msgspec.Struct, frozen=True, array_like=True):
    """What a node did in a few seconds, for charts; see `quiver.gateway.console.meter`."""

    time_ms: int
    """The end of the interval."""
    values: tuple[float | None, ...]
    """In the order of `SERIES`; None: there was nothing to measure."""
    lags: tuple[tuple[str, str, int], ...] = ()
    """The consumers with the greatest lags: name, topic, records."""


class NodeDescribed(Response, frozen=True):
    """The current state of a node."""

    node: NodeId
    version: str
    pid: int
    roles: tuple[str, ...]
    started_ms: int
    is_ready: bool
    primary: NodeId | None = None
    applied_index: Index = Index(0)
    stored_index: Index = Index(0)
    commit_index: Index = Index(0)
    digest: str = ""
    """Digest of the metadata at `applied_index`, if requested."""
    replicas: tuple[ReplicaInfo, ...] = ()
    lags: tuple[LagInfo, ...] = ()
    """The greatest lags, at most `LAGS_MAX`, in descending order."""
    holds: int = 0
    """Number of holds in the cluster."""
    now_ms: int = 0
    """The node's wall clock when it answered; with metrics only."""
    metrics: tuple[MetricFamily, ...] = ()
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    """Settings by key, without those that name or locate the node and without secrets."""
    setting_sources: dict[str, str] = msgspec.field(default_factory=dict)
    """What set a setting, by its key; those that are not in it have their default."""
    level_max: FeatureLevelNumber = LEVEL_MIN
    """The highest feature level that the node's program knows."""
    problems: tuple[ProblemInfo, ...] = ()
    """Replicas that do not serve, at most `PROBLEMS_MAX`."""
    partition_stops: int = 0
    """How often an error has stopped a partition since the node started."""
    unready: str = ""
    """Why the node is not ready; empty if it is."""
    database_outage: str = ""
    """Why the node's metadata database is unreachable; empty if it is reachable."""
    security_mode: str = ""
    """How the node is protected: `development`, `secure` or `insecure`."""
    provider_problem: str = ""
    """Why the node cannot read the keys of the identity provider; empty if it can, or has none."""
    certificate_problem: str = ""
    """Why other nodes and clients refuse the node's certificate, and what to do; empty if they do not."""
    history: tuple[HistorySample, ...] = ()
    """What the node did in the last minutes, oldest first; only gateways keep it."""


class DescribeNode(Request[NodeDescribed], frozen=True, tag="describe_node"):
    """Return the state of the node that receives it; never forwarded."""

    response = NodeDescribed
    is_read = True

    with_replicas: bool = False
    with_digest: bool = False
    with_lags: bool = False
    with_metrics: bool = False
    with_settings: bool = False
    with_history: bool = False
    topic: Name | None = None
    """Only replicas of this topic."""


class ClientInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A registered producer or consumer; a consumer's name is the `request_id` that it first registered with."""

    kind: Literal["producer", "consumer"]
    id: int
    name: str = ""
    epoch: int = 0
    registered_ms: int = 0
    last_seen_ms: int | None = None
    is_alive: bool = False
    topics: tuple[str, ...] = ()
    owner: str = ""
    """The user that it belongs to, such as `user:alice`; empty: nobody."""


class ClientsFound(Response, frozen=True):
    """The registered clients."""

    clients: tuple[ClientInfo, ...] = ()
    is_partial: bool = False
    """Whether there are others, which the caller may not see."""


class ListClients(Request[ClientsFound], frozen=True, tag="list_clients"):
    """List producers, consumers, or both."""

    response = ClientsFound
    waits_for_index = True
    is_read = True

    kind: Literal["producer", "consumer", ""] = ""
    topic: Name | None = None


class MoveInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A move of a replica to another broker."""

    move_id: int
    topic: str
    partition_id: PartitionId
    target: NodeId
    source: NodeId | None = None
    state: str = ""
    begun_ms: int = 0


class MovesFound(Response, frozen=True):
    """The moves in progress."""

    moves: tuple[MoveInfo, ...] = ()


class ListMoves(Request[MovesFound], frozen=True, tag="list_moves"):
    """List the moves in progress."""

    response = MovesFound
    is_read = True


class ManagerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node that is a manager, or a standby: it has the role and does not vote."""

    node: NodeId
    is_voter: bool
    state: str = ""
    """As in the metadata; empty if the node has never registered."""
    wire_address: str = ""
    http_address: str = ""


class ManagersFound(Response, frozen=True):
    """The managers and standbys, by id, as the node that answers knows them."""

    primary: NodeId | None = None
    managers: tuple[ManagerInfo, ...] = ()
    is_changing: bool = False
    """Whether a change of the managers is not committed yet."""


def manager_role(manager: ManagerInfo, primary: NodeId | None) -> Literal["primary", "replica", "standby"]:
    """Return what a manager does in the metadata group."""
    if not manager.is_voter:
        return "standby"
    return "primary" if manager.node == primary else "replica"


class ListManagers(Request[ManagersFound], frozen=True, tag="list_managers"):
    """List the managers."""

    response = ManagersFound
    waits_for_index = True
    is_read = True


class AddManager(Request[Done], frozen=True, tag="add_manager"):
    """Make a node, which must have the role, a voter of the metadata group; done when the change is committed."""

    response = Done
    _idempotent = True

    node: NodeId


class RemoveManager(Request[Done], frozen=True, tag="remove_manager"):
    """Take a node's vote in the metadata group; done when the change is committed."""

    response = Done
    _repeatable = False

    node: NodeId


HeldOffsets = Annotated[tuple[tuple[PartitionNumber, Offset], ...], Meta(max_length=RESULTS_MAX)]
"""By partition, the first offset that is held."""


class HoldInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A hold on a topic's records; times are the primary's."""

    name: str
    topic: str
    topic_id: TopicId
    offsets: HeldOffsets
    owner: str = ""
    placed_ms: int = 0
    expires_ms: int = 0


class HoldsFound(Response, frozen=True):
    """All holds, by topic and name."""

    holds: tuple[HoldInfo, ...] = ()


class ListHolds(Request[HoldsFound], frozen=True, tag="list_holds"):
    """List all holds."""

    response = HoldsFound
    waits_for_index = True
    is_read = True


class PlaceHoldRequest(Request[Done], frozen=True, tag="place_hold"):
    """Hold a topic's records from these offsets on for `lasting_ms`; repeating it renews and moves the hold."""

    response = Done
    _idempotent = True

    topic_id: TopicId
    name: Name
    offsets: HeldOffsets
    lasting_ms: Count
    owner: Name = ""


class ReleaseHoldRequest(Request[Done], frozen=True, tag="release_hold"):
    """Release a hold, on one topic or on all; a missing hold is no error."""

    response = Done
    _idempotent = True

    name: Name
    topic_id: TopicId | None = None


class NodeProgram(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node's program, as the node reported it to the primary."""

    node: NodeId
    level_max: FeatureLevelNumber | None = None
    """The highest feature level that it knows; None if the node has not reported it."""
    program: str = ""
    """Its version; empty for a program from before feature levels."""


class ClusterUpgraded(Response, frozen=True):
    """The cluster's feature level after the request, and the programs of all nodes."""

    level: FeatureLevelNumber
    level_before: FeatureLevelNumber
    index: Index = Index(0)
    nodes: tuple[NodeProgram, ...] = ()
    refusal: str = ""
    """In a dry run: why the upgrade would be refused; empty if it would be done."""


class UpgradeCluster(Request[ClusterUpgraded], frozen=True, tag="upgrade_cluster"):
    """Raise the cluster's feature level, to the highest that the primary knows unless another is given."""

    response = ClusterUpgraded
    _idempotent = True

    level: FeatureLevelNumber | None = None
    is_dry_run: bool = False


AdminRequest = (
    DescribeNode
    | ExplainReplica
    | ListClients
    | ListMoves
    | AddManager
    | RemoveManager
    | ListManagers
    | UpgradeCluster
    | ListHolds
    | PlaceHoldRequest
    | ReleaseHoldRequest
)
