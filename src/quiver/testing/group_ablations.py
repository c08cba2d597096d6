"""Disable one safeguard of consumer groups at a time, to prove that tests and simulations notice.

As in `raft_ablations`: each safeguard is one function, and this module replaces exactly that function while `disabled`
is active, in every node of the process. Only tests and the simulator may import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum, unique
from unittest.mock import patch

from quiver.groups import machine
from quiver.groups.machine import PartitionOwner
from quiver.manager import group_liveness
from quiver.model import SESSION_BITS, Index


@unique
class GroupSafeguard(StrEnum):
    """One rule of groups; the comment says what breaks without it."""

    EPOCH_BUMP = "epoch_bump"
    # A later owner has the epoch of an earlier one, which is not fenced: a zombie commits over its successor.
    TAKE_BEFORE_GIVE = "take_before_give"
    # A partition is given to its next owner while the one before still uses it.
    FAILOVER_GRACE = "failover_grace"
    # A new primary, which has heard nobody yet, expires all members of all groups.


def _same_epoch(_: Index) -> int:
    return 1 << SESSION_BITS


def _is_free_or_asked_for(owner: PartitionOwner | None) -> bool:
    return owner is None or owner.is_revoking


def _never_heard_ms(now_ms: int) -> int:
    return now_ms - (1 << 40)


_REPLACEMENTS: dict[GroupSafeguard, tuple[object, str, Callable[..., object]]] = {
    GroupSafeguard.EPOCH_BUMP: (machine, "epoch_at", _same_epoch),
    GroupSafeguard.TAKE_BEFORE_GIVE: (machine, "is_free", _is_free_or_asked_for),
    GroupSafeguard.FAILOVER_GRACE: (group_liveness, "first_heard_ms", _never_heard_ms),
}


@contextmanager
def disabled(safeguard: GroupSafeguard) -> Iterator[None]:
    """Run without one safeguard."""
    module, name, replacement = _REPLACEMENTS[safeguard]
    with patch.object(module, name, replacement):
        yield
