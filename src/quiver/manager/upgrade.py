"""The primary's part of an upgrade: which program each node runs, and raising the cluster's feature level.

Nodes report their program with every registration and heartbeat. The primary keeps the reports in memory: a new primary
has them after one heartbeat interval. They are no replicated state, because below level 2 the metadata cannot hold
them; the command that raises the level carries them, and `apply` refuses it unless it names every node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

from quiver import __version__
from quiver.clock import Clock
from quiver.errors import ConflictError, OutOfRangeError
from quiver.features import LEVEL_MIN, explain_level
from quiver.metadata import BrokerState, MetadataStore, RaiseLevel
from quiver.metadata.commands import NodeLevel
from quiver.model import NodeId
from quiver.tasks import timeout
from quiver.wire.admin_messages import ClusterUpgraded, NodeProgram, UpgradeCluster
from quiver.wire.messages import BrokerHeartbeatRequest, SubmitCommand

ProgramReport = SubmitCommand | BrokerHeartbeatRequest
"""The requests in which a node names its program."""
_SILENT = (BrokerState.SUSPECT, BrokerState.DEAD)


class ClusterUpgrade:
    """The programs of the nodes, and the upgrade of the cluster to what they all know."""

    def __init__(self, store: MetadataStore, *, clock: Clock, report_ms_max: int) -> None:
        self._store = store
        self._clock = clock
        self._report_ms_max = report_ms_max
        self._programs: dict[NodeId, NodeProgram] = {}
        self._reported = asyncio.Event()

    def check(self, report: ProgramReport) -> None:
        """Check the program of a node that sent a request.

        Raises:
            ConflictError: not done; the program is too old for this cluster (`program_too_old`).
        """
        level = self._store.feature_level
        if report.level_max < level:
            raise ConflictError(
                f"not done: {explain_level(level, level_max=report.level_max, program=__version__)}",
                code="program_too_old",
            )

    def record(self, node: NodeId, report: ProgramReport) -> None:
        """Record the program of a node that is registered."""
        self._programs[node] = NodeProgram(node=node, level_max=report.level_max, program=report.program)
        self._reported.set()

    def forget(self) -> None:
        """Forget all reports: this manager is no longer the primary, which the nodes report to."""
        self._programs.clear()

    async def carry_out(self, request: UpgradeCluster) -> ClusterUpgraded:
        """Raise the feature level.

        Raises:
            OutOfRangeError: not done; this program does not know the level, or it would be lowered.
            ConflictError: not done; a node's program is too old or not known (`nodes_too_old`).
        """
        before = self._store.feature_level
        level = self._store.level_max if request.level is None else request.level
        self._check(level)
        await self._wait_reports()
        nodes = tuple(self._list_programs())
        refusal = _explain_missing(nodes, level) if level > before else ""
        if refusal and not request.is_dry_run:
            raise ConflictError(f"not done: {refusal}", code="nodes_too_old")
        if level > before and not request.is_dry_run:
            known = tuple(NodeLevel(item.node, item.level_max or LEVEL_MIN) for item in nodes)
            await self._store.submit(RaiseLevel(now_ms=self._clock.wall_ms(), feature_level=level, nodes=known))
        return ClusterUpgraded(
            level=level, level_before=before, index=self._store.applied_index, nodes=nodes, refusal=refusal
        )

    def _check(self, level: int) -> None:
        current, known = self._store.feature_level, self._store.level_max
        if level > known:
            message = (
                f"not done: the primary knows feature levels up to {known}, not {level}: upgrade the program first"
            )
            raise OutOfRangeError(message, code="bad_level")
        if level < current:
            message = f"not done: the cluster is at feature level {current}, which cannot be lowered to {level}"
            raise OutOfRangeError(message, code="bad_level")

    async def _wait_reports(self) -> None:
        """Wait until every node has reported, but not longer than a node needs for a heartbeat."""
        with suppress(TimeoutError):
            async with timeout(self._report_ms_max / 1000):
                while any(item.level_max is None for item in self._list_programs(with_silent=False)):
                    self._reported.clear()
                    await self._reported.wait()

    def _list_programs(self, *, with_silent: bool = True) -> Iterator[NodeProgram]:
        """Yield the program of each node; that of a silent node is not known: it may return with another one."""
        for node, broker in sorted(self._store.view().brokers.items()):
            if broker.state is BrokerState.REMOVED:
                continue
            if broker.state not in _SILENT:
                yield self._programs.get(node, NodeProgram(node=node))
            elif with_silent:
                yield NodeProgram(node=node)


def _explain_missing(nodes: tuple[NodeProgram, ...], level: int) -> str:
    """Return why the level cannot be raised, naming the nodes; empty if it can."""
    silent = [str(item.node) for item in nodes if item.level_max is None]
    old = [
        f"node {item.node} (quiver {item.program or 'from before feature levels'}) knows levels up to {item.level_max}"
        for item in nodes
        if item.level_max is not None and item.level_max < level
    ]
    reasons = [*old, *([f"node {', '.join(silent)} is silent, so its program is not known"] if silent else [])]
    if not reasons:
        return ""
    return (
        f"feature level {level} needs a newer program on every node: {'; '.join(reasons)}; upgrade or remove it first"
    )
