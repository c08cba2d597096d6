"""Several questions at once: their answers in the same order, or the first error in that order."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from quiver.errors import QuiverError

T = TypeVar("T")


async def ask_all(questions: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what all coroutines return; once all have ended, raise the first error of `quiver.errors`, if any."""
    found: list[T] = []
    for answer in await try_all(questions):
        if isinstance(answer, QuiverError):
            raise answer
        found.append(answer)
    return found


async def try_all(questions: Iterable[Coroutine[Any, Any, T]]) -> list[T | QuiverError]:
    """Return what all coroutines return, or the error in its place."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_hold(question)) for question in questions]
    return [task.result() for task in tasks]


async def _hold(question: Coroutine[Any, Any, T]) -> T | QuiverError:
    try:
        return await question
    except QuiverError as error:
        return error
