"""Every safeguard of groups is needed: without it, a member sees what must not be; with it, the same run is fine."""

from __future__ import annotations

import asyncio

import pytest
from group_world import GroupWorld, work

from quiver.model import ConsumerId
from quiver.testing.group_ablations import GroupSafeguard, disabled


async def use_and_move(world: GroupWorld) -> None:
    """Let members join one after the other, and demand what every member relies on."""
    await world.prepare(logs=4)
    one = world.enter("one", release_s=0.5, pause_s=0.6)
    await world.wait_settled(4, one)
    epochs = dict(one.owned)
    two = world.enter("two", pause_s=0.6)
    key = (ConsumerId(1), "one")
    await world.wait(lambda: any(part.is_revoking for part in world.view.group_members[key].owned) or None)
    await world.create("audit", 1)  # plans again, while the first member still has what it was asked for
    await world.wait_settled(4, one, two)
    assert all(epoch > epochs[key] for key, epoch in two.owned.items()), "a later owner has a higher epoch"
    changes = one.changes + two.changes
    (await world.primary()).kill()
    await asyncio.sleep(4)
    assert one.changes + two.changes == changes, "a failover moves nothing"
    assert (one.joins, two.joins) == (1, 1)


def test_run_is_fine_with_all_safeguards() -> None:
    with disabled(GroupSafeguard.EPOCH_BUMP):
        pass  # it is back afterwards
    work(use_and_move)


@pytest.mark.parametrize(
    ("safeguard", "finding"),
    [
        (GroupSafeguard.EPOCH_BUMP, "a later owner has a higher epoch"),
        (GroupSafeguard.TAKE_BEFORE_GIVE, "which one uses"),
        (GroupSafeguard.FAILOVER_GRACE, "a failover moves nothing"),
    ],
)
def test_each_safeguard_is_needed(safeguard: GroupSafeguard, finding: str) -> None:
    with disabled(safeguard), pytest.raises(AssertionError, match=finding):
        work(use_and_move)


def test_every_safeguard_is_tested() -> None:
    assert len(GroupSafeguard) == 3
