"""Is what a leader calls committed on the disks of a majority? (I6)

Asked at every commit of the members' own words (how far their logs say they are durable; for a dead one: were
when it died), and now and then of the simulated platters themselves: a copy of the disk loses its power, a
restart's recovery reads it, and the entry must be there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from quiver.model import GroupId, Index, NodeId, Term
from quiver.raft import Configuration
from quiver.storage.recovery import recover
from quiver.testing.disk import SimulatedDisk
from quiver.testing.finding import require

_INDEX_INTERVAL_BYTES = 4096


class Copy(Protocol):
    """One member's copy of a group's log, alive or not."""

    def holds(self, index: Index, term: Term) -> bool:
        """Tell whether an entry is durable there, by the member's own word."""
        ...

    def holds_on_platter(self, index: Index, term: Term) -> bool:
        """Tell whether a restart after a power loss would find the entry there."""
        ...


def check_majority(
    configuration: Configuration,
    copies: Mapping[NodeId, Copy],
    *,
    group: GroupId,
    index: Index,
    term: Term,
    on_platter: bool,
) -> None:
    """Fail unless an entry is durable on a majority of every electorate."""
    for voters in configuration.electorates:
        holders = [
            node for node in voters if node in copies and _holds(copies[node], index, term, on_platter=on_platter)
        ]
        require(
            2 * len(holders) > len(voters),
            "I6",
            "an entry is committed that is not durable on a majority" + (" of platters" if on_platter else ""),
            group=group,
            index=index,
            term=term,
            voters=_list(voters),
            holders=_list(holders),
        )


def platter_holds(disk: SimulatedDisk, directory: str, index: Index, term: Term) -> bool:
    """Tell whether a restart after a power loss at this moment would find an entry, or a snapshot beyond it."""
    copy = disk.clone()
    copy.crash()
    if not copy.exists(directory):
        return False
    recovery = recover(copy, directory, index_interval_bytes=_INDEX_INTERVAL_BYTES)
    if not recovery.segments:
        return False
    if index < recovery.segments[0].first_index:
        return True  # the log starts behind it: a snapshot covers it
    for segment in recovery.segments:
        if segment.first_index <= index < segment.end_index:
            return segment.term_at(index) == term
    return False


def _holds(copy: Copy, index: Index, term: Term, *, on_platter: bool) -> bool:
    return copy.holds_on_platter(index, term) if on_platter else copy.holds(index, term)


def _list(nodes: Iterable[NodeId]) -> str:
    return "(" + " ".join(f"n{node}" for node in nodes) + ")"
