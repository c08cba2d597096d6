"""Feature levels: which replicated entries, fields and messages every node of a cluster can read. Pure.

A cluster has one feature level, in its replicated metadata. A program knows all levels up to `LEVEL_MAX`. Nodes of
different programs work together as long as each knows the cluster's level: nothing is written that a program of that
level cannot read. An operator raises the level once all nodes know the new one (`quiver cluster upgrade`). It is never
lowered. A new cluster starts at the newest level; data from before levels existed is at level 1.

How to add something replicated:

- **A new command, entry or field of one**: just add it, a field with a default that means what its absence meant.
  `level_of` finds by `shapes` that it is new. The primary refuses a command above the cluster's level with
  `feature_level`, `apply` does so again, and a partition does not propose such an entry. Code that chooses between an
  old and a new way asks first: ``if view.feature_level >= 2``. A task that only makes sense with the new commands does
  nothing below that level.
- **A changed rule in `apply`**: decide by ``state.counters.feature_level``. At a level, every program must compute the
  same result from the same log.
- **A new field of a row or of `Counters`**: it must keep its default below the level, since snapshots and SQL rows of
  that level do not have it. `shrink` leaves it out.
- **A new field of a request or response**: a default again. It is not sent to a program that does not know it. If that
  would be wrong rather than only less, add a request; an older node answers it with `unknown_request`.
- **A new value of an enumeration** inside a known field is not found by itself: refuse it below the level by hand.
- Describe it in `LEVELS`. Once a release with a level is out, the next new thing begins the next level.
"""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import msgspec

from quiver.errors import ConflictError
from quiver.shapes import SHAPES


class FeatureLevel(msgspec.Struct, frozen=True):
    """One level, and what a cluster gains when it is raised to it."""

    level: int
    turns_on: tuple[str, ...]


LEVELS = (
    FeatureLevel(1, ("everything that programs before feature levels wrote",)),
    FeatureLevel(
        2,
        (
            "feature levels themselves: raising the level, and its record in metadata and data directories",
            "clients that expire, and their state in every partition with them",
            "recovery of a lost majority",
            "sessions: of the users of one consumer name, only the newest reads and commits",
            "nodes without certificates prove by a secret that they belong to the cluster",
            "users, tokens, roles and grants; owners of clients; the principal of every change in the metadata's log",
            "quotas of principals, roles and topics; owners of topics and holds",
            "topics whose replicas encrypt their files",
            "work queues: leases, acknowledgements and dead letters in every partition",
            "consumer groups: members that share the partitions of topics",
        ),
    ),
)
SESSIONS_LEVEL = 2
"""The level from which partitions know sessions of consumers."""
PROOFS_LEVEL = 2
"""The level from which nodes accept only nodes that prove to belong to the cluster."""
LEVEL_MIN = LEVELS[0].level
"""The lowest level whose data this program reads, and which it assumes of a program that names none."""
LEVEL_MAX = LEVELS[-1].level
"""The highest level that this program knows."""


def explain_level(level: int, *, level_max: int = LEVEL_MAX, program: str = "") -> str:
    """Return the sentence for a program that is too old for a cluster's level; `program` is one that knows it."""
    wanted = f"quiver {program} or newer" if program else "the version of quiver that the other nodes run"
    return (
        f"the cluster is at feature level {level}, but this program knows levels {LEVEL_MIN} to {level_max}: "
        f"install {wanted} on this node"
    )


def level_of(value: Any) -> int:
    """Return the lowest level at which every program can read a value, such as a command or an entry."""
    return next((level for level in range(LEVEL_MIN, LEVEL_MAX) if _is_known(value, level)), LEVEL_MAX)


def shrink(value: Any, level: int) -> Any:
    """Return a value, ready to encode, without the fields that programs of `level` do not know.

    Structs that are encoded as arrays stay as they are: readers ignore further items.
    """
    if level >= LEVEL_MAX:
        return value
    if isinstance(value, tuple | list):
        return [shrink(item, level) for item in value] if _holds_structs(value) else value
    if not isinstance(value, msgspec.Struct) or value.__struct_config__.array_like:
        return value
    return dict(_known_items(value, level))


def version_of(kind: type[msgspec.Struct], level: int) -> int:
    """Return the version with which a partition's entries of a kind are written at a cluster's level.

    It is the lowest level whose programs know all of the kind's fields.

    Raises:
        ConflictError: the kind is newer than the level (`feature_level`).
    """
    if level < LEVEL_MAX and kind.__name__ not in SHAPES[level]:
        raise ConflictError(
            f"not done: {kind.__name__} needs a higher feature level than {level}, that of the cluster; "
            "upgrade all nodes, then run quiver cluster upgrade",
            code="feature_level",
        )
    return next((known for known in range(LEVEL_MIN, level) if not _has_grown(kind, known)), level)


def _known_items(value: msgspec.Struct, level: int) -> Any:
    config, kind = value.__struct_config__, type(value)
    if config.tag is not None:
        yield config.tag_field, config.tag
    added = _added_fields(kind, level)
    defaults = _defaults(kind)
    for name, encoded in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True):
        item = getattr(value, name)
        is_omitted = config.omit_defaults and name in defaults and defaults[name] == item
        if name not in added and not is_omitted:
            yield encoded, shrink(item, level)


def _is_known(value: Any, level: int) -> bool:
    """Return whether a program of a level can read a value without losing anything."""
    if isinstance(value, tuple | list):
        return not _holds_structs(value) or all(_is_known(item, level) for item in value)
    if not isinstance(value, msgspec.Struct):
        return True
    kind = type(value)
    if kind.__name__ not in SHAPES[level]:
        return False
    defaults = _defaults(kind)
    return all(
        getattr(value, name) == defaults[name]
        if name in _added_fields(kind, level)
        else _is_known(getattr(value, name), level)
        for name in kind.__struct_fields__
    )


def _holds_structs(values: tuple[Any, ...] | list[Any]) -> bool:
    return bool(values) and isinstance(values[0], msgspec.Struct)


@cache
def _added_fields(kind: type[msgspec.Struct], level: int) -> frozenset[str]:
    """Return the fields of a struct that programs of a level do not know; a struct that is new itself has none."""
    known = SHAPES[level].get(kind.__name__)
    return frozenset() if known is None else frozenset(kind.__struct_fields__).difference(known)


@cache
def _has_grown(kind: type[msgspec.Struct], level: int) -> bool:
    """Return whether a struct, or one inside it, has something that programs of a level do not know."""
    if kind.__name__ not in SHAPES[level] or _added_fields(kind, level):
        return True
    return any(_has_grown(inner, level) for field in msgspec.structs.fields(kind) for inner in _structs_in(field.type))


def _structs_in(annotation: Any) -> list[type[msgspec.Struct]]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return [annotation]
    return [found for inner in get_args(annotation) for found in _structs_in(inner)]


@cache
def _defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    found = {}
    for field in msgspec.structs.fields(kind):
        if field.default is not msgspec.NODEFAULT:
            found[field.name] = field.default
        elif field.default_factory is not msgspec.NODEFAULT:
            found[field.name] = field.default_factory()
    return found
