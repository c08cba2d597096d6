"""Compare the metadata of several managers: at equal index it must be equal, row by row.

Pure: it compares views, from memory or from databases, and lists their differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import msgspec

from quiver.metadata.rows import Table
from quiver.metadata.state import View
from quiver.model import Index

DIFFERENCES_MAX = 100
"""Maximum number of listed differences; more would add no information."""


class ManagerDigest(msgspec.Struct, frozen=True):
    """The index and digest of one manager's metadata."""

    name: str
    index: Index
    digest: str


class MetadataDifference(msgspec.Struct, frozen=True):
    """A row, or the counters, that differ between two managers at the same index."""

    index: Index
    first: str
    second: str
    table: str
    key: str


class MetadataComparison(msgspec.Struct, frozen=True):
    """The result of a comparison."""

    compared: tuple[ManagerDigest, ...]
    differences: tuple[MetadataDifference, ...]

    @property
    def is_equal(self) -> bool:
        """Return whether no two managers at the same index differ; different indexes are not comparable."""
        return not self.differences


def compare(views: Mapping[str, View]) -> MetadataComparison:
    """Compare the views of managers, by name, each with the others at the same index."""
    compared = [ManagerDigest(name, view.index, view.digest()) for name, view in sorted(views.items())]
    differences: list[MetadataDifference] = []
    ordered = sorted(compared, key=lambda item: item.index)
    for first, second in pairwise(ordered):
        if first.index == second.index and first.digest != second.digest:
            differences += _differences(first, second, views[first.name], views[second.name])
    return MetadataComparison(tuple(compared), tuple(differences[:DIFFERENCES_MAX]))


def _differences(first: ManagerDigest, second: ManagerDigest, mine: View, theirs: View) -> Iterator[MetadataDifference]:
    for table in Table:
        my_rows, their_rows = getattr(mine, table.value), getattr(theirs, table.value)
        for key in sorted({*my_rows, *their_rows}):
            if my_rows.get(key) != their_rows.get(key):
                yield MetadataDifference(first.index, first.name, second.name, table.value, _words(key))
    if mine.counters != theirs.counters:
        yield MetadataDifference(first.index, first.name, second.name, "meta", "counters")


def _words(key: object) -> str:
    parts = key if isinstance(key, tuple) else (key,)
    return "/".join(str(msgspec.to_builtins(part)) for part in parts)
