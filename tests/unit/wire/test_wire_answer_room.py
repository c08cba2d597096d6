"""The room of an answer that is not sent on the wire: who waits for it, who is refused, and that it is given back."""

from __future__ import annotations

import asyncio

import pytest

from quiver.errors import OverloadedError
from quiver.security import ANONYMOUS, user_principal
from quiver.wire.answer_memory import AnswerMemory
from quiver.wire.answer_room import AnswerRoom

MIB = 1024 * 1024


def make_memory() -> AnswerMemory:
    return AnswerMemory(limit_bytes=128 * MIB, connection_bytes_max=64 * MIB)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_answers_wait_for_each_other_first_come_first_served() -> None:
    async def test() -> None:
        memory = make_memory()
        rooms = [AnswerRoom(memory, ANONYMOUS) for _ in range(6)]
        asked = [asyncio.ensure_future(room.reserve(32 * MIB, timeout_s=60)) for room in rooms]
        for first in (0, 2, 4):
            await settle()
            assert [one.done() for one in asked] == [number < first + 2 for number in range(6)]
            assert memory.bytes == 64 * MIB
            for room in rooms[first : first + 2]:
                room.release()
        assert memory.bytes == 0

    asyncio.run(test())


def test_answer_that_gets_no_room_in_time_is_not_done() -> None:
    async def test() -> None:
        memory = make_memory()
        other, room = AnswerRoom(memory, ANONYMOUS), AnswerRoom(memory, ANONYMOUS)
        await other.reserve(60 * MIB, timeout_s=0)
        with pytest.raises(OverloadedError, match="not done") as refused:
            await room.reserve(60 * MIB, timeout_s=0.01)
        assert refused.value.outcome == "not_done"
        assert refused.value.retry_after_ms
        with pytest.raises(OverloadedError):
            room.reserve_nowait(60 * MIB)
        assert (room.held_bytes, memory.bytes, memory.waiting) == (0, 60 * MIB, 0)
        room.reserve_nowait(MIB)
        assert memory.bytes == 61 * MIB

    asyncio.run(test())


def test_answer_larger_than_everything_passes_alone() -> None:
    async def test() -> None:
        memory = make_memory()
        first, second = AnswerRoom(memory, ANONYMOUS), AnswerRoom(memory, ANONYMOUS)
        await first.reserve(1024 * MIB, timeout_s=0)
        asked = asyncio.ensure_future(second.reserve(1024 * MIB, timeout_s=60))
        await settle()
        assert not asked.done()
        first.release()
        await asked
        assert memory.bytes == 1024 * MIB

    asyncio.run(test())


def test_record_of_a_large_batch_does_not_wait_for_every_other_answer() -> None:
    """A batch of 64 MiB with millions of records takes 192 MiB once it is decoded, and its records less."""

    async def test() -> None:
        memory = make_memory()
        other, room = AnswerRoom(memory, ANONYMOUS), AnswerRoom(memory, ANONYMOUS)
        other.count(MIB)
        await room.reserve_large(192 * MIB, timeout_s=0)
        assert room.held_bytes == 64 * MIB

    asyncio.run(test())


def test_answer_that_needs_more_does_not_wait_for_itself() -> None:
    async def test() -> None:
        memory = make_memory()
        room = AnswerRoom(memory, ANONYMOUS)
        await room.reserve(60 * MIB, timeout_s=0)
        await room.reserve(70 * MIB, timeout_s=0)
        assert memory.bytes == room.held_bytes == 70 * MIB

    asyncio.run(test())


def test_principal_that_reads_slowly_leaves_room_to_others() -> None:
    async def test() -> None:
        memory = make_memory()
        slow = [AnswerRoom(memory, user_principal("slow")) for _ in range(4)]
        asked = [asyncio.ensure_future(room.reserve(30 * MIB, timeout_s=60)) for room in slow]
        await settle()
        assert [one.done() for one in asked] == [True, True, False, False]
        with pytest.raises(OverloadedError):
            AnswerRoom(memory, user_principal("slow")).reserve_nowait(1)  # others of its principal wait
        AnswerRoom(memory, user_principal("other")).reserve_nowait(30 * MIB)
        await AnswerRoom(memory, user_principal("other")).reserve(30 * MIB, timeout_s=1)
        for one in asked:
            one.cancel()

    asyncio.run(test())


def test_release_is_idempotent_and_what_is_dropped_is_released() -> None:
    memory = make_memory()
    room = AnswerRoom(memory, ANONYMOUS)
    room.count(MIB)
    room.count(2 * MIB)
    assert memory.answers_bytes == 2 * MIB
    assert not room.is_gone
    room.release()
    room.release()
    assert room.is_gone
    dropped = AnswerRoom(memory, ANONYMOUS)
    dropped.count(MIB)
    del dropped
    assert (memory.bytes, memory.answers_bytes) == (0, 0)


def test_memory_is_tight_beyond_half_of_it() -> None:
    memory = make_memory()
    room = AnswerRoom(memory, ANONYMOUS)
    room.count(64 * MIB)
    assert not room.is_memory_tight
    room.count(64 * MIB + 1)
    assert room.is_memory_tight
