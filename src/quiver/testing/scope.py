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
    """One scheduled callback.

    A handle of asyncio by type, so that callers can cancel it; none of the parent's state is used,
    as its constructor would cost more than the whole dispatch.
    """

    __slots__ = ("arguments", "callback", "context", "scope", "sequence")

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

    def cancel(self) -> None:
        """Never call the callback; idempotent."""
        self.callback = None
        self.arguments = ()

    def cancelled(self) -> bool:
        """Tell whether it was cancelled."""
        return self.callback is None

    def __repr__(self) -> str:
        return f"<Event {self.sequence} {self.callback!r}>"


class Timer(Event):
    """An event that waits for its time; `on_cancel` is called once if it is cancelled while it waits."""

    __slots__ = ("on_cancel", "when_ns")

    when_ns: int
    on_cancel: Callable[[], None] | None

    def arm(self, when_ns: int, on_cancel: Callable[[], None]) -> None:
        """Set when it is due and who hears of a cancellation."""
        self.when_ns = when_ns
        self.on_cancel = on_cancel

    def cancel(self) -> None:
        """Never call the callback; idempotent."""
        super().cancel()
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()

    def when(self) -> float:
        """Return when it is due, in seconds of virtual time."""
        return self.when_ns / 1e9


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
