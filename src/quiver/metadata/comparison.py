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


class Compared(msgspec.Struct, frozen=True):
    """One manager's metadata in short."""

    name: str
    index: Index
    digest: str


class Difference(msgspec.Struct, frozen=True):
    """A row, or the counters, that two managers at one index do not agree on."""

    index: Index
    first: str
    second: str
    table: str
    key: str


class Comparison(msgspec.Struct, frozen=True):
    """What came of comparing."""

    compared: tuple[Compared, ...]
    differences: tuple[Difference, ...]

    @property
    def is_equal(self) -> bool:
        """Tell whether no two managers at equal index differ; those at different indexes cannot."""
        return not self.differences


def compare(views: Mapping[str, View]) -> Comparison:
    """Compare managers by name, each with all others at its index."""
    compared = [Compared(name, view.index, view.digest()) for name, view in sorted(views.items())]
    differences: list[Difference] = []
    ordered = sorted(compared, key=lambda item: item.index)
    for first, second in pairwise(ordered):
        if first.index == second.index and first.digest != second.digest:
            differences += _differences(first, second, views[first.name], views[second.name])
    return Comparison(tuple(compared), tuple(differences[:DIFFERENCES_MAX]))


def _differences(first: Compared, second: Compared, mine: View, theirs: View) -> Iterator[Difference]:
    for table in Table:
        my_rows, their_rows = getattr(mine, table.value), getattr(theirs, table.value)
        for key in sorted({*my_rows, *their_rows}):
            if my_rows.get(key) != their_rows.get(key):
                yield Difference(first.index, first.name, second.name, table.value, _words(key))
    if mine.counters != theirs.counters:
        yield Difference(first.index, first.name, second.name, "meta", "counters")


def _words(key: object) -> str:
    parts = key if isinstance(key, tuple) else (key,)
    return "/".join(str(msgspec.to_builtins(part)) for part in parts)
