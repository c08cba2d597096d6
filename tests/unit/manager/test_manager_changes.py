"""The set of managers changes at run time: what is refused, what is done, and who may be lost on the way."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest
from manager_world import WorkingWorld, World, run
from metadata_world import register_broker

from quiver.errors import ConflictError, NotFoundError, QuiverError, UnavailableError
from quiver.manager import manager_changes
from quiver.metadata import BrokerState
from quiver.model import NodeId
from quiver.wire.admin_messages import AddManager, ListManagers, RemoveManager, manager_role
from quiver.wire.messages import CreateTopicRequest


def work(test: Any, **settings: Any) -> None:
    run(test, make_world=WorkingWorld, **settings)


async def voters(world: World) -> tuple[NodeId, ...]:
    return (await world.primary()).store.committed_members.voters


async def add_standby(world: WorkingWorld) -> NodeId:
    """Start a node with the role manager and wait until it follows the metadata."""
    joining = world.add_node()
    world.addresses[joining.id] = f"host{joining.id}:9002"
    joining.start()
    await world.join(joining.id)
    await world.wait(lambda: joining.id in (world._find_primary() or joining).store.members.learners)
    return joining.id


def test_manager_is_added_listed_and_removed() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        node = await add_standby(world)
        found = await world.ask(ListManagers())
        assert [manager_role(one, found.primary) for one in found.managers].count("standby") == 1
        done = await world.ask(AddManager(node=node))
        assert await voters(world) == (1, 2, 3, 4)
        await world.ask(AddManager(node=node))  # a repeat changes nothing
        for number in (1, 2, 3, 4):  # every node that has applied the change lists it
            found = await world.ask(ListManagers(known_index=done.index), of=number)
            assert [one.node for one in found.managers if one.is_voter] == [1, 2, 3, 4]
            assert not found.is_changing
        await world.ask(RemoveManager(node=node))
        assert await voters(world) == (1, 2, 3)
        assert node in (await world.primary()).store.members.learners
        await world.ask(CreateTopicRequest(topic="logs", partitions=1))

    work(test)


def test_primary_is_removed_after_it_has_transferred_its_leadership() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        primary = (await world.primary()).id
        await world.ask(RemoveManager(node=primary))
        assert primary not in await voters(world)
        await world.ask(CreateTopicRequest(topic="logs", partitions=1))

    work(test)


def test_dead_manager_is_replaced() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        node = await add_standby(world)
        victim = await world.primary()
        world.living.discard(victim.id)
        victim.kill()
        await world.wait(lambda: world.view.brokers[victim.id].state is BrokerState.DEAD)
        of = next(number for number in (1, 2, 3) if number != victim.id)
        await world.ask(AddManager(node=node), of=of)
        await world.ask(RemoveManager(node=victim.id), of=of)
        assert await voters(world) == tuple(sorted({1, 2, 3, 4} - {victim.id}))

    work(test)


def test_change_that_cannot_end_well_is_refused() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        await world.submit(register_broker(8, roles=("broker",)))
        node = await add_standby(world)
        cases: list[tuple[AddManager | RemoveManager, type[QuiverError], str]] = [
            (AddManager(node=NodeId(9)), NotFoundError, "unknown_broker"),
            (AddManager(node=NodeId(8)), ConflictError, "no_manager_role"),
            (RemoveManager(node=NodeId(9)), NotFoundError, "not_a_manager"),
            (RemoveManager(node=node), NotFoundError, "not_a_manager"),
        ]
        for request, kind, code in cases:
            with pytest.raises(kind) as caught:
                await world.ask(request)
            assert caught.value.code == code
        world.living.discard(node)
        await world.wait(lambda: world.view.brokers[node].state is BrokerState.DEAD)
        with pytest.raises(UnavailableError, match="start it first"):
            await world.ask(AddManager(node=node), timeout_ms=500)
        assert await voters(world) == (1, 2, 3)

    work(test)


def test_removal_that_leaves_no_majority_or_no_manager_is_refused() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        primary = await world.primary()
        dead, other = (manager for manager in world.managers.values() if manager is not primary)
        world.living.discard(dead.id)
        dead.kill()
        await world.wait(lambda: world.view.brokers[dead.id].state is BrokerState.DEAD)
        with pytest.raises(ConflictError) as caught:
            await world.ask(RemoveManager(node=other.id), of=primary.id)
        assert caught.value.code == "no_majority"
        await world.ask(RemoveManager(node=dead.id), of=primary.id)
        await world.ask(RemoveManager(node=other.id), of=primary.id)
        with pytest.raises(ConflictError) as caught:
            await world.ask(RemoveManager(node=primary.id), of=primary.id)
        assert caught.value.code == "last_manager"

    work(test)


def test_without_the_check_of_the_majority_a_removal_wedges_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: the change needs the vote of a dead manager; it never ends, and nothing can be changed any more."""
    monkeypatch.setattr(manager_changes, "_check_removable", lambda *_: None)
    monkeypatch.setattr(manager_changes, "_check_heard", lambda *_: None)

    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        primary = await world.primary()
        dead, other = (manager for manager in world.managers.values() if manager is not primary)
        world.living.discard(dead.id)
        dead.kill()
        await world.wait(lambda: world.view.brokers[dead.id].state is BrokerState.DEAD)
        with pytest.raises(QuiverError):
            await world.ask(RemoveManager(node=other.id), of=primary.id, timeout_ms=5_000)
        with pytest.raises(QuiverError):
            await world.ask(CreateTopicRequest(topic="logs", partitions=1), of=primary.id, timeout_ms=20_000)

    work(test)


@pytest.mark.parametrize("seed", range(4))
def test_managers_change_while_primaries_are_lost(seed: int) -> None:
    async def test(world: WorkingWorld) -> None:
        rng = Random(seed)
        await world.join(1, 2, 3)
        nodes = [1, 2, 3, await add_standby(world), await add_standby(world)]
        for step in range(12):
            members = await voters(world)
            chosen = NodeId(nodes[rng.randrange(len(nodes))])
            request = RemoveManager(node=chosen) if chosen in members else AddManager(node=chosen)
            if rng.random() < 0.5:
                victim = await world.primary()
                victim.kill()
                world.loop.call_later(rng.random(), victim.start)
            serving = [number for number in nodes if world.working(number).is_serving]
            with suppress(QuiverError):
                await world.ask(request, of=serving[rng.randrange(len(serving))])
            await world.wait(lambda: all(world.working(number).is_up for number in nodes) or None)
            await world.ask(CreateTopicRequest(topic=f"topic-{step}", partitions=1), timeout_ms=20_000)
        await world.wait(lambda: len({world.working(one).store.committed_members for one in nodes}) == 1 or None)

    work(test)
