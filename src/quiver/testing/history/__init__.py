"""Checks the recorded history of a cluster's clients, and names the anomalies in it.

The checker is independent of what it checks: nothing here imports any other part of Quiver, only the standard library,
so that a bug of the product cannot hide itself. Workloads write a history with `Recorder`; `check_history` reads it.
`events` documents the format, and each checker's module says what it requires.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from quiver.testing.history.cursors import check_cursors
from quiver.testing.history.events import HistoryError, HistoryEvent, RecordedCall, Recorder, pair_events, parse_history
from quiver.testing.history.ledger import Anomaly, CheckResult, Ledger
from quiver.testing.history.linearizability import check_names
from quiver.testing.history.logs import check_loss, check_order, check_replicas
from quiver.testing.history.members import check_members
from quiver.testing.history.queues import check_queues

__all__ = [
    "Anomaly",
    "CheckResult",
    "HistoryError",
    "HistoryEvent",
    "RecordedCall",
    "Recorder",
    "check_history",
    "parse_history",
]


def check_history(events: Iterable[HistoryEvent]) -> CheckResult:
    """Return everything that is wrong with a history; raise HistoryError if it is none."""
    verdict = CheckResult()
    with _no_collections():
        ledger = Ledger(pair_events(events), verdict)
        verdict.facts["operations"] = len(ledger.operations)
        for check in (check_loss, check_order, check_replicas, check_cursors, check_names, check_members, check_queues):
            check(ledger, verdict)
    return verdict


@contextmanager
def _no_collections() -> Iterator[None]:
    """Let the garbage collector rest: it would visit millions of objects of which none is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
