"""The checks of `quiver doctor`: each finds its fault, and a healthy cluster has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from quiver.client.checks import CHECKS, ClusterReport, NodeReport
from quiver.client.checkup import SEVERITIES, Checkup, check
from quiver.metrics import Histogram, MetricFamily, gauge, histogram
from quiver.model import GroupId, Index, NodeId, Offset, PartitionId, TopicId
from quiver.wire.admin_messages import (
    HoldInfo,
    LagInfo,
    ManagerInfo,
    ManagersFound,
    MoveInfo,
    NodeDescribed,
    ProblemInfo,
    ReplicaInfo,
)
from quiver.wire.messages import MetadataFound, NodeInfo, PartitionInfo, RetentionInfo, TopicInfo

NODES = (NodeId(1), NodeId(2), NodeId(3))
NOW_MS = 1_700_000_000_000
DAY_S = 86_400


def metrics(**changes: float) -> dict[str, MetricFamily]:
    values = {
        "quiver_disk_free_bytes": 100e9,
        "quiver_disk_reserved_bytes": 1e9,
        "process_open_fds": 100,
        "process_max_fds": 65536,
        "quiver_tls_certificate_expiry_timestamp_seconds": NOW_MS / 1000 + 300 * DAY_S,
        "quiver_cluster_feature_level": 1,
        **changes,
    }
    return {name: gauge(name, "X.", value) for name, value in values.items()}


def latencies(name: str, seconds: float, labels: tuple[tuple[str, str], ...] = (), *, count: int = 200) -> MetricFamily:
    one = Histogram()
    for _ in range(count):
        one.observe(seconds)
    return histogram(name, "X.", {labels: one})


def replica(node: NodeId, partition: int, **changes: Any) -> ReplicaInfo:
    leader = NODES[partition % 3]
    is_leader = node == leader
    return msgspec.structs.replace(
        ReplicaInfo(
            topic_id=TopicId(1),
            partition_id=PartitionId(partition),
            group=GroupId(partition + 2),
            role="leader" if is_leader else "follower",
            epoch=1,
            leader=leader,
            in_sync=NODES if is_leader else (),
            voters=NODES,
        ),
        **changes,
    )


def described(node: NodeId, **changes: Any) -> NodeDescribed:
    return msgspec.structs.replace(
        NodeDescribed(
            node=node,
            version="1",
            pid=1,
            roles=("manager", "broker", "gateway"),
            started_ms=0,
            is_ready=True,
            primary=NodeId(1),
            applied_index=Index(9),
            stored_index=Index(9),
            replicas=tuple(replica(node, partition) for partition in range(12)),
            metrics=tuple(metrics().values()),
            settings={"log.durability": "fsync"},
        ),
        **changes,
    )


def report(**changes: Any) -> ClusterReport:
    partitions = tuple(
        PartitionInfo(
            partition_id=PartitionId(number), group=GroupId(number + 2), replicas=NODES, learners=(), leader=None
        )
        for number in range(12)
    )
    topic = TopicInfo(
        topic="logs", topic_id=TopicId(1), replicas=3, partitions=partitions, retention=RetentionInfo(), created_ms=0
    )
    nodes = tuple(
        NodeInfo(node=node, wire_address=f"n{node}:9002", http_address=f"n{node}:8002", state="alive") for node in NODES
    )
    found = MetadataFound(cluster_id="c", index=Index(9), primary=NodeId(1), nodes=nodes, topics=(topic,))
    return msgspec.structs.replace(
        ClusterReport(
            metadata=found,
            nodes={node: NodeReport(described=described(node), clock_offset_ms=0) for node in NODES},
            holds=(),
            moves=(),
            managers=ManagersFound(
                primary=NodeId(1), managers=tuple(ManagerInfo(node=node, is_voter=True) for node in NODES)
            ),
            now_ms=NOW_MS,
        ),
        **changes,
    )


def with_node(node: int, **changes: Any) -> ClusterReport:
    """Return a healthy cluster except for one node's answer."""
    healthy = report()
    changed = NodeReport(described=described(NodeId(node), **changes), clock_offset_ms=0)
    return msgspec.structs.replace(healthy, nodes={**healthy.nodes, NodeId(node): changed})


def with_metrics(node: int, *more: MetricFamily, **changes: float) -> ClusterReport:
    return with_node(node, metrics=(*metrics(**changes).values(), *more))


def without(*nodes: int) -> ClusterReport:
    healthy = report()
    gone = {NodeId(node): NodeReport(error="not reached") for node in nodes}
    return msgspec.structs.replace(healthy, nodes={**healthy.nodes, **gone})


def with_clock(node: int, offset_ms: int, error_ms: int = 1) -> ClusterReport:
    healthy = report()
    late = NodeReport(described=described(NodeId(node)), clock_offset_ms=offset_ms, clock_error_ms=error_ms)
    return msgspec.structs.replace(healthy, nodes={**healthy.nodes, NodeId(node): late})


def hold(placed_ms: int) -> HoldInfo:
    return HoldInfo(
        name="h",
        topic="logs",
        topic_id=TopicId(1),
        offsets=((PartitionId(0), Offset(0)),),
        owner="",
        placed_ms=placed_ms,
    )


def all_led_by_one() -> ClusterReport:
    def lead(node: NodeId) -> tuple[ReplicaInfo, ...]:
        is_one = node == 1
        return tuple(
            replica(node, number, leader=NodeId(1), role="leader" if is_one else "follower", in_sync=NODES * is_one)
            for number in range(12)
        )

    nodes = {node: NodeReport(described=described(node, replicas=lead(node)), clock_offset_ms=0) for node in NODES}
    return msgspec.structs.replace(report(), nodes=nodes)


def stuck() -> ClusterReport:
    """Return a cluster in which a leader has lost its followers."""
    replicas = tuple(replica(NodeId(1), number, in_sync=(NodeId(1),) * (number % 3 == 0)) for number in range(12))
    return with_node(1, replicas=replicas)


def fewer_replicas() -> ClusterReport:
    healthy = report()
    topics = tuple(msgspec.structs.replace(one, replicas=1) for one in healthy.metadata.topics)
    return msgspec.structs.replace(healthy, metadata=msgspec.structs.replace(healthy.metadata, topics=topics))


def without_primary() -> ClusterReport:
    healthy = report()
    return msgspec.structs.replace(healthy, metadata=msgspec.structs.replace(healthy.metadata, primary=None))


def two_managers() -> ClusterReport:
    managers = tuple(ManagerInfo(node=node, is_voter=True) for node in NODES[:2])
    return msgspec.structs.replace(report(), managers=ManagersFound(primary=NodeId(1), managers=managers))


def with_hold(placed_ms: int) -> ClusterReport:
    return msgspec.structs.replace(report(), holds=(hold(placed_ms),))


def with_move(begun_ms: int) -> ClusterReport:
    move = MoveInfo(move_id=1, topic="logs", partition_id=PartitionId(0), target=NodeId(2), begun_ms=begun_ms)
    return msgspec.structs.replace(report(), moves=(move,))


def with_problem(state: str) -> ClusterReport:
    problem = ProblemInfo(state=state, problem="why", group=GroupId(2), topic="logs", partition_id=PartitionId(0))
    return with_node(2, problems=(problem,))


def draining() -> ClusterReport:
    healthy = report()
    nodes = tuple(msgspec.structs.replace(one, is_draining=one.node == 2) for one in healthy.metadata.nodes)
    return msgspec.structs.replace(healthy, metadata=msgspec.structs.replace(healthy.metadata, nodes=nodes))


def all_upgraded() -> ClusterReport:
    families = tuple(metrics(quiver_cluster_feature_level=1).values())
    nodes = {node: NodeReport(described=described(node, level_max=2, metrics=families)) for node in NODES}
    return msgspec.structs.replace(report(), nodes=nodes)


FAULTS: dict[str, tuple[Callable[[], ClusterReport], str, str]] = {
    "node_missing": (lambda: without(3), "critical", "node 3"),
    "manager_missing": (lambda: without(3), "critical", "managers"),
    "partition_leaderless": (lambda: without(3), "critical", "logs/2, logs/5, logs/8, logs/11"),
    "node_not_ready": (lambda: with_node(2, is_ready=False), "warning", "node 2"),
    "node_draining": (draining, "notice", "node 2"),
    "no_primary": (without_primary, "critical", "managers"),
    "managers_few": (two_managers, "warning", "managers"),
    "partition_under_majority": (stuck, "critical", "logs/0, logs/3, logs/6, logs/9"),
    "partition_under_replicated": (
        lambda: with_node(1, replicas=(replica(NodeId(1), 0, in_sync=NODES[:2]),)),
        "warning",
        "logs/0",
    ),
    "replica_stopped": (lambda: with_problem("stopped"), "critical", "node 2: logs/0"),
    "replica_needs_upgrade": (lambda: with_problem("needs_upgrade"), "critical", "node 2: logs/0"),
    "replica_unusable": (lambda: with_problem("unusable"), "critical", "node 2: logs/0"),
    "leaders_unbalanced": (all_led_by_one, "warning", "node 1"),
    "disk_filling": (lambda: with_metrics(1, quiver_disk_free_bytes=2e9), "warning", "node 1"),
    "disk_full": (lambda: with_metrics(1, quiver_disk_free_bytes=0.5e9), "critical", "node 1"),
    "clocks_differ": (lambda: with_clock(2, -3_000), "warning", "node 2, node 1"),
    "descriptors_short": (lambda: with_metrics(1, process_max_fds=1024), "warning", "node 1"),
    "versions_differ": (lambda: with_node(3, version="2"), "warning", "cluster"),
    "feature_level_low": (all_upgraded, "notice", "cluster"),
    "node_reports_little": (lambda: with_node(3, metrics=()), "notice", "node 3"),
    "consumer_lags": (
        lambda: with_node(1, lags=(LagInfo(consumer="slow", topic="logs", records=2_000_000),)),
        "warning",
        "consumer slow",
    ),
    "hold": (lambda: with_hold(NOW_MS - 1000), "notice", "topic logs"),
    "move_slow": (lambda: with_move(NOW_MS - 7_200_000), "warning", "logs/0"),
    "fsync_slow": (
        lambda: with_metrics(1, latencies("quiver_produce_stage_seconds", 0.4, (("stage", "fsync"),))),
        "warning",
        "node 1",
    ),
    "loop_lags": (lambda: with_metrics(1, latencies("quiver_loop_lag_seconds", 0.4)), "warning", "node 1"),
    "defect": (lambda: with_metrics(1, quiver_wire_handler_failures_total=2), "warning", "node 1"),
    "replica_failed": (lambda: with_metrics(1, quiver_partition_stops_total=1), "warning", "node 1"),
    "command_refused": (lambda: with_metrics(1, quiver_metadata_refused_commands_total=3), "warning", "node 1"),
    "certificate_expires": (
        lambda: with_metrics(1, quiver_tls_certificate_expiry_timestamp_seconds=NOW_MS / 1000 + 20 * DAY_S),
        "warning",
        "node 1",
    ),
    "certificate_refused": (
        lambda: with_node(1, certificate_problem="others refuse its certificate; renew it"),
        "critical",
        "node 1",
    ),
    "metadata_failed": (lambda: with_metrics(1, quiver_metadata_failed=1), "critical", "node 1"),
    "database_lags": (lambda: with_node(1, applied_index=Index(5_000)), "warning", "node 1"),
    "settings_differ": (lambda: with_node(1, settings={"log.durability": "none"}), "notice", "log.durability"),
    "durability_lax": (lambda: with_node(1, settings={"log.durability": "none"}), "warning", "node 1"),
    "replicas_few": (fewer_replicas, "warning", "logs"),
}


def codes(found: Checkup) -> set[str]:
    return {finding.code for finding in found.findings}


def test_healthy_cluster_has_no_findings() -> None:
    found = check(report())
    assert found.findings == ()
    assert (found.nodes, found.answered, found.partitions) == (3, 3, 12)
    assert found.checks == tuple(CHECKS)


@pytest.mark.parametrize("code", FAULTS)
def test_fault_is_found_with_what_to_do(code: str) -> None:
    make, severity, subject = FAULTS[code]
    (finding,) = [one for one in check(make()).findings if one.code == code]
    assert (finding.severity, finding.subject) == (severity, subject)
    assert finding.sentence
    assert finding.advice


def test_most_severe_findings_come_first() -> None:
    found = check(msgspec.structs.replace(without(3), holds=(hold(NOW_MS),)))
    ranks = [SEVERITIES.index(finding.severity) for finding in found.findings]
    assert ranks == sorted(ranks)
    assert found.findings[-1].code == "hold"


def test_each_kind_of_defect_is_a_finding_that_names_its_count_and_log_lines() -> None:
    stops = {"quiver_partition_stops_total": 1, "quiver_metadata_refused_commands_total": 1_200}
    found = check(with_metrics(2, quiver_wire_handler_failures_total=2, **stops)).findings
    assert [(one.sentence, one.advice) for one in found] == [
        (
            "2 requests ended with a defect of Quiver since its start",
            "report it, with the log lines `request handler failed`",
        ),
        ("1 error stopped a replica since its start", "report it, with the log lines `partition stopped`"),
        (
            "1,200 metadata commands could not be applied since its start",
            "report it, with the log lines `command refused`",
        ),
    ]
    none = dict.fromkeys(("quiver_wire_handler_failures_total", *stops), 0)
    assert codes(check(with_metrics(2, **none))) == set()


def test_few_slow_syncs_are_no_finding() -> None:
    few = latencies("quiver_produce_stage_seconds", 0.4, (("stage", "fsync"),), count=20)
    assert codes(check(with_metrics(1, few))) == set()


def test_uncertain_clock_is_no_finding() -> None:
    assert codes(check(with_clock(2, 3_000, error_ms=2_900))) == set()


def test_old_hold_and_near_expiry_are_worse() -> None:
    (old,) = check(with_hold(NOW_MS - 48 * 3_600_000)).findings
    assert old.severity == "warning"
    soon = with_metrics(1, quiver_tls_certificate_expiry_timestamp_seconds=NOW_MS / 1000 + DAY_S)
    (expiring,) = check(soon).findings
    assert expiring.severity == "critical"
    (used,) = check(with_metrics(1, process_open_fds=60_000)).findings
    assert used.severity == "critical"


def test_many_partitions_are_one_finding() -> None:
    (finding,) = [one for one in check(without(1, 2, 3)).findings if one.code == "partition_leaderless"]
    assert finding.subject == "logs/0, logs/1, logs/2, logs/3, logs/4 and 7 more"
    assert finding.sentence.startswith("12 partitions have no leader")


def test_lost_majority_of_managers_leads_to_recovery_and_not_to_a_change_that_needs_one() -> None:
    for missing, command in (((3,), "quiver manager list"), ((2, 3), "quiver recover --data DIRECTORY --plan")):
        (finding,) = [one for one in check(without(*missing)).findings if one.code == "manager_missing"]
        assert finding.command == command
        assert ("add another manager" in finding.advice) is (len(missing) == 1)


def test_state_of_a_missing_node_is_shown_only_while_a_primary_knows_it() -> None:
    for is_stale in (False, True):
        found = check(msgspec.structs.replace(without(3), is_stale=is_stale))
        (finding,) = [one for one in found.findings if one.code == "node_missing"]
        assert ("(state " in finding.sentence) is not is_stale
