"""Whole runs of a correct log pass; change one thing in one of them, and the history checker must notice."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from history_script import CorrectLog
from hypothesis import assume, given
from hypothesis import strategies as st

from quiver.testing.history import HistoryEvent, check_history

Mutation = Callable[[list[HistoryEvent], Random], bool]
"""Changes a history in place; returns False if it has nothing that could be changed so."""


@given(seed=st.integers(0, 2**32), steps=st.integers(0, 120))
def test_correct_execution_is_clean(seed: int, steps: int) -> None:
    result = check_history(CorrectLog(seed, steps).script.events)
    assert result.is_clean, result


def _pick(
    events: list[HistoryEvent], rng: Random, f: str, wanted: Callable[[HistoryEvent], bool] = lambda _: True
) -> Any:
    found = [event for event in events if event.f == f and event.type == "ok" and wanted(event)]
    return rng.choice(found) if found else None


def _records(event: HistoryEvent) -> Any:
    """Return a copy of an event's records that can be changed without changing other events that share them."""
    if event.f == "replica":
        event.value = {**event.value, "records": [list(record) for record in event.value["records"]]}
        return event.value["records"]
    event.value = [list(record) for record in event.value]
    return event.value


def _is_nonempty(event: HistoryEvent) -> bool:
    return bool(event.value["records"] if event.f == "replica" else event.value)


def _acknowledge_elsewhere(events: list[HistoryEvent], rng: Random) -> bool:
    event = _pick(events, rng, "send")
    if event is not None:
        event.value += rng.choice((-1, 1, 7))
    return event is not None


def _acknowledge_what_was_never_done(events: list[HistoryEvent], rng: Random) -> bool:
    event = next((one for one in events if one.f == "send" and one.type == "fail"), None)
    if event is not None:
        event.type, event.value = "ok", 10**6
    return event is not None


def _call_failed_what_was_done(events: list[HistoryEvent], rng: Random) -> bool:
    event = _pick(events, rng, "send")
    if event is not None:
        event.type, event.value = "fail", None
    return event is not None


def _drop_read_record(f: str) -> Mutation:
    def mutate(events: list[HistoryEvent], rng: Random) -> bool:
        event = _pick(events, rng, f, lambda one: _is_nonempty(one) and (f != "poll" or one.proc == "drainer"))
        if event is not None:
            records = _records(event)
            # The last record that a drain polls cannot be told from one that came later; the first of a broker
            # from one that went by retention.
            first, end = (1, len(records)) if f == "replica" else (0, len(records) - 1)
            if end <= first:
                return False
            del records[rng.randrange(first, end)]
        return event is not None

    return mutate


def _change_read_value(f: str) -> Mutation:
    def mutate(events: list[HistoryEvent], rng: Random) -> bool:
        event = _pick(events, rng, f, _is_nonempty)
        if event is not None:
            rng.choice(_records(event))[1] = "changed"
        return event is not None

    return mutate


def _swap_read_records(events: list[HistoryEvent], rng: Random) -> bool:
    event = _pick(events, rng, "poll", lambda one: len(one.value) > 1)
    if event is not None:
        records = _records(event)
        records[0][1], records[1][1] = records[1][1], records[0][1]
    return event is not None


def _poll_again(events: list[HistoryEvent], rng: Random) -> bool:
    event = _pick(events, rng, "poll", _is_nonempty)
    if event is not None:
        event.value = [*event.value, *event.value]
    return event is not None


def _deliver_again(events: list[HistoryEvent], rng: Random) -> bool:
    delivered = [one for one in events if one.f == "consume" and one.type == "ok" and one.value]
    pairs = [(one, two) for one in delivered for two in delivered if one.i < two.i and one.key == two.key]
    if pairs:
        one, two = rng.choice(pairs)
        two.value = [*one.value, *two.value]
    return bool(pairs)


def _lower_end(events: list[HistoryEvent], rng: Random) -> bool:
    """Answer an end that lies below what was acknowledged before it was asked for."""
    done: dict[str | None, int] = {}
    invoked: dict[str, int] = {}
    candidates = []
    sizes: dict[str, int] = {}
    for event in events:
        if event.f == "send" and event.type == "invoke":
            sizes[event.proc] = len(event.value)
        elif event.f == "send" and event.type == "ok":
            done[event.key] = max(done.get(event.key, 0), event.value + sizes[event.proc])
        elif event.f == "list_offsets" and event.type == "invoke":
            invoked[event.proc] = done.get(event.key, 0)
        elif event.f == "list_offsets" and invoked[event.proc]:
            candidates.append((event, invoked[event.proc]))
    if candidates:
        event, known = rng.choice(candidates)
        event.value = known - 1
    return bool(candidates)


MUTATIONS: dict[str, Mutation] = {
    "acknowledge elsewhere": _acknowledge_elsewhere,
    "acknowledge what was never done": _acknowledge_what_was_never_done,
    "call failed what was done": _call_failed_what_was_done,
    "drop a polled record": _drop_read_record("poll"),
    "drop a record of a replica": _drop_read_record("replica"),
    "change a polled value": _change_read_value("poll"),
    "change a consumed value": _change_read_value("consume"),
    "change a value of a replica": _change_read_value("replica"),
    "swap polled records": _swap_read_records,
    "poll records twice": _poll_again,
    "deliver records twice": _deliver_again,
    "lower an end offset": _lower_end,
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
@given(seed=st.integers(0, 2**32))
def test_one_change_is_noticed(mutation: Mutation, seed: int) -> None:
    events = CorrectLog(seed, 150).script.events
    assume(mutation(events, Random(seed)))
    assert not check_history(events).is_clean
