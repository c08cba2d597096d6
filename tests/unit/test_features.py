"""Feature levels: what is new is found by comparison with frozen shapes, and left out or refused below its level."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from metadata_commands import commands

from quiver.errors import ConflictError
from quiver.features import LEVEL_MAX, LEVELS, level_of, shrink, version_of
from quiver.metadata import MetadataState
from quiver.metadata.apply import apply
from quiver.metadata.commands import (
    AnyCommand,
    ChangeRebalancing,
    InitCluster,
    NodeLevel,
    RaiseLevel,
    RegisterBroker,
    decode_payload,
    encode_payload,
)
from quiver.metadata.rows import ROW_TYPES
from quiver.metadata.state import Counters
from quiver.model import NodeId
from quiver.partition.entries import FenceEntry, PartitionEntry, TrimEntry
from quiver.shapes import SHAPES
from quiver.wire import admin_messages, messages
from quiver.wire.admin_messages import NodeDescribed
from quiver.wire.requests import Request, Response


def _structs() -> dict[str, type[msgspec.Struct]]:
    found: set[type[msgspec.Struct]] = {Counters, *ROW_TYPES, *get_args(AnyCommand), *get_args(PartitionEntry)}
    for module in (messages, admin_messages):
        found.update(
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Request | Response) and value not in (Request, Response)
        )
    return {kind.__name__: kind for kind in found}


def test_levels_are_numbered_from_1_without_gaps_and_each_earlier_one_is_frozen() -> None:
    assert [each.level for each in LEVELS] == list(range(1, LEVEL_MAX + 1))
    assert sorted(SHAPES) == list(range(1, LEVEL_MAX))


@pytest.mark.parametrize("name", sorted(SHAPES[1].keys() & _structs().keys()))
def test_fields_of_an_earlier_level_are_still_there_and_later_ones_have_defaults(name: str) -> None:
    kind = _structs()[name]
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    assert SHAPES[1][name] <= fields.keys(), "a field was removed or renamed: older nodes and data still have it"
    for added in fields.keys() - SHAPES[1][name]:
        assert not fields[added].required, f"{name}.{added} needs a default: older data does not have it"


@given(commands())
def test_command_has_the_version_of_the_lowest_level_that_reads_it(command: Any) -> None:
    data = encode_payload(command)
    assert data[0] == level_of(command)
    assert decode_payload(data) == command
    if data[0] == 1:
        known = msgspec.msgpack.decode(data[1:])
        assert known.keys() - {"type"} <= SHAPES[1][type(command).__name__]


def test_field_that_is_new_raises_the_level_only_if_it_says_something() -> None:
    assert level_of(InitCluster(now_ms=1, cluster_id="c")) == 1
    assert level_of(InitCluster(now_ms=1, cluster_id="c", feature_level=2)) == 2
    assert level_of(RaiseLevel(now_ms=1, feature_level=2, nodes=())) == 2


def test_new_fields_are_left_out_for_programs_that_do_not_know_them() -> None:
    described = NodeDescribed(
        node=NodeId(1), version="1", pid=2, roles=(), started_ms=3, is_ready=True, level_max=LEVEL_MAX
    )
    assert shrink(described, LEVEL_MAX) is described
    assert "level_max" not in shrink(described, 1)
    assert shrink(Counters(cluster_id="c", feature_level=2), 1).keys() == SHAPES[1]["Counters"]


def test_entries_are_written_with_the_version_of_their_kind() -> None:
    assert version_of(FenceEntry, LEVEL_MAX) == 1
    assert version_of(TrimEntry, 1) == 1

    class NovelEntry(msgspec.Struct, array_like=True, tag=99):
        offset: int

    assert version_of(NovelEntry, LEVEL_MAX) == LEVEL_MAX
    with pytest.raises(ConflictError, match="quiver cluster upgrade") as refused:
        version_of(NovelEntry, 1)
    assert refused.value.code == "feature_level"


def _formed(*nodes: int, level: int = 1) -> MetadataState:
    state = MetadataState()
    apply(state, InitCluster(now_ms=1, cluster_id="c", feature_level=level))
    for node in nodes:
        row = RegisterBroker(now_ms=1, broker_id=NodeId(node), identity=f"i{node}", wire_address=f"host:{node}")
        assert apply(state, row).refusal is None
    return state


def test_level_is_raised_once_every_node_knows_it_and_never_lowered() -> None:
    state = _formed(1, 2)
    some = RaiseLevel(now_ms=2, feature_level=2, nodes=(NodeLevel(NodeId(1), 2), NodeLevel(NodeId(2), 1)))
    refusal = apply(state, some).refusal
    assert refusal is not None
    assert refusal.code == "nodes_too_old"
    assert "node 2 is not known" in refusal.message
    assert state.counters.feature_level == 1
    every = msgspec.structs.replace(some, nodes=(NodeLevel(NodeId(1), 2), NodeLevel(NodeId(2), 2)))
    assert apply(state, every).refusal is None
    assert state.counters.feature_level == 2
    assert apply(state, msgspec.structs.replace(every, feature_level=1)).refusal is None
    assert state.counters.feature_level == 2


def test_snapshot_below_a_level_has_the_shape_of_that_level() -> None:
    state = _formed(1)
    data = state.view().encode()
    assert data[0] == 1
    assert msgspec.msgpack.decode(data[1:])["counters"].keys() == SHAPES[1]["Counters"]
    assert MetadataState.decode(data).view().encode() == data
    raised = _formed(1, level=2).view().encode()
    assert raised[0] == 2
    assert MetadataState.decode(raised).counters.feature_level == 2


def test_command_above_the_level_is_refused_by_apply() -> None:
    state = _formed(1)
    newer = next(
        (kind for kind in get_args(AnyCommand) if kind.__name__ not in SHAPES[1] and kind is not RaiseLevel), None
    )
    assert newer is not None
    fields: dict[str, Any] = {"now_ms": 1, "clients": ()}
    outcome = apply(state, newer(**fields))
    assert outcome.refusal is not None
    assert outcome.refusal.code == "feature_level"
    assert apply(state, ChangeRebalancing(now_ms=1, is_rebalancing=True)).refusal is None
    assert apply(_formed(1, level=2), newer(**fields)).refusal is None
