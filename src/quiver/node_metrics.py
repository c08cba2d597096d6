"""The metrics of a node itself: identity, readiness, its copy of the metadata, its manager and certificate.

`node` adds those of its broker, network and process. `NodeDescribed` carries all of them, so that `/metrics`,
`quiver status` and `quiver doctor` show the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

from quiver.config import Settings
from quiver.manager import GroupsStatus, GroupStatus, ManagerStatus
from quiver.metadata.store import MetadataStatus
from quiver.metrics import MetricFamily, counter, gauge, labelled
from quiver.security.limits import QuotaLimits
from quiver.wire.admin_messages import LagInfo, NodeDescribed

_OF_GROUPS: tuple[tuple[str, Literal["counter", "gauge"], str, Callable[[GroupStatus], float]], ...] = (
    ("members", "gauge", "Members of a group; the largest groups only.", lambda one: one.members),
    (
        "unassigned_partitions",
        "gauge",
        "Partitions that members of a group subscribe to and that none owns.",
        lambda one: one.unassigned,
    ),
    (
        "assignment_version",
        "gauge",
        "The version of a group's assignment, which each rebalance raises.",
        lambda one: one.version,
    ),
    ("rebalances_total", "counter", "How often partitions of a group were given or taken.", lambda one: one.rebalances),
    (
        "last_rebalance_timestamp_seconds",
        "gauge",
        "When partitions of a group were last given or taken, in seconds since 1970.",
        lambda one: one.last_rebalance_ms / 1000,
    ),
)
"""The metrics of one group: name, kind, sentence and value."""


def describe_node(node: NodeDescribed, *, now_ms: int, feature_level: int) -> Iterable[MetricFamily]:
    """Return the metrics of a node's identity."""
    labels = (("version", node.version), ("node", str(node.node)))
    return (
        labelled("quiver_node_info", "gauge", "This node.", [(labels, 1.0)]),
        gauge("quiver_node_uptime_seconds", "Time since the node started.", max(0, now_ms - node.started_ms) / 1000),
        gauge("quiver_node_ready", "Whether the node serves.", int(node.is_ready)),
        labelled(
            "quiver_node_security_mode",
            "gauge",
            "How the node is protected: development, secure or insecure.",
            [((("mode", node.security_mode),), 1.0)],
        ),
        gauge("quiver_holds", "Retention holds in the cluster.", node.holds),
        gauge("quiver_cluster_feature_level", "Feature level of the cluster.", feature_level),
        gauge("quiver_node_feature_level", "Highest feature level that this node's program knows.", node.level_max),
    )


def describe_limits(settings: Settings) -> Iterable[MetricFamily]:
    """Return the limits that a node derived from its limit of open files, unless its settings are lower."""
    wire = settings.wire
    connections = (
        ("client", wire.client_connections_max),
        ("node", wire.connections_max),
        ("http", settings.gateway.connections_max),
    )
    return (
        labelled(
            "quiver_connections_max",
            "gauge",
            "Limit of incoming connections by kind.",
            [((("kind", kind),), limit) for kind, limit in connections],
        ),
        gauge(
            "quiver_partition_replicas_max",
            "Limit of replicas on a node, if it is the primary's; 0 is none.",
            settings.manager.replicas_per_broker_max,
        ),
    )


def describe_quotas(refusals: Mapping[str, int]) -> MetricFamily:
    """Return how often each quota was exceeded; every quota has a value, so that an alert can refer to it."""
    return labelled(
        "quiver_quota_refusals_total",
        "counter",
        "Requests that this node refused because of a quota, by the quota's name.",
        [((("quota", name),), refusals.get(name, 0)) for name in QuotaLimits.__struct_fields__],
    )


def describe_metadata(status: MetadataStatus, *, node: int, snapshot_age_ms: int) -> Iterable[MetricFamily]:
    """Return the metrics of a node's copy of the metadata."""
    lag = max(0, status.applied_index - status.stored_index)
    return (
        gauge("quiver_metadata_applied_index", "Applied index of the metadata log.", status.applied_index),
        gauge("quiver_metadata_commit_index", "Known commit index of the metadata log.", status.commit_index),
        gauge(
            "quiver_metadata_stored_index", "Index of the metadata log that is in the database.", status.stored_index
        ),
        gauge("quiver_metadata_database_lag_entries", "Applied entries that are not in the database.", lag),
        gauge(
            "quiver_metadata_database_outage_seconds",
            "Time since the database became unreachable; 0 while it is reachable.",
            status.outage_ms / 1000,
        ),
        gauge("quiver_metadata_pending_rows", "Rows that wait to be written to the database.", status.pending_rows),
        gauge("quiver_metadata_commands", "Metadata commands of this node in flight.", status.submits),
        labelled(
            "quiver_metadata_refused_commands_total",
            "counter",
            "Commands of the metadata log refused as malformed, or because this program fails on them.",
            [((("reason", "malformed"),), status.malformed_commands), ((("reason", "defect"),), status.defects)],
        ),
        counter("quiver_metadata_transactions_total", "Transactions of the database.", status.transactions),
        gauge(
            "quiver_metadata_failed", "Whether the metadata or its database failed.", int(status.failure is not None)
        ),
        gauge("quiver_metadata_primary", "Whether this node is the primary.", int(status.primary == node)),
        gauge("quiver_metadata_has_primary", "Whether this node knows a primary.", int(status.primary is not None)),
        gauge(
            "quiver_metadata_snapshot_age_seconds",
            "Age of the newest metadata snapshot if entries were applied since; else 0.",
            snapshot_age_ms / 1000,
        ),
    )


def describe_manager(status: ManagerStatus) -> Iterable[MetricFamily]:
    """Return the metrics of a manager."""
    return (
        counter("quiver_manager_terms_total", "How often this manager became the primary.", status.terms),
        gauge("quiver_manager_brokers", "Nodes in the metadata.", status.brokers),
        gauge("quiver_manager_brokers_alive", "Nodes whose heartbeats arrive.", status.brokers_alive),
        gauge("quiver_manager_moves", "Replica moves in progress.", status.moves),
        gauge("quiver_manager_rebalancing", "Whether replicas are being rebalanced.", int(status.is_rebalancing)),
        gauge("quiver_manager_members", "Managers that vote.", len(status.members)),
        *(() if status.groups is None else describe_consumer_groups(status.groups)),
    )


def describe_consumer_groups(status: GroupsStatus) -> Iterable[MetricFamily]:
    """Return the metrics of the coordinator of consumer groups: totals, and the largest groups one by one."""
    largest = status.largest
    return (
        gauge("quiver_groups", "Consumer groups, work queues included.", status.groups),
        gauge("quiver_group_members", "Members of consumer groups.", status.members),
        gauge("quiver_group_assigned_partitions", "Partitions that members of groups own.", status.assigned),
        gauge(
            "quiver_group_unassigned_partitions",
            "Partitions that members subscribe to and that no member owns.",
            status.unassigned,
        ),
        gauge("quiver_group_revoking_partitions", "Partitions that members were asked to release.", status.revoking),
        labelled(
            "quiver_group_rebalances_total",
            "counter",
            "How often this primary gave partitions to members of groups or took them, by reason.",
            [((("reason", reason),), count) for reason, count in status.rebalances],
        ),
        *(
            labelled(
                f"quiver_consumer_group_{name}",
                kind,
                sentence,
                [((("group", one.group),), get(one)) for one in largest],
            )
            for name, kind, sentence, get in _OF_GROUPS
        ),
    )


def describe_lags(lags: Iterable[LagInfo]) -> MetricFamily:
    """Return the lag of consumers, of which there is a bounded number."""
    return labelled(
        "quiver_consumer_lag_records",
        "gauge",
        "Records not yet consumed, in partitions led by this node; the greatest lags only.",
        [((("consumer", lag.consumer), ("topic", lag.topic)), lag.records) for lag in lags],
    )


def describe_certificate(end_s: float | None) -> Iterator[MetricFamily]:
    """Yield when the node's TLS certificate expires; nothing without one."""
    if end_s is not None:
        yield gauge(
            "quiver_tls_certificate_expiry_timestamp_seconds",
            "When the node's TLS certificate expires, in seconds since 1970.",
            end_s,
        )
