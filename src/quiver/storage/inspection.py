"""What an inspection of a log directory found, as values that the command line prints and encodes.

Nothing here reads a file: `quiver.storage.inspect` makes these. Field names are part of the `--json` output
and therefore stable.
"""

from __future__ import annotations

import msgspec

from quiver.model import Index, NodeId, Offset, Term


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a file that are not what was once written there, or not there at all."""

    name: str
    first_position: int
    end_position: int
    reason: str
    first_index: Index | None = None
    """The first entry that is lost or in doubt; None for a file that holds no entries."""
    end_index_max: Index | None = None
    """No entry at or behind this index is lost or in doubt; equal to `first_index` if none is."""


class SegmentInspection(msgspec.Struct, frozen=True, kw_only=True):
    """One segment as its bytes tell."""

    name: str
    is_sealed: bool
    first_index: Index
    end_index: Index
    first_offset: Offset
    end_offset: Offset
    terms: tuple[Term, ...]
    size_bytes: int
    batches: int
    records: int
    marks: int
    vouched_bytes: int
    """How much of the file the newest mark says was on disk."""
    torn_bytes: int
    """The length of a tail that was never acknowledged; the next start cuts it."""


class HardStateInspection(msgspec.Struct, frozen=True, kw_only=True):
    """Raft's hard state."""

    term: Term
    vote: NodeId | None
    commit_index: Index
    intact_copies: int


class SnapshotInspection(msgspec.Struct, frozen=True, kw_only=True):
    """One intact snapshot."""

    name: str
    size_bytes: int
    last_index: Index
    last_term: Term
    end_offset: Offset


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory holds."""

    directory: str
    segments: tuple[SegmentInspection, ...]
    hard_state: HardStateInspection | None
    """None if none was saved, or none is intact (then there is a finding)."""
    snapshots: tuple[SnapshotInspection, ...]
    damage: tuple[Finding, ...]
    notes: tuple[str, ...]
    """What is no damage but worth knowing: what the next start will mend by itself, and files of no use to it."""

    @property
    def is_whole(self) -> bool:
        """Tell whether every byte that is there is what was written, and no entry is missing."""
        return not self.damage
