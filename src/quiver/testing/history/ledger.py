"""The content of each partition's log, reconstructed from all answers that clients got, and the result of a check.

Acknowledged sends fix values at offsets, and so does every read. Building the ledger finds two values at one offset,
one value at two offsets, values that no client sent or whose send certainly failed, and batches of which only a part is
there. A send of unknown outcome counts as done once one of its values has been read.

`CheckResult` holds the anomalies, by name with their evidence, and the size of the history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from quiver.testing.history.events import HistoryError, HistoryOperation

READS = frozenset(("poll", "consume", "replica"))
EXAMPLES_MAX = 20
"""Number of anomalies of each kind that are kept with their evidence; the others are only counted."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One promise broken, once."""

    name: str
    key: str | None
    evidence: dict[str, Any]

    def __str__(self) -> str:
        facts = " ".join(f"{fact}={value}" for fact, value in self.evidence.items())
        return f"{self.name} key={self.key} {facts}"


@dataclass(slots=True)
class CheckResult:
    """The anomalies of a history, and its size."""

    counts: Counter[str] = field(default_factory=Counter)
    """How often each anomaly was found, by name."""
    anomalies: list[Anomaly] = field(default_factory=list)
    """The first `EXAMPLES_MAX` of each."""
    facts: Counter[str] = field(default_factory=Counter)
    """What the history holds: a history that is clean because it is empty shows here."""

    @property
    def is_clean(self) -> bool:
        """Return whether nothing was found."""
        return not self.counts

    def find(self, name: str, key: str | None, /, **evidence: Any) -> None:
        """Add an anomaly."""
        self.counts[name] += 1
        if self.counts[name] <= EXAMPLES_MAX:
            self.anomalies.append(Anomaly(name, key, evidence))

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        found = [{"name": one.name, "key": one.key, **one.evidence} for one in self.anomalies]
        return {"is_clean": self.is_clean, "counts": dict(self.counts), "facts": dict(self.facts), "anomalies": found}

    def __str__(self) -> str:
        sizes = " ".join(f"{fact}={count}" for fact, count in sorted(self.facts.items()))
        if self.is_clean:
            return f"nothing found in {sizes}"
        return "\n".join((f"found {dict(self.counts)} in {sizes}", *map(str, self.anomalies)))


@dataclass(slots=True, eq=False)
class TrackedSend:
    """One batch: where it is, if it is known to be anywhere."""

    operation: HistoryOperation
    values: list[str]
    key: str | None
    base: int | None = None

    @property
    def is_done(self) -> bool:
        """Return whether it was acknowledged or has been seen."""
        return self.base is not None


@dataclass(slots=True)
class ObservedLog:
    """One partition."""

    values: dict[int, str] = field(default_factory=dict)
    """The value at each offset known."""
    offsets: dict[str, int] = field(default_factory=dict)
    """The offset of each value known."""
    read: set[int] = field(default_factory=set)
    """The offsets that were read."""
    polled_end: int = 0
    """One past the last record that was polled or read from a broker: both skip nothing."""
    first_offset: int = 0
    """Records below it may have been removed."""
    drained: HistoryOperation | None = None
    """The last note that it was read to its end."""


class Ledger:
    """All partitions and all sends of a history."""

    def __init__(self, operations: Iterable[HistoryOperation], verdict: CheckResult) -> None:
        self.operations = list(operations)
        self.logs: dict[str, ObservedLog] = {}
        self.sends: list[TrackedSend] = []
        self._verdict = verdict
        self._writers: dict[str, tuple[TrackedSend, int]] = {}
        for operation in self.operations:
            if operation.f == "send":
                self._take_send(operation)
        for operation in self.operations:
            self._take_other(operation)
        self._check_batches()

    def log(self, key: str | None) -> ObservedLog:
        """Return the log of a partition."""
        if key is None:
            raise HistoryError("an operation that was done names no partition")
        log = self.logs.get(key)
        if log is None:
            log = self.logs[key] = ObservedLog()
        return log

    def _take_send(self, operation: HistoryOperation) -> None:
        send = TrackedSend(operation, operation.argument, operation.key)
        self.sends.append(send)
        self._verdict.facts[f"sends_{operation.outcome}"] += 1
        for position, value in enumerate(send.values):
            if value in self._writers:
                raise HistoryError(f"event {operation.invoked}: value {value!r} is sent twice")
            self._writers[value] = (send, position)
        if operation.outcome == "ok":
            send.base = operation.result
            self._verdict.facts["records_acknowledged"] += len(send.values)
            self._place(send, operation)

    def _place(self, send: TrackedSend, by: HistoryOperation) -> None:
        assert send.base is not None
        log = self.log(send.key)
        for offset, value in enumerate(send.values, send.base):
            self._note(log, by, offset, value, send.key)

    def _take_other(self, operation: HistoryOperation) -> None:
        if operation.outcome != "ok":
            return
        if operation.f in READS:
            records = operation.result["records"] if operation.f == "replica" else operation.result
            self._take_records(operation, records)
        elif operation.f == "receive":
            for key, offset, value, *_ in operation.result:
                self._take_records(operation, [(offset, value)], key)
        elif operation.f == "trim":
            log = self.log(operation.key)
            log.first_offset = max(log.first_offset, operation.result)
        elif operation.f == "drain":
            self.log(operation.key).drained = operation

    def _take_records(
        self, operation: HistoryOperation, records: list[tuple[int, str]], key: str | None = None
    ) -> None:
        if not records:
            return
        key = key or operation.key
        log = self.log(key)
        values, read = log.values, log.read
        self._verdict.facts["records_read"] += len(records)
        for offset, value in records:
            if values.get(offset) != value:
                self._note(log, operation, offset, value, key)
                self._check_origin(operation, offset, value, key)
            elif offset not in read:
                self._check_origin(operation, offset, value, key)
            read.add(offset)
        if operation.f not in ("consume", "receive"):
            log.polled_end = max(log.polled_end, 1 + max(offset for offset, _ in records))

    def _note(self, log: ObservedLog, by: HistoryOperation, offset: int, value: str, key: str | None) -> None:
        known = log.values.setdefault(offset, value)
        if known != value:
            self._verdict.find("inconsistent-offsets", key, offset=offset, values=[known, value], event=by.completed)
        place = log.offsets.setdefault(value, offset)
        if place != offset:
            self._verdict.find("duplicate", key, value=value, offsets=[place, offset], event=by.completed)

    def _check_origin(self, by: HistoryOperation, offset: int, value: str, key: str | None) -> None:
        send, position = self._writers.get(value, (None, 0))
        if send is None:
            self._verdict.find("unexpected", key, offset=offset, value=value, event=by.completed)
        elif send.operation.outcome == "fail":
            self._verdict.find(
                "aborted-read", key, offset=offset, value=value, sent=send.operation.invoked, event=by.completed
            )
        elif send.base is None and send.operation.key in (None, key):
            send.base, send.key = offset - position, key
            self._verdict.facts["sends_proven"] += 1
        elif send.key != key:
            name = "unexpected" if send.operation.key is not None else "duplicate"
            self._verdict.find(name, key, offset=offset, value=value, sent_to=send.key, event=by.completed)

    def _check_batches(self) -> None:
        """Require that the rest of a batch that was seen in part is in its place."""
        for send in self.proven():
            assert send.base is not None
            log = self.log(send.key)
            for offset, value in enumerate(send.values, send.base):
                if log.values.setdefault(offset, value) != value or log.offsets.setdefault(value, offset) != offset:
                    self._verdict.find("torn-batch", send.key, value=value, offset=offset, sent=send.operation.invoked)

    def proven(self) -> Iterator[TrackedSend]:
        """Yield the sends whose outcome was unknown until one of their values was read."""
        return (send for send in self.sends if send.operation.outcome == "info" and send.is_done)
