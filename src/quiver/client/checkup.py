"""Check a whole cluster: ask every node for its state, metrics and settings, and judge the answers by `checks`.

All nodes are asked at the same time with a short timeout. A node that does not answer is a finding, not an error: only
a cluster of which no node answers cannot be checked.
"""

from __future__ import annotations

import msgspec

from quiver.client.checks import CHECKS, ClusterFinding, ClusterReport, NodeReport
from quiver.client.overview import find_metadata
from quiver.errors import QuiverError, RequestError
from quiver.routing.router import Router, gather_outcomes
from quiver.wire.admin_messages import DescribeNode, ListManagers, ManagersFound, NodeDescribed
from quiver.wire.messages import NodeInfo

ANSWER_MS_MAX = 3_000
"""Timeout of one node's report, which is larger than that of `quiver status`."""
SEVERITIES = ("critical", "warning", "notice")
"""Most severe first."""


class Checkup(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking a cluster; without findings it is healthy."""

    cluster_id: str
    nodes: int
    answered: int
    partitions: int
    checks: tuple[str, ...]
    """Names of the checks that were made."""
    findings: tuple[ClusterFinding, ...]
    """The most severe first."""


async def check_cluster(router: Router) -> Checkup:
    """Ask every node and return what needs attention.

    Raises:
        UnavailableError: no node answers.
    """
    found, moves, holds, is_stale = await find_metadata(router)
    reports = await gather_outcomes(_ask_node(router, node) for node in found.nodes)
    managers = await _find_managers(router)
    report = ClusterReport(
        metadata=found,
        nodes={
            node.node: one if isinstance(one, NodeReport) else NodeReport(error=one.message)
            for node, one in zip(found.nodes, reports, strict=True)
        },
        holds=None if is_stale else holds,
        moves=None if is_stale else moves,
        managers=managers,
        is_stale=is_stale,
        now_ms=router.clock.wall_ms(),
    )
    return check(report)


def check(report: ClusterReport) -> Checkup:
    """Return the findings of all checks. Pure."""
    findings = [finding for check_one in CHECKS.values() for finding in check_one(report)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Checkup(
        cluster_id=report.metadata.cluster_id,
        nodes=len(report.nodes),
        answered=sum(node.described is not None for node in report.nodes.values()),
        partitions=sum(len(topic.partitions) for topic in report.metadata.topics),
        checks=tuple(CHECKS),
        findings=tuple(findings),
    )


async def _find_managers(router: Router) -> ManagersFound | None:
    try:
        return (await router.ask(ListManagers(), deadline=router.deadline(ANSWER_MS_MAX)))[0]
    except QuiverError:
        return None


async def _ask_node(router: Router, node: NodeInfo) -> NodeReport:
    """Ask a node for everything; one of an earlier version, which refuses that, for what it knows."""
    request = DescribeNode(with_replicas=True, with_lags=True, with_metrics=True, with_settings=True)
    deadline = router.deadline(ANSWER_MS_MAX)
    sent_ms = router.clock.wall_ms()
    described: NodeDescribed
    try:
        described = await router.ask_at(node.wire_address, request, deadline=deadline)
    except RequestError:
        plain = DescribeNode(with_replicas=True, with_lags=True)
        return NodeReport(described=await router.ask_at(node.wire_address, plain, deadline=deadline))
    received_ms = router.clock.wall_ms()
    offset_ms = described.now_ms - (sent_ms + received_ms) // 2
    return NodeReport(described=described, clock_offset_ms=offset_ms, clock_error_ms=(received_ms - sent_ms + 1) // 2)
