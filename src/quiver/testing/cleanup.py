"""The silent end of tasks that will never run again.

Python runs a coroutine's `finally` blocks when it is freed, at a moment that the garbage collector
chooses, and asyncio complains about every pending task it loses. Here both happen at one moment,
after a simulation's end, and nothing is heard of it: what these blocks raise means nothing, because
the node they belonged to is dead.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

_CLOSES_MAX = 100
"""How often a coroutine may refuse to end by waiting in its `finally` blocks, one wait per close."""


def close_quietly(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Close the coroutine of every task that is not done, and let asyncio forget the task."""
    heard_by, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        _close_all(tasks)
    finally:
        sys.unraisablehook = heard_by


def _close_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined] # asyncio has no public way
        if task.done():
            task._log_traceback = False
            continue
        _close(task.get_coro())


def _close(coroutine: Any) -> None:
    for _ in range(_CLOSES_MAX):
        if getattr(coroutine, "cr_frame", None) is None:
            return
        with suppress(BaseException):
            coroutine.close()
