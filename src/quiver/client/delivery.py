"""What becomes of records that were sent: one outcome per batch, shared by the light handles of its records.

An `Outcome` is settled once, on the loop that sends, and may be waited for from anywhere: from a thread (`result`), or
from any event loop (`await`). Callbacks run on the sending loop, in the order in which they were added; what they
raise is logged and goes no further.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

import msgspec

from quiver.errors import OutcomeUnknownError, QuiverError
from quiver.model import Offset, PartitionId

logger = logging.getLogger(__name__)


class Position(msgspec.Struct, frozen=True, gc=False):
    """Where a record is."""

    partition: PartitionId
    offset: Offset


class Span(msgspec.Struct, frozen=True, gc=False):
    """Where records are that were sent together."""

    partition: PartitionId
    first_offset: Offset
    count: int


class Outcome:
    """What becomes of one batch."""

    __slots__ = ("_callbacks", "_lock", "_settled", "base_offset", "error", "is_settled", "partition")

    def __init__(self, partition: PartitionId) -> None:
        self.partition = partition
        self.base_offset = Offset(-1)
        self.error: QuiverError | None = None
        self.is_settled = False
        self._lock = threading.Lock()
        self._settled: threading.Event | None = None
        self._callbacks: list[Callable[[], object]] = []

    def succeed(self, base_offset: Offset) -> None:
        """Settle it: the batch is committed there."""
        self._settle(base_offset, None)

    def fail(self, error: QuiverError) -> None:
        """Settle it: this is why the batch is not known to be committed."""
        self._settle(Offset(-1), error)

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call back when it is settled: at once, here, if it is."""
        with self._lock:
            if not self.is_settled:
                self._callbacks.append(callback)
                return
        _call(callback)

    def wait(self, timeout: float | None) -> Offset:
        """Block until it is settled; return the base offset or raise the error."""
        with self._lock:
            if not self.is_settled and self._settled is None:
                self._settled = threading.Event()
            settled = self._settled
        if not self.is_settled and settled is not None and not settled.wait(timeout):
            raise OutcomeUnknownError(f"not answered for within {timeout} s; it is still under way", code="timeout")
        return self._result()

    def __await__(self) -> Generator[Any, None, Offset]:
        if not self.is_settled:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self.add_callback(lambda: _wake(future, loop))
            yield from future
        return self._result()

    def _result(self) -> Offset:
        if self.error is not None:
            raise copy_error(self.error)
        return self.base_offset

    def _settle(self, base_offset: Offset, error: QuiverError | None) -> None:
        with self._lock:
            self.base_offset, self.error, self.is_settled = base_offset, error, True
            callbacks, self._callbacks = self._callbacks, []
            settled = self._settled
        if settled is not None:
            settled.set()
        for callback in callbacks:
            _call(callback)


class Delivery:
    """A promise that a record gets its place: `.result()` from a thread, `await` from a coroutine.

    Dropping it changes nothing: the record is on its way.
    """

    __slots__ = ("_index", "_outcome")

    def __init__(self, outcome: Outcome, index: int) -> None:
        self._outcome = outcome
        self._index = index

    @property
    def is_done(self) -> bool:
        """Whether it is known what became of the record."""
        return self._outcome.is_settled

    @property
    def partition(self) -> PartitionId:
        """The partition that the record goes to."""
        return self._outcome.partition

    @property
    def offset(self) -> Offset | None:
        """The record's offset, once it is committed."""
        outcome = self._outcome
        return Offset(outcome.base_offset + self._index) if outcome.is_settled and outcome.error is None else None

    @property
    def error(self) -> QuiverError | None:
        """Why it failed, if it did."""
        return self._outcome.error

    def result(self, timeout: float | None = None) -> Position:
        """Block until the record is committed, at most `timeout` seconds; return its place.

        Never call this on the event loop that sends.

        Raises:
            OutcomeUnknownError: time ran out here, or the cluster could not tell in `delivery_timeout`.
            QuiverError: the record was not taken, for the reason given.
        """
        return self._position(self._outcome.wait(timeout))

    def add_done_callback(self, callback: Callable[[Delivery], object]) -> None:
        """Call `callback` with this delivery when it is done; on the sending loop, so it must be quick."""
        self._outcome.add_callback(lambda: callback(self))

    def __await__(self) -> Generator[Any, None, Position]:
        offset = yield from self._outcome.__await__()
        return self._position(offset)

    def __repr__(self) -> str:
        state = "pending" if not self.is_done else (repr(self.error) if self.error else f"offset {self.offset}")
        return f"<Delivery to partition {self.partition}: {state}>"

    def _position(self, base_offset: Offset) -> Position:
        return Position(self._outcome.partition, Offset(base_offset + self._index))


class Deliveries:
    """A promise for many records that were sent together; `len()` is how many."""

    __slots__ = ("_parts", "count")

    def __init__(self, parts: Iterable[tuple[Outcome, int, int]]) -> None:
        """Take, for each batch that some of the records are in, where in it they begin and how many there are."""
        self._parts = tuple(parts)
        self.count = sum(count for _, _, count in self._parts)

    def __len__(self) -> int:
        return self.count

    @property
    def is_done(self) -> bool:
        """Whether it is known what became of every record."""
        return all(outcome.is_settled for outcome, _, _ in self._parts)

    @property
    def committed_count(self) -> int:
        """How many of the records are known to be committed."""
        return sum(count for outcome, _, count in self._parts if outcome.is_settled and outcome.error is None)

    def result(self, timeout: float | None = None) -> list[Span]:
        """Block until all records are committed, at most `timeout` seconds for each batch; return their places.

        Raises:
            QuiverError: as `Delivery.result`, for the first batch that failed; others may be committed.
        """
        return [_span(outcome, outcome.wait(timeout), *rest) for outcome, *rest in self._parts]

    def __await__(self) -> Generator[Any, None, list[Span]]:
        spans: list[Span] = []
        for outcome, *rest in self._parts:
            base_offset = yield from outcome.__await__()
            spans.append(_span(outcome, base_offset, *rest))
        return spans


def _span(outcome: Outcome, base_offset: Offset, index: int, count: int) -> Span:
    return Span(outcome.partition, Offset(base_offset + index), count)


def copy_error(error: QuiverError) -> QuiverError:
    """Return the error as one that may be raised by each who waits, without sharing a traceback."""
    copy = error.__class__.__new__(error.__class__)
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error
    return copy


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:
        logger.exception("a delivery callback failed")


def _wake(future: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
    if asyncio._get_running_loop() is loop:
        _resolve(future)
    elif not loop.is_closed():
        loop.call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
