"""Disable one safeguard of work queues at a time, to prove that tests and simulations notice.

As in `raft_ablations`: each safeguard is one function, and this module replaces exactly that function while `disabled`
is active, in every node of the process. Only tests and the simulator may import it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum, unique
from unittest.mock import patch

from quiver.broker.dead_letters import DeadLetterMover
from quiver.model import ConsumerId
from quiver.partition import lease_schedule, queue_window, state_codec
from quiver.partition.queue_handler import QueueHandler
from quiver.partition.queue_operations import LEASED, QueuePart, Run
from quiver.partition.queue_window import QueueWindow


@unique
class QueueSafeguard(StrEnum):
    """One rule of work queues; the comment says what breaks without it."""

    LEASE_EXPIRY = "lease_expiry"
    # Leases never end: the records of a worker that is gone are never delivered again.
    LEASE_EXCLUSION = "lease_exclusion"
    # Leases and delays end at once: a record is worked on twice at a time.
    STALE_RECEIPTS = "stale_receipts"
    # Any receipt is good while a record is leased: a zombie acknowledges what another one works on.
    WINDOW_SUMMARY = "window_summary"
    # A restored snapshot forgets what was under way: those records count as settled, and are lost.
    COMMIT_BEFORE_DELIVERY = "commit_before_delivery"
    # Records are delivered before their leases are committed: after a failover they are delivered to another.
    DEAD_LETTERS_ONCE = "dead_letters_once"
    # A mover does not ask which dead letters the target has: after a failover they are there twice.


def _is_due_unless_leased(run: Run, now_ms: int) -> bool:
    return run.state != LEASED and run.time_ms <= now_ms


def _is_always_due(_: Run, __: int) -> bool:
    return True


def _is_leased(run: Run, _: int) -> bool:
    return run.state == LEASED


def _add_head_only(windows: dict[ConsumerId, QueueWindow], part: QueuePart) -> None:
    queue_window.add_part(windows, QueuePart(part.group_id, part.head))


async def _never_wait(_: QueueHandler, __: asyncio.Future[None]) -> None:
    pass


async def _bury_nothing(*_: object) -> None:
    pass


_REPLACEMENTS: dict[QueueSafeguard, tuple[object, str, Callable[..., object]]] = {
    QueueSafeguard.LEASE_EXPIRY: (lease_schedule, "is_due", _is_due_unless_leased),
    QueueSafeguard.LEASE_EXCLUSION: (lease_schedule, "is_due", _is_always_due),
    QueueSafeguard.STALE_RECEIPTS: (queue_window, "is_current", _is_leased),
    QueueSafeguard.WINDOW_SUMMARY: (state_codec, "add_part", _add_head_only),
    QueueSafeguard.COMMIT_BEFORE_DELIVERY: (QueueHandler, "wait_leased", _never_wait),
    QueueSafeguard.DEAD_LETTERS_ONCE: (DeadLetterMover, "bury_moved", _bury_nothing),
}


@contextmanager
def disabled(safeguard: QueueSafeguard) -> Iterator[None]:
    """Run without one safeguard."""
    module, name, replacement = _REPLACEMENTS[safeguard]
    with patch.object(module, name, replacement):
        yield
