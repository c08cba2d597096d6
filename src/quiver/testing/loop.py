"""An asyncio event loop on virtual time, whose every choice comes from a seed.

It owns the ready queue, the timers and the virtual clock. Time stands still while anything is ready
and then jumps to the next timer, so that hours pass in seconds and a run depends on nothing but its
seed. When nothing is ready and no timer waits, the program hangs: that is a `Deadlock`.

Rules that simulations rely on:
- no host: no threads, sockets, processes, signals or real time (`quiver.testing.scheduling`);
- a callback belongs to the node in whose scope it was scheduled; a killed node's code never runs
  again, not even its `finally` blocks, as after `kill -9`; a paused node's waits, as after SIGSTOP;
- an unhandled error fails the run: immediately in a callback, at its end in a task. A node may set a handler
  of its own for the errors of its callbacks, as the process of a real one does.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import io
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Hashable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, TypeVar, cast

from quiver.clock import Rng
from quiver.testing.scheduling import (
    CURRENT_SCOPE,
    DEAD,
    PAUSED,
    RUNNING,
    FifoQueue,
    HostlessLoop,
    NodeScope,
    Policy,
    ReadyQueue,
    ScheduledCallback,
    ShuffledQueue,
    Timer,
    close_quietly,
)
from quiver.testing.trace import Trace

T = TypeVar("T")

EVENTS_MAX = 50_000_000
"""How many callbacks one run may take by default: minutes of real time."""

STILL_EVENTS_MAX = 1_000_000
"""How many callbacks may run by default before virtual time passes: more mean that something spins."""

FOREVER_S = 1e9
"""The virtual time of what never happens."""

TIME_MAX_S = 30 * 24 * 3600.0
"""How far virtual time may go by default: a forgotten periodic timer must not run forever."""

_ENDINGS_MAX = 10
"""How often tasks may start others as they end."""

_CANCELLED_MIN = 100
"""Rebuild the timers when this many, and more than half of them, are cancelled."""


class Deadlock(RuntimeError):  # noqa: N818 - it names a state, as in every text on the matter
    """Report that nothing can ever happen again although the run is not over."""


class LimitReached(RuntimeError):  # noqa: N818 - the run is cut off, nothing in it need be wrong
    """Report that a run took more callbacks or more virtual time than it may."""


class Spinning(RuntimeError):  # noqa: N818 - it names a state, as `Deadlock`
    """Report that callbacks run and run although no time passes: a loop whose wait returns without waiting."""


class UnhandledError(RuntimeError):
    """Report an error in a callback or task that was not handled; the cause is chained."""


class _NumberedFuture(asyncio.Future[Any]):
    """A future that sets and dictionaries order by its number: by default that would be by its place in memory."""

    def __init__(self, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(**options)

    def __hash__(self) -> int:
        return self._number


class _NumberedTask(asyncio.Task[T]):
    """A task that sets order by its number: a task group keeps its tasks in one, and cancels them in its order."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, T], **options: Any) -> None:
        self._number = number  # asyncio asks for the hash in the constructor
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class SimulatedLoop(HostlessLoop):
    """Run coroutines on virtual time, in an order drawn from `rng`.

    With a `trace`, every step is hashed into it. `events_max` and `time_max_s` bound a run, and `still_events_max` the
    callbacks at one moment of virtual time.
    """

    def __init__(
        self,
        rng: Rng,
        *,
        policy: Policy = "shuffle",
        trace: Trace | None = None,
        events_max: int = EVENTS_MAX,
        time_max_s: float = TIME_MAX_S,
        still_events_max: int = STILL_EVENTS_MAX,
    ) -> None:
        self.now_ns = 0
        self.event_count = 0
        self._still_events_max = still_events_max
        self._still_until = still_events_max
        """The event count by which time must have passed."""
        self.running_node: Hashable | None = None
        """The node whose callback ran last, for `after_event`; None: it belongs to no node."""
        self._ready: ReadyQueue = ShuffledQueue(rng) if policy == "shuffle" else FifoQueue()
        self._timers: list[tuple[int, int, Timer]] = []
        self._cancelled_timer_count = 0
        self._count_cancelled_timer = self._timer_cancelled
        self._sequence = 0
        self._task_count = 0
        self._trace = trace
        self._events_max = events_max
        self._time_max_ns = int(time_max_s * 1e9)
        self._root = NodeScope(None)
        self._scopes: dict[Hashable, NodeScope] = {}
        self._dead: list[ScheduledCallback | asyncio.Task[Any]] = []
        self._hooks: list[Callable[[], object]] = []
        self._generators: dict[int, tuple[weakref.ref[AsyncGenerator[Any, Any]], NodeScope | None]] = {}
        self._unhandled: list[BaseException] = []
        self._exception_handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None
        self._is_stopping = False
        self._is_closed = False
        self._is_ending = False
        self._thread: int | None = None

    # Running.

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run until `future` is done and return its result; raise what it or anything unhandled raised."""
        self._require_open()
        main: asyncio.Future[T] = asyncio.ensure_future(cast("Awaitable[T]", future), loop=self)
        self._run(main)
        if not main.done():
            raise RuntimeError("the loop was stopped before its main future was done")
        result = main.result()
        self._raise_unhandled()
        return result

    def run_forever(self) -> None:
        """Run until `stop` is called."""
        self._require_open()
        self._run(self.create_future())
        self._raise_unhandled()

    def stop(self) -> None:
        """End the run after the current callback."""
        self._is_stopping = True

    def is_running(self) -> bool:
        """Return whether a run is under way."""
        return self._thread is not None

    def is_closed(self) -> bool:
        """Return whether the loop was closed."""
        return self._is_closed

    def close(self) -> None:
        """End everything that is left, silently; idempotent.

        Only here do the `finally` blocks of killed tasks run, because Python runs them when it frees a
        coroutine: the run is over, and what they touch is dead. They find their loop, and each of their waits ends
        with `GeneratorExit`: no block sees an error that its code did not make.
        """
        if self.is_running():
            raise RuntimeError("a running loop cannot be closed")
        if self._is_closed:
            return
        self._is_closed = self._is_ending = True
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            self._end_tasks()
        finally:
            asyncio._set_running_loop(outer)
            self._is_ending = False
        self._ready.clear()
        self._timers.clear()
        self._dead.clear()
        self._scopes.clear()
        self._root = NodeScope(None)

    def _end_tasks(self) -> None:
        """Close every task that is left, and those that such a task starts as it ends."""
        dead = [buried for buried in self._dead if isinstance(buried, asyncio.Task)]
        for _ in range(_ENDINGS_MAX):
            pending = []
            for scope in (self._root, *self._scopes.values()):  # one that ends may start the process of a node
                pending += scope.pending_tasks()
                scope.tasks = []
            pending, dead = pending + dead, []
            if not pending:
                return
            close_quietly(pending)

    async def shutdown_asyncgens(self) -> None:
        """Close every asynchronous generator that is still open, oldest first."""
        opened = [reference() for reference, _ in self._generators.values()]
        self._generators.clear()
        for generator in opened:
            if generator is not None:
                await generator.aclose()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - asyncio's signature
        """Do nothing: there is no executor."""

    # Scheduling.

    def call_soon(  # type: ignore[override] # typeshed binds the arguments by a private variadic
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> ScheduledCallback:
        """Make a callback ready."""
        self._sequence = sequence = self._sequence + 1
        if context is None:
            context = contextvars.copy_context()
        event = ScheduledCallback(callback, args, context, context.get(CURRENT_SCOPE), sequence)
        self._ready.append(event)
        return event

    def call_soon_threadsafe(  # type: ignore[override] # as call_soon
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> ScheduledCallback:
        """Make a callback ready, from the loop's own thread only: others would bring in real time."""
        if self._thread not in (None, threading.get_ident()):
            raise RuntimeError("a simulated loop takes no callbacks from other threads")
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override] # as call_soon
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Timer:
        """Call back after `delay` seconds of virtual time."""
        return self.call_later_ns(round(delay * 1e9), callback, *args, context=context)

    def call_at(  # type: ignore[override] # as call_soon
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Timer:
        """Call back at virtual time `when`, in seconds; infinity is the end of all simulations."""
        return self.call_later_ns(round(min(when, FOREVER_S) * 1e9) - self.now_ns, callback, *args, context=context)

    def call_later_ns(
        self, delay_ns: int, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Timer:
        """Call back after `delay_ns` nanoseconds of virtual time; no earlier than now."""
        self._sequence = sequence = self._sequence + 1
        if context is None:
            context = contextvars.copy_context()
        timer = Timer(callback, args, context, context.get(CURRENT_SCOPE), sequence)
        when_ns = self.now_ns + max(0, delay_ns)
        timer.arm(when_ns, self._count_cancelled_timer)
        heapq.heappush(self._timers, (when_ns, sequence, timer))
        return timer

    def time(self) -> float:
        """Return virtual time in seconds."""
        return self.now_ns / 1e9

    def create_future(self) -> asyncio.Future[Any]:
        """Return a new future on this loop."""
        self._task_count += 1
        return _NumberedFuture(self._task_count, loop=self)

    def create_task(  # type: ignore[override] # options differ between Python versions
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None, **options: Any
    ) -> asyncio.Task[T]:
        """Start a task, in the scope of the context it is started from."""
        self._require_open()
        self._task_count += 1
        number = self._task_count
        task = _NumberedTask(number, coro, loop=self, name=name or f"task-{number}", context=context, **options)
        scope = CURRENT_SCOPE.get() if context is None else context.get(CURRENT_SCOPE)
        (scope or self._root).add_task(task)
        return task

    def after_event(self, callback: Callable[[], object]) -> None:
        """Call back after every callback that ran; what it raises ends the run."""
        self._hooks.append(callback)

    # Nodes.

    @contextmanager
    def node_scope(self, node: Hashable) -> Iterator[None]:
        """Let everything that is scheduled in this block belong to `node`, in its present life."""
        scope = self._scopes.setdefault(node, NodeScope(node))
        token = CURRENT_SCOPE.set(scope)
        try:
            yield
        finally:
            CURRENT_SCOPE.reset(token)

    def run_as(self, context: Context, callback: Callable[..., object], *arguments: Any) -> None:
        """Let what is left of the current event be a node's: run a callback in the scope of `context`, now.

        It costs less than an event of its own. A paused node's callback waits until `resume`, a dead one's is void.
        """
        scope = context.get(CURRENT_SCOPE)
        if scope is None or scope.state == RUNNING:
            self.running_node = scope.node if scope is not None else None
            try:
                context.run(callback, *arguments)
            except BaseException as error:
                if scope is None or scope.state != DEAD:
                    if scope is None or scope.on_error is None or not isinstance(error, Exception):
                        raise
                    scope.on_error(_describe_error(error))
        else:
            self._sequence += 1
            self._divert(ScheduledCallback(callback, arguments, context, scope, self._sequence))

    def kill(self, node: Hashable) -> None:
        """End a node's life: none of its callbacks, timers or tasks ever runs again.

        The next `node_scope` of this node begins a new life. Fine for a node that does not live.
        """
        scope = self._scopes.pop(node, None)
        if scope is None:
            return
        scope.state = DEAD
        timers = self._timers
        # They are kept, not freed: freeing a coroutine runs its finally blocks.
        self._dead.extend(self._ready.take_scope(scope))
        self._dead.extend(event for _, _, event in timers if event.scope is scope)
        self._dead.extend(scope.held)
        self._dead.extend(scope.tasks)
        timers[:] = [timer for timer in timers if timer[2].scope is not scope]
        heapq.heapify(timers)

    def pause(self, node: Hashable) -> None:
        """Hold all callbacks and timers of a node until `resume`."""
        scope = self._scopes.get(node)
        if scope is not None:
            scope.state = PAUSED

    def resume(self, node: Hashable) -> None:
        """Resume a paused node; what fell due meanwhile is ready now."""
        scope = self._scopes.get(node)
        if scope is not None and scope.state == PAUSED:
            scope.state = RUNNING
            self._ready.extend(scope.held)
            scope.held.clear()

    def is_alive(self, node: Hashable) -> bool:
        """Return whether a node lives, running or paused."""
        return node in self._scopes

    # Errors.

    def get_exception_handler(self) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None:
        """Return the handler that was set, if any."""
        return self._exception_handler

    def set_exception_handler(
        self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None
    ) -> None:
        """Send unhandled errors to `handler` instead of failing the run."""
        self._exception_handler = handler

    def set_node_exception_handler(self, node: Hashable, handler: Callable[[dict[str, Any]], object]) -> None:
        """Send errors that escape the callbacks of a node, in its present life, to `handler`."""
        self._scopes[node].on_error = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Fail the run with this error."""
        error = context.get("exception")
        self._unhandled.append(error or RuntimeError(str(context.get("message"))))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Handle an error that no code handled.

        A plain future's unseen error is reported when it is freed. Once a node was killed it may be one
        of the dead, which report nothing.
        """
        if self._is_closed or (self._dead and "future" in context and "task" not in context):
            return
        (self._exception_handler or _default_handler)(self, context)

    def get_debug(self) -> bool:
        """Return False: asyncio's debug mode measures real time."""
        return False

    def set_debug(self, enabled: bool) -> None:  # noqa: FBT001 - asyncio's signature
        """Ignore the call: asyncio's debug mode measures real time."""

    def get_task_factory(self) -> None:
        """Return None: there is one kind of task."""

    def set_task_factory(self, factory: object) -> None:
        """Refuse any factory: tasks must be known to their scope."""
        if factory is not None:
            raise RuntimeError("a simulated loop makes its tasks itself")

    # The engine.

    def _run(self, until: asyncio.Future[Any]) -> None:
        if self.is_running() or asyncio._get_running_loop() is not None:
            raise RuntimeError("another event loop is running")
        hooks = sys.get_asyncgen_hooks()
        self._thread = threading.get_ident()
        self._is_stopping = False
        sys.set_asyncgen_hooks(firstiter=self._generator_started, finalizer=self._generator_abandoned)
        asyncio._set_running_loop(self)
        try:
            self._run_events(until)
        finally:
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
            self._thread = None

    def _run_events(self, until: asyncio.Future[Any]) -> None:
        """Run one event after the other: the hot path."""
        ready, timers, hooks, trace, unhandled = self._ready, self._timers, self._hooks, self._trace, self._unhandled
        take, is_done = ready.take, until.done
        while not is_done() and not self._is_stopping:
            if timers and timers[0][0] <= self.now_ns:
                self._wake_timers()
            if not ready:
                self._advance(until)
                continue
            event = take()
            scope = event.scope
            if scope is None:
                self.running_node = None
            elif scope.state == RUNNING:
                self.running_node = scope.node
            else:
                self._divert(event)
                continue
            callback = event.callback
            if callback is None:
                continue
            self.event_count += 1
            if trace is not None:
                trace.record_step(event.sequence, self.now_ns)
            try:
                event.context.run(callback, *event.arguments)
            except BaseException as error:  # noqa: BLE001 - a loop judges every error of a callback
                self._judge(event, error)
            for hook in hooks:
                hook()
            if unhandled:
                self._raise_unhandled()
            if self.event_count >= self._still_until:
                self._check_progress(event)
            if self.event_count >= self._events_max:
                raise LimitReached(f"{self.event_count} callbacks ran, at {self.time()} s; {self._describe_tasks()}")

    def _judge(self, event: ScheduledCallback, error: BaseException) -> None:
        """Decide on an error that left a callback: the dead's are void, the grave ones end the run."""
        if event.scope is not None and event.scope.state == DEAD:
            return
        if not isinstance(error, Exception):
            raise error
        if event.scope is not None and event.scope.on_error is not None:
            event.scope.on_error(_describe_error(error))
        else:
            self.call_exception_handler(_describe_error(error))

    def _wake_timers(self) -> None:
        """Make all timers ready that are due."""
        timers, now_ns = self._timers, self.now_ns
        while timers and timers[0][0] <= now_ns:
            timer = heapq.heappop(timers)[2]
            timer.on_cancel = None
            if timer.callback is None:
                self._cancelled_timer_count -= 1
            else:
                self._ready.append(timer)

    def _advance(self, until: asyncio.Future[Any]) -> None:
        """Move time to the next timer."""
        timers = self._timers
        while timers and timers[0][2].callback is None:
            heapq.heappop(timers)
            self._cancelled_timer_count -= 1
        if not timers:
            raise Deadlock(f"nothing is left to run at {self.time()} s for {until!r}; {self._describe_tasks()}")
        if timers[0][0] > self._time_max_ns:
            raise LimitReached(f"the next timer is beyond {self._time_max_ns / 1e9} s; {self._describe_tasks()}")
        self.now_ns = timers[0][0]
        self._still_until = self.event_count + self._still_events_max

    def _check_progress(self, event: ScheduledCallback) -> None:
        """Raise `Spinning` with the stack of the task that ran last: no time has passed for very long."""
        task = getattr(event.callback, "__self__", None)
        text = repr(event)
        if isinstance(task, asyncio.Task):
            with io.StringIO() as file:
                task.print_stack(file=file)
                text = file.getvalue()
        count, node = self._still_events_max, self.running_node
        raise Spinning(f"{count} callbacks of node {node} ran at {self.time()} s while no time passed; last: {text}")

    def _divert(self, event: ScheduledCallback) -> None:
        """Keep an event of a node that does not run."""
        assert event.scope is not None
        if event.scope.state == PAUSED:
            event.scope.held.append(event)
        else:
            self._dead.append(event)

    def _timer_cancelled(self) -> None:
        self._cancelled_timer_count += 1
        timers = self._timers
        if self._cancelled_timer_count > _CANCELLED_MIN and self._cancelled_timer_count * 2 > len(timers):
            timers[:] = [timer for timer in timers if timer[2].callback is not None]
            heapq.heapify(timers)
            self._cancelled_timer_count = 0

    def _raise_unhandled(self) -> None:
        """Raise the first unhandled error, if any."""
        scopes = (self._root, *self._scopes.values())
        errors = self._unhandled + [error for scope in scopes for error in scope.unseen_failures()]
        self._unhandled.clear()
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            raise UnhandledError(f"{errors[0]!r} was not handled{more}") from errors[0]

    def _describe_tasks(self) -> str:
        lines = [
            f"{task.get_name()} of node {scope.node}: {task.get_coro()!r}{' (paused)' if scope.state == PAUSED else ''}"
            for scope in (self._root, *self._scopes.values())
            for task in scope.pending_tasks()
        ]
        failures = [repr(error) for scope in (self._root, *self._scopes.values()) for error in scope.unseen_failures()]
        return "\n  ".join(["pending tasks:", *lines, *(f"failed unseen: {failure}" for failure in failures)])

    def _generator_started(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators[id(generator)] = (weakref.ref(generator), CURRENT_SCOPE.get())

    def _generator_abandoned(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Close an unreferenced generator, unless its node is dead."""
        _, scope = self._generators.pop(id(generator), (None, None))
        if not self._is_closed and (scope is None or scope.state != DEAD):
            self.create_task(generator.aclose())

    def _require_open(self) -> None:
        if self._is_closed and not self._is_ending:
            raise RuntimeError("the loop is closed")


def _describe_error(error: Exception) -> dict[str, Any]:
    return {"message": "unhandled error in a callback", "exception": error}


def _default_handler(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    loop.default_exception_handler(context)
