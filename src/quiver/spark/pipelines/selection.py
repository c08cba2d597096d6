"""Which archived records are meant: by offsets, by time, or all. Pure.

Offsets are `FIRST:END`, half-open, either left out at will: `100:200`, `:50`, `100:`; for all partitions, or by
partition: `0=100:200,2=:50`, and then of no other. Times are `FROM/TO`, half-open, ISO 8601, in UTC unless they say
else, either left out at will: `2026-11-15T10:00/2026-11-15T12:00`, `2026-11-15T10:00/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from quiver.errors import RequestError
from quiver.spark.pipelines.lake import LakeFile

OFFSET_MAX: Final = 2**63 - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_RANGE: Final = re.compile(r"(?:(\d+)=)?(\d*):(\d*)")
_HOUR_US: Final = 3_600_000_000

Bounds = tuple[int, int]
"""From one, up to another that is not meant any more."""
EVERYTHING: Final[Bounds] = (0, OFFSET_MAX)


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which records are meant."""

    every_partition: Bounds | None = EVERYTHING
    by_partition: dict[int, Bounds] = {}
    times_us: Bounds | None = None

    def offsets(self, partition: int) -> Bounds | None:
        """Return the offsets that are meant in a partition; None if none are."""
        return self.by_partition.get(partition, self.every_partition)

    def files(self, files: Iterable[LakeFile]) -> list[LakeFile]:
        """Return the files that may hold records that are meant."""
        return [file for file in files if self._may_hold(file)]

    def records(self, batch: pa.RecordBatch, partition: int) -> pa.RecordBatch:
        """Return the records of a batch, in the order of their offsets, that are meant."""
        bounds = self.offsets(partition)
        if bounds is None:
            return batch.slice(0, 0)
        first, end = np.searchsorted(batch["offset"].to_numpy(), bounds).tolist()
        batch = batch.slice(first, end - first)
        if self.times_us is None:
            return batch
        times = batch["timestamp"].cast(pa.int64()).to_numpy()
        return batch.filter(pa.array((times >= self.times_us[0]) & (times < self.times_us[1])))

    def _may_hold(self, file: LakeFile) -> bool:
        bounds = self.offsets(file.partition)
        if bounds is None or file.last_offset < bounds[0] or file.first_offset >= bounds[1]:
            return False
        if self.times_us is None:
            return True
        hour_us = int(np.datetime64(file.hour, "us").astype(np.int64))
        return hour_us + _HOUR_US > self.times_us[0] and hour_us < self.times_us[1]


def select(offsets: str, time: str) -> Selection:
    """Return what options say; raise `RequestError` (`bad_option`) for what cannot be."""
    every, by_partition = _parse_offsets(offsets) if offsets else (EVERYTHING, {})
    return Selection(every_partition=every, by_partition=by_partition, times_us=_parse_time(time) if time else None)


def _parse_offsets(text: str) -> tuple[Bounds | None, dict[int, Bounds]]:
    every: Bounds | None = None
    by_partition: dict[int, Bounds] = {}
    parts = text.split(",")
    for part in parts:
        found = _RANGE.fullmatch(part.strip())
        if not found or (found[1] is None and len(parts) > 1):
            raise _bad(f"offsets are FIRST:END, or PARTITION=FIRST:END with commas between, not {text!r}")
        bounds = (int(found[2] or 0), int(found[3] or OFFSET_MAX))
        if bounds[0] >= bounds[1]:
            raise _bad(f"offsets {part.strip()} are none: a range ends behind where it begins")
        if found[1] is None:
            every = bounds
        else:
            by_partition[int(found[1])] = bounds
    return every, by_partition


def _parse_time(text: str) -> Bounds:
    begin, is_there, end = text.partition("/")
    if not is_there:
        raise _bad(f"time is FROM/TO, such as 2026-11-15T10:00/2026-11-15T12:00, not {text!r}")
    bounds = (_to_us(begin, -OFFSET_MAX), _to_us(end, OFFSET_MAX))
    if bounds[0] >= bounds[1]:
        raise _bad(f"time {text} is none: it ends before it begins")
    return bounds


def _to_us(text: str, default: int) -> int:
    if not text.strip():
        return default
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise _bad(f"{text!r} is no time such as 2026-11-15T10:00") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _bad(sentence: str) -> RequestError:
    return RequestError(sentence, code="bad_option")
