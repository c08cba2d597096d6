"""Can operations on one thing be put in one order that keeps real time and explains every answer?

The search of Wing and Gong as Lowe runs it: it walks over beginnings and ends of operations and keeps every
*possibility*, a state of the thing and the calls that have taken effect without having ended yet. A call of known
outcome takes effect before it ends; one of unknown outcome at any time, or never. What is left when the walk is over
is not empty, or no order exists.

Calls of unknown outcome stay open for ever, so that possibilities could double with each. Two such calls of one kind
are the same in all that they can do, hence only the number of each kind that took effect is kept; and a possibility
that took more of them to get to the same state explains nothing that the other does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from quiver.testing.history.events import HistoryOperation
from quiver.testing.history.ledger import CheckResult, Ledger

POSSIBILITIES_MAX = 50_000

State = Hashable
Step = Callable[[State, HistoryOperation], State | None]
"""Return the state after an operation, or None if it cannot have had that answer in that state."""


class UndecidedError(Exception):
    """There were too many possibilities to tell."""


@dataclass(frozen=True, slots=True)
class _Possibility:
    state: State
    done: frozenset[int]
    """Calls of known outcome that took effect and have not ended yet, by the event that began them."""
    unknown_done: tuple[int, ...]
    """How many calls of unknown outcome took effect, by kind."""


def find_contradiction(
    operations: Iterable[HistoryOperation], *, initial: State, step: Step
) -> HistoryOperation | None:
    """Return the first operation whose answer no order explains, or None: there is one.

    Raises:
        UndecidedError: there were more than `POSSIBILITIES_MAX` possibilities at a time.
    """
    operations = [operation for operation in operations if operation.outcome != "fail"]
    moments = [(one.invoked, False, one) for one in operations]
    moments += [(one.completed, True, one) for one in operations if one.outcome == "ok"]
    moments.sort(key=lambda moment: moment[0])
    search = _Search(step, initial)
    for _, is_end, operation in moments:
        if not is_end:
            search.begin(operation)
        elif not search.end(operation):
            return operation
    return None


class _Search:
    def __init__(self, step: Step, initial: State) -> None:
        self._step = step
        self._open: dict[int, HistoryOperation] = {}
        self._unknown: list[tuple[HistoryOperation, int]] = []
        """One call of each kind whose outcome is unknown, and how many have begun."""
        self._possible = {_Possibility(initial, frozenset(), ())}

    def begin(self, operation: HistoryOperation) -> None:
        """Let a call take effect from now on."""
        if operation.outcome == "ok":
            self._open[operation.invoked] = operation
            return
        for position, (other, count) in enumerate(self._unknown):
            if (other.f, other.argument) == (operation.f, operation.argument):
                self._unknown[position] = (other, count + 1)
                return
        self._unknown.append((operation, 1))
        self._possible = {_Possibility(one.state, one.done, (*one.unknown_done, 0)) for one in self._possible}

    def end(self, operation: HistoryOperation) -> bool:
        """Keep what is possible given that a call has taken effect by now; tell whether anything is."""
        number = operation.invoked
        reached: set[_Possibility] = set()
        seen = set(self._possible)
        todo = list(seen)
        while todo:
            one = todo.pop()
            if number in one.done:
                reached.add(_Possibility(one.state, one.done - {number}, one.unknown_done))
                continue
            for following in self._follow(one):
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
            if len(seen) > POSSIBILITIES_MAX:
                raise UndecidedError
        del self._open[number]
        self._possible = _without_dominated(reached)
        return bool(self._possible)

    def _follow(self, one: _Possibility) -> Iterable[_Possibility]:
        """Yield what can come next: one more call takes effect."""
        for number, operation in self._open.items():
            if number not in one.done:
                state = self._step(one.state, operation)
                if state is not None:
                    yield _Possibility(state, one.done | {number}, one.unknown_done)
        for position, (operation, count) in enumerate(self._unknown):
            used = one.unknown_done[position]
            if used < count:
                state = self._step(one.state, operation)
                if state is not None and state != one.state:
                    more = (*one.unknown_done[:position], used + 1, *one.unknown_done[position + 1 :])
                    yield _Possibility(state, one.done, more)


def _without_dominated(possible: set[_Possibility]) -> set[_Possibility]:
    """Drop what differs from another possibility only by having used up more calls of unknown outcome."""
    best: dict[tuple[State, frozenset[int]], list[_Possibility]] = {}
    for one in sorted(possible, key=lambda possibility: sum(possibility.unknown_done)):
        rivals = best.setdefault((one.state, one.done), [])
        if not any(_is_below(rival.unknown_done, one.unknown_done) for rival in rivals):
            rivals.append(one)
    return {one for rivals in best.values() for one in rivals}


def _is_below(few: tuple[int, ...], many: tuple[int, ...]) -> bool:
    return all(left <= right for left, right in zip(few, many, strict=True))


TOPIC_CALLS = frozenset(("create", "delete", "exists"))
_MUST_BE_THERE = {"create": False, "delete": True}
"""What must be so for a call to change it."""


def check_names(ledger: Ledger, verdict: CheckResult) -> None:
    """Find answers about names that contradict each other."""
    topics: dict[str, list[HistoryOperation]] = defaultdict(list)
    clients: dict[str, list[HistoryOperation]] = defaultdict(list)
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


def _check_topic(name: str, operations: list[HistoryOperation], verdict: CheckResult) -> None:
    try:
        wrong = find_contradiction(operations, initial=False, step=_step_topic)
    except UndecidedError:
        verdict.find("undecided-name", name, calls=len(operations))
        return
    if wrong is not None:
        verdict.find("nonlinearizable-name", name, f=wrong.f, answer=wrong.result, proc=wrong.proc, event=wrong.invoked)


def _step_topic(state: State, operation: HistoryOperation) -> State | None:
    is_there = bool(state)
    if operation.f == "exists":
        return is_there if operation.outcome != "ok" or operation.result == is_there else None
    changes = is_there == _MUST_BE_THERE[operation.f]
    if operation.outcome == "ok" and operation.result != changes:
        return None
    return operation.f == "create"


def _check_client(name: str, operations: list[HistoryOperation], verdict: CheckResult) -> None:
    """Demand one id, and epochs that rise in real time and never come twice."""
    done = [one for one in operations if one.outcome == "ok"]
    by_end = sorted(done, key=lambda one: one.completed)
    epochs: dict[int, HistoryOperation] = {}
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
