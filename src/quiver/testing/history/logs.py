"""Loss and order: is every acknowledged record still there, in an order that one log can have?

A record that was acknowledged, or belongs to a batch that a client saw, is **lost** if no client ever read it although
one polled beyond it. Its position among its producer's records gives the kind of loss: at the beginning (the log was
started over), in the middle (the worst), or at the end (the log was cut). After a drain more is known: a record that
was never read by then is **unseen**, one that was read before and is at or past the drained end has **vanished**, and
an offset without a record is a **hole**.

Within one call and from call to call of one process, polls resume where the last one ended: a skipped record is a
**poll-skip**, a record at or before the last one a **nonmonotonic-poll**; for sends this is a **nonmonotonic-send**.
Across processes real time decides: records that a client knew to be in the log before a send began are before it
(**real-time-violation**), and those known before an end offset was requested are below it (**stale-end**).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator

from quiver.testing.history.events import HistoryOperation
from quiver.testing.history.ledger import CheckResult, Ledger, ObservedLog, TrackedSend


def check_loss(ledger: Ledger, verdict: CheckResult) -> None:
    """Find records that are gone."""
    by_producer: dict[tuple[str | None, str], list[TrackedSend]] = defaultdict(list)
    for send in ledger.sends:
        if send.is_done:
            by_producer[send.key, send.operation.proc].append(send)
    for (key, _), sends in by_producer.items():
        assert key is not None
        _check_producer(key, sends, ledger.logs[key], verdict)
    for key, log in ledger.logs.items():
        if log.drained is not None:
            _check_drain(key, log, verdict)


def _check_producer(key: str, sends: list[TrackedSend], log: ObservedLog, verdict: CheckResult) -> None:
    missing = [place for place in _places(sends) if _is_missing(place[0], log)]
    if not missing:
        return
    read = [offset for offset, _, _ in _places(sends) if offset in log.read]
    first_read, last_read = min(read, default=0), max(read, default=-1)
    for offset, value, send in missing:
        facts = {"offset": offset, "value": value, "sent": send.operation.invoked}
        if offset < log.polled_end:
            part = "suffix" if offset > last_read else "prefix" if offset < first_read else "middle"
            verdict.find("lost-write", key, part=part, **facts)
        elif log.drained is not None and send.operation.completed < log.drained.invoked:
            verdict.find("unseen", key, **facts)


def _places(sends: list[TrackedSend]) -> Iterator[tuple[int, str, TrackedSend]]:
    for send in sends:
        assert send.base is not None
        for offset, value in enumerate(send.values, send.base):
            yield offset, value, send


def _is_missing(offset: int, log: ObservedLog) -> bool:
    return offset not in log.read and offset >= log.first_offset


def _check_drain(key: str, log: ObservedLog, verdict: CheckResult) -> None:
    assert log.drained is not None
    end = log.drained.result
    verdict.facts["partitions_drained"] += 1
    for offset in sorted(offset for offset in log.read if offset >= end):
        verdict.find("vanished", key, offset=offset, value=log.values[offset], drained_end=end)
    for offset in range(log.first_offset, end):
        if offset not in log.values:
            verdict.find("hole", key, offset=offset, drained_end=end)


Copies = dict[str, dict[int, str]]


def check_replicas(ledger: Ledger, verdict: CheckResult) -> None:
    """Compare what was read from each broker."""
    copies: dict[str, Copies] = defaultdict(dict)
    for operation in ledger.operations:
        if operation.f == "replica" and operation.key is not None:
            records = copies[operation.key].setdefault(operation.result["replica"], {})
            records.update((offset, value) for offset, value in operation.result["records"])
    for key, by_replica in copies.items():
        verdict.facts["replicas_read"] += len(by_replica)
        _compare(key, by_replica, ledger, verdict)


def _compare(key: str, copies: Copies, ledger: Ledger, verdict: CheckResult) -> None:
    everything: dict[int, str] = {}
    for records in copies.values():
        everything.update(records)
    log = ledger.logs.get(key)
    if log is not None:
        everything.update((offset, log.values[offset]) for offset in log.read)
    for replica, records in copies.items():
        first = max(min(records, default=0), log.first_offset if log is not None else 0)
        for offset, value in everything.items():
            if offset >= first and records.get(offset) != value:
                verdict.find(
                    "replica-difference", key, replica=replica, offset=offset, has=records.get(offset), others=value
                )


def check_order(ledger: Ledger, verdict: CheckResult) -> None:
    """Find what was read or written out of order."""
    _Polls(ledger, verdict).check()
    _check_sends(ledger, verdict)
    _check_real_time(ledger, verdict)


class _Polls:
    """Walks over the polls of every process, with the place in the log that each has reached."""

    def __init__(self, ledger: Ledger, verdict: CheckResult) -> None:
        self._ledger = ledger
        self._verdict = verdict
        self._known = {key: sorted(log.values) for key, log in ledger.logs.items()}
        self._next: dict[str, dict[str | None, int]] = defaultdict(dict)

    def check(self) -> None:
        for operation in sorted(self._reads(), key=lambda one: one.completed):
            if operation.f == "poll":
                self._check_poll(operation)
            elif operation.f == "crash" or operation.key is None:
                self._next.pop(operation.proc, None)
            elif operation.result is None:
                self._next[operation.proc].pop(operation.key, None)
            else:
                self._next[operation.proc][operation.key] = operation.result

    def _reads(self) -> Iterator[HistoryOperation]:
        for operation in self._ledger.operations:
            if operation.f in ("assign", "crash") or (operation.f == "poll" and operation.outcome == "ok"):
                yield operation

    def _check_poll(self, poll: HistoryOperation) -> None:
        if not poll.result:
            return
        positions = self._next[poll.proc]
        position = positions.get(poll.key)
        for offset, _ in poll.result:
            if position is not None and offset != position:
                self._check_step(poll, position, offset)
            position = offset + 1
        assert position is not None
        positions[poll.key] = position

    def _check_step(self, poll: HistoryOperation, position: int, offset: int) -> None:
        facts = {"expected": position, "offset": offset, "proc": poll.proc, "event": poll.completed}
        if offset < position:
            self._verdict.find("nonmonotonic-poll", poll.key, **facts)
            return
        assert poll.key is not None
        known = self._known[poll.key]
        skipped = known[bisect_left(known, position) : bisect_left(known, offset)]
        if skipped and skipped[-1] >= self._ledger.logs[poll.key].first_offset:
            self._verdict.find("poll-skip", poll.key, skipped=len(skipped), **facts)


def _check_sends(ledger: Ledger, verdict: CheckResult) -> None:
    last: dict[tuple[str, str | None], TrackedSend] = {}
    for send in ledger.sends:
        if send.operation.outcome != "ok":
            continue
        assert send.base is not None
        before = last.get((send.operation.proc, send.key))
        if before is not None and before.base is not None and send.base < before.base + len(before.values):
            verdict.find(
                "nonmonotonic-send",
                send.key,
                proc=send.operation.proc,
                offsets=[before.base, send.base],
                events=[before.operation.completed, send.operation.completed],
            )
        last[send.operation.proc, send.key] = send


def _check_real_time(ledger: Ledger, verdict: CheckResult) -> None:
    """Sweep over all beginnings and ends of operations in real time, with what is known to be in each log by then.

    An end that is learnt counts for what begins later; what begins remembers the end known at that moment.
    """
    moments: list[tuple[int, bool, str, int, HistoryOperation]] = []
    for send in ledger.sends:
        if send.is_done and send.key is not None and send.base is not None:
            moments.append((send.operation.invoked, False, send.key, send.base, send.operation))
            if send.operation.outcome == "ok":
                end = send.base + len(send.values)
                moments.append((send.operation.completed, True, send.key, end, send.operation))
    for operation in ledger.operations:
        if operation.outcome != "ok" or operation.key is None:
            continue
        if operation.f == "list_offsets":
            verdict.facts["end_offsets_read"] += 1
            moments.append((operation.invoked, False, operation.key, operation.result, operation))
            moments.append((operation.completed, True, operation.key, operation.result, operation))
        elif operation.f in ("poll", "consume") and operation.result:
            end = 1 + max(offset for offset, _ in operation.result)
            moments.append((operation.completed, True, operation.key, end, operation))
    moments.sort(key=lambda moment: moment[0])
    ends: dict[str, int] = defaultdict(int)
    for _, is_learnt, key, offset, operation in moments:
        if is_learnt:
            ends[key] = max(ends[key], offset)
        elif offset < ends[key]:
            name = "real-time-violation" if operation.f == "send" else "stale-end"
            verdict.find(name, key, offset=offset, known_end=ends[key], proc=operation.proc, event=operation.invoked)
