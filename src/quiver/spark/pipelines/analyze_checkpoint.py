"""The checkpoint of an analysis: its offsets, model and counts, and the end of the batch that is being counted.

A batch is planned, counted, written to the sink, and then the state with all of it is stored. The plan is durable
before the batch begins: after a crash exactly this batch is repeated, under the same number, so that a sink that
already has it changes nothing. Both files are replaced atomically.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final, TypeVar
from uuid import uuid4

import msgspec

from quiver.errors import ConflictError, DamageError
from quiver.spark.offsets import StreamOffset
from quiver.spark.pipelines.lake import fsync_path
from quiver.spark.pipelines.place import Place

VERSION: Final = 1


class AnalyzeState(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted up to the end of a batch."""

    v: int = VERSION
    query_id: str
    topic: str
    batch_id: int = -1
    """The last batch that was counted; -1 before the first."""
    offsets: StreamOffset
    model: bytes = b""
    summary: bytes = b""
    floor_ms: int | None = None
    """Windows before this time are no longer kept: lines of theirs come too late."""
    late: int = 0
    """Lines that came too late."""


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that has begun."""

    v: int = VERSION
    batch_id: int
    end: StreamOffset


class AnalyzeCheckpoint:
    """Files in a directory or object store; without a place, memory."""

    def __init__(self, place: Place | None) -> None:
        self._place = place
        if place is not None and place.is_local:
            if os.path.isdir(os.path.join(place.url, "offsets")):
                raise ConflictError(
                    f"the checkpoint {place} is one of an earlier release, which counted messages instead of templates:"
                    " nothing was done; use another directory",
                    code="other_checkpoint",
                )
            os.makedirs(place.url, exist_ok=True)

    def load(self, topic: str) -> AnalyzeState | None:
        """Return the last state; None before the first batch."""
        data = self._read("state")
        if data is None:
            return None
        state = _decode(data, AnalyzeState, f"{self._place}/state")
        if state.topic != topic:
            raise ConflictError(
                f"the checkpoint {self._place} is of topic {state.topic!r}, not {topic!r}: use another directory",
                code="other_checkpoint",
            )
        return state

    def planned(self, batch_id: int) -> StreamOffset | None:
        """Return the end of a batch that had begun when the last run ended."""
        data = self._read("plan")
        if data is None:
            return None
        plan = _decode(data, BatchPlan, f"{self._place}/plan")
        return plan.end if plan.batch_id == batch_id else None

    def plan(self, batch_id: int, end: StreamOffset) -> None:
        """Store the end of a batch durably, before it begins."""
        self._write("plan", msgspec.msgpack.encode(BatchPlan(batch_id=batch_id, end=end)))

    def save(self, state: AnalyzeState) -> None:
        """Store a state durably: its batch is counted."""
        self._write("state", msgspec.msgpack.encode(state))

    def _read(self, name: str) -> bytes | None:
        if self._place is None:
            return None
        path, filesystem = self._place.locate(name)
        with suppress(FileNotFoundError):
            if filesystem is None:
                with open(path, "rb") as file:
                    return file.read()
            with filesystem.open_input_file(path) as stream:
                return bytes(stream.read())
        return None

    def _write(self, name: str, data: bytes) -> None:
        if self._place is None:
            return
        path, filesystem = self._place.locate(name)
        if filesystem is not None:  # the store has the whole object, or the one before
            with filesystem.open_output_stream(path) as stream:
                stream.write(data)
            return
        draft = f"{path}.{uuid4().hex}"
        with open(draft, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        fsync_path(os.path.dirname(path))


Stored = TypeVar("Stored", AnalyzeState, BatchPlan)


def _decode(data: bytes, kind: type[Stored], path: str) -> Stored:
    try:
        found = msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise DamageError(f"{path} is not a valid checkpoint: {error}") from None
    if found.v != VERSION:
        raise DamageError(f"{path} has version {found.v}; this release reads version {VERSION}")
    return found
