"""The metrics of a broker: its replicas in sums, its topics' traffic, and the latencies of its stages.

A node may hold thousands of replicas: `collect` gives up the event loop every `REPLICAS_PER_SLICE` of them. Label sets
are bounded: at most `topics_max` topics have a label of their own; the rest is summed as `other`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from quiver.broker.replica_table import ReplicaState, ReplicaTable
from quiver.config import LogSettings
from quiver.metadata import View
from quiver.metrics import OTHER, Labels, MetricFamily, counter, gauge, histogram, labelled
from quiver.model import NodeId, TopicId
from quiver.partition import Meters, Replica
from quiver.raft import Role
from quiver.record.decoded import DecodedBatchBudget
from quiver.replication import Replicator
from quiver.storage import DiskSpace, LogStatus

REPLICAS_PER_SLICE = 50
"""Replicas that are read without giving up the event loop: about 1 ms."""


class ReplicaTotals:
    """Sums over the replicas on one node."""

    def __init__(self) -> None:
        self.states = dict.fromkeys(ReplicaState, 0)
        self.led = 0
        self.leaderless = 0
        self.under_replicated = 0
        self.under_minimum = 0
        self.out_of_sync = 0
        self.log_bytes = 0
        self.segments = 0
        self.uncommitted_bytes = 0
        self.pending_bytes = 0
        self.unapplied = 0
        self.waiting = 0
        self.cursors = 0
        self.producers = 0
        self.hibernating = 0
        self.snapshot_age_ms = 0
        self.rebuilding: dict[NodeId, int] = {}
        self.rebuild_bytes: dict[NodeId, int] = {}
        self.lags: dict[NodeId, int] = {}

    def add(self, replica: Replica, *, now_ms: int, wall_ms: int) -> None:
        """Add one open replica."""
        member = replica.member
        raft, log = member.raft_status(), member.log.status()
        status = replica.status(now_ms=now_ms)
        self.leaderless += status.leader is None
        self.log_bytes += log.size_bytes
        self.segments += log.segments
        self.pending_bytes += log.pending_bytes
        self.uncommitted_bytes += raft.uncommitted_bytes
        self.unapplied += max(0, raft.commit_index - member.applied_index)
        self.waiting += status.waiting
        self.cursors += status.consumers
        self.producers += status.producers
        self.hibernating += raft.hibernating
        if member.applied_index > member.history.saved_index:
            self.snapshot_age_ms = max(self.snapshot_age_ms, wall_ms - member.history.saved_ms)
        if status.role is not Role.LEADER:
            return
        self.led += 1
        missing = len(set(status.voters) - set(status.in_sync))
        self.out_of_sync += missing
        self.under_replicated += missing > 0
        self.under_minimum += len(status.in_sync) * 2 <= len(status.voters)
        for peer in raft.peers:
            behind = max(0, raft.last_index - peer.match_index)
            self.lags[peer.node] = self.lags.get(peer.node, 0) + behind
            if peer.node in status.learners:
                self.rebuilding[peer.node] = self.rebuilding.get(peer.node, 0) + 1
                left = estimate_bytes(log, entries=behind)
                self.rebuild_bytes[peer.node] = self.rebuild_bytes.get(peer.node, 0) + left


def estimate_bytes(log: LogStatus, *, entries: int) -> int:
    """Return about how large the last `entries` of a log are, as if all of its entries were equally large."""
    retained = log.end_index - log.first_index
    return log.size_bytes * min(entries, retained) // retained if retained else 0


async def collect(table: ReplicaTable, *, now_ms: int, wall_ms: int) -> ReplicaTotals:
    """Return the sums over all replicas of this node."""
    totals = ReplicaTotals()
    for number, hosted in enumerate(table):
        if number % REPLICAS_PER_SLICE == REPLICAS_PER_SLICE - 1:
            await asyncio.sleep(0)
        totals.states[hosted.state] += 1
        if hosted.replica is not None:
            totals.add(hosted.replica, now_ms=now_ms, wall_ms=wall_ms)
    return totals


def describe_totals(totals: ReplicaTotals) -> Iterable[MetricFamily]:
    """Return the metrics of the replicas."""
    replicas = sum(totals.states.values())
    return (
        gauge("quiver_partition_replicas", "Replicas of partitions on this node.", replicas),
        gauge("quiver_partition_leads", "Partitions whose leader is this node.", totals.led),
        gauge("quiver_partition_not_ready", "Replicas that are not open.", replicas - totals.states[ReplicaState.OPEN]),
        labelled(
            "quiver_partition_replica_states",
            "gauge",
            "Replicas on this node by state.",
            [((("state", state.value),), count) for state, count in totals.states.items()],
        ),
        gauge("quiver_partition_log_bytes", "Bytes of all replicas' logs.", totals.log_bytes),
        gauge("quiver_partition_segments", "Segment files of all replicas' logs.", totals.segments),
        gauge("quiver_partition_leaderless", "Replicas on this node that know no leader.", totals.leaderless),
        gauge(
            "quiver_partition_under_replicated",
            "Partitions led by this node with a voter that is not in sync.",
            totals.under_replicated,
        ),
        gauge(
            "quiver_partition_under_majority",
            "Partitions led by this node whose in-sync voters are no majority: writes wait.",
            totals.under_minimum,
        ),
        gauge(
            "quiver_partition_out_of_sync",
            "Follower replicas that are behind leaders on this node.",
            totals.out_of_sync,
        ),
        gauge(
            "quiver_partition_uncommitted_bytes",
            "Bytes that leaders on this node have accepted and not committed.",
            totals.uncommitted_bytes,
        ),
        gauge(
            "quiver_partition_unapplied_entries",
            "Committed entries that replicas on this node have not applied.",
            totals.unapplied,
        ),
        gauge("quiver_partition_pending_bytes", "Bytes that wait for this node's disk.", totals.pending_bytes),
        gauge("quiver_partition_waiting_reads", "Long polls that wait for records.", totals.waiting),
        gauge("quiver_partition_cursors", "Cursors in all replicas on this node.", totals.cursors),
        gauge("quiver_partition_producers", "Producers that replicas on this node remember.", totals.producers),
        gauge("quiver_partition_hibernating", "Replicas of idle partitions without timers.", totals.hibernating),
        gauge(
            "quiver_partition_snapshot_age_seconds",
            "Age of the oldest checkpoint that does not cover all applied entries.",
            totals.snapshot_age_ms / 1000,
        ),
        labelled(
            "quiver_replica_lag_entries",
            "gauge",
            "Entries that replicas on another node lack of partitions led by this node.",
            [((("peer", str(node)),), lag) for node, lag in sorted(totals.lags.items())],
        ),
        labelled(
            "quiver_rebuild_replicas",
            "gauge",
            "Replicas on another node that leaders on this node are rebuilding.",
            [((("peer", str(node)),), count) for node, count in sorted(totals.rebuilding.items())],
        ),
        labelled(
            "quiver_rebuild_remaining_bytes",
            "gauge",
            "About how many bytes these replicas still lack.",
            [((("peer", str(node)),), left) for node, left in sorted(totals.rebuild_bytes.items())],
        ),
    )


def describe_replication(replicator: Replicator, meters: Meters) -> Iterable[MetricFamily]:
    """Return latencies by stage, elections, cache hits, and messages between nodes."""
    counters, timings = replicator.counters, replicator.timings
    stages = (
        ("queue", timings.queue),
        ("append", timings.write),
        ("fsync", timings.fsync),
        ("replicate", counters.replicate),
        ("commit", counters.commit),
    )
    consume_stages = (("read", meters.timings.read), ("commit", meters.timings.commit))
    peers = replicator.peers_status()
    return (
        histogram(
            "quiver_produce_stage_seconds",
            "Time that writes spend in each stage; one value per group of batches.",
            {(("stage", name),): one for name, one in stages},
        ),
        histogram(
            "quiver_consume_stage_seconds",
            "Time that reads spend in each stage, without long polls.",
            {(("stage", name),): one for name, one in consume_stages},
        ),
        counter("quiver_campaigns_total", "Elections that replicas on this node began.", counters.campaigns),
        counter("quiver_elections_total", "Elections that replicas on this node won.", counters.elections_won),
        counter(
            "quiver_leaderships_lost_total",
            "Leaderships that replicas on this node lost or transferred.",
            counters.leaderships_lost,
        ),
        counter("quiver_leader_transfers_total", "Leadership transfers that this node began.", counters.transfers),
        counter(
            "quiver_rebuild_sent_bytes_total",
            "Bytes that this node read from its disk for replicas that it rebuilds.",
            replicator.catch_up_limiter.sent_bytes,
        ),
        gauge(
            "quiver_rebuild_bytes_per_second",
            "Rate at which this node may rebuild replicas now.",
            replicator.catch_up_limiter.bytes_per_second,
        ),
        counter("quiver_tail_cache_hits_total", "Reads of records that memory answered.", replicator.tails.hits),
        counter("quiver_tail_cache_misses_total", "Reads of records that went to the disk.", replicator.tails.misses),
        gauge("quiver_tail_cache_bytes", "Memory of all tail caches.", replicator.tails.size_bytes),
        counter("quiver_replication_envelopes_total", "Envelopes sent to other nodes.", replicator.envelopes_sent),
        counter(
            "quiver_replication_envelopes_refused_total",
            "Malformed envelopes from other nodes.",
            replicator.envelopes_refused,
        ),
        counter(
            "quiver_replication_messages_refused_total",
            "Messages of nodes that are no members, or of terms that no election can have reached.",
            replicator.messages_refused,
        ),
        labelled(
            "quiver_peer_alive",
            "gauge",
            "Whether another node was heard within the election timeout.",
            [((("peer", str(peer.node)),), peer.is_alive) for peer in peers],
        ),
        labelled(
            "quiver_peer_silence_seconds",
            "gauge",
            "Time since another node was heard.",
            [((("peer", str(peer.node)),), peer.silent_ms / 1000) for peer in peers],
        ),
    )


def _describe_queues(meters: Meters, shown: dict[TopicId, str]) -> Iterator[MetricFamily]:
    """Yield what the work queues of each topic have done; topics without queues have no samples."""
    for field, sentence in (
        ("leased", "Records that leaders on this node leased to workers, redelivered ones included."),
        ("redelivered", "Records leased again: not acknowledged in time, or returned."),
        ("acknowledged", "Records that workers acknowledged."),
        ("dead", "Records that became dead letters."),
        ("stale", "Receipts refused because the record had been leased again, or settled."),
    ):
        values: dict[Labels, float] = {}
        for topic_id, meter in meters.topics.items():
            if meter.queues.is_used:
                labels: Labels = (("topic", shown.get(topic_id, OTHER)),)
                values[labels] = values.get(labels, 0.0) + getattr(meter.queues, field)
        yield labelled(f"quiver_queue_{field}_records_total", "counter", sentence, sorted(values.items()))


def describe_topics(meters: Meters, view: View, *, topics_max: int) -> Iterator[MetricFamily]:
    """Return the traffic by topic, of at most `topics_max` topics and the sum of the rest."""
    meters.forget(view.topics)
    shown = {topic_id: view.topics[topic_id].name for topic_id in meters.labelled(topics_max)}
    for field, sentence in (
        ("received_records", "Records that leaders on this node appended."),
        ("received_bytes", "Bytes of batches that leaders on this node appended."),
        ("sent_records", "Records that this node sent to readers and consumers."),
        ("sent_bytes", "Bytes of batches that this node sent to readers and consumers."),
    ):
        values: dict[Labels, float] = {}
        for topic_id, meter in meters.topics.items():
            labels: Labels = (("topic", shown.get(topic_id, OTHER)),)
            values[labels] = values.get(labels, 0.0) + getattr(meter, field)
        yield labelled(f"quiver_topic_{field}_total", "counter", sentence, sorted(values.items()))
    yield from _describe_queues(meters, shown)


def describe_disk(space: DiskSpace, settings: LogSettings) -> Iterator[MetricFamily]:
    """Yield the room on the disk of the replicas; the free bytes are known after the first check."""
    if space.free_bytes is not None:
        yield gauge("quiver_disk_free_bytes", "Free bytes on the disk of the data directory.", space.free_bytes)
    yield gauge(
        "quiver_disk_reserved_bytes",
        "Free bytes below which records are refused (log.free_bytes_min).",
        settings.free_bytes_min,
    )
    yield gauge("quiver_disk_waiting_writes", "Writes that wait because the disk is full.", space.stalled)
    yield counter(
        "quiver_disk_refused_appends_total",
        "Messages with entries or snapshots of leaders that were not stored for want of room.",
        space.refused_appends,
    )


def describe_decoded(budget: DecodedBatchBudget) -> Iterable[MetricFamily]:
    """Return the use of the memory for decoded batches."""
    return (
        gauge("quiver_decoded_cached_bytes", "Memory of the decoded batches in caches.", budget.cached_bytes),
        gauge(
            "quiver_decoded_reserved_bytes",
            "Memory that requests in progress have reserved for the batches that they decode.",
            budget.reserved_bytes,
        ),
        counter(
            "quiver_decoded_refused_total",
            "Reservations refused because requests in progress had reserved all memory for decoded batches.",
            budget.refused,
        ),
    )
