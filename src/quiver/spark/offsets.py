"""Stream offsets, and the ranges of records between two of them. Pure.

Spark stores `StreamOffset` in its checkpoint as JSON:

    {"v": 1, "topics": {"logs": {"id": "quiver/7/1731672000000", "p": {"0": 123}, "lost": 0}}}

`id` is the topic's incarnation: cluster id, topic id and creation time. It differs after the topic was deleted and
recreated, and on another cluster, so a checkpoint is never applied to a different topic. `p` has the next offset to
read per partition. `lost` counts records that retention removed before they were read (`failOnDataLoss=false`).

Ranges are half-open. Planning splits a range only into parts of at least `SPLIT_RECORDS_MIN` records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec

from quiver.client.ranges import TopicOffsets
from quiver.errors import RequestError

VERSION: Final = 1
SPLIT_RECORDS_MIN: Final = 20_000
"""Minimum records per task: below that, starting a task costs more than it saves."""


class TopicOffset(msgspec.Struct, frozen=True, kw_only=True):
    """Next offsets to read in one incarnation of a topic."""

    id: str
    p: dict[int, int]
    lost: int = 0


class StreamOffset(msgspec.Struct, frozen=True, kw_only=True):
    """Next offsets to read of a stream, by topic."""

    v: int = VERSION
    topics: dict[str, TopicOffset] = {}

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON-compatible dictionary, as Spark expects."""
        return msgspec.to_builtins(self, str_keys=True)  # type: ignore[no-any-return] # a dictionary

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> StreamOffset:
        """Decode it; raise `RequestError` if it is invalid or of another version."""
        if found.get("v") != VERSION:
            raise RequestError(
                f"the checkpoint's offset has version {found.get('v')}; this release reads version {VERSION}: {found}"
            )
        try:
            return msgspec.convert(found, cls, strict=False)
        except msgspec.ValidationError as error:
            raise RequestError(f"the checkpoint's offset cannot be decoded: {error}") from None

    def position(self, topic: str, partition: int, *, incarnation: str) -> int:
        """Return the next offset to read in a partition; 0 if the partition or the topic's incarnation is new."""
        known = self.topics.get(topic)
        return known.p.get(partition, 0) if known is not None and known.id == incarnation else 0

    def unread(self, end: StreamOffset) -> dict[str, dict[int, int]]:
        """Return the next offset to read for every partition of `end`, by topic; omit topics without partitions."""
        return {
            topic: {part: self.position(topic, part, incarnation=own.id) for part in sorted(own.p)}
            for topic, own in sorted(end.topics.items())
            if own.p
        }

    def with_lost(self, lost: Mapping[str, int]) -> StreamOffset:
        """Return this offset with more records counted as lost, by topic."""
        if not lost:
            return self
        topics = {
            topic: msgspec.structs.replace(own, lost=own.lost + lost.get(topic, 0))
            for topic, own in self.topics.items()
        }
        return msgspec.structs.replace(self, topics=topics)

    def up_to(self, target: StreamOffset, start: StreamOffset) -> StreamOffset:
        """Return this offset clamped to [`start`, `target`], without partitions that neither of them has."""
        topics: dict[str, TopicOffset] = {}
        for topic, own in self.topics.items():
            bounds = target.topics.get(topic)
            ends = bounds.p if bounds is not None and bounds.id == own.id else {}
            begun = start.topics[topic].p if topic in start.topics and start.topics[topic].id == own.id else {}
            parts = own.p.keys() & (ends.keys() | begun.keys())
            reached = {part: max(begun.get(part, 0), min(own.p[part], ends.get(part, 0))) for part in sorted(parts)}
            topics[topic] = msgspec.structs.replace(own, p=reached)
        return StreamOffset(topics=topics)


class OffsetRange(msgspec.Struct, frozen=True, kw_only=True):
    """Records of one partition to read: first offset inclusive, end offset exclusive."""

    topic: str
    topic_id: int
    partition: int
    first_offset: int
    end_offset: int

    def __len__(self) -> int:
        return self.end_offset - self.first_offset

    def split(self, count: int) -> list[OffsetRange]:
        """Split it into `count` parts of nearly equal length, in order."""
        edges = [self.first_offset + len(self) * number // count for number in range(count + 1)]
        return [msgspec.structs.replace(self, first_offset=first, end_offset=end) for first, end in pairwise(edges)]


def incarnation_of(cluster_id: str, found: TopicOffsets) -> str:
    """Return the globally unique identity of a topic: cluster id, topic id, creation time."""
    return f"{cluster_id}/{found.topic_id}/{found.created_ms}"


def topic_id_of(incarnation: str) -> int:
    """Return the topic id of an incarnation."""
    return int(incarnation.rsplit("/", 2)[1])


def ranges_between(start: StreamOffset, end: StreamOffset) -> list[OffsetRange]:
    """Return the ranges between two offsets, by topic and partition, for the incarnations of `end` only."""
    return [
        OffsetRange(
            topic=topic,
            topic_id=topic_id_of(own.id),
            partition=partition,
            first_offset=first,
            end_offset=end_offset,
        )
        for topic, own in sorted(end.topics.items())
        for partition, end_offset in sorted(own.p.items())
        if (first := start.position(topic, partition, incarnation=own.id)) < end_offset
    ]


def uncounted_loss(
    start: StreamOffset, end: StreamOffset, ranges: Sequence[OffsetRange], found: Sequence[OffsetRange]
) -> dict[str, int]:
    """Return the number of missing records that `end` does not count as lost yet, by topic."""
    uncounted: dict[str, int] = {}
    for topic, own in end.topics.items():
        planned, there = (sum(len(one) for one in some if one.topic == topic) for some in (ranges, found))
        gone = planned - there
        before = start.topics[topic].lost if topic in start.topics else 0
        if gone > own.lost - before:
            uncounted[topic] = gone - (own.lost - before)
    return uncounted


def plan(ranges: list[OffsetRange], tasks_min: int) -> list[OffsetRange]:
    """Split ranges into about `tasks_min` parts, in proportion to their sizes."""
    total = sum(map(len, ranges))
    if not total:
        return []
    planned: list[OffsetRange] = []
    for one in ranges:
        share = -(-tasks_min * len(one) // total)  # rounded up
        planned += one.split(max(1, min(share, len(one) // SPLIT_RECORDS_MIN)))
    return planned


def limit_records(start: StreamOffset, end: StreamOffset, records_max: int) -> StreamOffset:
    """Return the offset at most `records_max` records after `start`, divided among partitions by their backlog.

    Every partition with a backlog advances by at least one record if `records_max` allows it.
    """
    ranges = ranges_between(start, end)
    total = sum(map(len, ranges))
    if total <= records_max:
        return end
    least = 1 if records_max >= len(ranges) else 0
    rest, waiting = records_max - least * len(ranges), total - least * len(ranges)
    shares = [least + (len(one) - least) * rest // waiting for one in ranges]
    # The rounding remainder, less than one per range, goes to the largest backlogs.
    for number in sorted(range(len(ranges)), key=lambda number: -len(ranges[number]))[: records_max - sum(shares)]:
        shares[number] += 1
    limited = {topic: dict(own.p) for topic, own in end.topics.items()}
    for one, share in zip(ranges, shares, strict=True):
        limited[one.topic][one.partition] = one.first_offset + share
    topics = {topic: msgspec.structs.replace(own, p=limited[topic]) for topic, own in end.topics.items()}
    return msgspec.structs.replace(end, topics=topics)


def records_between(start: StreamOffset, end: StreamOffset) -> int:
    """Return the number of records between two offsets."""
    return sum(map(len, ranges_between(start, end)))
