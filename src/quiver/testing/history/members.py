"""Members of consumer groups: who owns a partition, and what the owners before may still do there.

A `grant` note is written when a member begins a partition: `{"consumer", "member", "epoch", "offset"}`, where `offset`
is the position that it begins at. Its `consume` and `commit` events name the `epoch` under which it holds the
partition, and its `consume` events the `member`. That nothing is skipped is judged by `cursors`.

- **epoch-shared**: two members hold a partition at one epoch.
- **zombie-commit**: a commit was accepted although a member with a higher epoch had begun before it was sent.
- **zombie-read**: a member was given a record that was sent only after a member with a higher epoch had begun.
- **commit-undone**: a member began before a position that was committed at an earlier epoch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from quiver.testing.history.events import HistoryOperation
from quiver.testing.history.ledger import CheckResult, Ledger


@dataclass(slots=True)
class _Shared:
    """One partition of one group."""

    group: str
    key: str
    grants: list[HistoryOperation] = field(default_factory=list)
    commits: list[HistoryOperation] = field(default_factory=list)
    deliveries: list[HistoryOperation] = field(default_factory=list)


class _Begun:
    """When a higher epoch than a given one had begun for sure."""

    def __init__(self, grants: list[HistoryOperation]) -> None:
        newest_first = sorted(grants, key=lambda grant: -grant.result["epoch"])
        self._epochs: list[int] = []
        self._events: list[int] = []
        for grant in newest_first:
            earlier = self._events[-1] if self._events else grant.completed
            self._epochs.append(-grant.result["epoch"])
            self._events.append(min(earlier, grant.completed))

    def above(self, epoch: int) -> int | None:
        """Return the first event at which a higher epoch was known to have begun."""
        higher = bisect_left(self._epochs, -epoch)
        return self._events[higher - 1] if higher else None


def check_members(ledger: Ledger, verdict: CheckResult) -> None:
    """Find what owners of partitions did that only later owners may do."""
    sent = {value: send.operation.invoked for send in ledger.sends for value in send.values}
    for shared in _gather(ledger):
        verdict.facts["shared_partitions_judged"] += 1
        verdict.facts["grants"] += len(shared.grants)
        _check_owners(shared, verdict)
        begun = _Begun(shared.grants)
        for commit in shared.commits:
            after = begun.above(commit.argument["epoch"])
            if commit.outcome == "ok" and after is not None and after < commit.invoked:
                _find(verdict, "zombie-commit", shared, epoch=commit.argument["epoch"], event=commit.completed)
        for delivery in shared.deliveries:
            after = begun.above(delivery.argument["epoch"])
            late = [] if after is None else [one for one in delivery.result if sent.get(one[1], -1) > after]
            if late:
                facts = {"epoch": delivery.argument["epoch"], "member": delivery.argument["member"]}
                _find(verdict, "zombie-read", shared, offset=late[0][0], event=delivery.completed, **facts)
        _check_commits(shared, verdict)


def _gather(ledger: Ledger) -> Iterator[_Shared]:
    found: dict[tuple[str, str], _Shared] = {}

    def shared_of(group: str, key: str) -> _Shared:
        return found.setdefault((group, key), _Shared(group, key))

    for operation in ledger.operations:
        if operation.key is None:
            continue
        if operation.f == "grant":
            shared_of(operation.result["consumer"], operation.key).grants.append(operation)
        elif operation.f == "commit" and "epoch" in operation.argument:
            shared_of(operation.argument["consumer"], operation.key).commits.append(operation)
        elif operation.f == "consume" and "epoch" in operation.argument and operation.outcome == "ok":
            shared_of(operation.argument["consumer"], operation.key).deliveries.append(operation)
    yield from found.values()


def _check_owners(shared: _Shared, verdict: CheckResult) -> None:
    owners: dict[int, set[str]] = defaultdict(set)
    for facts in [grant.result for grant in shared.grants] + [one.argument for one in shared.deliveries]:
        owners[facts["epoch"]].add(facts["member"])
    for epoch, members in owners.items():
        if len(members) > 1:
            _find(verdict, "epoch-shared", shared, epoch=epoch, members=sorted(members))


def _check_commits(shared: _Shared, verdict: CheckResult) -> None:
    """Require that each owner begins at or after everything that earlier owners committed."""
    committed = [one.argument for one in shared.commits if one.outcome == "ok"]
    for grant in shared.grants:
        epoch, offset = grant.result["epoch"], grant.result["offset"]
        known = max((one["offset"] for one in committed if one["epoch"] < epoch), default=0)
        if offset < known:
            _find(verdict, "commit-undone", shared, epoch=epoch, offset=offset, committed=known, event=grant.completed)


def _find(verdict: CheckResult, name: str, shared: _Shared, **evidence: object) -> None:
    verdict.find(name, shared.key, group=shared.group, **evidence)
