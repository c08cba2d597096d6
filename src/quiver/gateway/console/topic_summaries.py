"""The list of all topics with sizes and rates, computed at most once a second for all who ask.

All nodes are asked for the partitions that they lead. With very many partitions that takes a while: the list is then
computed more rarely, so that it never costs more than a small share of a core.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

from quiver.clock import Clock
from quiver.errors import QuiverError
from quiver.gateway.console.contract import TopicSummariesAnswer, TopicSummaryItem
from quiver.gateway.contract import RetentionBody
from quiver.metadata import BrokerState, TopicRow, View
from quiver.model import PartitionId, TopicId
from quiver.routing.router import Router, gather_outcomes
from quiver.wire.admin_messages import DescribeNode, ReplicaInfo

AGE_MS_MIN: Final = 1_000
"""Age up to which a list is reused."""
COST_SHARE_MAX: Final = 0.05
"""Share of a core that computing lists may take."""
ANSWER_MS_MAX: Final = 5_000
"""Timeout of one node's report."""
RATE_MS_MAX: Final = 60_000
"""Rates are not computed over more than this: somebody opened the list again after a while."""

Leaders = dict[tuple[TopicId, PartitionId], ReplicaInfo]


class TopicSummaries:
    """Summarize all topics, for all who ask at the same time."""

    def __init__(self, router: Router, view: Callable[[], View], clock: Clock) -> None:
        self._router = router
        self._view = view
        self._clock = clock
        self._computing = asyncio.Lock()
        self._until_ms = 0
        self._answer: TopicSummariesAnswer | None = None
        self._before: tuple[int, Leaders] | None = None

    async def find(self) -> TopicSummariesAnswer:
        """Return the list, as it is now or was at most a second ago."""
        async with self._computing:
            if self._answer is None or self._clock.monotonic_ms() >= self._until_ms:
                cpu_s = time.thread_time()
                self._answer = await self._compute()
                cost_ms = 1000 * (time.thread_time() - cpu_s) / COST_SHARE_MAX
                self._until_ms = self._clock.monotonic_ms() + max(AGE_MS_MIN, round(cost_ms))
            return self._answer

    async def _compute(self) -> TopicSummariesAnswer:
        view = self._view()
        brokers = [row for row in view.brokers.values() if row.state is not BrokerState.REMOVED]
        request, deadline = DescribeNode(with_replicas=True), self._router.deadline(ANSWER_MS_MAX)
        answers = await gather_outcomes(
            self._router.ask_at(row.wire_address, request, deadline=deadline) for row in brokers
        )
        leaders: Leaders = {}
        for answer in answers:
            if isinstance(answer, QuiverError):
                continue
            for replica in answer.replicas:
                key = (replica.topic_id, replica.partition_id)
                known = leaders.get(key)
                if replica.leader == answer.node and (known is None or known.epoch < replica.epoch):
                    leaders[key] = replica
        now_ms = self._clock.wall_ms()
        before, self._before = self._before, (now_ms, leaders)
        if before is not None and now_ms - before[0] > RATE_MS_MAX:
            before = None
        topics = [summarize_topic(topic, leaders, before=before, now_ms=now_ms) for topic in view.active_topics()]
        return TopicSummariesAnswer(time_ms=now_ms, topics=topics)


def summarize_topic(
    topic: TopicRow, leaders: Leaders, *, before: tuple[int, Leaders] | None, now_ms: int
) -> TopicSummaryItem:
    """Return a topic with the sums over its partitions, and rates since `before`. Pure."""
    keys = [(topic.topic_id, PartitionId(number)) for number in range(topic.partitions)]
    led = [leaders[key] for key in keys if key in leaders]
    retention = topic.retention
    return TopicSummaryItem(
        topic=topic.name,
        partitions=topic.partitions,
        replicas=topic.replicas,
        retention=RetentionBody(ms=retention.ms, bytes=retention.bytes, until_consumed=retention.until_consumed),
        records=sum(one.end_offset - one.first_offset for one in led) if led else None,
        bytes=sum(one.bytes for one in led) if led else None,
        records_per_second=_rate(led, before, now_ms),
        under_replicated=sum(len(one.in_sync) < len(one.voters) for one in led),
        leaderless=topic.partitions - len(led),
        created_ms=topic.created_ms,
        encrypted=topic.is_encrypted,
    )


def _rate(led: Iterable[ReplicaInfo], before: tuple[int, Leaders] | None, now_ms: int) -> float | None:
    """Return records per second over the partitions that reported both times."""
    if before is None or now_ms <= before[0]:
        return None
    passed_s = (now_ms - before[0]) / 1000
    both = ((one, before[1].get((one.topic_id, one.partition_id))) for one in led)
    appended = [max(0, one.end_offset - old.end_offset) for one, old in both if old is not None]
    return round(sum(appended) / passed_s, 2) if appended else None
