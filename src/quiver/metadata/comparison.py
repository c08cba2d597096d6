"""Whether managers agree: at equal index their metadata must be equal, row by row.

Pure: it is given views, from memory or from databases, and says where they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import msgspec

from quiver.metadata.rows import Table
from quiver.metadata.state import View
from quiver.model import Index

DIFFERENCES_MAX = 100
"""How many differences are told; more say nothing new."""


class ManagerDigest(msgspec.Struct, frozen=True):
    """One manager's metadata in short."""

    name: str
    index: Index
    digest: str


class MetadataDifference(msgspec.Struct, frozen=True):
    """A row, or the counters, that two managers at one index do not agree on."""

    index: Index
    first: str
    second: str
    table: str
    key: str


class MetadataComparison(msgspec.Struct, frozen=True):
    """What came of comparing."""

    compared: tuple[ManagerDigest, ...]
    differences: tuple[MetadataDifference, ...]

    @property
    def is_equal(self) -> bool:
        """Tell whether no two managers at equal index differ; those at different indexes cannot."""
        return not self.differences


def compare(views: Mapping[str, View]) -> MetadataComparison:
    """Compare managers by name, each with all others at its index."""
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
