"""A lake of plain Parquet files, readable without other metadata: `spark.read.parquet(DIR)` reads all of it.

Commits `_quiver/N.json` list the valid files. A commit is created by linking a finished file to its name, which
succeeds for one process only. It also has the archived offsets of every topic, so the last commit is enough to resume.

Tasks write files under hidden names (with a leading dot), which readers skip. After the commit each file is renamed to
its final name; if the committing process dies before that, the next process to open the lake finishes the renames.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final
from uuid import uuid4

import msgspec

from quiver.errors import DamageError, StorageError
from quiver.spark.pipelines.lake import (
    RECORDS,
    ArchivedRanges,
    LakeFile,
    LakeLayout,
    check_incarnation,
    check_not_archived,
    fsync_path,
    hidden_path,
    in_order,
    incarnation_digest,
    other_layout,
)
from quiver.spark.pipelines.place import Place

COMMITS: Final = "_quiver"
VERSION: Final = 1


class ArchivedTopic(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Archived end offsets of one incarnation of a topic."""

    incarnation: str
    ends: Mapping[int, int]
    model: str = ""


class LakeCommit(msgspec.Struct, frozen=True, kw_only=True):
    """The files added by one commit, and the archived offsets of all topics after it."""

    v: int = VERSION
    identity: str
    layout: str = RECORDS.name
    topics: dict[str, ArchivedTopic] = {}
    files: tuple[LakeFile, ...] = ()


class ParquetLake:
    """A directory of Parquet files with the records of topics."""

    hides_uncommitted = True

    def __init__(self, place: Place, layout: LakeLayout = RECORDS) -> None:
        self.place, self.layout = place, layout
        self._folder = os.path.join(place.url, COMMITS)
        self._number = -1
        self._last = LakeCommit(identity=uuid4().hex, layout=layout.name)
        try:
            os.makedirs(self._folder, exist_ok=True)
        except OSError as error:
            raise StorageError(f"the lake {place} cannot be created: {error.strerror}", code="lake_failed") from None
        if not self.is_at(place):
            with suppress(FileExistsError):  # another process created it
                self._link(0, self._last)
        self.refresh()
        if self._last.layout != layout.name:
            raise other_layout(place, layout)

    @staticmethod
    def is_at(place: Place) -> bool:
        """Return whether a place contains such a lake."""
        return place.is_local and os.path.exists(os.path.join(place.url, COMMITS, _name(0)))

    @property
    def identity(self) -> str:
        """Return the id that the lake was created with."""
        return self._last.identity

    def refresh(self) -> None:
        """Read the last commit, and finish its renames if the committing process died."""
        self._number = max(self._numbers())
        self._last = self._read(self._number)
        self._publish(self._last)

    def archived(self, topic: str, incarnation: str, partitions: Sequence[int]) -> dict[int, int] | None:
        """Return the archived end offsets by partition; None if the topic is not in the lake."""
        known = self._last.topics.get(topic)
        if known is None:
            return None
        check_incarnation(topic, known.incarnation, incarnation, self.place)
        return {part: end for part, end in known.ends.items() if part in partitions}

    def commit(self, files: Sequence[LakeFile], archived: ArchivedRanges) -> None:
        """Add files and advance the archived offsets atomically."""
        while True:
            check_not_archived(
                self.archived(archived.topic, archived.incarnation, list(archived.ends)), archived, self.place
            )
            fresh = self._after(files, archived)
            try:
                self._link(self._number + 1, fresh)
                break
            except FileExistsError:
                self.refresh()  # the other commit may be for another topic: check and retry
        # The commit is durable: the records are archived, even if another process renames the files.
        self._number, self._last = self._number + 1, fresh
        self._publish(fresh)

    def _after(self, files: Sequence[LakeFile], archived: ArchivedRanges) -> LakeCommit:
        before = self._last.topics.get(archived.topic)
        ends = {**(before.ends if before is not None else {}), **archived.ends}
        model = archived.model or (before.model if before is not None else "")
        topic_state = ArchivedTopic(incarnation=archived.incarnation, ends=ends, model=model)
        topics = {**self._last.topics, archived.topic: topic_state}
        return msgspec.structs.replace(self._last, topics=topics, files=tuple(files))

    def incarnation(self, topic: str) -> str:
        """Return a digest of the incarnation of a topic that is in the lake."""
        return str(incarnation_digest(self._last.topics[topic].incarnation))

    def model(self, topic: str) -> str:
        """Return the name of the model that the last commit of a topic set; empty if there is none."""
        known = self._last.topics.get(topic)
        return known.model if known is not None else ""

    def files(self, topic: str) -> list[LakeFile]:
        """Return the files of a topic, by partition and offset."""
        commits = (self._read(number) for number in self._numbers() if number <= self._number)
        return in_order([file for commit in commits for file in commit.files if file.topic == topic])

    def topics(self) -> list[str]:
        """Return the topics that have records in the lake."""
        return sorted(self._last.topics)

    def partition_count(self, topic: str) -> int:
        """Return the partitions that a topic had when it was last archived, with records or without."""
        return 1 + max(self._last.topics[topic].ends)

    def _numbers(self) -> list[int]:
        names = (name.partition(".") for name in os.listdir(self._folder) if not name.startswith("."))
        return sorted(int(number) for number, _, kind in names if kind == "json" and number.isdecimal())

    def _read(self, number: int) -> LakeCommit:
        path = os.path.join(self._folder, _name(number))
        with open(path, "rb") as file:
            try:
                commit = msgspec.json.decode(file.read(), type=LakeCommit, strict=False)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise DamageError(f"{path} is not a valid commit of this archive: {error}") from None
        if commit.v != VERSION:
            raise DamageError(f"{path} has version {commit.v}; this release reads version {VERSION}")
        return commit

    def _link(self, number: int, commit: LakeCommit) -> None:
        """Store a commit durably under its number; raise `FileExistsError` if that number exists."""
        draft = os.path.join(self._folder, f".{uuid4().hex}")
        with open(draft, "xb") as file:
            file.write(msgspec.json.encode(commit))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, os.path.join(self._folder, _name(number)))
        finally:
            os.unlink(draft)
        fsync_path(self._folder)

    def _publish(self, commit: LakeCommit) -> None:
        for file in commit.files:
            path = os.path.join(self.place.url, file.path)
            with suppress(FileNotFoundError):  # already renamed
                os.rename(hidden_path(path), path)


def _name(number: int) -> str:
    return f"{number:020d}.json"
