"""Does every consumer get every record, and each once?

A consumer that never names an offset and never moves its cursor must not get a record twice (**repeated-delivery**),
and its cursor never moves back (**cursor-regression**). No consumer may miss a record before others that it got
(**undelivered**), and no cursor may be past a record that was not delivered and is not being delivered
(**cursor-passed**). A call at the cursor whose answer was lost may have consumed as many consecutive records as it
asked for: at most that many records, in at most that many places, may be missing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from quiver.testing.history.events import END_OF_TIME, HistoryOperation
from quiver.testing.history.ledger import CheckResult, Ledger, ObservedLog


@dataclass(slots=True)
class _Reader:
    """One consumer at one partition."""

    name: str
    key: str
    start: int | None = 0
    is_repeating: bool = False
    deliveries: list[HistoryOperation] = field(default_factory=list)
    lost_answers: list[HistoryOperation] = field(default_factory=list)
    cursors: list[HistoryOperation] = field(default_factory=list)

    def swallowed_max(self, *, before: int) -> int:
        """Return how many records calls that began before an event may have swallowed."""
        return sum(call.argument["max"] for call in self.lost_answers if call.invoked < before)


def check_cursors(ledger: Ledger, verdict: CheckResult) -> None:
    """Find what consumers were given twice or never."""
    for reader in _gather(ledger):
        verdict.facts["consumers_judged"] += 1
        log = ledger.logs.get(reader.key, ObservedLog())
        given: dict[int, HistoryOperation] = {}
        for delivery in reader.deliveries:
            for offset, _ in delivery.result:
                before = given.setdefault(offset, delivery)
                if before is not delivery and not reader.is_repeating:
                    _find(verdict, "repeated-delivery", reader, offset=offset, events=_events(before, delivery))
        missing = _missing(reader, log, given)
        places = _places(missing, log)
        if len(missing) > reader.swallowed_max(before=END_OF_TIME) or places > len(reader.lost_answers):
            facts = {"missing": len(missing), "places": places, "lost_answers": len(reader.lost_answers)}
            _find(verdict, "undelivered", reader, offsets=missing[:20], **facts)
        kept = {offset: delivery for offset, delivery in given.items() if offset >= log.first_offset}
        _check_cursors(reader, kept, missing, verdict)  # a cursor may pass records that were trimmed


def _gather(ledger: Ledger) -> Iterator[_Reader]:
    readers: dict[tuple[str, str], _Reader] = {}
    anywhere: dict[str, list[HistoryOperation]] = defaultdict(list)

    def reader_of(name: str, key: str) -> _Reader:
        return readers.setdefault((name, key), _Reader(name, key))

    for operation in ledger.operations:
        match operation.f:
            case "subscribe" if operation.key is not None:
                reader_of(operation.result["consumer"], operation.key).start = operation.result["offset"]
            case "consume" if operation.key is None:
                if operation.outcome == "info":
                    anywhere[operation.argument["consumer"]].append(operation)
            case "consume" | "commit" | "cursor" if operation.key is not None and operation.outcome != "fail":
                _take(reader_of(operation.argument["consumer"], operation.key), operation)
    for reader in readers.values():
        reader.lost_answers.extend(anywhere[reader.name])
        yield reader


def _take(reader: _Reader, operation: HistoryOperation) -> None:
    if operation.f == "commit" or (operation.f == "consume" and operation.argument["offset"] is not None):
        reader.is_repeating = True
    if operation.f == "consume":
        if operation.outcome == "ok":
            reader.deliveries.append(operation)
        elif operation.argument["offset"] is None:
            reader.lost_answers.append(operation)
    elif operation.f == "cursor" and operation.outcome == "ok":
        reader.cursors.append(operation)


def _missing(reader: _Reader, log: ObservedLog, given: dict[int, HistoryOperation]) -> list[int]:
    """Return the offsets that the consumer was never given, though it or its cursor went past them."""
    passed = max((*given, *(cursor.result - 1 for cursor in reader.cursors)), default=-1)
    start = min(given, default=passed + 1) if reader.start is None else reader.start
    start = max(start, log.first_offset)
    return sorted(offset for offset in log.values if start <= offset <= passed and offset not in given)


def _places(missing: list[int], log: ObservedLog) -> int:
    """Return how many runs of records without any between them the missing ones form."""
    if not missing:
        return 0
    known = sorted(offset for offset in log.values if missing[0] <= offset <= missing[-1])
    gone = set(missing)
    return sum(offset in gone and before not in gone for before, offset in pairwise((-1, *known)))


def _check_cursors(
    reader: _Reader, given: dict[int, HistoryOperation], missing: list[int], verdict: CheckResult
) -> None:
    """Walk over the cursors as they were read, beside the deliveries that had begun by then."""
    by_beginning = sorted(given, key=lambda offset: given[offset].invoked)
    by_offset = sorted(given)
    begun: set[int] = set()
    position = frontier = 0
    for cursor in sorted(reader.cursors, key=lambda one: one.completed):
        while position < len(by_beginning) and given[by_beginning[position]].invoked < cursor.completed:
            begun.add(by_beginning[position])
            position += 1
        while frontier < len(by_offset) and by_offset[frontier] in begun:
            frontier += 1
        if frontier < len(by_offset) and by_offset[frontier] < cursor.result:
            _find(verdict, "cursor-passed", reader, offset=by_offset[frontier], cursor=cursor.result)
        if bisect_left(missing, cursor.result) > reader.swallowed_max(before=cursor.completed):
            _find(verdict, "cursor-passed", reader, offset=missing[0], cursor=cursor.result)
    if not reader.is_repeating:
        _check_regression(reader, verdict)


def _check_regression(reader: _Reader, verdict: CheckResult) -> None:
    """Require that each cursor is past everything known to be consumed when it was asked for."""
    learnt = [(done.completed, done.result[-1][0] + 1) for done in reader.deliveries if done.result]
    learnt += [(cursor.completed, cursor.result) for cursor in reader.cursors]
    learnt.sort()
    position = known = 0
    for cursor in sorted(reader.cursors, key=lambda one: one.invoked):
        while position < len(learnt) and learnt[position][0] < cursor.invoked:
            known = max(known, learnt[position][1])
            position += 1
        if cursor.result < known:
            _find(verdict, "cursor-regression", reader, cursor=cursor.result, known=known, event=cursor.completed)


def _find(verdict: CheckResult, name: str, reader: _Reader, **evidence: object) -> None:
    verdict.find(name, reader.key, consumer=reader.name, **evidence)


def _events(*operations: HistoryOperation) -> list[int]:
    return [operation.completed for operation in operations]
