"""The memory of answers: who waits, for what, and who is woken."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from quiver.security import ANONYMOUS, Principal, user_principal
from quiver.wire.answer_memory import AnswerMemory

KIB = 1024


class Connection:
    """A connection that holds what a test says."""

    def __init__(self, memory: AnswerMemory, *, requests_bytes: int = 0, principal: Principal = ANONYMOUS) -> None:
        self.account = memory.open_account(principal)
        self._memory = memory
        self._requests_bytes = requests_bytes
        self.answers_bytes = 0
        self.is_gone = False
        memory.count_request(self.account, requests_bytes)

    @property
    def held_bytes(self) -> int:
        return self._requests_bytes + self.answers_bytes

    async def reserve(self, size_bytes: int) -> None:
        await self._memory.wait_room(self, size_bytes)
        self.hold(size_bytes)

    def hold(self, size_bytes: int) -> None:
        self.answers_bytes += size_bytes
        self._memory.count(self.account, size_bytes)


def run(test: Coroutine[object, object, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test

    asyncio.run(bounded())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_answer_larger_than_every_limit_is_admitted_alone() -> None:
    async def test() -> None:
        memory = AnswerMemory(limit_bytes=64 * KIB, connection_bytes_max=64 * KIB)
        connections = [Connection(memory, requests_bytes=100) for _ in range(3)]
        tasks = [asyncio.ensure_future(each.reserve(1024 * KIB)) for each in connections]
        await settle()
        for number, connection in enumerate(connections, 1):
            assert sum(task.done() for task in tasks) == number, "one at a time, and none waits for its own request"
            assert connection.answers_bytes
            connection.hold(-1024 * KIB)
            await settle()
        assert memory.waiting == 0
        assert memory.answers_bytes == 0

    run(test())


def test_answer_whose_turn_comes_too_late_wakes_the_next() -> None:
    async def test() -> None:
        memory = AnswerMemory(limit_bytes=64 * KIB, connection_bytes_max=64 * KIB)
        slow, late, next_ = (Connection(memory) for _ in range(3))
        slow.hold(40 * KIB)
        waiting = [asyncio.ensure_future(each.reserve(30 * KIB)) for each in (late, next_)]
        await settle()
        assert memory.waiting == 2
        slow.hold(-40 * KIB)
        await asyncio.sleep(0)  # the first is admitted, and cancelled before it knows
        waiting[0].cancel()
        await settle()
        assert (late.answers_bytes, next_.answers_bytes) == (0, 30 * KIB)
        assert memory.waiting == 0

    run(test())


def test_connections_take_turns() -> None:
    async def test() -> None:
        memory = AnswerMemory(limit_bytes=64 * KIB, connection_bytes_max=64 * KIB)
        greedy, modest = Connection(memory), Connection(memory)
        greedy.hold(1024)
        order: list[str] = []

        async def take(connection: Connection, name: str) -> None:
            await connection.reserve(40 * KIB)
            order.append(name)
            await settle()
            connection.hold(-40 * KIB)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(take(greedy, "greedy"))
            tasks.create_task(take(modest, "modest"))
        assert order.index("modest") < 3, "not after all that asked before it"

    run(test())


ALICE, BOB = user_principal("alice"), user_principal("bob")


async def fill(memory: AnswerMemory, principal: Principal, *, size_bytes: int) -> list[asyncio.Future[None]]:
    """Have many connections of a principal ask for an answer that they never read; return those that wait."""
    asked = [asyncio.ensure_future(Connection(memory, principal=principal).reserve(size_bytes)) for _ in range(200)]
    await settle()
    return [each for each in asked if not each.done()]


def test_principal_with_many_connections_leaves_room_for_others() -> None:
    async def test() -> None:
        memory = AnswerMemory(limit_bytes=1024 * KIB, connection_bytes_max=1024 * KIB)
        waiting = await fill(memory, ALICE, size_bytes=12 * KIB)
        assert waiting, "each connection holds little, together they hold too much"
        assert 512 * KIB < memory.bytes <= 640 * KIB
        for _ in range(3):  # whatever Alice's connections wait for
            await Connection(memory, principal=BOB).reserve(12 * KIB)
        for each in waiting:
            each.cancel()

    run(test())


def test_several_principals_leave_room_for_the_next() -> None:
    async def test() -> None:
        memory = AnswerMemory(limit_bytes=1024 * KIB, connection_bytes_max=1024 * KIB)
        waiting = []
        for number in range(5):
            waiting += await fill(memory, user_principal(f"attacker-{number}"), size_bytes=KIB)
        assert memory.bytes < 768 * KIB
        await Connection(memory, principal=BOB).reserve(KIB)
        for each in waiting:
            each.cancel()

    run(test())


def test_account_is_forgotten_with_its_last_connection() -> None:
    memory = AnswerMemory(limit_bytes=1024 * KIB, connection_bytes_max=1024 * KIB)
    first, second = memory.open_account(ALICE), memory.open_account(ALICE)
    assert first is second
    memory.close_account(first)
    assert memory.open_account(ALICE) is first
    for _ in range(2):
        memory.close_account(first)
    assert memory.open_account(ALICE) is not first


def test_share_of_unsent_answers_counts_once_half_of_the_memory_is_used() -> None:
    memory = AnswerMemory(limit_bytes=1000, connection_bytes_max=1000)
    alice, bob = memory.open_account(ALICE), memory.open_account(BOB)
    memory.count(alice, 500)
    assert not memory.is_over_share(alice)
    memory.count(alice, 1)
    assert memory.is_over_share(alice)
    memory.count(bob, 60)
    assert not memory.is_over_share(bob)
    memory.count(alice, -101)
    assert not memory.is_over_share(alice)
