"""Are topics created and deleted, and clients registered, as if on one machine?

Each name is judged by itself. A topic is there or not: `create` and `delete` say whether they changed that, `exists`
says what is. A registered name keeps its id for ever, and each registration gives it a higher epoch.
"""

from __future__ import annotations

from collections import defaultdict

from quiver.testing.judge.anomaly import Verdict
from quiver.testing.judge.ledger import Ledger
from quiver.testing.judge.linearizability import State, UndecidedError, find_contradiction
from quiver.testing.judge.operations import Operation

TOPIC_CALLS = frozenset(("create", "delete", "exists"))
_MUST_BE_THERE = {"create": False, "delete": True}
"""What must be so for a call to change it."""


def check_names(ledger: Ledger, verdict: Verdict) -> None:
    """Find answers about names that contradict each other."""
    topics: dict[str, list[Operation]] = defaultdict(list)
    clients: dict[str, list[Operation]] = defaultdict(list)
    for operation in ledger.operations:
        if operation.key is not None and operation.f in TOPIC_CALLS:
            topics[operation.key].append(operation)
        elif operation.key is not None and operation.f == "register":
            clients[operation.key].append(operation)
    for name, operations in topics.items():
        verdict.facts["names_judged"] += 1
        _check_topic(name, operations, verdict)
    for name, operations in clients.items():
        verdict.facts["names_judged"] += 1
        _check_client(name, operations, verdict)


def _check_topic(name: str, operations: list[Operation], verdict: Verdict) -> None:
    try:
        wrong = find_contradiction(operations, initial=False, step=_step_topic)
    except UndecidedError:
        verdict.find("undecided-name", name, calls=len(operations))
        return
    if wrong is not None:
        verdict.find("nonlinearizable-name", name, f=wrong.f, answer=wrong.result, proc=wrong.proc, event=wrong.invoked)


def _step_topic(state: State, operation: Operation) -> State | None:
    is_there = bool(state)
    if operation.f == "exists":
        return is_there if operation.outcome != "ok" or operation.result == is_there else None
    changes = is_there == _MUST_BE_THERE[operation.f]
    if operation.outcome == "ok" and operation.result != changes:
        return None
    return operation.f == "create"


def _check_client(name: str, operations: list[Operation], verdict: Verdict) -> None:
    """Demand one id, and epochs that rise in real time and never come twice."""
    done = [one for one in operations if one.outcome == "ok"]
    by_end = sorted(done, key=lambda one: one.completed)
    epochs: dict[int, Operation] = {}
    position = 0
    known = -1
    for one in done:
        while position < len(by_end) and by_end[position].completed < one.invoked:
            known = max(known, by_end[position].result["epoch"])
            position += 1
        facts = {"epoch": one.result["epoch"], "proc": one.proc, "event": one.completed}
        if one.result["id"] != done[0].result["id"]:
            verdict.find("two-ids", name, ids=[done[0].result["id"], one.result["id"]], **facts)
        if one.result["epoch"] <= known or one.result["epoch"] in epochs:
            verdict.find("epoch-regression", name, known=known, **facts)
        epochs[one.result["epoch"]] = one
