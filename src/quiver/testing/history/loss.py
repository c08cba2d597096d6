"""Is everything still there that was acknowledged?

A record that was acknowledged, or belongs to a batch that a client saw, is **lost** if no client ever read it although
one polled beyond it. Its position among its producer's records gives the kind of loss: at the beginning (the log was
started over), in the middle (the worst), or at the end (the log was cut). After a drain more is known: a record that
was never read by then is **unseen**, one that was read before and is at or past the drained end has **vanished**, and
an offset without a record is a **hole**.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from quiver.testing.history.anomalies import CheckResult
from quiver.testing.history.ledger import Ledger, ObservedLog, TrackedSend


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
