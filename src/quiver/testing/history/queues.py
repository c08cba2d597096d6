"""Work queues: what workers received, what they settled, and what became of every record.

A `receive` returns deliveries: `[partition key, offset, value, attempt, grant, sent_ns, until_ns, record key,
not_before_ns]`. `sent_ns` is when the request left at the earliest, `until_ns` how long the worker may count on its
lease, both by the clock of the history; `not_before_ns` is the time that the sender asked for, or null. A `settle` is
of one `kind` (ack, return, release, reject, extend) for `records`, which are `[offset, grant]`, and has `ms` for a
delay or a lease; it returns those of its `records` that were refused. At the end come the notes `queue` (`{"group",
"keys", "max_attempts", "order", "clock_error_ms"}`: no record of these partitions is under way any more) and `dead`
(`{"group", "letters"}`: the dead-letter topic's content, as `[partition key, offset, value, attempts, reason]`).

- **doubled-grant**: a record was delivered twice under one grant.
- **acknowledged-again**: a record was leased after its acknowledgement had been confirmed.
- **zombie-settled**: a receipt was accepted although the record had been delivered again, and was not settled.
- **lease-overlap**, **lease-refused**: a record was delivered again, or a receipt refused, before its lease had ended.
- **attempts-exceeded**, **attempt-uncounted**: more deliveries than allowed, or one that was not counted.
- **short-delay**: a delivery before the time that the sender or a return asked for.
- **key-order**: a record was delivered while an earlier one of its key was under way.
- **unsettled**: a record that nobody acknowledged is not under way, and is no dead letter.
- **dead-twice**, **dead-wrong**, **dead-early**, **dead-unasked**: a dead letter is there twice, has another value,
  had attempts left, or was not rejected.
- **acknowledged-dead**, **rejected-alive**: a record that was settled while its lease lasted ended otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quiver.testing.history.events import END_OF_TIME, HistoryOperation
from quiver.testing.history.ledger import CheckResult, Ledger

MAX_ATTEMPTS_REASON = "max_attempts"
_MS = 1_000_000


class _Delivery(NamedTuple):
    """One record in the hands of one worker."""

    call: HistoryOperation
    attempt: int
    grant: int
    sent_ns: int
    until_ns: int
    not_before_ns: int | None


class _Settlement(NamedTuple):
    """What a worker did with one record."""

    call: HistoryOperation
    kind: str
    grant: int
    ms: int
    is_refused: bool

    @property
    def is_done(self) -> bool:
        return self.call.outcome == "ok" and not self.is_refused

    @property
    def may_be_done(self) -> bool:
        # One whose answer was lost is refused when it is repeated, if the record was delivered again meanwhile.
        is_repeated = self.is_refused and self.kind in ("return", "release", "extend")
        return self.is_done or self.call.outcome == "info" or is_repeated


@dataclass(slots=True)
class _Job:
    """One record of one queue."""

    key: str
    offset: int
    record_key: str | None = None
    deliveries: list[_Delivery] = field(default_factory=list)
    settlements: list[_Settlement] = field(default_factory=list)
    letters: list[list[Any]] = field(default_factory=list)

    def done(self, *kinds: str) -> Iterator[_Settlement]:
        return (one for one in self.settlements if one.kind in kinds and one.is_done)

    def maybe(self, *kinds: str) -> Iterator[_Settlement]:
        return (one for one in self.settlements if one.kind in kinds and one.may_be_done)


@dataclass(slots=True)
class _Queue:
    """One queue at its end."""

    group: str
    keys: frozenset[str]
    max_attempts: int
    is_by_key: bool
    error_ns: int
    jobs: dict[tuple[str, int], _Job] = field(default_factory=dict)

    def job(self, key: str, offset: int) -> _Job:
        found = self.jobs.get((key, offset))
        if found is None:
            found = self.jobs[key, offset] = _Job(key, offset)
        return found


def check_queues(ledger: Ledger, verdict: CheckResult) -> None:
    """Find what queues delivered too often, too early, to too many, or never."""
    for queue in _gather(ledger):
        verdict.facts["queues_judged"] += 1
        for job in queue.jobs.values():
            verdict.facts["deliveries"] += len(job.deliveries)
            job.deliveries.sort(key=lambda one: one.grant)
            _check_grants(queue, job, verdict)
            _check_leases(queue, job, verdict)
            _check_receipts(queue, job, verdict)
            _check_delays(queue, job, verdict)
            _check_letters(queue, job, verdict, ledger)
        _check_settled(queue, ledger, verdict)
        if queue.is_by_key:
            _check_key_order(queue, verdict)


def _gather(ledger: Ledger) -> Iterator[_Queue]:
    queues: dict[str, _Queue] = {}
    for operation in ledger.operations:
        if operation.f == "queue":
            note = operation.result
            queues[note["group"]] = _Queue(
                note["group"],
                frozenset(note["keys"]),
                note["max_attempts"],
                note["order"] == "key",
                note["clock_error_ms"] * _MS,
            )
    for operation in ledger.operations:
        note = operation.result if operation.f == "dead" else operation.argument
        queue = queues.get(note["group"]) if operation.f in ("receive", "settle", "dead") else None
        if queue is None:
            continue
        if operation.f == "receive" and operation.outcome == "ok":
            for key, offset, _, attempt, grant, sent_ns, until_ns, record_key, not_before_ns in operation.result:
                job = queue.job(key, offset)
                job.record_key = record_key
                job.deliveries.append(_Delivery(operation, attempt, grant, sent_ns, until_ns, not_before_ns))
        elif operation.f == "settle" and operation.key is not None:
            refused = (
                {(offset, grant) for offset, grant in operation.result or ()} if operation.outcome == "ok" else set()
            )
            for offset, grant in operation.argument["records"]:
                queue.job(operation.key, offset).settlements.append(
                    _Settlement(
                        operation,
                        operation.argument["kind"],
                        grant,
                        operation.argument["ms"] or 0,
                        (offset, grant) in refused,
                    )
                )
        elif operation.f == "dead":
            for letter in operation.result["letters"]:
                queue.job(letter[0], letter[1]).letters.append(letter)
    yield from queues.values()


def _check_grants(queue: _Queue, job: _Job, verdict: CheckResult) -> None:
    released = {one.grant for one in job.maybe("release")}
    for before, after in zip(job.deliveries, job.deliveries[1:], strict=False):
        if before.grant == after.grant:
            _find(verdict, "doubled-grant", queue, job, grant=after.grant, events=_events(before, after))
        elif after.attempt < before.attempt + (before.grant not in released):
            _find(verdict, "attempt-uncounted", queue, job, attempt=after.attempt, events=_events(before, after))
    confirmed_ns = min((one.call.ended_ns for one in job.done("ack")), default=END_OF_TIME)
    for one in job.deliveries:
        if queue.max_attempts and one.attempt > queue.max_attempts:
            _find(verdict, "attempts-exceeded", queue, job, attempt=one.attempt, event=one.call.completed)
        if one.sent_ns > confirmed_ns:
            _find(verdict, "acknowledged-again", queue, job, grant=one.grant, event=one.call.completed)


def _lasts_until_ns(queue: _Queue, job: _Job, delivery: _Delivery) -> int:
    """Return until when a lease lasts for sure; an extension may have shortened it."""
    ends = [
        one.call.began_ns + one.ms * _MS
        for one in job.settlements
        if one.kind == "extend" and one.grant == delivery.grant and one.may_be_done
    ]
    return min(delivery.until_ns, *ends) - queue.error_ns if ends else delivery.until_ns - queue.error_ns


def _check_leases(queue: _Queue, job: _Job, verdict: CheckResult) -> None:
    """Require that a record belongs to one worker as long as its lease lasts."""
    for before, after in zip(job.deliveries, job.deliveries[1:], strict=False):
        given_back = any(
            one.grant == before.grant and one.call.invoked < after.call.completed
            for one in job.maybe("return", "release")
        )
        if not given_back and after.call.ended_ns < _lasts_until_ns(queue, job, before):
            _find(verdict, "lease-overlap", queue, job, grant=after.grant, events=_events(before, after))
    for delivery in job.deliveries:
        until_ns = _lasts_until_ns(queue, job, delivery)
        own = [one for one in job.settlements if one.grant == delivery.grant]
        for one in own:
            is_first = not any(other.kind != "extend" and other.call.invoked < one.call.invoked for other in own)
            if one.is_refused and not one.may_be_done and is_first and one.call.ended_ns < until_ns:
                _find(verdict, "lease-refused", queue, job, grant=one.grant, event=one.call.completed)
            elif is_first and one.is_done and one.call.ended_ns < until_ns:
                if one.kind == "ack" and job.letters:
                    _find(verdict, "acknowledged-dead", queue, job, grant=one.grant, event=one.call.completed)
                if one.kind == "reject" and not job.letters:
                    _find(verdict, "rejected-alive", queue, job, grant=one.grant, event=one.call.completed)


def _check_receipts(queue: _Queue, job: _Job, verdict: CheckResult) -> None:
    """Require that receipts of workers whose record was delivered again are refused, unless it is settled."""
    for one in job.settlements:
        if not one.is_done:
            continue
        newer = [
            other for other in job.deliveries if other.grant > one.grant and other.call.completed < one.call.invoked
        ]
        if not newer:
            continue
        may_be_settled = bool(job.letters) or any(
            other.grant > one.grant and other.call.invoked < one.call.completed for other in job.maybe("ack", "reject")
        )
        if one.kind not in ("ack", "reject") or not may_be_settled:
            _find(verdict, "zombie-settled", queue, job, kind=one.kind, grant=one.grant, event=one.call.completed)


def _check_delays(queue: _Queue, job: _Job, verdict: CheckResult) -> None:
    for one in job.deliveries:
        due = [
            other.call.began_ns + other.ms * _MS
            for other in job.done("return")
            if other.grant < one.grant and other.call.invoked < one.call.completed
        ]
        if one.not_before_ns is not None:
            due.append(one.not_before_ns)
        if due and one.call.ended_ns < max(due) - queue.error_ns:
            _find(verdict, "short-delay", queue, job, grant=one.grant, event=one.call.completed)


def _check_letters(queue: _Queue, job: _Job, verdict: CheckResult, ledger: Ledger) -> None:
    if len(job.letters) > 1:
        _find(verdict, "dead-twice", queue, job, letters=len(job.letters))
    for _, _, value, attempts, reason in job.letters:
        verdict.facts["dead_letters"] += 1
        known = ledger.logs[job.key].values.get(job.offset) if job.key in ledger.logs else None
        if known is not None and value != known:
            _find(verdict, "dead-wrong", queue, job, value=value, known=known)
        if reason == MAX_ATTEMPTS_REASON:
            if attempts != queue.max_attempts:
                _find(verdict, "dead-early", queue, job, attempts=attempts)
        elif not any(job.maybe("reject")):
            _find(verdict, "dead-unasked", queue, job, reason=reason)


def _check_settled(queue: _Queue, ledger: Ledger, verdict: CheckResult) -> None:
    for key in sorted(queue.keys & ledger.logs.keys()):
        log = ledger.logs[key]
        for offset in sorted(log.values):
            job = queue.jobs.get((key, offset))
            if offset >= log.first_offset and (job is None or not (job.letters or any(job.maybe("ack")))):
                deliveries = 0 if job is None else len(job.deliveries)
                verdict.find("unsettled", key, group=queue.group, offset=offset, deliveries=deliveries)


def _check_key_order(queue: _Queue, verdict: CheckResult) -> None:
    by_key: dict[tuple[str, str], list[_Job]] = defaultdict(list)
    for job in queue.jobs.values():
        if job.record_key is not None:
            by_key[job.key, job.record_key].append(job)
    for jobs in by_key.values():
        jobs.sort(key=lambda job: job.offset)
        settled_after = -1
        for job in jobs:
            first = min((one.call.completed for one in job.deliveries), default=END_OF_TIME)
            if first < settled_after:
                _find(verdict, "key-order", queue, job, event=first, earlier_settled=settled_after)
            is_dead = any(letter[4] == MAX_ATTEMPTS_REASON for letter in job.letters)
            attempts = [] if is_dead else [one.call.invoked for one in job.maybe("ack", "reject")]
            settled_after = max(settled_after, min(attempts, default=-1))


def _find(verdict: CheckResult, name: str, queue: _Queue, job: _Job, **evidence: object) -> None:
    verdict.find(name, job.key, group=queue.group, offset=job.offset, **evidence)


def _events(*deliveries: _Delivery) -> list[int]:
    return [one.call.completed for one in deliveries]
