"""The topic of audit events: created with the first ones, by whichever node comes first."""

from __future__ import annotations

import asyncio

from gateway_world import World

from quiver.gateway.audit_topic import AUDIT_TOPIC
from quiver.wire.messages import DeleteTopicRequest


def test_audit_topic_is_created_once_and_again_after_its_deletion() -> None:
    async def test(world: World) -> None:
        audit, router = world.gateway.audit_topic, world.gateway._router
        await asyncio.gather(audit.publish([b"a"]), audit.publish([b"b"]))
        assert set(world.cluster.partition(AUDIT_TOPIC, 0).values()) == {b"a", b"b"}
        await router.ask(DeleteTopicRequest(topic=AUDIT_TOPIC), deadline=router.deadline())
        router.cache.forget_topic(AUDIT_TOPIC)
        await audit.publish([b"c"])
        assert world.cluster.partition(AUDIT_TOPIC, 0).values() == [b"c"]

    World().run(test)
