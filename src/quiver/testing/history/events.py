"""The history of a run as clients saw it: one JSON object a line, and what its fields mean.

`{"i", "t_ns", "proc", "type", "f", "key", "value"}`. `i` counts from 0 and is the real-time order: an `invoke` is
written before the request leaves, its outcome after the answer is in. A process does one thing at a time. Outcomes
are Jepsen's: `ok` was done, `fail` was certainly not, `info` is unknown. Every value sent is unique in the run.

| f | key | value of `invoke` | value of `ok` |
|---|---|---|---|
| `send` | partition, or null: the outcome names it | list of values, one batch | offset of the first |
| `poll` | partition | – | list of `[offset, value]` |
| `list_offsets` | partition | – | end offset |
| `consume` | the same | `{"consumer", "max", "offset"}`, null: at the cursor | list of `[offset, value]` |
| `commit` | partition | `{"consumer", "offset"}`: where the cursor is put | – |
| `cursor` | partition | `{"consumer"}` | the consumer's cursor |
| `receive` | null | `{"group", "max"}` | list of deliveries, see `queues` |
| `settle` | partition | `{"group", "kind", "records", "ms"}`, see `queues` | those of its records that were refused |
| `create`, `delete`, `exists` | name | – | whether it changed something; for `exists`, whether it is there |
| `register` | name | – | `{"id", "epoch"}` |

Notes, which are one event of type `ok` each: `assign` (the process reads on from offset `value`, null: anywhere),
`subscribe` (`{"consumer", "offset"}`: where it begins), `trim` (records below offset `value` may be gone), `drain` (the
partition was polled to its end, offset `value`, after everything healed), `replica` (`{"replica", "records"}`: a part
of what one broker has), `grant` (a member of a group begins a partition, see `members`), `queue` and `dead` (the end of
a work queue, see `queues`). `crash` is of type `info`: the process is no more, and what it was doing is unknown.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

OUTCOMES = frozenset(("ok", "fail", "info"))
NOTES = frozenset(("assign", "subscribe", "trim", "drain", "replica", "grant", "queue", "dead", "crash"))
CALLS = frozenset(
    (
        *("send", "poll", "list_offsets", "consume", "commit", "cursor", "receive", "settle"),
        *("create", "delete", "exists", "register"),
    )
)


class HistoryError(ValueError):
    """A history that is no history: the workload or the recorder is at fault, not what was tested."""


@dataclass(slots=True)
class HistoryEvent:
    """One line of a history."""

    i: int
    t_ns: int
    proc: str
    type: str
    f: str
    key: str | None
    value: Any


def parse_history(lines: Iterable[str]) -> Iterator[HistoryEvent]:
    """Yield the events of a history written as JSON lines.

    A last line without its end is skipped: the recorder was killed while it wrote.
    """
    decode = json.JSONDecoder().decode
    for number, line in enumerate(lines):
        if not line.endswith("\n"):
            return
        try:
            yield HistoryEvent(**decode(line))
        except (ValueError, TypeError) as error:
            raise HistoryError(f"line {number + 1} is no event: {error}") from error


END_OF_TIME = 1 << 62


@dataclass(slots=True, eq=False)
class HistoryOperation:
    """One call or note, from its beginning to its outcome."""

    proc: str
    f: str
    key: str | None
    argument: Any
    invoked: int
    outcome: str = "info"
    completed: int = END_OF_TIME
    result: Any = None
    began_ns: int = 0
    ended_ns: int = END_OF_TIME


def pair_events(events: Iterable[HistoryEvent]) -> list[HistoryOperation]:
    """Return the operations of a history in the order of their beginnings; raise HistoryError if it is none."""
    operations: list[HistoryOperation] = []
    pending: dict[str, HistoryOperation] = {}
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


def _begin(event: HistoryEvent, pending: dict[str, HistoryOperation]) -> HistoryOperation:
    if event.proc in pending:
        raise HistoryError(f"event {event.i}: {event.proc} begins {event.f} before its {pending[event.proc].f} ended")
    if event.f not in CALLS:
        raise HistoryError(f"event {event.i}: {event.f} is no call")
    operation = HistoryOperation(event.proc, event.f, event.key, event.value, event.i, began_ns=event.t_ns)
    pending[event.proc] = operation
    return operation


def _note(event: HistoryEvent, pending: dict[str, HistoryOperation]) -> HistoryOperation:
    if event.f == "crash":
        pending.pop(event.proc, None)
    return HistoryOperation(
        event.proc, event.f, event.key, None, event.i, event.type, event.i, event.value, event.t_ns, event.t_ns
    )


def _complete(event: HistoryEvent, pending: dict[str, HistoryOperation]) -> None:
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
        operation.ended_ns = event.t_ns


class RecordedCall:
    """A call whose outcome is still to come; exactly one of `ok`, `fail` and `info` records it."""

    __slots__ = ("_recorder", "f", "is_open", "key", "proc")

    def __init__(self, recorder: Recorder, proc: str, f: str, key: str | None) -> None:
        self._recorder = recorder
        self.proc = proc
        self.f = f
        self.key = key
        self.is_open = True

    def ok(self, value: Any = None, *, key: str | None = None) -> None:
        """Record that it was done; `key` if only the answer named it."""
        self._end("ok", value, key)

    def fail(self, value: Any = None) -> None:
        """Record that it was certainly not done, and never will be."""
        self._end("fail", value, None)

    def info(self, value: Any = None) -> None:
        """Record that the outcome is unknown."""
        self._end("info", value, None)

    def _end(self, outcome: str, value: Any, key: str | None) -> None:
        if not self.is_open:
            raise RuntimeError(f"{self.f} of {self.proc} has an outcome already")
        self.is_open = False
        self._recorder.write(self.proc, outcome, self.f, key or self.key, value)


class Recorder:
    """Write events to a text stream that the caller owns; `now_ns` may be a simulated clock's."""

    def __init__(self, stream: TextIO, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._stream = stream
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
        self.count = 0
        """How many events were written."""

    def invoke(self, proc: str, f: str, key: str | None = None, value: Any = None) -> RecordedCall:
        """Record that a process begins something; call this before the request leaves."""
        call = RecordedCall(self, proc, f, key)
        self.write(proc, "invoke", f, key, value)
        return call

    def note(self, proc: str, f: str, key: str | None = None, value: Any = None) -> None:
        """Record something that has no duration, such as `assign`, `drain` or `replica`."""
        self.write(proc, "info" if f == "crash" else "ok", f, key, value)

    def write(self, proc: str, kind: str, f: str, key: str | None, value: Any) -> None:
        """Write one event. The value is encoded immediately: it may change afterwards."""
        tail = self._encode({"proc": proc, "type": kind, "f": f, "key": key, "value": value})
        with self._lock:
            self._stream.write(f'{{"i":{self.count},"t_ns":{self._now_ns()},{tail[1:]}\n')
            self.count += 1
