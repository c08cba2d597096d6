"""The next steps of a group: what its coordinator gives to members, and what it asks back. Pure.

A partition is taken before it is given. `plan_steps` compares who owns what with `assignment` and returns:

- *grants* of partitions that nobody owns;
- *revokes* of partitions that should belong to somebody else: their owners finish, commit and release them, and only
  then are they free;
- *drops* of partitions that do not exist any more, which are free at once.

A partition that is being revoked is nobody's in the computation of the target, so that a change of mind in between
leads to the least movement, and it is not granted before it is released. Partitions that do not move never pause.

The safeguards are functions of their own: `is_free` (taken before given) and `epoch_at` (every grant has a higher epoch
than all before it). The metadata asks the same functions when it applies a grant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from quiver.groups.assignment import AssignablePartition, MemberName, PartitionKey, Subscription, assign
from quiver.model import SESSION_BITS, Index


class PartitionOwner(msgspec.Struct, frozen=True):
    """The member that has a partition, and whether it was asked to release it."""

    member: MemberName
    is_revoking: bool = False


class GroupSteps(msgspec.Struct, frozen=True):
    """What to do next; each list is sorted. Nothing, if all are empty."""

    grants: tuple[tuple[PartitionKey, MemberName], ...] = ()
    revokes: tuple[PartitionKey, ...] = ()
    drops: tuple[PartitionKey, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is to be done now; partitions that are being revoked may be awaited."""
        return not (self.grants or self.revokes or self.drops)


def plan_steps(
    members: Mapping[MemberName, Subscription],
    partitions: Sequence[AssignablePartition],
    owners: Mapping[PartitionKey, PartitionOwner],
) -> GroupSteps:
    """Return the next steps of a group.

    `partitions` are all existing ones of the topics that members subscribe to or have partitions of: what a member has
    and does not subscribe to any more is revoked, and what does not exist any more is dropped.
    """
    kept = {key: owner.member for key, owner in owners.items() if not owner.is_revoking}
    target = assign(members, partitions, kept)
    existing = {one.key for one in partitions}
    return GroupSteps(
        grants=tuple((key, target[key]) for key in sorted(target) if is_free(owners.get(key))),
        revokes=tuple(sorted(key for key, owner in kept.items() if key in existing and target.get(key) != owner)),
        drops=tuple(sorted(key for key in owners if key not in existing)),
    )


def is_free(owner: PartitionOwner | None) -> bool:
    """Return whether a partition may be given to a member: nobody has it, not even one that is to release it."""
    return owner is None


def epoch_at(index: Index) -> int:
    """Return the epoch of what the command at an index of the metadata's log grants; recoveries count as indexes.

    It is higher than every epoch before it, and than the session of every plain consumer that registered before it.
    """
    return index << SESSION_BITS
