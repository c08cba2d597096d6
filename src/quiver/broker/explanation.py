"""One replica in full, for `quiver explain`: its log, its followers, its last elections, and why it refuses records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from heapq import nsmallest
from itertools import islice

import msgspec

from quiver.broker.replica_table import HostedReplica, PartitionKey
from quiver.clock import Clock
from quiver.config import LogSettings
from quiver.metadata import View
from quiver.model import ConsumerId, NodeId
from quiver.partition import PartitionState, Replica, ReplicaStatus
from quiver.raft import RaftStatus, Role
from quiver.storage import DiskSpace
from quiver.wire.explain_messages import (
    CursorInfo,
    FollowerInfo,
    ObstacleInfo,
    ReplicaEventInfo,
    ReplicaExplained,
)

CURSORS_MAX = 5
"""Cursors that an explanation shows: those that are furthest behind."""
CONSUMERS_PER_STEP = 2_000
"""Consumers compared before others get a turn of the event loop."""


class ReplicaExplainer:
    """Explain the replicas of one node."""

    def __init__(self, node: NodeId, *, clock: Clock, space: DiskSpace, settings: LogSettings) -> None:
        self._node = node
        self._clock = clock
        self._space = space
        self._settings = settings

    async def explain(self, hosted: HostedReplica | None, view: View, key: PartitionKey) -> ReplicaExplained:
        """Return what this node knows about its replica of a partition, which may be missing."""
        slowest: tuple[CursorInfo, ...] = ()
        if hosted is not None and hosted.replica is not None:
            slowest = await find_slowest(hosted.replica.state, view, key)
        if hosted is None or hosted.replica is None:  # perhaps closed meanwhile
            return ReplicaExplained(
                node=self._node,
                state="missing" if hosted is None else hosted.state,
                problem="" if hosted is None else hosted.problem,
                now_ms=self._clock.wall_ms(),
            )
        return self._explain_open(hosted, hosted.replica, view, slowest)

    def _explain_open(
        self, hosted: HostedReplica, replica: Replica, view: View, slowest: tuple[CursorInfo, ...]
    ) -> ReplicaExplained:
        now_ms, member = self._clock.monotonic_ms(), replica.member
        status, raft, log = replica.status(now_ms=now_ms), member.raft_status(), member.log.status()
        return ReplicaExplained(
            node=self._node,
            state=hosted.state,
            problem=hosted.problem,
            group=hosted.group,
            role=status.role,
            epoch=status.epoch,
            leader=status.leader,
            since_ms=member.history.since_ms,
            is_ready=status.is_ready,
            is_hibernating=raft.hibernating,
            transfer_to=raft.transfer_to,
            first_index=log.first_index,
            end_index=log.end_index,
            durable_index=raft.durable_index,
            commit_index=raft.commit_index,
            applied_index=member.applied_index,
            first_offset=status.first_offset,
            log_end_offset=log.end_offset,
            high_watermark=status.end_offset,
            bytes=status.size_bytes,
            voters=status.voters,
            learners=status.learners,
            in_sync=status.in_sync,
            followers=tuple(
                FollowerInfo(
                    node=peer.node,
                    state="full" if peer.is_full else peer.state.value,
                    match_index=peer.match_index,
                    silent_ms=max(0, now_ms - peer.heard_ms),
                )
                for peer in raft.peers
            ),
            held_offset=view.held_offset(*hosted.key),
            slowest=slowest,
            free_bytes=self._space.free_bytes,
            obstacles=tuple(self._find_obstacles(status, raft, is_full=member.is_full)),
            events=tuple(
                msgspec.convert(event, ReplicaEventInfo, from_attributes=True) for event in member.history.events
            ),
            now_ms=self._clock.wall_ms(),
        )

    def _find_obstacles(self, status: ReplicaStatus, raft: RaftStatus, *, is_full: bool) -> Iterator[ObstacleInfo]:
        """Yield why a leader does not accept records now, or why a follower does not store them."""
        if status.role is not Role.LEADER:
            if is_full:
                yield ObstacleInfo(code="disk_full", sentence=f"{self._describe_room()}: it stores no more entries")
            return
        majority = len(status.voters) // 2 + 1
        if len(status.in_sync) < majority:
            sentence = f"{len(status.in_sync)} of {len(status.voters)} voters are in sync, {majority} are needed"
            yield ObstacleInfo(code="not_enough_replicas", sentence=f"{sentence}: records wait to be committed")
        if not status.is_ready:
            sentence = "it has not committed an entry in its own epoch yet"
            yield ObstacleInfo(code="not_ready", sentence=sentence)
        if raft.transfer_to is not None:
            sentence = f"it is transferring its leadership to node {raft.transfer_to}"
            yield ObstacleInfo(code="transferring", sentence=sentence)
        free_bytes = self._space.free_bytes
        if self._space.stalled or (free_bytes is not None and free_bytes < self._settings.free_bytes_min):
            yield ObstacleInfo(code="disk_full", sentence=self._describe_room())
        low = [peer.node for peer in raft.peers if peer.is_low and peer.node in status.voters]
        if len(status.voters) - len(low) < majority:
            sentence = f"the disks of nodes {', '.join(map(str, low))} are nearly full, so that no majority has room"
            yield ObstacleInfo(code="disk_full", sentence=sentence)

    def _describe_room(self) -> str:
        found = "no room" if self._space.stalled else f"{self._space.free_bytes} free bytes"
        return f"its disk has {found}, log.free_bytes_min is {self._settings.free_bytes_min}"


async def find_slowest(state: PartitionState, view: View, key: PartitionKey) -> tuple[CursorInfo, ...]:
    """Return the cursors that keep records, if the topic keeps records until they are consumed; in small steps."""
    topic = view.topics.get(key[0])
    if topic is None or not topic.retention.until_consumed:
        return ()
    slowest: list[ConsumerId] = []
    left = iter(view.consumers_on(*key))
    while step := list(islice(left, CONSUMERS_PER_STEP)):
        slowest = nsmallest(CURSORS_MAX, [*slowest, *step], key=partial(_rank, state))
        await asyncio.sleep(0)
    return tuple(
        CursorInfo(consumer=view.consumers[one].request_id or str(one), cursor=state.cursors.get(one))
        for one in slowest
    )


def _rank(state: PartitionState, consumer_id: ConsumerId) -> tuple[bool, int, ConsumerId]:
    """Return what consumers are ordered by: those without a cursor first, then by cursor."""
    cursor = state.cursors.get(consumer_id)
    return cursor is not None, cursor or 0, consumer_id
