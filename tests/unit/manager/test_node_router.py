"""A node's way to the primary: also to one that is newer than what the node knows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest
from manager_world import World, run

from quiver.errors import ConflictError, OutcomeUnknownError, QuiverError, UnavailableError
from quiver.manager import NodeRouter
from quiver.metadata import MetadataStore, View
from quiver.metadata.state import MetadataState
from quiver.model import Index, NodeId
from quiver.testing import SimulatedClock
from quiver.wire.messages import CreateTopicRequest, GetMetadata
from quiver.wire.serving import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping


class BlankStore:
    """The metadata of a node that has just joined; it has heard of a primary, or not."""

    is_primary = False
    is_attached = False

    def __init__(self, primary: NodeId | None = None) -> None:
        self.primary = primary

    def view(self) -> View:
        return MetadataState().view()

    async def wait_applied(self, index: Index) -> None:
        """Return at once, as a node does that has caught up."""


def newcomer(world: World, seeds: Mapping[NodeId, str], primary: NodeId | None = None) -> NodeRouter:
    return NodeRouter(
        NodeId(9),
        cast("MetadataStore", BlankStore(primary)),
        world.wire.port(NodeId(9)),
        clock=SimulatedClock(world.loop),
        rng=world.streams.stream("newcomer"),
        seeds=seeds,
    )


@pytest.mark.parametrize("has_heard_of_it", [True, False])
def test_primary_that_is_none_of_the_seeds_is_found_and_asked_directly(has_heard_of_it: bool) -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        primary, replica = (await world.primary()).id, (await world.replica()).id
        seeds = {replica: world.addresses[replica]}
        router = newcomer(world, seeds, primary if has_heard_of_it else None)
        assert router.find_address(primary) is None
        world.wire.asked.clear()
        found = await router.ask_primary(GetMetadata(topics=(), is_linearizable=True))
        assert found.primary == primary
        assert [address for address, _ in world.wire.asked] == [world.addresses[replica], world.addresses[primary]]
        assert router.find_address(primary) == world.addresses[primary]

    run(test)


def test_nodes_that_catch_up_together_share_a_request_that_is_sent_after_all_of_them() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        primary = (await world.primary()).id
        router = newcomer(world, {primary: world.addresses[primary]}, primary)
        world.wire.asked.clear()
        first = asyncio.ensure_future(router.catch_up())
        await asyncio.sleep(0)  # its request is under way, so that it may not know what these have seen
        await asyncio.gather(first, *(router.catch_up() for _ in range(10)))
        assert len(world.wire.asked) == 2

    run(test)


def test_cancelled_catch_up_leaves_those_who_wait_for_it_a_request_of_their_own() -> None:
    async def test(world: World) -> None:
        await world.join(1, 2, 3)
        primary = (await world.primary()).id
        router = newcomer(world, {primary: world.addresses[primary]}, primary)
        first, second = (asyncio.ensure_future(router.catch_up()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await second is not None

    run(test)


def test_node_that_knows_nobody_says_so() -> None:
    async def test(world: World) -> None:
        with pytest.raises(UnavailableError, match="does not know the primary"):
            await newcomer(world, {}).ask_primary(GetMetadata(topics=()))

    run(test)


def test_refusal_after_an_attempt_of_unknown_outcome_is_no_proof_that_nothing_was_done() -> None:
    async def test(world: World) -> None:
        router = newcomer(world, {})
        failures: list[QuiverError] = [
            OutcomeUnknownError("the connection broke"),
            UnavailableError("not done: no primary", code="no_leader"),
            ConflictError("not done: topic 'made' exists already", code="topic_exists"),
        ]

        async def fail() -> Answer:
            raise failures.pop(0)

        cast("BlankStore", router._store).is_primary = True
        request = CreateTopicRequest(topic="made", request_id="first")
        deadline_ms = SimulatedClock(world.loop).monotonic_ms() + 5_000
        with pytest.raises(OutcomeUnknownError, match=r"may have been done: the connection broke; .* exists already"):
            await router.forward(request, b"", deadline_ms=deadline_ms, locally=fail)
        failures.append(ConflictError("not done: topic 'made' exists already", code="topic_exists"))
        with pytest.raises(ConflictError, match="exists already"):
            await router.forward(request, b"", deadline_ms=deadline_ms, locally=fail)

    run(test)
