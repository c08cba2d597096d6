"""A lake: a folder of Parquet files that hold what topics held, and the word on which of them count.

Files lie in `topic=T/partition=P/hour=H/`, `H` being the hour of the records' timestamps in UTC; each holds records of
one partition in the order of their offsets. How far a topic is archived is part of the very commit that adds its files,
so the two cannot disagree: whoever crashed before the commit has archived nothing, whoever crashed after it has
archived all of it, and either way the next one begins where the commit says.

There are two kinds: `DeltaLake`, a Delta table, and `ParquetLake`, plain files and a folder of commits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec
import pyarrow as pa

from quiver.errors import ConflictError, NotFoundError
from quiver.spark.columns import arrow_schema

RECORD_COLUMNS: Final = ("offset", "timestamp", "key", "value", "headers")
FILE_SCHEMA: Final[pa.Schema] = arrow_schema(RECORD_COLUMNS)
"""What each file holds; topic, partition and hour stand in its path."""
FOLDER_COLUMNS: Final = ("topic", "partition", "hour")
_FOLDER_FIELDS: Final[list[pa.Field[Any]]] = [
    pa.field("topic", pa.string(), nullable=False),
    pa.field("partition", pa.int32(), nullable=False),
    pa.field("hour", pa.string(), nullable=False),
]
LAKE_SCHEMA: Final = pa.schema([*_FOLDER_FIELDS, *FILE_SCHEMA])

Kind = Literal["delta", "parquet"]


class LakeFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of records of one partition, in the order of their offsets, all of the same hour."""

    path: str
    """Relative to the lake."""
    topic: str
    partition: int
    hour: str
    size_bytes: int
    count: int
    first_offset: int
    last_offset: int


class Archived(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit archives of one incarnation of a topic: by partition, from an offset up to another."""

    topic: str
    incarnation: str
    begins: Mapping[int, int]
    ends: Mapping[int, int]


class Lake(Protocol):
    """What jobs need of a lake. It shows one version of itself until `refresh`."""

    root: str
    is_hiding: bool
    """Whether files have names that readers pass over until they are committed."""

    @property
    def identity(self) -> str:
        """Return what tells this lake from every other one, also at the same place."""

    def refresh(self) -> None:
        """See what was committed meanwhile."""

    def archived(self, topic: str, incarnation: str, partitions: Sequence[int]) -> dict[int, int] | None:
        """Return how far partitions are archived, those that are; None if nothing of the topic is.

        Raises:
            ConflictError: it is another incarnation of the topic that is archived (`topic_recreated`).
        """

    def commit(self, files: Sequence[LakeFile], archived: Archived) -> None:
        """Add files and move the place to behind them, in one step.

        Raises:
            ConflictError: somebody else archived the topic meanwhile (`archive_conflict`); nothing was done.
        """

    def files(self, topic: str) -> list[LakeFile]:
        """Return the files of a topic, by partition and offset."""

    def topics(self) -> list[str]:
        """Return the topics of which there are records."""


def open_lake(root: str, kind: Kind | None = None) -> Lake:
    """Open the lake in a folder; with a `kind`, make it if there is none.

    Raises:
        NotFoundError: there is none, and no kind is given (`no_lake`).
        ConflictError: there is one of another kind (`other_lake`).
    """
    from quiver.spark.pipelines.delta_lake import DeltaLake
    from quiver.spark.pipelines.parquet_lake import ParquetLake

    kinds: dict[Kind, type[DeltaLake] | type[ParquetLake]] = {"delta": DeltaLake, "parquet": ParquetLake}
    root = os.path.abspath(root)
    found = next((own for own in kinds if kinds[own].is_at(root)), None)
    if found is None and kind is None:
        raise NotFoundError(f"there is no archive in {root}", code="no_lake")
    if found is not None and kind not in (None, found):
        raise ConflictError(f"{root} holds an archive of format {found}, not {kind}", code="other_lake")
    return kinds[found or kind or "delta"](root)


def check_incarnation(topic: str, known: object, found: object, root: str) -> None:
    """Raise unless a topic is the one that a lake has records of."""
    if known != found:
        message = (
            f"topic {topic!r} is not the one that is archived in {root}: it was deleted and made anew, or is in "
            "another cluster. Archive it into another folder"
        )
        raise ConflictError(message, code="topic_recreated")


def check_place(known: Mapping[int, int] | None, archived: Archived, root: str) -> None:
    """Raise if a lake has, by now, some of what is to be archived."""
    if any(end > archived.begins[part] for part, end in (known or {}).items() if part in archived.begins):
        raise conflict(archived.topic, root)


def conflict(topic: str, root: str) -> ConflictError:
    """Return the error for two who archive the same topic into the same lake."""
    message = f"another job archives {topic!r} into {root}: what this one had read was not added"
    return ConflictError(message, code="archive_conflict")


def in_order(files: Sequence[LakeFile]) -> list[LakeFile]:
    """Return files by partition and offset."""
    return sorted(files, key=lambda file: (file.partition, file.first_offset))
