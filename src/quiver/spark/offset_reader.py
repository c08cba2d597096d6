"""Resolve the start and end offsets of reads: options, cluster state and data loss.

Runs on Spark's driver; its only state is what it has logged. Reported offsets never go backwards: a partition's end is
its high watermark, confirmed by the leader and stable across leader changes, and no result is before the query's own
offset.
"""

from __future__ import annotations

import logging
import re

import msgspec

from quiver.client.sync import Cluster
from quiver.errors import ConflictError, NotFoundError, RequestError, TrimmedError
from quiver.logs import facts
from quiver.spark.connections import connection
from quiver.spark.offsets import OffsetRange, StreamOffset, TopicOffset, incarnation_of
from quiver.spark.options import OffsetBound, ReadOptions

logger = logging.getLogger(__name__)

METADATA_AGE_MS_MAX = 1_000
"""Maximum age of cached topic metadata: a stream asks several times per second."""
IN_USE = frozenset({"group_active", "group_kind"})
"""Refusals to move cursors that others use: members of a group, or workers of a queue."""


class OffsetReader:
    """Ask the cluster for first and end offsets of the topics to read."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._kept: set[str] = set()
        """Topics whose cursors others use, as was logged."""

    @property
    def _cluster(self) -> Cluster:
        return connection(self._options.servers)

    # -- bounds ----------------------------------------------------------------------------------

    def find(self, bound: OffsetBound) -> StreamOffset:
        """Resolve a bound to an offset in every partition to read."""
        self._check_named(bound)
        return StreamOffset(topics={topic: self._locate(topic, bound) for topic in self.topics()})

    def topics(self) -> list[str]:
        """Return the topics to read; a pattern is matched against the topics that exist now."""
        options = self._options
        if not options.pattern:
            return list(options.topics or options.assigned)
        found = [topic for topic in self._cluster.list_topics() if re.fullmatch(options.pattern, topic)]
        if not found:
            raise NotFoundError(f"no topic matches subscribePattern {options.pattern!r}", code="unknown_topic")
        return found

    def _locate(self, topic: str, bound: OffsetBound) -> TopicOffset:
        """Resolve words and times on the cluster; use numeric offsets as given, checked against the partition's end."""
        own = bound.by_partition.get(topic, {})
        default = self._cluster.offsets(topic, bound.default)
        offsets = dict(default.offsets)
        questions = {part: at for part, at in own.items() if bound.is_time or isinstance(at, str)}
        if questions:
            offsets |= self._cluster.offsets(topic, questions, topic_id=default.topic_id).offsets
        given = {part: at for part, at in own.items() if part not in questions and isinstance(at, int)}
        self._check_given(topic, given, default.topic_id)
        offsets |= given
        assigned = self._options.assigned.get(topic)
        wanted = offsets if assigned is None else {part: _offset_of(topic, offsets, part) for part in assigned}
        return TopicOffset(id=incarnation_of(self._cluster.cluster_id, default), p=wanted)

    def _check_given(self, topic: str, given: dict[int, int], topic_id: int) -> None:
        if not given:
            return
        ends = self._cluster.offsets(topic, dict.fromkeys(given, "latest"), topic_id=topic_id).offsets
        for partition, offset in given.items():
            if offset > ends[partition]:
                message = (
                    f"offset {offset} is beyond the end {ends[partition]} of topic {topic!r} partition {partition}"
                )
                raise RequestError(message, code="past_end")

    def _check_named(self, bound: OffsetBound) -> None:
        options = self._options
        named = set(options.topics or options.assigned)
        for topic in bound.by_partition.keys() - named if named else ():
            raise RequestError(
                f"offsets are given for topic {topic!r}, which this query does not read", code="bad_option"
            )

    # -- progress of a stream --------------------------------------------------------------------

    def advance(self, start: StreamOffset) -> tuple[StreamOffset, StreamOffset]:
        """Return the range that a stream can read now, never before `start`; both ends count lost records.

        Raises:
            ConflictError: a topic was deleted and recreated (`topic_recreated`) and `failOnDataLoss` is true.
            NotFoundError: a topic was deleted and `failOnDataLoss` is true.
        """
        names = self.topics()
        if self._options.pattern:
            names = list(dict.fromkeys((*start.topics, *names)))
        found = {topic: self._advance_topic(topic, start.topics.get(topic)) for topic in names}
        return (
            StreamOffset(topics={topic: own[0] for topic, own in found.items()}),
            StreamOffset(topics={topic: own[1] for topic, own in found.items()}),
        )

    def _advance_topic(self, topic: str, known: TopicOffset | None) -> tuple[TopicOffset, TopicOffset]:
        try:
            found = self._cluster.offsets(topic, max_age_ms=METADATA_AGE_MS_MAX)
        except NotFoundError as error:
            if self._options.fails_on_data_loss or known is None:
                raise
            logger.warning("topic was deleted", extra=facts(topic=topic, error=error))
            return known, known
        incarnation = incarnation_of(self._cluster.cluster_id, found)
        if known is None:
            known = TopicOffset(id=incarnation, p={})
        elif known.id != incarnation:
            known = self._restart(topic, known, incarnation)
        assigned = self._options.assigned.get(topic)
        ends = {part: end for part, end in found.offsets.items() if assigned is None or part in assigned}
        begun = self._skip_lost(topic, found.topic_id, known, list(ends))
        reached = {part: max(end, begun.p.get(part, 0)) for part, end in ends.items()}
        return begun, msgspec.structs.replace(begun, p={**begun.p, **reached})

    def _restart(self, topic: str, known: TopicOffset, incarnation: str) -> TopicOffset:
        if self._options.fails_on_data_loss:
            message = (
                f"topic {topic!r} was recreated, or is in another cluster: the checkpoint has {known.id}, the cluster "
                f"has {incarnation}. Use a new checkpoint, or set failOnDataLoss=false to read it from its beginning"
            )
            raise ConflictError(message, code="topic_recreated")
        logger.warning("topic was recreated", extra=facts(topic=topic, was=known.id, now=incarnation))
        return TopicOffset(id=incarnation, p={}, lost=known.lost)

    def _skip_lost(self, topic: str, topic_id: int, known: TopicOffset, partitions: list[int]) -> TopicOffset:
        """Skip records that retention removed and count them as lost, if `failOnDataLoss` is false."""
        if self._options.fails_on_data_loss:
            return known
        firsts = self._cluster.offsets(topic, "earliest", topic_id=topic_id, max_age_ms=METADATA_AGE_MS_MAX).offsets
        gaps = {part: gap for part in partitions if (gap := firsts.get(part, 0) - known.p.get(part, 0)) > 0}
        if not gaps:
            return known
        logger.warning("unread records were removed", extra=facts(topic=topic, gaps=gaps))
        moved = {part: firsts[part] for part in gaps}
        return msgspec.structs.replace(known, p={**known.p, **moved}, lost=known.lost + sum(gaps.values()))

    def average_record_bytes(self, topics: list[str]) -> int:
        """Return the average stored size of a record."""
        described = [own for topic in topics for own in self._cluster.describe_topic(topic).partitions]
        records = sum((own.end_offset or 0) - (own.first_offset or 0) for own in described)
        return max(1, sum(own.bytes or 0 for own in described) // max(1, records))

    def publish(self, reached: StreamOffset) -> None:
        """Store the stream's offsets as the cursors of its `groupId`, and register that consumer if it is unknown.

        Cursors that others use are left to them, and so is a deleted topic: the checkpoint has the query's own offsets,
        and the read decides whether it fails.
        """
        for topic, own in reached.topics.items():
            try:
                self._move_cursors(topic, own)
                self._kept.discard(topic)
            except NotFoundError as error:
                logger.warning("cursors not moved", extra=facts(topic=topic, error=error))
            except ConflictError as error:
                if error.code not in IN_USE:
                    raise
                if topic not in self._kept:
                    logger.warning("cursors not moved: others use them", extra=facts(topic=topic, error=error))
                self._kept.add(topic)

    def _move_cursors(self, topic: str, own: TopicOffset) -> None:
        try:
            self._cluster.move_cursors(topic, self._options.group_id, own.p)
        except RequestError as error:
            if error.code not in ("unknown_consumer", "not_registered"):
                raise
            self._cluster.move_cursors(topic, self._options.group_id, own.p)

    # -- ranges ----------------------------------------------------------------------------------

    def clip(self, ranges: list[OffsetRange]) -> list[OffsetRange]:
        """Return ranges without records that retention removed; raise or log for those, by `failOnDataLoss`."""
        clipped: list[OffsetRange] = []
        for topic in dict.fromkeys(one.topic for one in ranges):
            own = [one for one in ranges if one.topic == topic]
            wanted = dict.fromkeys((one.partition for one in own), "earliest")
            found = self._cluster.offsets(
                topic,
                wanted,  # type: ignore[arg-type] # words
                topic_id=own[0].topic_id,
                max_age_ms=METADATA_AGE_MS_MAX,
            )
            firsts = found.offsets
            clipped += [part for one in own if len(part := self._clip(one, firsts[one.partition]))]
        return clipped

    def _clip(self, one: OffsetRange, first_offset: int) -> OffsetRange:
        if one.first_offset >= first_offset:
            return one
        end_offset = min(first_offset, one.end_offset)
        if self._options.fails_on_data_loss:
            message = (
                f"topic {one.topic!r} partition {one.partition}: retention removed offsets {one.first_offset} to "
                f"{end_offset - 1} before they were read; the partition now begins at {first_offset}. "
                "Set failOnDataLoss=false to continue without them"
            )
            raise TrimmedError(message, code="trimmed")
        removed = facts(topic=one.topic, partition=one.partition, first_offset=one.first_offset, end_offset=end_offset)
        logger.warning("unread records were removed", extra=removed)
        return msgspec.structs.replace(one, first_offset=min(first_offset, one.end_offset))


def _offset_of(topic: str, offsets: dict[int, int], partition: int) -> int:
    if partition not in offsets:
        raise NotFoundError(f"topic {topic!r} has no partition {partition}", code="unknown_partition")
    return offsets[partition]
