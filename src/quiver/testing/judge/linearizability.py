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

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from quiver.testing.judge.operations import Operation

POSSIBILITIES_MAX = 50_000

State = Hashable
Step = Callable[[State, Operation], State | None]
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


def find_contradiction(operations: Iterable[Operation], *, initial: State, step: Step) -> Operation | None:
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
        self._open: dict[int, Operation] = {}
        self._unknown: list[tuple[Operation, int]] = []
        """One call of each kind whose outcome is unknown, and how many have begun."""
        self._possible = {_Possibility(initial, frozenset(), ())}

    def begin(self, operation: Operation) -> None:
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

    def end(self, operation: Operation) -> bool:
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
