"""Commands as bytes: they come back as they were, and what is not one is a decode error that says why."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata_commands import commands
from metadata_world import init_cluster, register_consumer

from quiver.errors import DecodeError
from quiver.metadata.commands import (
    CONTROL_STATE,
    AnyCommand,
    CommandDone,
    CommandResult,
    CreateTopicResult,
    RegisterProducerResult,
    UnknownCommandError,
    command_name,
    decode_command,
    decode_payload,
    encode_command,
    encode_payload,
    encode_result,
)
from quiver.model import ProducerId, TopicId
from quiver.record import Batch, build_batch, build_control_batch
from quiver.replication.entries import CONTROL_STATE as DRIVERS_MARK


def payload(**fields: object) -> bytes:
    return bytes((1,)) + msgspec.msgpack.encode(fields)


@settings(deadline=None)
@given(commands())
def test_command_comes_back_from_its_batch(command: AnyCommand) -> None:
    batch = Batch.decode(encode_command(command))
    assert decode_command(batch) == command
    assert batch.header.first_timestamp == command.now_ms
    assert batch.header.record_count == 0


def test_mark_is_the_one_that_the_driver_leaves_to_the_layer_above() -> None:
    assert bytes((CONTROL_STATE,)) == DRIVERS_MARK


def test_command_is_named_as_in_its_bytes() -> None:
    assert command_name(init_cluster()) == "init_cluster"
    assert b"init_cluster" in encode_command(init_cluster())


def test_drivers_own_entries_are_no_commands() -> None:
    for mark in (b"\x01", b"\x02rest", b""):
        assert decode_command(Batch.decode(build_control_batch(mark, timestamp=1))) is None


def test_records_are_no_commands() -> None:
    with pytest.raises(DecodeError, match="records"):
        decode_command(Batch.decode(build_batch([b"value"], timestamp=1)))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (bytes((99,)) + msgspec.msgpack.encode({"type": "init_cluster"}), "version 99"),
        (payload(type="paint_topic", now_ms=1), "paint_topic"),
        (payload(type="init_cluster", now_ms=1, cluster_id="c", colour="red"), "colour"),
        (payload(type="change_broker_state", now_ms=1, broker_id=1, state="asleep"), "asleep"),
    ],
)
def test_what_a_newer_program_wrote_stops_the_member(data: bytes, says: str) -> None:
    with pytest.raises(UnknownCommandError, match=says) as caught:
        decode_payload(data)
    assert "upgrade this node" in caught.value.message
    assert caught.value.code == "unknown_command"


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x01\x81", payload(no="type"), payload(type=3), b"\x01\x90"])
def test_what_nobody_wrote_is_a_plain_decode_error(data: bytes) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_payload(data)
    assert type(caught.value) is DecodeError


@pytest.mark.parametrize(
    "fields",
    [
        {"now_ms": -1, "cluster_id": "c"},
        {"now_ms": 2**53 + 1, "cluster_id": "c"},
        {"now_ms": 1, "cluster_id": "c\x00"},
        {"now_ms": 1, "cluster_id": "c\n"},
        {"now_ms": 1, "cluster_id": "c" * 301},
    ],
)
def test_values_that_sql_could_not_keep_are_not_read(fields: dict[str, object]) -> None:
    with pytest.raises(DecodeError):
        decode_payload(payload(type="init_cluster", **fields))


@settings(deadline=None)
@given(st.binary(max_size=60), st.integers(0, 100), st.integers(0, 255))
def test_reading_raises_decode_errors_only(noise: bytes, position: int, byte: int) -> None:
    whole = encode_command(register_consumer(request_id="r"))[97:]
    changed = bytearray(whole)
    changed[position % len(whole)] = byte
    for data in (noise, b"\x01" + noise, bytes(changed), whole[:position]):
        try:
            decode_payload(data)
        except DecodeError:
            continue


@pytest.mark.parametrize(
    "result", [CommandDone(3), CreateTopicResult(TopicId(1), 2), RegisterProducerResult(ProducerId(1), 0)]
)
def test_result_comes_back_from_its_bytes(result: CommandResult) -> None:
    assert msgspec.msgpack.decode(encode_result(result), type=CommandResult) == result


@settings(deadline=None)
@given(commands())
def test_command_is_forwarded_as_it_stands_in_its_batch(command: AnyCommand) -> None:
    data = encode_payload(command)
    assert decode_payload(data) == command
    assert data in encode_command(command)
