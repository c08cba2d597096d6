"""Judges what clients of a cluster saw: a history in, anomalies by name out.

Written apart from what it judges: nothing here imports any other part of Quiver, only the standard library, so that
a defect cannot excuse itself. Workloads write a history with `Recorder`; `judge` reads it. `events` tells the format,
and each checker's module what it demands.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from quiver.testing.judge.anomaly import Anomaly, Verdict
from quiver.testing.judge.cursors import check_cursors
from quiver.testing.judge.events import Event, HistoryError, parse_history
from quiver.testing.judge.ledger import Ledger
from quiver.testing.judge.loss import check_loss
from quiver.testing.judge.names import check_names
from quiver.testing.judge.operations import pair_events
from quiver.testing.judge.order import check_order
from quiver.testing.judge.recorder import Call, Recorder
from quiver.testing.judge.replicas import check_replicas

__all__ = ["Anomaly", "Call", "Event", "HistoryError", "Recorder", "Verdict", "judge", "parse_history"]


def judge(events: Iterable[Event]) -> Verdict:
    """Return everything that is wrong with a history; raise HistoryError if it is none."""
    verdict = Verdict()
    with _no_collections():
        ledger = Ledger(pair_events(events), verdict)
        verdict.facts["operations"] = len(ledger.operations)
        for check in (check_loss, check_order, check_replicas, check_cursors, check_names):
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
