"""Plan an audit: the offsets of each partition, the edges between digests, and the pieces that tasks read. Pure.

Edges are the bounds of digest blocks, the bounds of every run that a client stated, and the end of the archive. So
every digest that a source reports is a sum over segments between edges.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from quiver.record.digest import BLOCK_RECORDS, block_edges
from quiver.spark.pipelines.audit_sources import AuditSource, Piece, Runs
from quiver.spark.pipelines.lake import LakeFile
from quiver.spark.pipelines.place import Place

LEADER: Final = AuditSource("leader")
PIECE_BLOCKS_MAX: Final = 16
"""Maximum blocks per piece: the most that a retried task reads again."""
PIECES_PER_CORE: Final = 4
"""Approximate pieces per core: several, so that cores are not idle while the last piece is read."""


class ArchivedPart(msgspec.Struct, frozen=True, kw_only=True):
    """The archived part of one partition."""

    source: AuditSource
    place: Place
    end_offset: int
    files: tuple[LakeFile, ...]


class PartitionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The audit plan of one partition."""

    topic: str
    topic_id: int
    partition: int
    edges: tuple[int, ...]
    """Empty if the partition has no records."""
    nodes: tuple[int, ...]
    """Live nodes with a replica; the leader first."""
    archived: ArchivedPart | None = None
    runs: Mapping[AuditSource, Runs] = {}

    @property
    def bounds(self) -> tuple[int, int]:
        """The first offset and the end offset."""
        return (self.edges[0], self.edges[-1]) if self.edges else (0, 0)

    @property
    def count(self) -> int:
        """The number of offsets."""
        return self.bounds[1] - self.bounds[0]

    def piece(self, source: AuditSource, first_offset: int, end_offset: int) -> Piece:
        """Return the piece of a source between two edges, with the edges inside it."""
        edges = self.edges[bisect_left(self.edges, first_offset) : bisect_right(self.edges, end_offset)]
        place, paths = None, tuple[str, ...]()
        if source.role == "archive" and self.archived is not None:
            place = self.archived.place
            paths = tuple(
                file.path
                for file in self.archived.files
                if file.first_offset < end_offset and file.last_offset >= first_offset
            )
        return Piece(
            source=source,
            topic=self.topic,
            topic_id=self.topic_id,
            partition=self.partition,
            edges=edges,
            place=place,
            paths=paths,
        )


def plan_edges(
    first_offset: int, end_offset: int, *, archived_end: int | None, runs: Sequence[Runs]
) -> tuple[int, ...]:
    """Return the edges of one partition."""
    edges = set(block_edges(first_offset, end_offset))
    if archived_end is not None:
        edges.add(archived_end)
    edges.update(edge for own in runs for first, end, _ in own for edge in (first, end))
    return tuple(sorted(edge for edge in edges if first_offset <= edge <= end_offset)) if edges else ()


def plan_pieces(plans: Sequence[PartitionPlan], cores: int) -> list[Piece]:
    """Divide everything that must be read into pieces."""
    total = sum(plan.count * (1 + len(plan.nodes) + (plan.archived is not None)) for plan in plans)
    size = total // (PIECES_PER_CORE * cores)
    size = max(1, min(PIECE_BLOCKS_MAX, size // BLOCK_RECORDS)) * BLOCK_RECORDS
    pieces: list[Piece] = []
    for plan in plans:
        cuts = cut_edges(plan.edges, size)
        for source in (LEADER, *(AuditSource("replica", str(node)) for node in plan.nodes)):
            pieces += [plan.piece(source, *cut) for cut in cuts]
        pieces += plan_files(plan, size)
    return pieces


def cut_edges(edges: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Return ranges between edges, each of at least `size` offsets except the last."""
    cuts: list[tuple[int, int]] = []
    first = edges[0] if edges else 0
    for edge in edges[1:]:
        if edge - first >= size or edge == edges[-1]:
            cuts.append((first, edge))
            first = edge
    return cuts


def plan_files(plan: PartitionPlan, size: int) -> list[Piece]:
    """Return the pieces of an archive: each file is in exactly one piece, with all edges around its records."""
    if plan.archived is None or not plan.edges:
        return []
    pieces: list[Piece] = []
    waiting: list[LakeFile] = []
    for file in plan.archived.files:
        if file.last_offset >= plan.edges[0]:
            waiting.append(file)
        if sum(own.count for own in waiting) >= size:
            pieces.append(_file_piece(plan, plan.archived, waiting))
            waiting = []
    return [*pieces, _file_piece(plan, plan.archived, waiting)] if waiting else pieces


def _file_piece(plan: PartitionPlan, archived: ArchivedPart, files: Sequence[LakeFile]) -> Piece:
    first = min(file.first_offset for file in files)
    end = max(file.last_offset for file in files) + 1
    low, high = max(0, bisect_right(plan.edges, first) - 1), bisect_left(plan.edges, end) + 1
    return Piece(
        source=archived.source,
        topic=plan.topic,
        topic_id=plan.topic_id,
        partition=plan.partition,
        edges=plan.edges[low:high],
        place=archived.place,
        paths=tuple(file.path for file in files),
    )
