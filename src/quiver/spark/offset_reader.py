"""Where a read begins and ends: options and the cluster's own word, made into places in partitions.

It runs on Spark's driver and keeps nothing. What it reports never goes back: the high watermark of a partition is what
is committed, confirmed by its leader, and stays so over a change of leader; and no place is before the one that the
query has reached.
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
"""How old the knowledge of a topic's partitions may be: a stream asks several times a second."""


class OffsetReader:
    """Ask the cluster where topics begin and end."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    @property
    def _cluster(self) -> Cluster:
        return connection(self._options.servers)

    # -- where to begin and end ------------------------------------------------------------------

    def find(self, bound: OffsetBound) -> StreamOffset:
        """Return the places that a bound stands for, in every partition that is to be read."""
        self._check_named(bound)
        return StreamOffset(topics={topic: self._locate(topic, bound) for topic in self.topics()})

    def topics(self) -> list[str]:
        """Return the topics that are to be read, as they are now."""
        options = self._options
        if not options.pattern:
            return list(options.topics or options.assigned)
        found = [topic for topic in self._cluster.list_topics() if re.fullmatch(options.pattern, topic)]
        if not found:
            raise NotFoundError(f"no topic matches subscribePattern {options.pattern!r}", code="unknown_topic")
        return found

    def _locate(self, topic: str, bound: OffsetBound) -> TopicOffset:
        """Ask for places that are words or times; take offsets as they are, after a look at the partition's end."""
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
        wanted = offsets if assigned is None else {part: _take(topic, offsets, part) for part in assigned}
        return TopicOffset(id=incarnation_of(self._cluster.cluster_id, default), p=wanted)

    def _check_given(self, topic: str, given: dict[int, int], topic_id: int) -> None:
        if not given:
            return
        ends = self._cluster.offsets(topic, dict.fromkeys(given, "latest"), topic_id=topic_id).offsets
        for partition, offset in given.items():
            if offset > ends[partition]:
                message = f"{topic!r} partition {partition} ends at {ends[partition]}; offset {offset} was asked for"
                raise RequestError(message, code="past_end")

    def _check_named(self, bound: OffsetBound) -> None:
        options = self._options
        named = set(options.topics or options.assigned)
        for topic in bound.by_partition.keys() - named if named else ():
            raise RequestError(f"offsets are given for topic {topic!r}, which is not read", code="bad_option")

    # -- what a stream may read next -------------------------------------------------------------

    def advance(self, start: StreamOffset) -> tuple[StreamOffset, StreamOffset]:
        """Return from where and up to where a stream can read, never before `start`; what is lost is counted in both.

        Raises:
            ConflictError: a topic was deleted and made anew (`topic_recreated`), unless `failOnDataLoss` is off.
            NotFoundError: a topic is gone, unless `failOnDataLoss` is off.
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
            logger.warning("topic is gone", extra=facts(topic=topic, error=error))
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
                f"topic {topic!r} is not the one that this query has read: it was {known.id} and is {incarnation}. "
                "Begin a new checkpoint, or set failOnDataLoss=false to read the new topic from its beginning"
            )
            raise ConflictError(message, code="topic_recreated")
        logger.warning("topic was made anew", extra=facts(topic=topic, was=known.id, now=incarnation))
        return TopicOffset(id=incarnation, p={}, lost=known.lost)

    def _skip_lost(self, topic: str, topic_id: int, known: TopicOffset, partitions: list[int]) -> TopicOffset:
        """Return a place behind what retention has removed, and count that, if the query may go on without it."""
        if self._options.fails_on_data_loss:
            return known
        firsts = self._cluster.offsets(topic, "earliest", topic_id=topic_id, max_age_ms=METADATA_AGE_MS_MAX).offsets
        gaps = {part: gap for part in partitions if (gap := firsts.get(part, 0) - known.p.get(part, 0)) > 0}
        if not gaps:
            return known
        logger.warning("records are gone", extra=facts(topic=topic, gaps=gaps))
        moved = {part: firsts[part] for part in gaps}
        return msgspec.structs.replace(known, p={**known.p, **moved}, lost=known.lost + sum(gaps.values()))

    def average_record_bytes(self, topics: list[str]) -> int:
        """Return about how large a stored record is."""
        described = [own for topic in topics for own in self._cluster.describe_topic(topic).partitions]
        records = sum((own.end_offset or 0) - (own.first_offset or 0) for own in described)
        return max(1, sum(own.bytes or 0 for own in described) // max(1, records))

    def publish(self, place: StreamOffset) -> None:
        """Show how far the stream has come as the cursors of a named consumer; whoever forgot it sees it again."""
        for topic, own in place.topics.items():
            try:
                self._move_cursors(topic, own)
            except NotFoundError as error:
                # Whether a topic may be gone is for who reads it to say.
                logger.warning("cursors not shown", extra=facts(topic=topic, error=error))

    def _move_cursors(self, topic: str, own: TopicOffset) -> None:
        try:
            self._cluster.move_cursors(topic, self._options.group_id, own.p)
        except RequestError as error:
            if error.code not in ("unknown_consumer", "not_registered"):
                raise
            self._cluster.move_cursors(topic, self._options.group_id, own.p)

    # -- what is really there --------------------------------------------------------------------

    def clip(self, ranges: list[OffsetRange]) -> list[OffsetRange]:
        """Return ranges without what retention has removed, which is an error or is left out and told."""
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
        place = f"{one.topic!r} partition {one.partition}"
        if self._options.fails_on_data_loss:
            message = f"{place} begins at {first_offset} by now; offsets from {one.first_offset} on were to be read"
            raise TrimmedError(f"{message}. Set failOnDataLoss=false to go on without them", code="trimmed")
        logger.warning(
            "records are gone", extra=facts(place=place, first_offset=one.first_offset, begins_at=first_offset)
        )
        return msgspec.structs.replace(one, first_offset=min(first_offset, one.end_offset))


def _take(topic: str, offsets: dict[int, int], partition: int) -> int:
    if partition not in offsets:
        raise NotFoundError(f"topic {topic!r} has no partition {partition}", code="unknown_partition")
    return offsets[partition]
