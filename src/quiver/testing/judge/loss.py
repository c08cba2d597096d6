"""Is everything still there that was acknowledged?

A record that was acknowledged, or belongs to a batch that somebody saw, is **lost** if nobody ever read it although
somebody polled beyond it. Where in its producer's work it lies tells the kind of loss: at the beginning (the log was
started over), in the middle (the worst), or at the end (the log was cut). After a drain more can be said: what nobody
read by then is **unseen**, what was read once and lies behind the drained end has **vanished**, and an offset that
holds nothing is a **hole**.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from quiver.testing.judge.anomaly import Verdict
from quiver.testing.judge.ledger import Ledger, Log, Send


def check_loss(ledger: Ledger, verdict: Verdict) -> None:
    """Find records that are gone."""
    by_producer: dict[tuple[str | None, str], list[Send]] = defaultdict(list)
    for send in ledger.sends:
        if send.is_done:
            by_producer[send.key, send.operation.proc].append(send)
    for (key, _), sends in by_producer.items():
        assert key is not None
        _check_producer(key, sends, ledger.logs[key], verdict)
    for key, log in ledger.logs.items():
        if log.drained is not None:
            _check_drain(key, log, verdict)


def _check_producer(key: str, sends: list[Send], log: Log, verdict: Verdict) -> None:
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


def _places(sends: list[Send]) -> Iterator[tuple[int, str, Send]]:
    for send in sends:
        assert send.base is not None
        for offset, value in enumerate(send.values, send.base):
            yield offset, value, send


def _is_missing(offset: int, log: Log) -> bool:
    return offset not in log.read and offset >= log.first_offset


def _check_drain(key: str, log: Log, verdict: Verdict) -> None:
    assert log.drained is not None
    end = log.drained.result
    verdict.facts["partitions_drained"] += 1
    for offset in sorted(offset for offset in log.read if offset >= end):
        verdict.find("vanished", key, offset=offset, value=log.values[offset], drained_end=end)
    for offset in range(log.first_offset, end):
        if offset not in log.values:
            verdict.find("hole", key, offset=offset, drained_end=end)
