"""Which node a scheduled callback belongs to, and whether that node still runs.

The scope travels in a context variable: whatever is scheduled inside `SimulatedLoop.node_scope` —
and by the tasks started there, and by theirs — carries it. A killed node's scope is dead for good;
the node's next life gets a new one. This module holds state only; the loop acts on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any, Final

RUNNING: Final = 0
PAUSED: Final = 1
DEAD: Final = 2

_SWEEP_MIN: Final = 64
"""Look for finished tasks no more often than every so many new ones."""


class Event(asyncio.TimerHandle):
    """One scheduled callback, ready or waiting for its time.

    A handle of asyncio by type, so that callers can cancel it; none of the parent's state is used,
    as its constructor would cost more than the whole dispatch.
    """

    __slots__ = ("arguments", "callback", "context", "is_cancelled", "on_cancel", "scope", "sequence", "when_ns")

    def __init__(
        self,
        callback: Callable[..., object],
        arguments: tuple[Any, ...],
        context: Context,
        scope: Scope | None,
        sequence: int,
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.arguments = arguments
        self.context = context
        self.scope = scope
        self.sequence = sequence
        self.is_cancelled = False
        self.when_ns = -1
        self.on_cancel: Callable[[], None] | None = None

    def cancel(self) -> None:
        """Never call the callback; idempotent."""
        if self.is_cancelled:
            return
        self.is_cancelled = True
        self.callback = None
        self.arguments = ()
        if self.on_cancel is not None:
            self.on_cancel()
            self.on_cancel = None

    def cancelled(self) -> bool:
        """Tell whether it was cancelled."""
        return self.is_cancelled

    def when(self) -> float:
        """Return when a timer is due, in seconds of virtual time."""
        return self.when_ns / 1e9

    def __repr__(self) -> str:
        return f"<Event {self.sequence} {self.callback!r}>"


class Scope:
    """One life of one node on the loop, or the life of what belongs to no node."""

    __slots__ = ("_sweep_at", "held", "node", "state", "tasks")

    def __init__(self, node: object) -> None:
        self.node = node
        self.state = RUNNING
        self.held: list[Event] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self._sweep_at = _SWEEP_MIN

    def add_task(self, task: asyncio.Task[Any]) -> None:
        """Keep a task alive until it is finished and its outcome was looked at.

        Otherwise the garbage collector would decide when an abandoned task ends.
        """
        self.tasks.append(task)
        if len(self.tasks) >= self._sweep_at:
            self.tasks = [task for task in self.tasks if not task.done() or is_failure_unseen(task)]
            self._sweep_at = max(_SWEEP_MIN, 2 * len(self.tasks))

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        """Return the unfinished tasks, oldest first."""
        return [task for task in self.tasks if not task.done()]

    def unseen_failures(self) -> list[BaseException]:
        """Return, once, the errors of finished tasks that nobody has looked at."""
        failed = [task for task in self.tasks if task.done() and is_failure_unseen(task)]
        return [error for task in failed if (error := task.exception()) is not None]


CURRENT_SCOPE: ContextVar[Scope | None] = ContextVar("quiver_simulated_scope", default=None)


def is_failure_unseen(task: asyncio.Task[Any]) -> bool:
    """Tell whether a finished task holds an error that nobody has looked at."""
    return bool(task._log_traceback)
