"""Pairs each call with its outcome.

An operation spans `invoked` to `completed`, numbers of events: one that completed before another was invoked came
before it in real time. A call whose outcome is unknown, or was never written, completes at the end of time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quiver.testing.judge.events import CALLS, NOTES, OUTCOMES, Event, HistoryError

END_OF_TIME = 1 << 62


@dataclass(slots=True, eq=False)
class Operation:
    """One call or note, from its beginning to its outcome."""

    proc: str
    f: str
    key: str | None
    argument: Any
    invoked: int
    outcome: str = "info"
    completed: int = END_OF_TIME
    result: Any = None


def pair_events(events: Iterable[Event]) -> list[Operation]:
    """Return the operations of a history in the order of their beginnings; raise HistoryError if it is none."""
    operations: list[Operation] = []
    pending: dict[str, Operation] = {}
    last = -1
    for event in events:
        if event.i <= last:
            raise HistoryError(f"event {event.i} follows event {last}")
        last = event.i
        if event.type == "invoke":
            operations.append(_begin(event, pending))
        elif event.f in NOTES:
            operations.append(_note(event, pending))
        else:
            _complete(event, pending)
    return operations


def _begin(event: Event, pending: dict[str, Operation]) -> Operation:
    if event.proc in pending:
        raise HistoryError(f"event {event.i}: {event.proc} begins {event.f} before its {pending[event.proc].f} ended")
    if event.f not in CALLS:
        raise HistoryError(f"event {event.i}: {event.f} is no call")
    operation = Operation(event.proc, event.f, event.key, event.value, event.i)
    pending[event.proc] = operation
    return operation


def _note(event: Event, pending: dict[str, Operation]) -> Operation:
    if event.f == "crash":
        pending.pop(event.proc, None)
    return Operation(event.proc, event.f, event.key, None, event.i, event.type, event.i, event.value)


def _complete(event: Event, pending: dict[str, Operation]) -> None:
    operation = pending.pop(event.proc, None)
    if operation is None or operation.f != event.f or event.type not in OUTCOMES:
        raise HistoryError(f"event {event.i}: {event.type} of {event.f}, which {event.proc} did not begin")
    if operation.key is not None and event.key != operation.key:
        raise HistoryError(f"event {event.i}: {event.f} of {operation.key} ended with key {event.key}")
    operation.outcome = event.type
    operation.key = event.key
    operation.result = event.value
    if event.type != "info":
        operation.completed = event.i
