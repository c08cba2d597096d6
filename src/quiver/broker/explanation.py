"""One replica in full, for `quiver explain`: its log, its followers, its last elections, and why it refuses records."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quiver.broker.replica_table import HostedReplica, PartitionKey
from quiver.clock import Clock
from quiver.config import LogSettings
from quiver.metadata import View
from quiver.model import NodeId
from quiver.partition import Replica, ReplicaStatus
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


class ReplicaExplainer:
    """Explain the replicas of one node."""

    def __init__(self, node: NodeId, *, clock: Clock, space: DiskSpace, settings: LogSettings) -> None:
        self._node = node
        self._clock = clock
        self._space = space
        self._settings = settings

    def explain(self, hosted: HostedReplica | None, view: View, key: PartitionKey) -> ReplicaExplained:
        """Return what this node knows about its replica of a partition, which may be missing."""
        if hosted is None or hosted.replica is None:
            return ReplicaExplained(
                node=self._node,
                state="missing" if hosted is None else hosted.state,
                problem="" if hosted is None else hosted.problem,
                now_ms=self._clock.wall_ms(),
            )
        return self._explain_open(hosted, hosted.replica, view, key)

    def _explain_open(self, hosted: HostedReplica, replica: Replica, view: View, key: PartitionKey) -> ReplicaExplained:
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
            held_offset=view.held_offset(*key),
            slowest=_find_slowest(replica, view, key),
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


def _find_slowest(replica: Replica, view: View, key: PartitionKey) -> tuple[CursorInfo, ...]:
    """Return the cursors that keep records, if the topic keeps records until they are consumed."""
    topic = view.topics.get(key[0])
    if topic is None or not topic.retention.until_consumed:
        return ()
    cursors = replica.state.cursors
    found = [
        CursorInfo(consumer=view.consumers[one].request_id or str(one), cursor=cursors.get(one))
        for one in view.consumers_of(key[0])
        if any(item.covers(*key) for item in view.consumers[one].registrations)
    ]
    found.sort(key=lambda item: (item.cursor is not None, item.cursor or 0))
    return tuple(found[:CURSORS_MAX])
