"""Histories for tests of the history checker: by hand, line by line, or a whole run of a correct log from a seed."""

from __future__ import annotations

from random import Random
from typing import Any

from quiver.testing.history import CheckResult, HistoryEvent, check_history


class Script:
    """A history in the making; calls begin and end at once unless `begin` and `end` are used."""

    def __init__(self) -> None:
        self.events: list[HistoryEvent] = []

    def add(self, proc: str, kind: str, f: str, key: str | None, value: Any) -> None:
        self.events.append(HistoryEvent(len(self.events), 1000 * len(self.events), proc, kind, f, key, value))

    def begin(self, proc: str, f: str, key: str | None = "t-0", value: Any = None) -> None:
        self.add(proc, "invoke", f, key, value)

    def end(self, proc: str, f: str, kind: str = "ok", value: Any = None, *, key: str | None = "t-0") -> None:
        self.add(proc, kind, f, key, value)

    def call(self, proc: str, f: str, value: Any, answer: Any, *, kind: str = "ok", key: str | None = "t-0") -> None:
        self.begin(proc, f, key, value)
        self.end(proc, f, kind, answer, key=key)

    def send(self, proc: str, values: str, at: int | None, *, kind: str = "ok", key: str = "t-0") -> None:
        """Send one record for each word of `values`."""
        self.call(proc, "send", values.split(), at, kind=kind, key=key)

    def poll(self, proc: str, first: int, values: str, *, key: str = "t-0") -> None:
        self.call(proc, "poll", None, _records(first, values), key=key)

    def consume(
        self, consumer: str, first: int, values: str, *, proc: str = "", offset: int | None = None, kind: str = "ok"
    ) -> None:
        argument = {"consumer": consumer, "max": 2, "offset": offset}
        answer = _records(first, values) if kind == "ok" else None
        self.call(proc or consumer, "consume", argument, answer, kind=kind)

    def cursor(self, consumer: str, offset: int) -> None:
        self.call(f"{consumer} cursor", "cursor", {"consumer": consumer}, offset)

    def note(self, proc: str, f: str, value: Any = None, *, key: str | None = "t-0") -> None:
        self.add(proc, "info" if f == "crash" else "ok", f, key, value)

    def replica(self, name: str, first: int, values: str) -> None:
        self.note("drainer", "replica", {"replica": name, "records": _records(first, values)})

    def check(self) -> CheckResult:
        return check_history(self.events)

    def found(self) -> dict[str, int]:
        """Judge, and return how often each anomaly was found."""
        return dict(self.check().counts)


def _records(first: int, values: str) -> list[list[Any]]:
    return [[offset, value] for offset, value in enumerate(values.split(), first)]


class CorrectLog:
    """Runs clients against a log that keeps every promise, drawn from a seed, and drains it.

    Clients overlap: each step begins a call of an idle client or ends one of a busy client. A call takes effect
    when it ends, at the latest; a call of unknown outcome does or does not.
    """

    KEYS = ("t-0", "t-1")

    def __init__(self, seed: int, steps: int) -> None:
        self.rng = Random(seed)
        self.script = Script()
        self.logs: dict[str, list[str]] = {key: [] for key in self.KEYS}
        self._count = 0
        self._generation: dict[str, int] = {}
        self._busy: dict[str, tuple[str, str, Any]] = {}
        self._positions: dict[tuple[str, str], int] = {}
        self._cursors: dict[str, int] = dict.fromkeys(self.KEYS, 0)
        for _ in range(steps):
            self._step()
        for client in list(self._busy):
            self._end(client)
        self._drain()

    def _step(self) -> None:
        client = self.rng.choice(("p0", "p1", "p2", "r0", "r1", "c0", "e0"))
        if client in self._busy:
            self._end(client)
        else:
            self._begin(client)

    def _proc(self, client: str) -> str:
        return f"{client}.{self._generation.get(client, 0)}"

    def _begin(self, client: str) -> None:
        key = self.rng.choice(self.KEYS)
        f = {"p": "send", "r": "poll", "c": "consume", "e": "list_offsets"}[client[0]]
        argument: Any = None
        if f == "send":
            argument = [f"v{self._count + i}" for i in range(self.rng.randrange(1, 4))]
            self._count += len(argument)
        elif f == "consume":
            argument = {"consumer": "c0", "max": 2, "offset": None}
        self._busy[client] = (f, key, argument)
        self.script.begin(self._proc(client), f, key, argument)

    def _end(self, client: str) -> None:
        f, key, argument = self._busy.pop(client)
        kind = "ok"
        if f in ("send", "consume"):
            kind = self.rng.choices(("ok", "fail", "info"), (8, 1, 1))[0]
        happens = kind == "ok" or (kind == "info" and self.rng.random() < 0.5)
        answer = self._do(client, f, key, argument) if happens else None
        self.script.end(self._proc(client), f, kind, answer if kind == "ok" else None, key=key)
        if kind == "info":
            self._generation[client] = self._generation.get(client, 0) + 1

    def _do(self, client: str, f: str, key: str, argument: Any) -> Any:
        log = self.logs[key]
        if f == "send":
            log.extend(argument)
            return len(log) - len(argument)
        if f == "list_offsets":
            return len(log)
        if f == "consume":
            first = self._cursors[key]
            self._cursors[key] = min(first + 2, len(log))
            return self._slice(key, first, self._cursors[key])
        place = (client, key)
        first = self._positions.get(place, 0)
        self._positions[place] = min(first + self.rng.randrange(1, 4), len(log))
        return self._slice(key, first, self._positions[place])

    def _slice(self, key: str, first: int, end: int) -> list[list[Any]]:
        return [[offset, self.logs[key][offset]] for offset in range(first, end)]

    def _drain(self) -> None:
        for key in self.KEYS:
            self.script.note("drainer", "assign", 0, key=key)
            records = self._slice(key, 0, len(self.logs[key]))
            for first in range(0, len(records), 5):
                self.script.call("drainer", "poll", None, records[first : first + 5], key=key)
            self.script.note("drainer", "drain", len(records), key=key)
            for replica in ("n1", "n2", "n3"):
                self.script.note("drainer", "replica", {"replica": replica, "records": records}, key=key)
