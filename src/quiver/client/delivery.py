"""Delivery results of sent records: one outcome per batch, shared by the small handles of its records.

An `Outcome` is settled once, on the sending loop. Any thread (`result`) and any event loop (`await`) may wait for it.
Callbacks run on the sending loop, in the order in which they were added; their exceptions are logged and dropped.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

import msgspec

from quiver.client.arguments import checked
from quiver.errors import OutcomeUnknownError, QuiverError
from quiver.model import Offset, PartitionId

logger = logging.getLogger(__name__)


class Position(msgspec.Struct, frozen=True, gc=False):
    """The partition and offset of a record."""

    partition: PartitionId
    offset: Offset


class Span(msgspec.Struct, frozen=True, gc=False):
    """The partition and offsets of records that were sent together."""

    partition: PartitionId
    first_offset: Offset
    count: int


class Outcome:
    """The result of sending one batch: its base offset or an error."""

    __slots__ = ("_callbacks", "_lock", "_waiters", "base_offset", "error", "is_settled", "partition")

    def __init__(self, partition: PartitionId) -> None:
        self.partition = partition
        self.base_offset = Offset(-1)
        self.error: QuiverError | None = None
        self.is_settled = False
        self._lock = threading.Lock()
        self._waiters: list[threading.Lock] | None = None
        """A lock for each thread that waits, released when it is settled: an event has four locks and more calls."""
        self._callbacks: list[Callable[[], object]] = []

    def succeed(self, base_offset: Offset) -> None:
        """Settle it: the batch is committed at `base_offset`."""
        self._settle(base_offset, None)

    def fail(self, error: QuiverError) -> None:
        """Settle it: the batch was not committed, or may be, as `error` says."""
        self._settle(Offset(-1), error)

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call back when it is settled: immediately, in this thread, if it already is."""
        with self._lock:
            if not self.is_settled:
                self._callbacks.append(callback)
                return
        _call(callback)

    def wait(self, timeout: float | None) -> Offset:
        """Block until it is settled; return the base offset or raise the error."""
        if not self.is_settled and not self._wait_settled(timeout):
            raise OutcomeUnknownError(
                f"perhaps done: no answer within {timeout} s; the batch is still in flight, wait again for the result",
                code="timeout",
            )
        return self._result()

    def _wait_settled(self, timeout: float | None) -> bool:
        waiter = threading.Lock()
        waiter.acquire()
        with self._lock:
            if self.is_settled:
                return True
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(waiter)
        # A lock that is released before the wait begins is acquired at once.
        return waiter.acquire() if timeout is None else waiter.acquire(timeout=max(0.0, timeout))

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
            waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            waiter.release()
        for callback in callbacks:
            _call(callback)


class Delivery:
    """The pending result of one record: `.result()` in a thread, `await` in a coroutine.

    Dropping it does not cancel the send.
    """

    __slots__ = ("_index", "_outcome")

    def __init__(self, outcome: Outcome, index: int) -> None:
        self._outcome = outcome
        self._index = index

    @property
    def is_done(self) -> bool:
        """Whether the outcome of the record is known."""
        return self._outcome.is_settled

    @property
    def partition(self) -> PartitionId:
        """The partition of the record."""
        return self._outcome.partition

    @property
    def offset(self) -> Offset | None:
        """The record's offset, once it is committed."""
        outcome = self._outcome
        return Offset(outcome.base_offset + self._index) if outcome.is_settled and outcome.error is None else None

    @property
    def error(self) -> QuiverError | None:
        """The error of a failed delivery, else None."""
        return self._outcome.error

    @checked
    def result(self, timeout: float | None = None) -> Position:
        """Block until the record is committed, at most `timeout` seconds; return its partition and offset.

        Never call this on the event loop that sends.

        Raises:
            OutcomeUnknownError: no outcome within `timeout` here, or within `delivery_timeout` in the producer.
            QuiverError: the record was not committed, for this reason.
        """
        return self._position(self._outcome.wait(timeout))

    def add_done_callback(self, callback: Callable[[Delivery], object]) -> None:
        """Call `callback` with this delivery when it is done; it runs on the sending loop and must not block."""
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
    """The pending result of many records that were sent together; `len()` is their number."""

    __slots__ = ("_parts", "count")

    def __init__(self, parts: Iterable[tuple[Outcome, int, int]]) -> None:
        """Accept the outcome of each batch that holds some of the records, their first index in it and their count."""
        self._parts = tuple(parts)
        self.count = sum(count for _, _, count in self._parts)

    def __len__(self) -> int:
        return self.count

    @property
    def is_done(self) -> bool:
        """Whether the outcome of every record is known."""
        return all(outcome.is_settled for outcome, _, _ in self._parts)

    @property
    def committed_count(self) -> int:
        """The number of records that are known to be committed."""
        return sum(count for outcome, _, count in self._parts if outcome.is_settled and outcome.error is None)

    @checked
    def result(self, timeout: float | None = None) -> list[Span]:
        """Block until all records are committed, at most `timeout` seconds for each batch; return their offsets.

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
    """Return a copy of an error, so that several waiters can raise it without sharing a traceback."""
    copy = error.__class__.__new__(error.__class__)
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error
    return copy


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:
        logger.exception("delivery callback failed")


def _wake(future: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
    if asyncio._get_running_loop() is loop:
        _resolve(future)
    elif not loop.is_closed():
        loop.call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
