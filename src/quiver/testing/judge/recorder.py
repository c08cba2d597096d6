"""Writes a history while it happens, from any number of threads and tasks.

The number of an event is given and its line is written under one lock, so that the order of the file is an order in
which things happened: a call is written before its request leaves, and its outcome after the answer has arrived.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO


class Call:
    """A call whose outcome is still to come; exactly one of `ok`, `fail` and `info` tells it."""

    __slots__ = ("_recorder", "f", "is_open", "key", "proc")

    def __init__(self, recorder: Recorder, proc: str, f: str, key: str | None) -> None:
        self._recorder = recorder
        self.proc = proc
        self.f = f
        self.key = key
        self.is_open = True

    def ok(self, value: Any = None, *, key: str | None = None) -> None:
        """Record that it was done; `key` if only the answer told which."""
        self._end("ok", value, key)

    def fail(self, value: Any = None) -> None:
        """Record that it was certainly not done, and never will be."""
        self._end("fail", value, None)

    def info(self, value: Any = None) -> None:
        """Record that nobody knows."""
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

    def invoke(self, proc: str, f: str, key: str | None = None, value: Any = None) -> Call:
        """Record that a process begins something; call this before the request leaves."""
        call = Call(self, proc, f, key)
        self.write(proc, "invoke", f, key, value)
        return call

    def note(self, proc: str, f: str, key: str | None = None, value: Any = None) -> None:
        """Record something that has no duration, such as `assign`, `drain` or `replica`."""
        self.write(proc, "info" if f == "crash" else "ok", f, key, value)

    def write(self, proc: str, kind: str, f: str, key: str | None, value: Any) -> None:
        """Write one event. The value is encoded at once: it may change afterwards."""
        tail = self._encode({"proc": proc, "type": kind, "f": f, "key": key, "value": value})
        with self._lock:
            self._stream.write(f'{{"i":{self.count},"t_ns":{self._now_ns()},{tail[1:]}\n')
            self.count += 1
