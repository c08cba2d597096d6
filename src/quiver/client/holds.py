"""Holds: records that retention leaves alone for a program that keeps its own place and has yet to read them.

A hold lasts for a time and is renewed by being placed again, at where the program is by then. It takes effect when the
partitions' leaders hear of it, which is at once as a rule; what was trimmed before stays gone. So whoever begins at the
first record places the hold first and asks for the beginning then.
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
    """Keep a topic's records, by partition from an offset on; replaces the hold of that name on the topic.

    Raises:
        NotFoundError: there is no such topic (`unknown_topic`) or partition (`unknown_partition`).
        ConflictError: there are too many holds (`too_many_holds`), or the topic was made anew (`topic_recreated`).
        OutOfRangeError: no partition is named, or the time is too short or too long (`bad_hold`).
    """
    deadline = router.deadline()
    info = await router.find_topic(topic, deadline=deadline)
    check_incarnation(info, info.topic_id if topic_id is None else TopicId(topic_id))
    for partition, offset in offsets.items():
        check_partition(info, partition)
        if offset < 0:
            raise OutOfRangeError(f"not done: {offset} is no offset", code="bad_hold")
    request = PlaceHoldRequest(
        topic_id=info.topic_id,
        name=name,
        offsets=tuple((PartitionId(part), Offset(at)) for part, at in offsets.items()),
        lasting_ms=lasting_ms,
        owner=owner,
    )
    done, _ = await router.ask(request, deadline=deadline)
    router.cache.see(done.index)


async def release_hold(router: Router, name: str, topic: str | None = None) -> None:
    """Let a hold go, on one topic or on all; one that is gone already is no error."""
    deadline = router.deadline()
    topic_id = None if topic is None else (await router.find_topic(topic, deadline=deadline)).topic_id
    done, _ = await router.ask(ReleaseHoldRequest(name=name, topic_id=topic_id), deadline=deadline)
    router.cache.see(done.index)


async def find_holds(router: Router) -> list[HoldInfo]:
    """Return the holds that there are, by topic and name."""
    request = ListHolds()
    return list((await router.ask(request, deadline=router.deadline()))[0].holds)
