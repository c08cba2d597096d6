"""Is what a leader calls committed on the disks of a majority? (I6)

Asked at every commit of the members' own words (how far their logs say they are durable; for a dead one: were
when it died), and now and then of the simulated platters themselves: would the entry, whole, and the name of its
file be there after a power loss at this very moment?
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from quiver.model import GroupId, Index, NodeId, Term
from quiver.raft import Configuration
from quiver.storage import Log
from quiver.storage.scan import SegmentFrame, decode_frame
from quiver.storage.segment import Segment
from quiver.testing.disk import SimulatedDisk
from quiver.testing.simulator.report import require

_LOOK_BYTES = 64 * 1024
"""More than any simulated batch."""


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


class PlatterReader:
    """Look entries of one log up on the platter of its disk.

    It continues from where the last entry was found, since requested indexes grow; otherwise the log's own bookkeeping
    says where to search, and nothing more. A segment that was cut is another object and is searched from its start.
    """

    def __init__(self, disk: SimulatedDisk, log: Log) -> None:
        self._disk = disk
        self._log = log
        self._segment: Segment | None = None
        self._index = Index(0)
        self._position = 0

    def holds(self, index: Index, term: Term) -> bool:
        """Tell whether an entry is on the platter, whole, in a file whose name is there, too."""
        if index < self._log.first_index:
            return True  # the log starts after it: a snapshot covers it
        segments = self._log._segments
        segment = next((segment for segment in segments if segment.first_index <= index < segment.end_index), None)
        if segment is None:
            return False
        position = segment.position_before_index(index)
        if segment is self._segment and self._index <= index:
            position = max(position, self._position)
        while (frame := self._read_frame(segment, position)) is not None:
            if frame.header is not None and frame.header.index == index:
                self._segment, self._index, self._position = segment, index, position
                return frame.header.term == term
            position += frame.end
        return False

    def _read_frame(self, segment: Segment, position: int) -> SegmentFrame | None:
        data = self._disk.read_platter(f"{self._log.directory}/{segment.name}", position, _LOOK_BYTES)
        frame = decode_frame(data, 0) if data else None
        return frame if isinstance(frame, SegmentFrame) else None


def _holds(copy: Copy, index: Index, term: Term, *, on_platter: bool) -> bool:
    return copy.holds_on_platter(index, term) if on_platter else copy.holds(index, term)


def _list(nodes: Iterable[NodeId]) -> str:
    return "(" + " ".join(f"n{node}" for node in nodes) + ")"
