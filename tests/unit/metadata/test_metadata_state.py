"""State and views: what is shown stays, equal states look equal, and every member computes the same."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata_commands import commands
from metadata_world import (
    create_topic,
    do,
    formed_state,
    init_cluster,
    register_broker,
    register_consumer,
    select,
)

from quiver.errors import ConflictError, DecodeError, NotFoundError, RequestError
from quiver.metadata.apply import apply
from quiver.metadata.commands import AnyCommand
from quiver.metadata.decision import REFUSAL_CODES, CommandRefusal
from quiver.metadata.rows import ROW_TYPES, ConsumerRow, ProducerRow, Table
from quiver.metadata.state import LogPosition, MetadataState
from quiver.model import ConsumerId, Index, PartitionId, Term, TopicId

SEQUENCES = st.lists(commands(), max_size=40)
BEGINNING: tuple[AnyCommand, ...] = (init_cluster(), *map(register_broker, (1, 2, 3)), create_topic())


def run(*parts: AnyCommand) -> MetadataState:
    state = MetadataState()
    for command in (*BEGINNING, *parts):
        apply(state, command)
    return state


@settings(deadline=None)
@given(SEQUENCES)
def test_two_members_compute_the_same(sequence: list[AnyCommand]) -> None:
    first, second = MetadataState(), MetadataState()
    for index, command in enumerate((*BEGINNING, *sequence), start=1):
        assert apply(first, command) == apply(second, command)
        first.advance_to(LogPosition(Index(index), Term(1)))
        second.advance_to(LogPosition(Index(index), Term(1)))
        second.view()  # being looked at changes nothing
    assert first.view().digest() == second.view().digest()
    assert first.view().encode() == second.view().encode()


@settings(deadline=None)
@given(SEQUENCES, SEQUENCES)
def test_state_goes_on_from_its_snapshot_as_if_nothing_had_happened(
    before: list[AnyCommand], after: list[AnyCommand]
) -> None:
    state = run(*before)
    state.advance_to(LogPosition(Index(7), Term(3)))
    restored = MetadataState.decode(state.view().encode())
    assert restored.position == LogPosition(Index(7), Term(3))
    assert restored.names == state.names
    for command in after:
        assert apply(restored, command) == apply(state, command)
    assert restored.view().encode() == state.view().encode()


@settings(deadline=None)
@given(SEQUENCES)
def test_view_never_changes(sequence: list[AnyCommand]) -> None:
    state = run()
    shown = [(state.view(), state.view().encode())]
    for command in sequence:
        apply(state, command)
        shown.append((state.view(), state.view().encode()))
    assert [view.encode() for view, _ in shown] == [encoded for _, encoded in shown]


@settings(deadline=None)
@given(SEQUENCES)
def test_rows_alone_make_the_state_in_any_order(sequence: list[AnyCommand]) -> None:
    state = run(*sequence)
    view = state.view()
    rows = list(view.rows())
    rebuilt = MetadataState(reversed(rows), counters=view.counters, position=view.position)
    assert rebuilt.view().encode() == view.encode()
    assert rebuilt.view().topics_by_name == view.topics_by_name
    assert rebuilt.names == state.names


@settings(deadline=None)
@given(SEQUENCES)
def test_what_is_referred_to_is_there(sequence: list[AnyCommand]) -> None:
    view = run(*sequence).view()
    for topic in view.topics.values():
        assert len(view.partitions_of(topic.topic_id)) == topic.partitions
    assert sum(topic.partitions for topic in view.topics.values()) == len(view.partitions)
    groups = [partition.group_id for partition in view.partitions.values()]
    assert len(set(groups)) == len(groups)
    for partition in view.partitions.values():
        members = (*partition.replicas, *partition.learners)
        assert len(set(members)) == len(members)
        assert set(members) <= set(view.brokers)
    for move in view.moves.values():
        assert (move.topic_id, move.partition_id) in view.partitions
    clients: list[ProducerRow | ConsumerRow] = [*view.producers.values(), *view.consumers.values()]
    for client in clients:
        assert {item.topic_id for item in client.registrations} <= set(view.topics)


def test_view_is_the_same_object_until_something_happens() -> None:
    state = formed_state()
    view = state.view()
    assert state.view() is view
    state.advance_to(LogPosition(Index(9), Term(1)))
    assert (view.index, state.view().index) == (0, 9)
    assert state.view().topics is view.topics
    assert state.view().digest() == view.digest()


@settings(deadline=None)
@given(SEQUENCES)
def test_consumers_of_a_partition_are_those_whose_registrations_cover_it(sequence: list[AnyCommand]) -> None:
    state = run()
    views = [state.view()]
    for command in sequence:
        apply(state, command)
        views.append(state.view())
    for view in (*views, MetadataState.decode(views[-1].encode()).view()):
        for key in view.partitions:
            covered = {row.key for row in view.consumers.values() if any(one.covers(*key) for one in row.registrations)}
            found = view.consumers_on(*key)
            assert (set(found), len(found), len(list(found))) == (covered, len(covered), len(covered))
            assert all(consumer_id in found for consumer_id in covered)
            assert 99 not in found
        for topic_id in (*view.topics, TopicId(99)):
            registered = {one.topic_id for row in view.consumers.values() for one in row.registrations}
            assert view.has_consumers(topic_id) == (topic_id in registered)


def test_consumer_of_a_whole_topic_and_of_a_partition_counts_once() -> None:
    state = formed_state()
    key = (TopicId(1), PartitionId(0))
    do(state, register_consumer(select("logs", 0)))
    partial = state.view().consumers_on(*key)
    do(state, register_consumer(select("logs"), consumer_id=ConsumerId(1)))
    do(state, register_consumer(select("logs", 0)))
    both = state.view().consumers_on(*key)
    assert (len(partial), set(partial), len(both), set(both)) == (1, {1}, 2, {1, 2})
    assert set(state.view().consumers_on(TopicId(1), PartitionId(1))) == {1}
    assert state.view().consumers_on(*key) | {3} == {1, 2, 3}


def test_empty_snapshot_is_the_beginning() -> None:
    assert MetadataState.decode(b"").view().encode() == MetadataState().view().encode()


@pytest.mark.parametrize("data", [b"\x02", b"\x01", b"\x01\x80", b"\x01" + msgspec.msgpack.encode({"brokers": 1})])
def test_snapshot_of_something_else_is_a_decode_error(data: bytes) -> None:
    with pytest.raises(DecodeError):
        MetadataState.decode(data)


def test_snapshot_from_before_there_were_holds_can_be_read() -> None:
    whole = formed_state().view().encode()
    saved = msgspec.msgpack.decode(whole[1:])
    del saved["holds"]
    assert MetadataState.decode(whole[:1] + msgspec.msgpack.encode(saved)).view().encode() == whole


def test_every_table_has_rows_of_its_own() -> None:
    assert {row_type.table for row_type in ROW_TYPES} == set(Table)


def test_refusals_are_errors_by_what_to_do() -> None:
    assert type(CommandRefusal("unknown_topic", "not done: ?").error()) is NotFoundError
    assert type(CommandRefusal("topic_exists", "not done: ?").error()) is ConflictError
    assert type(CommandRefusal("of_a_newer_program", "not done: ?").error()) is RequestError
    assert all(CommandRefusal(code, "not done: ?").error().code == code for code in REFUSAL_CODES)
