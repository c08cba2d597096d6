"""Which node a scheduled callback belongs to, and whether that node still runs.

The scope travels in a context variable: whatever is scheduled inside `SimulatedLoop.node_scope` —
and by the tasks started there, and by theirs — carries it. A killed node's scope stays dead;
the node's next life gets a new one. This module holds state only; the loop acts on it.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import Context, ContextVar
from typing import Any, Final, Literal, NoReturn

from quiver.clock import Rng

RUNNING: Final = 0
PAUSED: Final = 1
DEAD: Final = 2

_SWEEP_MIN: Final = 64
"""Sweep finished tasks at most once per this many new ones."""


class ScheduledCallback(asyncio.TimerHandle):
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
        scope: NodeScope | None,
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
        """Return whether it was cancelled."""
        return self.callback is None

    def __repr__(self) -> str:
        return f"<Event {self.sequence} {self.callback!r}>"


class Timer(ScheduledCallback):
    """An event that waits for its time; `on_cancel` is called once if it is cancelled while it waits."""

    __slots__ = ("on_cancel", "when_ns")

    when_ns: int
    on_cancel: Callable[[], None] | None

    def arm(self, when_ns: int, on_cancel: Callable[[], None]) -> None:
        """Set when it is due and what a cancellation calls."""
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


class NodeScope:
    """One life of one node on the loop, or the life of what belongs to no node."""

    __slots__ = ("_sweep_at", "held", "node", "on_error", "state", "tasks")

    def __init__(self, node: object) -> None:
        self.node = node
        self.state = RUNNING
        self.on_error: Callable[[dict[str, Any]], object] | None = None
        """The exception handler that this life of the node has set."""
        self.held: list[ScheduledCallback] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self._sweep_at = _SWEEP_MIN

    def add_task(self, task: asyncio.Task[Any]) -> None:
        """Keep a task alive until it is finished and its outcome was retrieved.

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
        """Return, once, the errors of finished tasks that was not retrieved."""
        failed = [task for task in self.tasks if task.done() and is_failure_unseen(task)]
        return [error for task in failed if (error := task.exception()) is not None]


CURRENT_SCOPE: ContextVar[NodeScope | None] = ContextVar("quiver_simulated_scope", default=None)


def is_failure_unseen(task: asyncio.Task[Any]) -> bool:
    """Return whether a finished task holds an error that was not retrieved."""
    return bool(task._log_traceback)


Policy = Literal["shuffle", "fifo"]


class ShuffledQueue(list[ScheduledCallback]):
    """Pick any ready event, each with the same chance."""

    def __init__(self, rng: Rng) -> None:
        super().__init__()
        self._random = rng.random

    def take(self) -> ScheduledCallback:
        """Remove and return a random event in constant time."""
        last = self.pop()
        count = len(self)
        if not count:
            return last
        chosen = int(self._random() * (count + 1))
        if chosen == count:
            return last
        event = self[chosen]
        self[chosen] = last
        return event

    def take_scope(self, scope: NodeScope) -> list[ScheduledCallback]:
        """Remove and return every event of one scope."""
        taken = [event for event in self if event.scope is scope]
        self[:] = [event for event in self if event.scope is not scope]
        return taken


class FifoQueue(deque[ScheduledCallback]):
    """Run events in the order in which they became ready."""

    take = deque[ScheduledCallback].popleft

    def take_scope(self, scope: NodeScope) -> list[ScheduledCallback]:
        """Remove and return every event of one scope."""
        events = list(self)
        self.clear()
        self.extend(event for event in events if event.scope is not scope)
        return [event for event in events if event.scope is scope]


ReadyQueue = ShuffledQueue | FifoQueue
"""What the loop takes its next event from."""


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


class HostAccessError(RuntimeError):
    """Report that simulated code reached for the host; the message names the call."""


def _refuse(name: str, instead: str) -> Any:
    def refused(_loop: asyncio.AbstractEventLoop, *_arguments: object, **_options: object) -> NoReturn:
        raise HostAccessError(f"a simulated loop has no {name}: {instead}")

    return refused


_NETWORK = "send through the Network seam"
_THREADS = "run blocking work through the Executor seam"
_PROCESSES = "there are no processes in a simulation"
_SIGNALS = "there are no signals in a simulation"


class HostlessLoop(asyncio.AbstractEventLoop):
    """An event loop without a host: every call that would reach it is refused."""

    run_in_executor = _refuse("run_in_executor", _THREADS)
    set_default_executor = _refuse("set_default_executor", _THREADS)

    getaddrinfo = _refuse("getaddrinfo", _NETWORK)
    getnameinfo = _refuse("getnameinfo", _NETWORK)
    create_connection = _refuse("create_connection", _NETWORK)
    create_server = _refuse("create_server", _NETWORK)
    create_unix_connection = _refuse("create_unix_connection", _NETWORK)
    create_unix_server = _refuse("create_unix_server", _NETWORK)
    create_datagram_endpoint = _refuse("create_datagram_endpoint", _NETWORK)
    connect_accepted_socket = _refuse("connect_accepted_socket", _NETWORK)
    start_tls = _refuse("start_tls", _NETWORK)
    sendfile = _refuse("sendfile", _NETWORK)
    add_reader = _refuse("add_reader", _NETWORK)
    remove_reader = _refuse("remove_reader", _NETWORK)
    add_writer = _refuse("add_writer", _NETWORK)
    remove_writer = _refuse("remove_writer", _NETWORK)
    sock_recv = _refuse("sock_recv", _NETWORK)
    sock_recv_into = _refuse("sock_recv_into", _NETWORK)
    sock_recvfrom = _refuse("sock_recvfrom", _NETWORK)
    sock_recvfrom_into = _refuse("sock_recvfrom_into", _NETWORK)
    sock_sendall = _refuse("sock_sendall", _NETWORK)
    sock_sendto = _refuse("sock_sendto", _NETWORK)
    sock_connect = _refuse("sock_connect", _NETWORK)
    sock_accept = _refuse("sock_accept", _NETWORK)
    sock_sendfile = _refuse("sock_sendfile", _NETWORK)

    connect_read_pipe = _refuse("connect_read_pipe", _PROCESSES)
    connect_write_pipe = _refuse("connect_write_pipe", _PROCESSES)
    subprocess_shell = _refuse("subprocess_shell", _PROCESSES)
    subprocess_exec = _refuse("subprocess_exec", _PROCESSES)

    add_signal_handler = _refuse("add_signal_handler", _SIGNALS)
    remove_signal_handler = _refuse("remove_signal_handler", _SIGNALS)
