"""Holds: a program that stores its own offsets keeps records from retention until it has read them.

A hold expires after a time; placing it again renews it at the program's current offsets. It takes effect when the
partitions' leaders learn of it, usually immediately. It does not bring back trimmed records. To start at the first
record, place the hold first and ask for the first offset afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping

from quiver.client.ranges import check_incarnation, check_partition
from quiver.errors import OutOfRangeError
from quiver.model import Offset, PartitionId, TopicId
from quiver.routing.router import Router
from quiver.wire.admin_messages import HoldInfo, ListHolds, PlaceHoldRequest, ReleaseHoldRequest


async def place_hold(
    router: Router,
    topic: str,
    name: str,
    offsets: Mapping[int, int],
    *,
    lasting_ms: int,
    owner: str = "",
    topic_id: int | None = None,
) -> None:
    """Keep a topic's records from retention, by partition from an offset on; replaces the hold of that name.

    Raises:
        NotFoundError: unknown topic (`unknown_topic`) or partition (`unknown_partition`).
        ConflictError: too many holds (`too_many_holds`), or the topic was created again (`topic_recreated`).
        OutOfRangeError: no partition is named, or the time is too short or too long (`bad_hold`).
    """
    deadline = router.deadline()
    info = await router.find_topic(topic, deadline=deadline)
    check_incarnation(info, info.topic_id if topic_id is None else TopicId(topic_id))
    for partition, offset in offsets.items():
        check_partition(info, partition)
        if offset < 0:
            raise OutOfRangeError(f"not done: offset {offset} of partition {partition} is negative", code="bad_hold")
    request = PlaceHoldRequest(
        topic_id=info.topic_id,
        name=name,
        offsets=tuple((PartitionId(part), Offset(at)) for part, at in offsets.items()),
        lasting_ms=lasting_ms,
        owner=owner,
    )
    done, _ = await router.ask(request, deadline=deadline)
    router.cache.record_index(done.index)


async def release_hold(router: Router, name: str, topic: str | None = None) -> None:
    """Release a hold on one topic or on all its topics; a missing hold is no error."""
    deadline = router.deadline()
    topic_id = None if topic is None else (await router.find_topic(topic, deadline=deadline)).topic_id
    done, _ = await router.ask(ReleaseHoldRequest(name=name, topic_id=topic_id), deadline=deadline)
    router.cache.record_index(done.index)


async def find_holds(router: Router) -> list[HoldInfo]:
    """Return the holds, sorted by topic and name."""
    request = ListHolds()
    return list((await router.ask(request, deadline=router.deadline()))[0].holds)
