"""Whether all replicas of this node are in sync: what a rolling update waits for before it stops the next node.

Only the leader of a partition knows who is in sync, so the other nodes are asked, at most once in `AGE_MS_MAX` however
often the probe is called. Once all replicas were in sync, the node has caught up since its start, and nobody is asked
again: what happens later is for alerts, not for a probe.
"""

from __future__ import annotations

from typing import Final

from quiver.clock import Clock
from quiver.model import PartitionId, TopicId
from quiver.routing.router import Router, gather_outcomes
from quiver.wire.admin_messages import DescribeNode, NodeDescribed, ReplicaInfo
from quiver.wire.messages import GetMetadata

AGE_MS_MAX: Final = 1_000
ANSWER_MS_MAX: Final = 2_000
"""Time for another node to answer; one that does not is no leader."""

Key = tuple[TopicId, PartitionId]


class SyncProbe:
    """Finds the replicas of this node that are not in sync yet."""

    def __init__(self, router: Router, clock: Clock) -> None:
        self._router = router
        self._clock = clock
        self._asked_ms: int | None = None
        self._behind = 0
        self._has_caught_up = False

    async def count_behind(self, own_address: str) -> int:
        """Return how many replicas of this node are not in sync, or have no leader that could tell."""
        now_ms = self._clock.monotonic_ms()
        if self._has_caught_up or (self._asked_ms is not None and now_ms - self._asked_ms < AGE_MS_MAX):
            return self._behind
        self._asked_ms = now_ms
        deadline = self._router.deadline(ANSWER_MS_MAX)
        found = (await self._router.ask(GetMetadata(topics=()), deadline=deadline))[0]
        request = DescribeNode(with_replicas=True)
        own = await self._router.ask_at(own_address, request, deadline=deadline)
        others = [node.wire_address for node in found.nodes if node.node != own.node and node.wire_address]
        answers = await gather_outcomes(self._router.ask_at(one, request, deadline=deadline) for one in others)
        described = [answer for answer in answers if isinstance(answer, NodeDescribed)]
        self._behind = find_behind(own, described)
        self._has_caught_up = not self._behind
        return self._behind


def find_behind(own: NodeDescribed, others: list[NodeDescribed]) -> int:
    """Return how many replicas of a node are not in sync by what the leaders among all nodes say.

    A replica that is no voter yet, or any more, is being moved, and nothing waits for it.
    """
    leading: dict[Key, ReplicaInfo] = {}
    for info in (info for node in (own, *others) for info in node.replicas if info.role == "leader"):
        key = (info.topic_id, info.partition_id)
        if key not in leading or leading[key].epoch < info.epoch:
            leading[key] = info
    behind = 0
    for info in own.replicas:
        leader = leading.get((info.topic_id, info.partition_id))
        behind += leader is None or (own.node in leader.voters and own.node not in leader.in_sync)
    return behind
