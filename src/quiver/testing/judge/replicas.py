"""Do all brokers hold the same?

After the drain every broker is read by itself, from its first record to its last. Where two of them differ there were
two logs once. A broker that lacks what others hold at its end or in the middle is no copy; one whose first records
went by retention is.
"""

from __future__ import annotations

from collections import defaultdict

from quiver.testing.judge.anomaly import Verdict
from quiver.testing.judge.ledger import Ledger

Copies = dict[str, dict[int, str]]


def check_replicas(ledger: Ledger, verdict: Verdict) -> None:
    """Compare what was read from each broker."""
    copies: dict[str, Copies] = defaultdict(dict)
    for operation in ledger.operations:
        if operation.f == "replica" and operation.key is not None:
            records = copies[operation.key].setdefault(operation.result["replica"], {})
            records.update((offset, value) for offset, value in operation.result["records"])
    for key, by_replica in copies.items():
        verdict.facts["replicas_read"] += len(by_replica)
        _compare(key, by_replica, ledger, verdict)


def _compare(key: str, copies: Copies, ledger: Ledger, verdict: Verdict) -> None:
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
