"""Lets the judge of histories look at a simulated run, beside the checkers that watched it.

The checkers know the product's own types; the judge knows nothing but what clients were told. What clients sent and
what the committed log holds in the end is written down as a history for it, in the order of simulated time. Two things
at the same instant count as overlapping.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from quiver.record import Batch
from quiver.testing.finding import require
from quiver.testing.history import Send
from quiver.testing.judge import Event, judge

_INVOKE, _COMPLETE = 0, 1
"""Beginnings first: then what ends in the same instant did not end before."""


def check_second_opinion(sends: Iterable[Send], batches: Iterable[Batch]) -> None:
    """Demand that the judge finds nothing in the sends of one group and its committed log."""
    verdict = judge(_events(sends, batches))
    require(verdict.is_clean, "J", str(verdict))


def _events(sends: Iterable[Send], batches: Iterable[Batch]) -> Iterator[Event]:
    moments = sorted(_moments(sends), key=lambda moment: moment[:2])
    end_ns = moments[-1][0] if moments else 0
    last = 0
    for last, (at_ns, _, proc, kind, value) in enumerate(moments, 1):
        yield Event(last, at_ns, proc, kind, "send", "log", value)
    records = [
        (batch.header.base_offset + at, _text(value)) for batch in batches for at, value in enumerate(batch.values())
    ]
    drained = records[-1][0] + 1 if records else 0
    notes: tuple[tuple[str, str, Any], ...] = (
        ("ok", "assign", 0),
        ("invoke", "poll", None),
        ("ok", "poll", records),
        ("ok", "drain", drained),
    )
    for i, (kind, f, value) in enumerate(notes, last + 1):
        yield Event(i, end_ns, "drain", kind, f, "log", value)


def _moments(sends: Iterable[Send]) -> Iterator[tuple[int, int, str, str, Any]]:
    """Yield when, what first, who, what kind and which value; each send is a process, since several overlap."""
    for number, send in enumerate(sends):
        proc = f"send {number}"
        yield send.invoked_ns, _INVOKE, proc, "invoke", [_text(value) for value in send.values]
        if send.outcome == "ok":
            yield send.completed_ns, _COMPLETE, proc, "ok", send.base_offset
        elif send.outcome == "fail":
            yield send.invoked_ns, _COMPLETE, proc, "fail", None


def _text(value: bytes | None) -> str:
    return "null" if value is None else value.decode()
