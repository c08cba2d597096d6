"""Lags and cursors of many consumers: found in small steps, between which cursors move and go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from quiver.broker.consumer_lags import CURSORS_PER_STEP, _add_lags
from quiver.broker.explanation import CURSORS_MAX, find_slowest
from quiver.metadata import ConsumerRow, Registration, Retention, TopicRow, TopicState, View
from quiver.metadata.state import MetadataState
from quiver.model import ConsumerId, Offset, PartitionId, TopicId
from quiver.partition import PartitionState

LOGS = TopicId(1)
KEY = (LOGS, PartitionId(0))
COUNT = 2 * CURSORS_PER_STEP + 1


def view_with(ids: Iterable[int]) -> View:
    retention = Retention(until_consumed=True)
    topic = TopicRow(
        topic_id=LOGS,
        name="logs",
        partitions=1,
        replicas=1,
        retention=retention,
        state=TopicState.ACTIVE,
        created_ms=0,
        purge_ms=None,
        request_id="",
    )
    return MetadataState([topic, *map(consumer, ids)]).view()


def consumer(number: int) -> ConsumerRow:
    registrations = (Registration(topic_id=LOGS),)
    return ConsumerRow(consumer_id=ConsumerId(number), registered_ms=0, registrations=registrations, request_id="")


def state_with(cursors: dict[int, int]) -> PartitionState:
    state = PartitionState()
    state.end_offset = Offset(COUNT)
    state.cursors = {ConsumerId(id_): Offset(cursor) for id_, cursor in cursors.items()}
    return state


def test_lags_are_of_registered_consumers_with_a_cursor() -> None:
    state = state_with({number: number for number in range(COUNT)})
    lags: dict[ConsumerId, int] = {ConsumerId(4): 1}
    assert len(list(_add_lags(lags, state, view_with(range(2, COUNT + 9, 2)).consumers_on(*KEY)))) == 2
    assert lags == {number: COUNT - number + (number == 4) for number in range(2, COUNT, 2)}


def test_cursors_may_move_and_go_while_lags_are_added() -> None:
    state = state_with(dict.fromkeys(range(COUNT), 0))
    lags: dict[ConsumerId, int] = {}
    steps = _add_lags(lags, state, view_with(range(COUNT)).consumers_on(*KEY))
    next(steps)
    del state.cursors[ConsumerId(COUNT - 1)]
    state.cursors[ConsumerId(COUNT - 2)] = Offset(COUNT - 3)
    state.cursors[ConsumerId(COUNT)] = Offset(0)
    assert not [None for _ in steps][1:]
    assert (len(lags), lags[ConsumerId(COUNT - 2)], lags[ConsumerId(0)]) == (COUNT - 1, 3, COUNT)


def slowest_of(state: PartitionState, view: View) -> list[tuple[str, int | None]]:
    return [(one.consumer, one.cursor) for one in asyncio.run(find_slowest(state, view, KEY))]


def test_slowest_are_those_without_a_cursor_and_then_the_furthest_behind() -> None:
    state, view = state_with({number: number for number in range(COUNT)}), view_with(range(3, COUNT + 2))
    assert slowest_of(state, view) == [(str(COUNT), None), (str(COUNT + 1), None), ("3", 3), ("4", 4), ("5", 5)]
    state.cursors = dict.fromkeys(state.cursors, Offset(7))
    assert [cursor for _, cursor in slowest_of(state, view)] == [None, None, 7, 7, 7]
    assert [name for name, _ in slowest_of(state, view)][2:] == ["3", "4", "5"], "the lower ids of equals"
    assert len(slowest_of(state, view)) == CURSORS_MAX
    assert slowest_of(state, view_with(())) == []
