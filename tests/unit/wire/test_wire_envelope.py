"""Requests, responses and errors on the wire: all arrive unchanged; an unreadable request is answered."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import (
    DecodeError,
    LogFailedError,
    NotLeaderError,
    OutcomeUnknownError,
    OverloadedError,
    QuiverError,
    RequestError,
    UnavailableError,
)
from quiver.model import Buffer, Index, NodeId, Offset, PartitionId, TopicId
from quiver.wire.envelope import (
    MESSAGE_LENGTH_MAX,
    TIMEOUT_MS_MAX,
    ErrorInfo,
    IncomingRequest,
    decode_body,
    decode_cancel,
    decode_request,
    decode_response,
    describe_error,
    encode_cancel,
    encode_failure,
    encode_request,
    encode_response,
    restore_error,
)
from quiver.wire.frames import Frame, FrameKind, FrameReader, encode_frame
from quiver.wire.messages import (
    AnyRequest,
    BrokerHeartbeatRequest,
    CommandSubmitted,
    Consume,
    Fetch,
    Fetched,
    GetMetadata,
    LeaderInfo,
    MetadataFound,
    NodeInfo,
    Produce,
    Produced,
    SubmitCommand,
)
from quiver.wire.requests import Done, Request, Response

PRODUCE = Produce(topic_id=TopicId(1), partition_id=PartitionId(2))
LONG_HEARTBEAT = BrokerHeartbeatRequest(
    node=NodeId(1), identity="disk", leads=tuple(LeaderInfo(TopicId(at), PartitionId(0), 3) for at in range(20_000))
)
LONG_METADATA = MetadataFound(
    cluster_id="c",
    index=Index(1),
    nodes=tuple(NodeInfo(node=NodeId(at), wire_address="broker:9000") for at in range(5_000)),
)
CHECKED = 1


def as_frame(buffers: list[Buffer]) -> Frame:
    stream = memoryview(b"".join(buffers))
    reader = FrameReader(64 * 1024 * 1024)
    while stream:
        room = reader.writable()
        count = min(len(room), len(stream))
        room[:count], stream = stream[:count], stream[count:]
        reader.received(count)
        if (frame := reader.next_frame()) is not None:
            assert not stream
            return frame
    raise AssertionError("not a whole frame")


def head(*items: object) -> Frame:
    return Frame(FrameKind.REQUEST, memoryview(msgspec.msgpack.encode(items)), memoryview(b""))


GRANT = {"subject": "user:alice", "verb": "read", "kind": "topic"}
VALUES: tuple[object, ...] = (1, "earliest", "consumer", "read", (), (1,), {}, GRANT)


def fits(value: object, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def example(kind: type[Request[Any]]) -> Request[Any]:
    """Return a request of this kind with all required fields set to what their types allow."""
    fields: dict[str, object] = {}
    for field in msgspec.structs.fields(kind):
        if field.required:
            fields[field.encode_name] = next(value for value in VALUES if fits(value, field.type))
    request: Request[Any] = msgspec.convert({"type": kind.__struct_config__.tag, **fields}, kind)
    return request


@pytest.mark.parametrize("payload", [[], [b"x"], [b"one", bytes(50_000), b"two"]])
@pytest.mark.parametrize("request_", [PRODUCE, SubmitCommand(), LONG_HEARTBEAT], ids=["produce", "command", "long"])
def test_request_arrives_as_it_was_sent(request_: AnyRequest, payload: list[Buffer]) -> None:
    asked = decode_request(as_frame(encode_request(7, 1500, request_, payload)))
    assert (asked.correlation_id, asked.timeout_ms, asked.request) == (7, 1500, request_)
    assert asked.payload == b"".join(payload)


@pytest.mark.parametrize("payload", [[], [b"x"], [b"one", bytes(50_000), b"two"]])
@pytest.mark.parametrize(
    ("request_", "response"),
    [(PRODUCE, Produced(base_offset=Offset(5))), (SubmitCommand(), CommandSubmitted(index=Index(4)))],
)
def test_response_arrives_as_it_was_sent(request_: AnyRequest, response: Response, payload: list[Buffer]) -> None:
    answered = decode_response(as_frame(encode_response(7, request_, response, payload)))
    assert (answered.correlation_id, answered.failure) == (7, None)
    assert decode_body(answered.body, type(response)) == response
    assert answered.payload == b"".join(payload)


def test_body_that_no_head_can_hold_travels_before_the_payload_and_under_the_checksum() -> None:
    buffers = encode_response(7, GetMetadata(), LONG_METADATA, [b"behind"])
    assert b"".join(buffers)[9] == CHECKED
    answered = decode_response(as_frame(buffers))
    assert decode_body(answered.body, MetadataFound) == LONG_METADATA
    assert bytes(answered.payload) == b"behind"


@pytest.mark.parametrize("offset", [1 << 70, object()])
def test_request_that_no_message_can_hold_is_refused_before_it_is_sent(offset: Any) -> None:
    request = Fetch(topic_id=TopicId(1), partition_id=PartitionId(0), offset=offset)
    with pytest.raises(RequestError, match="not done: the request fetch cannot be sent"):
        encode_request(1, 1000, request)


def test_failure_arrives() -> None:
    failure = describe_error(QuiverError("why", code="because"))
    answered = decode_response(as_frame(encode_failure(9, failure)))
    assert (answered.correlation_id, answered.failure) == (9, failure)


def test_cancel_arrives() -> None:
    assert decode_cancel(as_frame(encode_cancel(2**63 - 1))) == 2**63 - 1


def test_longest_time_is_bounded() -> None:
    assert decode_request(as_frame(encode_request(1, 10**15, PRODUCE))).timeout_ms == TIMEOUT_MS_MAX


@pytest.mark.parametrize("request_", [PRODUCE, SubmitCommand()])
def test_payload_is_under_the_checksum_unless_it_is_batches(request_: AnyRequest) -> None:
    is_checked = not isinstance(request_, Produce)
    assert (b"".join(encode_request(1, 1, request_, [b"payload"]))[9] == CHECKED) is is_checked
    response = Produced(base_offset=Offset(0)) if isinstance(request_, Produce) else CommandSubmitted(index=Index(1))
    assert (b"".join(encode_response(1, request_, response, [b"payload"]))[9] == CHECKED) is is_checked


@pytest.mark.parametrize("kind", get_args(AnyRequest), ids=lambda kind: kind.__name__)
def test_every_request_can_be_sent_and_its_response_be_read(kind: type[Request[Any]]) -> None:
    request = example(kind)
    asked = decode_request(as_frame(encode_request(1, 1, request)))
    assert asked.request == request
    with pytest.raises(DecodeError):
        decode_body(b"\xc1", request.response)


def test_traits_name_only_requests() -> None:
    known: set[type[Request[Any]]] = set(get_args(AnyRequest))
    reads = {kind for kind in known if kind.is_read}
    assert GetMetadata in reads
    assert {Produce, Consume, SubmitCommand, BrokerHeartbeatRequest}.isdisjoint(reads)


# What cannot be read.


@pytest.mark.parametrize(
    ("body", "code", "sentence"),
    [
        ({"type": "compact_topic", "topic": "t"}, "unknown_request", "does not support the request 'compact_topic'"),
        ({"type": "produce"}, "decode_failed", "the request produce cannot be decoded: .*topic_id"),
        ({"type": "fetch", "topic_id": "1"}, "decode_failed", "the request fetch cannot be decoded"),
        ({"topic": "t"}, "decode_failed", "the request cannot be decoded"),
        ({"type": 7}, "decode_failed", "the request cannot be decoded"),
        ([1], "decode_failed", "the request cannot be decoded"),
        (None, "decode_failed", "the request cannot be decoded"),
    ],
)
def test_request_that_cannot_be_read_is_answered_with_why(body: object, code: str, sentence: str) -> None:
    asked = decode_request(head(7, 100, body))
    assert asked.correlation_id == 7
    assert isinstance(asked.request, RequestError)
    assert asked.request.code == code
    with pytest.raises(RequestError, match=sentence):
        raise asked.request


def test_name_of_an_unknown_request_is_repeated_only_in_part() -> None:
    asked = decode_request(head(7, 100, {"type": "x" * 50_000}))
    assert isinstance(asked.request, RequestError)
    assert len(asked.request.message) < 200


def test_unknown_request_with_a_long_body_is_answered_too() -> None:
    body = msgspec.msgpack.encode({"type": "novel", "text": "x" * 70_000})
    frame = as_frame(
        encode_frame(
            FrameKind.REQUEST, msgspec.msgpack.encode((3, 5, None, len(body))), [body, b"p"], check_payload=True
        )
    )
    asked = decode_request(frame)
    assert isinstance(asked.request, RequestError)
    assert (asked.request.code, asked.correlation_id, bytes(asked.payload)) == ("unknown_request", 3, b"p")


@pytest.mark.parametrize(
    "items",
    [
        (),
        (1,),
        (1, 2),
        (-1, 2, {"type": "produce"}),
        (2**63, 2, {"type": "produce"}),
        ("1", 2, {"type": "produce"}),
        (1, -1, {"type": "produce"}),
        (1, TIMEOUT_MS_MAX + 1, {"type": "produce"}),
        (1, 2, None, 1),
        (1, 2, None, -1),
    ],
)
def test_request_without_a_call_to_answer_ends_the_connection(items: tuple[object, ...]) -> None:
    with pytest.raises(DecodeError):
        decode_request(head(*items))


@pytest.mark.parametrize("items", [(), (1,), (-1, {}), (1, None, {"kind": 1}), (1, None, None, 5)])
def test_response_that_is_none_ends_the_connection(items: tuple[object, ...]) -> None:
    frame = Frame(FrameKind.RESPONSE, memoryview(msgspec.msgpack.encode(items)), memoryview(b""))
    with pytest.raises(DecodeError):
        decode_response(frame)


@pytest.mark.parametrize("items", [(), (-1,), (1, 2), ("1",)])
def test_cancel_of_nothing_ends_the_connection(items: tuple[object, ...]) -> None:
    with pytest.raises(DecodeError, match="not a valid cancel"):
        decode_cancel(Frame(FrameKind.CANCEL, memoryview(msgspec.msgpack.encode(items)), memoryview(b"")))


def test_body_of_another_response_is_refused() -> None:
    answered = decode_response(as_frame(encode_response(1, PRODUCE, Produced(base_offset=Offset(1)))))
    with pytest.raises(DecodeError, match="not a valid Fetched"):
        decode_body(answered.body, Fetched)


def test_unknown_fields_of_a_newer_program_are_ignored() -> None:
    novel = {"type": "produce", "topic_id": 1, "partition_id": 2, "novel": 1}
    assert decode_request(head(7, 100, novel)).request == PRODUCE
    answered = decode_response(as_frame(encode_response(1, PRODUCE, Produced(base_offset=Offset(1)))))
    assert decode_body(answered.body, Done) == Done()


def test_fields_that_an_older_program_does_not_know_are_not_sent() -> None:
    newer = BrokerHeartbeatRequest(node=NodeId(3), identity="i", level_max=2, program="9.9")
    for level, sent in ((1, {"type": "heartbeat", "node": 3, "identity": "i"}), (2, msgspec.to_builtins(newer))):
        frame = as_frame(encode_request(1, 100, newer, level=level))
        assert msgspec.msgpack.decode(frame.head)[2] == sent


@given(st.binary(max_size=100), st.binary(max_size=20))
def test_arbitrary_heads_are_read_or_refused_and_nothing_else(data: bytes, payload: bytes) -> None:
    frame = Frame(FrameKind.REQUEST, memoryview(data), memoryview(payload))
    with suppress(DecodeError):
        assert isinstance(decode_request(frame), IncomingRequest)
    with suppress(DecodeError):
        decode_body(decode_response(frame).body, Produced)
    with suppress(DecodeError):
        decode_cancel(frame)


def test_forwarded_request_keeps_its_field_name_on_the_wire() -> None:
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(GetMetadata(is_forwarded=True)))
    assert body == {"type": "get_metadata", "is_handed_on": True}


# -- errors: the same class, code and outcome on the other side, whatever its version --


def all_classes() -> list[type[QuiverError]]:
    found: list[type[QuiverError]] = [QuiverError]
    for kind in found:
        found.extend(each for each in kind.__subclasses__() if each.__module__ == "quiver.errors")
    return found


def travel(error: QuiverError) -> QuiverError:
    return restore_error(msgspec.msgpack.decode(msgspec.msgpack.encode(describe_error(error)), type=ErrorInfo))


@pytest.mark.parametrize("kind", all_classes(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("code", [None, "more_precise"])
def test_error_arrives_as_what_it_was(kind: type[QuiverError], code: str | None) -> None:
    error = travel(kind("a sentence", code=code))
    assert type(error) is kind
    assert (error.code, error.message, error.outcome) == (code or kind.code, "a sentence", kind.outcome)


def test_there_are_classes_to_test() -> None:
    assert len(all_classes()) >= 20


@pytest.mark.parametrize("leader", [None, NodeId(0), NodeId(3)])
def test_leader_and_wait_arrive(leader: NodeId | None) -> None:
    error = travel(NotLeaderError("node 3 leads", leader=leader, retry_after_ms=40))
    assert isinstance(error, NotLeaderError)
    assert (error.leader, error.retry_after_ms) == (leader, 40)


@pytest.mark.parametrize("kind", [UnavailableError, OverloadedError])
def test_wait_arrives_with_every_error_that_can_name_one(kind: type[UnavailableError]) -> None:
    error = travel(kind(retry_after_ms=0))
    assert isinstance(error, kind)
    assert error.retry_after_ms == 0


def test_class_of_another_module_travels_as_the_nearest_known() -> None:
    class LocalError(UnavailableError):
        code = "local"

    error = travel(LocalError("here"))
    assert (type(error), error.code) == (UnavailableError, "local")


@pytest.mark.parametrize(("outcome", "kind"), [("not_done", QuiverError), ("unknown", OutcomeUnknownError)])
def test_kind_of_a_newer_program_keeps_its_outcome(outcome: str, kind: type[QuiverError]) -> None:
    failure = msgspec.convert({"kind": "novel", "code": "novel_thing", "outcome": outcome}, ErrorInfo)
    error = restore_error(failure)
    assert (type(error), error.code, error.outcome) == (kind, "novel_thing", outcome)


def test_outcome_counts_more_than_the_kind() -> None:
    error = restore_error(describe_error(UnavailableError("who knows", code="odd"), outcome="unknown"))
    assert (type(error), error.code) == (OutcomeUnknownError, "odd")
    # The reverse would be a promise that the kind does not give.
    assert restore_error(describe_error(LogFailedError("lost"), outcome="not_done")).outcome == "unknown"


def test_fields_of_a_newer_program_are_ignored() -> None:
    encoded = msgspec.msgpack.encode({"kind": "not_found", "code": "unknown_topic", "novel": [1]})
    assert restore_error(msgspec.msgpack.decode(encoded, type=ErrorInfo)).code == "unknown_topic"


def test_long_sentence_is_cut() -> None:
    assert travel(QuiverError("ü" * 5000)).message == "ü" * MESSAGE_LENGTH_MAX
