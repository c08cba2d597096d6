"""The checks of `quiver doctor`: what is wrong with a cluster, and what to do about it. Pure.

A check is a function from the collected answers to findings; `CHECKS` lists them all. A finding names its subject, says
in a sentence what is wrong, and gives the command that shows more or repairs it. Findings of one kind on many
partitions are one finding that names the first few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec

from quiver.metrics import MetricReader
from quiver.model import NodeId
from quiver.wire.admin_messages import HoldInfo, ManagersFound, MoveInfo, NodeDescribed, ProblemInfo, ReplicaInfo
from quiver.wire.messages import MetadataFound, NodeInfo

SHOWN_MAX = 5
"""Partitions that one finding names."""
CLOCK_WARNING_MS = 500
"""Difference of two clocks that confuses retention by age and timestamps of records."""
CLOCK_CRITICAL_MS = 10_000
DESCRIPTORS_SHARE = 0.8
"""Share of the limit of file descriptors from which on a node may run out of them."""
DESCRIPTORS_MIN = 4_096
"""Limit of file descriptors below which a node with many partitions or clients fails."""
LAG_RECORDS_MAX = 100_000
"""Unread records of a consumer in one topic from which on it counts as lagging."""
DATABASE_LAG_MAX = 1_000
"""Metadata entries that a database may lack."""
FSYNC_S_MAX = 0.1
"""p99 of a disk's fdatasync; a slower disk delays every awaited record."""
LOOP_LAG_S_MAX = 0.1
"""p99 of the event loop's lag; beyond it elections become likely."""
SAMPLES_MIN = 100
"""Values that a p99 needs."""
HOLD_MS_MAX = 24 * 3_600_000
"""Age from which on a hold is suspicious."""
MOVE_MS_MAX = 3_600_000
"""Age from which on a move is suspicious."""
DAY_S = 86_400
CERTIFICATE_WARNING_DAYS = 30
CERTIFICATE_CRITICAL_DAYS = 7
DEFECTS = (
    (
        "defect",
        "quiver_wire_handler_failures_total",
        ("request", "ended with a defect of Quiver"),
        "request handler failed",
    ),
    ("replica_failed", "quiver_partition_stops_total", ("error", "stopped a replica"), "partition stopped"),
    (
        "command_refused",
        "quiver_metadata_refused_commands_total",
        ("metadata command", "could not be applied"),
        "command refused",
    ),
)
"""Counters of defects: code of the finding, metric, what it counts and what became of it, and phrase in the log."""
RESERVE_FACTOR = 3
"""A disk with less than this many times `log.free_bytes_min` free will be full soon."""

Severity = Literal["critical", "warning", "notice"]


class ClusterFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that needs attention."""

    severity: Severity
    """critical: records are not accepted, not delivered, or at risk; warning: it will be; notice: good to know."""
    code: str
    subject: str
    sentence: str
    advice: str
    command: str = ""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node's answer, or why there is none."""

    described: NodeDescribed | None = None
    error: str = ""
    clock_offset_ms: int | None = None
    """Its wall clock minus the one of the asking program."""
    clock_error_ms: int = 0


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the checks judge; None: it could not be found out."""

    metadata: MetadataFound
    nodes: dict[NodeId, NodeReport]
    holds: tuple[HoldInfo, ...] | None
    moves: tuple[MoveInfo, ...] | None
    managers: ManagersFound | None
    now_ms: int
    is_stale: bool = False
    """Whether the metadata may be old because there is no primary."""

    def answers(self) -> Iterator[tuple[NodeId, NodeDescribed, MetricReader]]:
        """Yield the nodes that answered, with their metrics."""
        for node, report in self.nodes.items():
            if report.described is not None:
                yield node, report.described, MetricReader(report.described.metrics)

    def brokers(self) -> list[NodeInfo]:
        """Return the nodes that hold replicas."""
        return [node for node in self.metadata.nodes if not node.roles or "broker" in node.roles]

    def leaders(self) -> dict[tuple[int, int], ReplicaInfo]:
        """Return by partition the leader's report; the later epoch wins."""
        found: dict[tuple[int, int], ReplicaInfo] = {}
        for node, described, _ in self.answers():
            for replica in described.replicas:
                key = (replica.topic_id, replica.partition_id)
                known = found.get(key)
                if replica.leader == node and (known is None or known.epoch < replica.epoch):
                    found[key] = replica
        return found


def _check_nodes(report: ClusterReport) -> Iterator[ClusterFinding]:
    for info in report.metadata.nodes:
        node, answer = info.node, report.nodes[info.node]
        if answer.described is None:
            yield ClusterFinding(
                severity="critical",
                code="node_missing",
                subject=f"node {node}",
                sentence=f"does not answer{'' if report.is_stale else f' (state {info.state})'}: {answer.error}",
                advice="start it again; if its machine or disk is lost, add a node with a new id and remove this one",
                command="quiver broker list",
            )
        elif not answer.described.is_ready:
            yield ClusterFinding(
                severity="warning",
                code="node_not_ready",
                subject=f"node {node}",
                sentence="runs but is not ready: it is starting, or cannot reach the primary or open its replicas",
                advice="wait for it, or read its log",
                command=f"curl http://{info.http_address}/readyz" if info.http_address else "quiver status",
            )
        elif info.is_draining:
            yield ClusterFinding(
                severity="notice",
                code="node_draining",
                subject=f"node {node}",
                sentence="is draining: no replicas are placed on it",
                advice="undo it if the node is to stay",
                command=f"quiver broker drain {node} --undo",
            )


def _check_managers(report: ClusterReport) -> Iterator[ClusterFinding]:
    if report.metadata.primary is None or report.is_stale:
        yield ClusterFinding(
            severity="critical",
            code="no_primary",
            subject="managers",
            sentence="no manager is the primary: topics, clients and moves cannot be changed",
            advice="start managers until a majority of them runs",
            command="quiver manager list",
        )
    if report.managers is None:
        return
    voters = [one.node for one in report.managers.managers if one.is_voter]
    gone = [node for node in voters if node not in report.nodes or report.nodes[node].described is None]
    if gone and len(voters) > 1:
        left = len(voters) - len(gone) - (len(voters) // 2 + 1)
        lost = f"{left} more may fail" if left > 0 else "no further one may fail"
        lost = lost if left >= 0 else "they have no majority"
        yield ClusterFinding(
            severity="warning" if left > 0 else "critical",
            code="manager_missing",
            subject="managers",
            sentence=f"{len(gone)} of {len(voters)} managers do not answer ({_names(gone)}): {lost}",
            advice="start them again, or replace them: add another manager, then remove the lost one"
            if left >= 0
            else "start them again; only if their disks are lost for good, stop the others and plan a recovery",
            command="quiver manager list" if left >= 0 else "quiver recover --data DIRECTORY --plan",
        )
    if len(voters) in (2, 4) or (len(voters) == 1 and len(report.metadata.nodes) >= 3):
        yield ClusterFinding(
            severity="warning",
            code="managers_few",
            subject="managers",
            sentence=f"{len(voters)} managers tolerate the loss of {(len(voters) - 1) // 2}",
            advice="use one manager for tests, three or five otherwise",
            command="quiver manager add NODE",
        )


def _check_partitions(report: ClusterReport) -> Iterator[ClusterFinding]:
    leaders = report.leaders()
    leaderless: list[str] = []
    short: list[str] = []
    stuck: list[str] = []
    for topic in report.metadata.topics:
        for partition in topic.partitions:
            place = f"{topic.topic}/{partition.partition_id}"
            leader = leaders.get((topic.topic_id, partition.partition_id))
            if leader is None:
                leaderless.append(place)
            elif len(leader.in_sync) * 2 <= len(leader.voters):
                stuck.append(place)
            elif len(leader.in_sync) < max(len(leader.voters), topic.replicas):
                short.append(place)
    advice = "start the missing nodes; `quiver explain` says for each partition what is in the way"
    for severity, code, places, what in (
        ("critical", "partition_leaderless", leaderless, "have no leader: nothing is accepted or delivered"),
        ("critical", "partition_under_majority", stuck, "have no majority in sync: records wait"),
        ("warning", "partition_under_replicated", short, "have fewer replicas in sync than configured"),
    ):
        if places:
            yield ClusterFinding(
                severity="critical" if severity == "critical" else "warning",
                code=code,
                subject=_shorten(places),
                sentence=f"{_count(len(places), 'partition')} {what}".replace("partition have", "partition has"),
                advice=advice,
                command=f"quiver explain {places[0]}",
            )


def _check_replicas(report: ClusterReport) -> Iterator[ClusterFinding]:
    """Find replicas that cannot be opened, were stopped by a fault, or need a newer program."""
    for node, described, _ in report.answers():
        by_state: dict[str, list[ProblemInfo]] = {}
        for problem in described.problems:
            by_state.setdefault(problem.state, []).append(problem)
        for state, problems in by_state.items():
            places = [f"{one.topic}/{one.partition_id}" if one.topic else "metadata" for one in problems]
            yield ClusterFinding(
                severity="critical",
                code=f"replica_{state}",
                subject=f"node {node}: {_shorten(places)}",
                sentence=f"{_count(len(places), 'replica')} {state.replace('_', ' ')}: {problems[0].problem}",
                advice="start a newer version of Quiver on this node"
                if state == "needs_upgrade"
                else "correct what the error names and restart the node; if its files are lost or damaged, move the "
                "replica to another node; report any other error",
                command="quiver status" if places[0] == "metadata" else f"quiver explain {places[0]}",
            )


def _check_balance(report: ClusterReport) -> Iterator[ClusterFinding]:
    alive = [info.node for info in report.brokers() if report.nodes[info.node].described is not None]
    led = Counter(replica.leader for replica in report.leaders().values())
    total = sum(led.values())
    if len(alive) < 2 or total < 4 * len(alive):
        return
    most = max(alive, key=lambda node: led[node])
    if led[most] > 2 * total / len(alive):
        yield ClusterFinding(
            severity="warning",
            code="leaders_unbalanced",
            subject=f"node {most}",
            sentence=f"leads {led[most]} of {total} partitions, its share is {round(total / len(alive))}",
            advice="wait for broker.leader_balance_delay_ms after a failover; if it stays so, rebalance replicas",
            command="quiver broker rebalance",
        )


def _check_disks(report: ClusterReport) -> Iterator[ClusterFinding]:
    for node, _, metrics in report.answers():
        free, reserved = metrics.total("quiver_disk_free_bytes"), metrics.total("quiver_disk_reserved_bytes")
        waiting = metrics.total("quiver_disk_waiting_writes")
        if free is None or reserved is None or (free >= RESERVE_FACTOR * reserved and not waiting):
            continue
        is_full = free < reserved or bool(waiting)
        sentence = f"its disk has {free / 1e6:,.0f} MB free; below {reserved / 1e6:,.0f} MB it refuses records"
        if waiting:
            sentence = f"its disk is full: {waiting:.0f} writes wait for room"
        yield ClusterFinding(
            severity="critical" if is_full else "warning",
            code="disk_full" if is_full else "disk_filling",
            subject=f"node {node}",
            sentence=sentence,
            advice="add room, shorten the retention of large topics, release holds, or move replicas away",
            command="quiver hold list",
        )


def _check_clocks(report: ClusterReport) -> Iterator[ClusterFinding]:
    known = {node: one for node, one in report.nodes.items() if one.clock_offset_ms is not None}
    if len(known) < 2:
        return
    offsets = {node: one.clock_offset_ms or 0 for node, one in known.items()}
    first, last = min(offsets, key=lambda node: offsets[node]), max(offsets, key=lambda node: offsets[node])
    apart_ms = offsets[last] - offsets[first] - known[first].clock_error_ms - known[last].clock_error_ms
    if apart_ms > CLOCK_WARNING_MS:
        yield ClusterFinding(
            severity="critical" if apart_ms > CLOCK_CRITICAL_MS else "warning",
            code="clocks_differ",
            subject=f"node {first}, node {last}",
            sentence=f"their clocks differ by {apart_ms / 1000:.1f} s at least: retention by age and times are wrong",
            advice="synchronize the clocks (chrony, systemd-timesyncd)",
            command="timedatectl timesync-status",
        )


def _check_descriptors(report: ClusterReport) -> Iterator[ClusterFinding]:
    for node, _, metrics in report.answers():
        limit, used = metrics.total("process_max_fds"), metrics.total("process_open_fds") or 0
        if limit is None or (limit >= DESCRIPTORS_MIN and used <= DESCRIPTORS_SHARE * limit):
            continue
        is_near = used > DESCRIPTORS_SHARE * limit
        yield ClusterFinding(
            severity="critical" if is_near else "warning",
            code="descriptors_short",
            subject=f"node {node}",
            sentence=f"uses {used:.0f} of {limit:.0f} file descriptors; each log, connection and client needs some",
            advice="raise the limit (LimitNOFILE in the service file) to 65536 and restart the node",
            command="ulimit -n 65536",
        )


def _check_versions(report: ClusterReport) -> Iterator[ClusterFinding]:
    versions: dict[str, list[NodeId]] = {}
    for node, described, _ in report.answers():
        versions.setdefault(described.version, []).append(node)
        if not described.metrics:
            yield ClusterFinding(
                severity="notice",
                code="node_reports_little",
                subject=f"node {node}",
                sentence=f"its version {described.version} reports no metrics to this command",
                advice="upgrade it to check it fully",
            )
    levels = [described.level_max for _, described, _ in report.answers()]
    used = [metrics.total("quiver_cluster_feature_level") or 0 for _, _, metrics in report.answers() if metrics]
    if used and max(used) < min(levels) and len(levels) == len(report.nodes):
        yield ClusterFinding(
            severity="notice",
            code="feature_level_low",
            subject="cluster",
            sentence=f"all nodes know feature level {min(levels)}, the cluster uses {max(used):.0f}",
            advice="raise it once you will not go back to the previous version",
            command="quiver cluster upgrade",
        )
    if len(versions) > 1:
        shown = "; ".join(f"{version}: {_names(nodes)}" for version, nodes in sorted(versions.items()))
        yield ClusterFinding(
            severity="warning",
            code="versions_differ",
            subject="cluster",
            sentence=f"nodes run different versions ({shown})",
            advice="finish the upgrade; new features are used only once all nodes have them",
            command="quiver status",
        )


def _check_consumers(report: ClusterReport) -> Iterator[ClusterFinding]:
    lags: Counter[tuple[str, str]] = Counter()
    for _, described, _ in report.answers():
        for lag in described.lags:
            lags[lag.consumer, lag.topic] += lag.records
    for (consumer, topic), records in lags.most_common(SHOWN_MAX):
        if records >= LAG_RECORDS_MAX:
            yield ClusterFinding(
                severity="warning",
                code="consumer_lags",
                subject=f"consumer {consumer}",
                sentence=f"has {records:,} unread records in topic {topic}",
                advice="see whether it runs and keeps up; forget it if it is gone for good",
                command=f"quiver consumer lag {consumer}",
            )


def _check_holds(report: ClusterReport) -> Iterator[ClusterFinding]:
    for hold in report.holds or ():
        age_ms = report.now_ms - hold.placed_ms
        yield ClusterFinding(
            severity="warning" if age_ms > HOLD_MS_MAX else "notice",
            code="hold",
            subject=f"topic {hold.topic}",
            sentence=f"hold {hold.name}{f' of {hold.owner}' * bool(hold.owner)} keeps its records from retention, "
            f"renewed {max(0, age_ms) // 1000} s ago",
            advice="its owner renews it while it runs; release it if the owner is gone",
            command=f"quiver hold release {hold.name}",
        )


def _check_moves(report: ClusterReport) -> Iterator[ClusterFinding]:
    for move in report.moves or ():
        if report.now_ms - move.begun_ms > MOVE_MS_MAX:
            place = f"{move.topic}/{move.partition_id}"
            yield ClusterFinding(
                severity="warning",
                code="move_slow",
                subject=place,
                sentence=f"its move to node {move.target} runs for {(report.now_ms - move.begun_ms) // 60_000} minutes",
                advice="see how far the new replica is, and whether its node answers",
                command=f"quiver explain {place}",
            )


def _check_latencies(report: ClusterReport) -> Iterator[ClusterFinding]:
    for node, _, metrics in report.answers():
        fsync_s = metrics.quantile("quiver_produce_stage_seconds", 0.99, count_min=SAMPLES_MIN, stage="fsync")
        if fsync_s is not None and fsync_s > FSYNC_S_MAX:
            yield ClusterFinding(
                severity="warning",
                code="fsync_slow",
                subject=f"node {node}",
                sentence=f"1 of 100 disk syncs took more than {FSYNC_S_MAX * 1000:.0f} ms since its start",
                advice="look for other load on its disk, or use a faster one: every awaited record waits for a sync",
                command="iostat -x 1",
            )
        lag_s = metrics.quantile("quiver_loop_lag_seconds", 0.99, count_min=SAMPLES_MIN)
        if lag_s is not None and lag_s > LOOP_LAG_S_MAX:
            yield ClusterFinding(
                severity="warning",
                code="loop_lags",
                subject=f"node {node}",
                sentence=f"1 of 100 turns of its event loop came more than {LOOP_LAG_S_MAX * 1000:.0f} ms late",
                advice="its processor is overloaded or one task holds the loop: see its log for stacks",
                command="quiver status",
            )


def _check_defects(report: ClusterReport) -> Iterator[ClusterFinding]:
    for node, _, metrics in report.answers():
        for code, metric, (noun, outcome), phrase in DEFECTS:
            if failures := metrics.total(metric):
                yield ClusterFinding(
                    severity="warning",
                    code=code,
                    subject=f"node {node}",
                    sentence=f"{_count(int(failures), noun)} {outcome} since its start",
                    advice=f"report it, with the log lines `{phrase}`",
                )


def _check_certificates(report: ClusterReport) -> Iterator[ClusterFinding]:
    for node, described, metrics in report.answers():
        if described.certificate_problem:
            sentence, _, advice = described.certificate_problem.partition("; ")
            yield ClusterFinding(
                severity="critical",
                code="certificate_refused",
                subject=f"node {node}",
                sentence=sentence,
                advice=advice,
            )
        end_s = metrics.total("quiver_tls_certificate_expiry_timestamp_seconds")
        days = None if end_s is None else (end_s - report.now_ms / 1000) / DAY_S
        if days is not None and days < CERTIFICATE_WARNING_DAYS:
            yield ClusterFinding(
                severity="critical" if days < CERTIFICATE_CRITICAL_DAYS else "warning",
                code="certificate_expires",
                subject=f"node {node}",
                sentence=f"its TLS certificate expires in {days:.1f} days" if days > 0 else "its certificate expired",
                advice="replace it by one that is valid for longer; the node reads the file again within ten seconds",
                command="quiver security renew CERTIFICATE",
            )


def _check_metadata(report: ClusterReport) -> Iterator[ClusterFinding]:
    for node, described, metrics in report.answers():
        lag = described.applied_index - described.stored_index
        if metrics.total("quiver_metadata_failed"):
            yield ClusterFinding(
                severity="critical",
                code="metadata_failed",
                subject=f"node {node}",
                sentence="its metadata or its database failed",
                advice="read its log; check the database's connection, room and permissions",
            )
        elif lag > DATABASE_LAG_MAX:
            yield ClusterFinding(
                severity="warning",
                code="database_lags",
                subject=f"node {node}",
                sentence=f"its metadata database lacks the last {lag:,} entries",
                advice="check that the database answers and is not overloaded",
                command="quiver status",
            )


def _check_settings(report: ClusterReport) -> Iterator[ClusterFinding]:
    by_node = {node: described.settings for node, described, _ in report.answers() if described.settings}
    for key in sorted({key for settings in by_node.values() for key in settings}):
        values: dict[str, list[NodeId]] = {}
        for node, settings in by_node.items():
            if key in settings:
                values.setdefault(settings[key], []).append(node)
        if len(values) > 1:
            shown = "; ".join(f"{value!r} on {_names(nodes)}" for value, nodes in values.items())
            yield ClusterFinding(
                severity="notice",
                code="settings_differ",
                subject=key,
                sentence=f"differs between nodes: {shown}",
                advice="set the same value on all nodes unless this is meant",
                command="quiver config docs",
            )
    lax = [node for node, settings in by_node.items() if settings.get("log.durability", "fsync") != "fsync"]
    if lax:
        yield ClusterFinding(
            severity="warning",
            code="durability_lax",
            subject=_names(lax),
            sentence="log.durability is not fsync: acknowledged records can be lost when machines lose power together",
            advice="set log.durability to fsync unless records may be lost",
        )


def _check_topics(report: ClusterReport) -> Iterator[ClusterFinding]:
    wanted = min(3, len(report.brokers()))
    few = [topic.topic for topic in report.metadata.topics if topic.replicas < wanted]
    if few:
        yield ClusterFinding(
            severity="warning",
            code="replicas_few",
            subject=_shorten(few),
            sentence=f"{_count(len(few), 'topic')} with fewer than {wanted} replicas: a lost disk may lose records",
            advice="create topics with --replicas 3, and move the records",
            command=f"quiver topic describe {few[0]}",
        )


CHECKS: dict[str, Callable[[ClusterReport], Iterable[ClusterFinding]]] = {
    "nodes": _check_nodes,
    "managers": _check_managers,
    "partitions": _check_partitions,
    "replicas": _check_replicas,
    "balance": _check_balance,
    "disks": _check_disks,
    "clocks": _check_clocks,
    "descriptors": _check_descriptors,
    "versions": _check_versions,
    "consumers": _check_consumers,
    "holds": _check_holds,
    "moves": _check_moves,
    "latencies": _check_latencies,
    "defects": _check_defects,
    "certificates": _check_certificates,
    "metadata": _check_metadata,
    "settings": _check_settings,
    "topics": _check_topics,
}
"""All checks by name, in the order in which they are made."""


def _names(nodes: Iterable[NodeId]) -> str:
    return ", ".join(f"node {node}" for node in nodes)


def _shorten(places: list[str]) -> str:
    more = len(places) - SHOWN_MAX
    return ", ".join(places[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)
