"""What a console shows of the cluster at a glance: the reports of all nodes, put together once for all consoles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from quiver.clock import Clock
from quiver.errors import QuiverError
from quiver.gateway.console.events import ConsoleEvent
from quiver.gateway.console.health import ConsoleHealth, NodeFacts, judge_health
from quiver.gateway.console.meter import SERIES, NodeMeter, carry, combine, sum_by_peer, total
from quiver.metadata import BrokerRow, BrokerState, View
from quiver.model import NodeId
from quiver.routing.router import Router, gather_outcomes
from quiver.wire.admin_messages import DescribeNode, HistorySample, NodeDescribed

ANSWER_MS_MAX: Final = 2_000
"""Timeout of one node's report; a node that is later is shown as not answering."""
CARRIED_MS_MAX: Final = 5_000
"""How long the last numbers of a node that does not answer are part of the cluster's sums."""
MOVES_MAX: Final = 100
"""Moves in one update."""
LAGS_MAX: Final = 20
"""Consumers in one update."""


class ConsoleNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node: its metadata, and its own report if it answers."""

    node: int
    state: str
    roles: list[str]
    http_address: str
    wire_address: str
    rack: str = ""
    is_alive: bool = False
    is_primary: bool = False
    is_ready: bool = False
    version: str = ""
    uptime_ms: int | None = None
    leads: int | None = None
    replicas: int | None = None
    log_bytes: float | None = None
    problem: str = ""
    security_mode: str = ""
    """How the node is protected: `development`, `secure` or `insecure`."""
    rebuild_replicas: int = 0
    """Replicas on this node that leaders are rebuilding."""
    rebuild_bytes: float = 0
    """About how many bytes these replicas still lack."""
    values: tuple[float | None, ...] = ()
    """In the order of `SERIES`."""


class ConsoleMove(msgspec.Struct, frozen=True, kw_only=True):
    """A replica on its way to another node."""

    topic: str
    partition: int
    source: int | None
    target: int
    state: str
    begun_ms: int


class ConsoleUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent to all consoles."""

    time_ms: int
    served_by: int
    cluster_id: str
    primary: int | None
    feature_level: int
    security_mode: str
    health: ConsoleHealth
    series: tuple[str, ...]
    sample: tuple[float | None, ...]
    lags: list[tuple[str, str, int]]
    nodes: list[ConsoleNode]
    topics: int
    partitions: int
    producers: int
    consumers: int
    holds: int
    is_rebalancing: bool
    moves: list[ConsoleMove]
    moves_total: int
    moves_ended: int
    """Moves that were completed or cancelled since the cluster was formed."""
    events: list[ConsoleEvent]
    """The newest events; a console that wants more asks for them."""


class OverviewCollector:
    """Ask all nodes, and put their reports together."""

    def __init__(self, router: Router, view: Callable[[], View], clock: Clock, *, node: NodeId) -> None:
        self._router = router
        self._view = view
        self._clock = clock
        self._node = node
        self._meters: dict[NodeId, NodeMeter] = {}
        self._measured: dict[NodeId, tuple[int, HistorySample]] = {}

    async def collect(self, events: list[ConsoleEvent]) -> ConsoleUpdate:
        """Return the state of the cluster now."""
        view = self._view()
        brokers = [row for _, row in sorted(view.brokers.items()) if row.state is not BrokerState.REMOVED]
        answers = await gather_outcomes(self._describe(row) for row in brokers)
        described = {
            row.broker_id: answer
            for row, answer in zip(brokers, answers, strict=True)
            if not isinstance(answer, QuiverError)
        }
        now_ms = self._clock.wall_ms()
        samples = {node: self._measure(node, answer) for node, answer in described.items()}
        for gone in self._meters.keys() - {row.broker_id for row in brokers}:
            del self._meters[gone]
        whole = combine([*samples.values(), *self._carried(samples, now_ms)], time_ms=now_ms)
        return _summarize(view, brokers, described, samples, whole, events=events, served_by=self._node)

    def forget(self) -> None:
        """Forget the last measurements: what comes next is not measured against them."""
        self._meters.clear()
        self._measured.clear()

    def _carried(self, samples: Mapping[NodeId, HistorySample], now_ms: int) -> list[HistorySample]:
        """Return the last samples of nodes that do not answer just now: sums without them would dip."""
        self._measured |= {node: (now_ms, sample) for node, sample in samples.items()}
        self._measured = {node: one for node, one in self._measured.items() if 0 <= now_ms - one[0] <= CARRIED_MS_MAX}
        return [carry(sample) for node, (_, sample) in self._measured.items() if node not in samples]

    async def _describe(self, row: BrokerRow) -> NodeDescribed:
        deadline = self._router.deadline(ANSWER_MS_MAX)
        return await self._router.ask_at(row.wire_address, DescribeNode(with_metrics=True), deadline=deadline)

    def _measure(self, node: NodeId, answer: NodeDescribed) -> HistorySample:
        meter = self._meters.get(node)
        if meter is None:
            meter = self._meters[node] = NodeMeter()
        return meter.measure(answer.metrics, time_ms=answer.now_ms)


def _summarize(
    view: View,
    brokers: list[BrokerRow],
    described: Mapping[NodeId, NodeDescribed],
    samples: Mapping[NodeId, HistorySample],
    whole: HistorySample,
    *,
    events: list[ConsoleEvent],
    served_by: NodeId,
) -> ConsoleUpdate:
    primaries = {answer.node for answer in described.values() if answer.primary == answer.node}
    own = described.get(served_by)
    primary = max(primaries, default=None) if own is None else own.primary
    topics = [row for row in view.topics.values() if row.state == "active"]
    partitions = sum(row.partitions for row in topics)
    health = judge_health(
        [_find_facts(row, described.get(row.broker_id)) for row in brokers],
        primary=primary,
        partitions=partitions,
        under_replicated=int(whole.values[SERIES.index("under_replicated")] or 0),
        leaderless=int(whole.values[SERIES.index("leaderless")] or 0),
        moves=len(view.moves),
    )
    return ConsoleUpdate(
        time_ms=whole.time_ms,
        served_by=served_by,
        cluster_id=view.cluster_id,
        primary=primary,
        feature_level=view.feature_level,
        security_mode="" if own is None else own.security_mode,
        health=health,
        series=SERIES,
        sample=whole.values,
        lags=list(whole.lags[:LAGS_MAX]),
        nodes=_show_nodes(brokers, described, samples, primary=primary, now_ms=whole.time_ms),
        topics=len(topics),
        partitions=partitions,
        producers=len(view.producers),
        consumers=len(view.consumers),
        holds=len(view.holds),
        is_rebalancing=view.counters.is_rebalancing,
        moves=[
            ConsoleMove(
                topic=topic.name if (topic := view.topics.get(move.topic_id)) else f"id {move.topic_id}",
                partition=move.partition_id,
                source=move.source,
                target=move.target,
                state=move.state,
                begun_ms=move.begun_ms,
            )
            for _, move in sorted(view.moves.items())[:MOVES_MAX]
        ],
        moves_total=len(view.moves),
        moves_ended=view.counters.next_move_id - 1 - len(view.moves),
        events=events,
    )


def _find_facts(row: BrokerRow, answer: NodeDescribed | None) -> NodeFacts:
    if answer is None:
        return NodeFacts(node=row.broker_id, state=row.state, is_alive=False)
    values = {family.name: family for family in answer.metrics}
    return NodeFacts(
        node=row.broker_id,
        state=row.state,
        is_alive=True,
        is_ready=answer.is_ready,
        unready=answer.unready,
        problems=len(answer.problems),
        disk_free_bytes=total(values.get("quiver_disk_free_bytes")),
        disk_reserved_bytes=total(values.get("quiver_disk_reserved_bytes")) or 0,
    )


def _show_nodes(
    brokers: list[BrokerRow],
    described: Mapping[NodeId, NodeDescribed],
    samples: Mapping[NodeId, HistorySample],
    *,
    primary: NodeId | None,
    now_ms: int,
) -> list[ConsoleNode]:
    families = [family for answer in described.values() for family in answer.metrics]
    replicas, lacking = (sum_by_peer(families, f"quiver_rebuild_{name}") for name in ("replicas", "remaining_bytes"))
    return [
        msgspec.structs.replace(
            _show_node(row, described.get(node), samples.get(node), primary=primary, now_ms=now_ms),
            rebuild_replicas=int(replicas.get(node, 0)),
            rebuild_bytes=lacking.get(node, 0),
        )
        for node, row in ((row.broker_id, row) for row in brokers)
    ]


def _show_node(
    row: BrokerRow,
    answer: NodeDescribed | None,
    sample: HistorySample | None,
    *,
    primary: NodeId | None,
    now_ms: int,
) -> ConsoleNode:
    shown = ConsoleNode(
        node=row.broker_id,
        state=row.state,
        roles=list(row.roles),
        http_address=row.http_address,
        wire_address=row.wire_address,
        rack=row.rack,
        is_primary=row.broker_id == primary,
    )
    if answer is None or sample is None:
        return shown
    values = {family.name: family for family in answer.metrics}
    leads, replicas = (total(values.get(f"quiver_partition_{name}")) for name in ("leads", "replicas"))
    return msgspec.structs.replace(
        shown,
        is_alive=True,
        is_ready=answer.is_ready,
        version=answer.version,
        uptime_ms=max(0, now_ms - answer.started_ms),
        leads=None if leads is None else int(leads),
        replicas=None if replicas is None else int(replicas),
        log_bytes=total(values.get("quiver_partition_log_bytes")),
        problem=answer.unready or (answer.problems[0].problem if answer.problems else ""),
        security_mode=answer.security_mode,
        values=sample.values,
    )
