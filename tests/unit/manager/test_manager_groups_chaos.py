"""Members and managers that fail in any order: every owner is fenced by the next; at the end all is used, evenly."""

from __future__ import annotations

import asyncio
import random

import pytest
from group_world import GroupWorld, SimulatedMember, work

from quiver.errors import OutcomeUnknownError, RequestError, UnavailableError
from quiver.metadata import AddPartitionsCommand
from quiver.model import NodeId
from quiver.wire.group_messages import RestartGroup

SEEDS = range(4)
STEPS = 25


class Chaos:
    """Random events over one group."""

    def __init__(self, world: GroupWorld, seed: int) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.alive: list[SimulatedMember] = []
        self.partitions = 5
        self._names = 0

    async def step(self) -> None:
        """Let something happen, and some time pass."""
        actions = (
            self.enter,
            self.enter,
            self.crash,
            self.leave,
            self.come_back,
            self.fail_over,
            self.grow,
            self.restart,
        )
        await self.rng.choice(actions)()
        await asyncio.sleep(self.rng.choice((0.01, 0.1, 0.5, 2.0)))

    async def enter(self) -> None:
        if len(self.alive) < 6:
            self._names += 1
            self._start(instance=self.rng.choice(("", "", f"i{self._names % 3}")))

    def _start(self, *, instance: str) -> None:
        for member in [one for one in self.alive if instance and one.request.instance == instance]:
            self._end(member)
        member = self.world.enter(
            f"m{self._names:03}{'x' * self.rng.randrange(3)}",
            instance=instance,
            release_s=self.rng.choice((0.0, 0.3)),
            session_timeout_ms=self.rng.choice((2_000, 4_000)),
        )
        self.alive.append(member)

    def _end(self, member: SimulatedMember) -> None:
        member.crash()
        self.alive.remove(member)

    async def crash(self) -> None:
        if self.alive:
            self._end(self.rng.choice(self.alive))

    async def leave(self) -> None:
        if self.alive:
            member = self.rng.choice(self.alive)
            self.alive.remove(member)
            try:
                await member.leave()
            except (UnavailableError, OutcomeUnknownError, RequestError):
                return  # it expires, or has not joined yet

    async def come_back(self) -> None:
        """Restart a static member under its own name."""
        static = [one for one in self.alive if one.request.instance]
        if static:
            self._names += 1
            self._start(instance=self.rng.choice(static).request.instance)

    async def fail_over(self) -> None:
        primary = await self.world.primary()
        primary.kill()
        await asyncio.sleep(self.rng.choice((0.0, 1.0)))
        primary.start()

    async def grow(self) -> None:
        if self.partitions < 12:
            self.partitions += 1
            command = AddPartitionsCommand(
                now_ms=1, topic="logs", partitions=self.partitions, assignments=((NodeId(1),),)
            )
            try:
                await self.world.submit(command)
            except RequestError:
                return  # an earlier attempt was done

    async def restart(self) -> None:
        if self.world.view.consumer("g") is not None:
            try:
                await self.world.ask(RestartGroup(group="g", pause_ms=self.rng.choice((0, 500))))
            except (UnavailableError, OutcomeUnknownError):
                return


@pytest.mark.parametrize("seed", SEEDS)
def test_group_survives_everything_and_settles(seed: int) -> None:
    async def test(world: GroupWorld) -> None:
        await world.prepare(logs=5)
        chaos = Chaos(world, seed)
        for _ in range(STEPS):
            await chaos.step()
        while len(chaos.alive) < 2:
            await chaos.enter()
        await world.wait_settled(chaos.partitions, *chaos.alive)
        assert [member.error for member in chaos.alive] == [None] * len(chaos.alive)
        moves = len(world.moves)
        await asyncio.sleep(5)
        assert len(world.moves) == moves, "a settled group rests"
        await world.wait_equal()

    work(test, may_overlap=True, seed=seed)
