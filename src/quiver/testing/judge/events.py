"""The history of a run as clients saw it: one JSON object a line, and what its fields mean.

`{"i", "t_ns", "proc", "type", "f", "key", "value"}`. `i` counts from 0 and is the real-time order: an `invoke` is
written before the request leaves, its outcome after the answer is in. A process does one thing at a time. Outcomes
are Jepsen's: `ok` was done, `fail` was certainly not, `info` is unknown. Every value sent is unique in the run.

| f | key | value of `invoke` | value of `ok` |
|---|---|---|---|
| `send` | partition, or null: the outcome tells | list of values, one batch | offset of the first |
| `poll` | partition | – | list of `[offset, value]` |
| `list_offsets` | partition | – | end offset |
| `consume` | the same | `{"consumer", "max", "offset"}`, null: at the cursor | list of `[offset, value]` |
| `commit` | partition | `{"consumer", "offset"}`: where the cursor is put | – |
| `cursor` | partition | `{"consumer"}` | the consumer's cursor |
| `create`, `delete`, `exists` | name | – | whether it changed something; for `exists`, whether it is there |
| `register` | name | – | `{"id", "epoch"}` |

Notes, which are one event of type `ok` each: `assign` (the process reads on from offset `value`, null: anywhere),
`subscribe` (`{"consumer", "offset"}`: where it begins), `trim` (records below offset `value` may be gone), `drain` (the
partition was polled to its end, offset `value`, after everything healed), `replica` (`{"replica", "records"}`: a part
of what one broker has). `crash` is of type `info`: the process is no more, and what it was doing is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

OUTCOMES = frozenset(("ok", "fail", "info"))
NOTES = frozenset(("assign", "subscribe", "trim", "drain", "replica", "crash"))
CALLS = frozenset(
    ("send", "poll", "list_offsets", "consume", "commit", "cursor", "create", "delete", "exists", "register")
)


class HistoryError(ValueError):
    """A history that is no history: the workload or the recorder is at fault, not what was tested."""


@dataclass(slots=True)
class Event:
    """One line of a history."""

    i: int
    t_ns: int
    proc: str
    type: str
    f: str
    key: str | None
    value: Any


def parse_history(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events of a history written as JSON lines.

    A last line without its end is skipped: the recorder was killed while it wrote.
    """
    decode = json.JSONDecoder().decode
    for number, line in enumerate(lines):
        if not line.endswith("\n"):
            return
        try:
            yield Event(**decode(line))
        except (ValueError, TypeError) as error:
            raise HistoryError(f"line {number + 1} is no event: {error}") from error
