"""Encode and decode requests, responses and errors as frames. Pure.

A request's head is the array `[correlation id, remaining ms, body]`, a response's `[correlation id, body]` or
`[correlation id, nil, failure]`, a cancel's `[correlation id]`. A body that is too long for a head begins the payload
instead; then it is nil in the head and its length is the last item. `docs/protocol/wire.md` has the tables.

A body has only the fields that the other side's program knows by its hello; unknown fields are ignored.

The frame's checksum covers the payload, except a payload that is only batches, which carry their own checksums.

An error travels as its kind, code, message and outcome; the other side raises the same class with the same code. The
outcome must never get lost: an error of an unknown kind, or of a kind whose class does not itself say that the outcome
is unknown, is raised as `OutcomeUnknownError` if the sender said *unknown*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar, cast, get_args

import msgspec
from msgspec import Meta

from quiver.errors import (
    DecodeError,
    NotLeaderError,
    Outcome,
    OutcomeUnknownError,
    QuiverError,
    RequestError,
    UnavailableError,
    error_class,
    kind_of,
)
from quiver.features import LEVEL_MAX, shrink
from quiver.model import Buffer, NodeId
from quiver.wire.frames import HEAD_BYTES_MAX, Frame, FrameKind, encode_frame
from quiver.wire.messages import AnyRequest
from quiver.wire.requests import Request, Response

TIMEOUT_MS_MAX = 24 * 3_600_000
"""Longest timeout of a request; a longer one is reduced to it."""

MESSAGE_LENGTH_MAX = 1000
"""Longest error message that is sent; a longer one is truncated."""

_Name = Annotated[str, Meta(max_length=64)]
_CorrelationId = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_TimeoutMs = Annotated[int, Meta(ge=0, le=TIMEOUT_MS_MAX)]
_Length = Annotated[int, Meta(ge=0)]
_ResponseType = TypeVar("_ResponseType", bound=Response)


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error on the wire; unknown fields are ignored."""

    kind: _Name
    code: _Name
    message: Annotated[str, Meta(max_length=MESSAGE_LENGTH_MAX)] = ""
    outcome: Outcome = "not_done"
    leader: NodeId | None = None
    retry_after_ms: Annotated[int, Meta(ge=0)] | None = None


class _RequestHead(msgspec.Struct, frozen=True, array_like=True):
    correlation_id: _CorrelationId
    timeout_ms: _TimeoutMs
    body: AnyRequest | None
    body_bytes: _Length = 0


class _UnknownHead(msgspec.Struct, frozen=True, array_like=True):
    """The part of a request's head that every version of this program can read."""

    correlation_id: _CorrelationId
    timeout_ms: _TimeoutMs
    body: msgspec.Raw
    body_bytes: _Length = 0


class _ResponseHead(msgspec.Struct, frozen=True, array_like=True):
    correlation_id: _CorrelationId
    body: msgspec.Raw
    failure: ErrorInfo | None = None
    body_bytes: _Length = 0


class _Tagged(msgspec.Struct, frozen=True):
    type: str


class IncomingRequest(msgspec.Struct, frozen=True):
    """A request as received; if it cannot be decoded, `request` is the error to answer with."""

    correlation_id: int
    timeout_ms: int
    request: AnyRequest | RequestError
    payload: memoryview


class IncomingResponse(msgspec.Struct, frozen=True):
    """A response as received; `body` is decoded once the type of the request is known."""

    correlation_id: int
    body: memoryview
    failure: ErrorInfo | None
    payload: memoryview


def encode_request(
    correlation_id: int,
    timeout_ms: int,
    request: Request[Any],
    parts: Sequence[Buffer] = (),
    *,
    level: int = LEVEL_MAX,
) -> list[Buffer]:
    """Return the buffers of a request's frame for a program that knows `level`.

    Large parts are not copied and must not change until sent.

    Raises:
        RequestError: it holds what no message can hold, such as a number of more than 64 bits.
    """
    timeout_ms = min(timeout_ms, TIMEOUT_MS_MAX)
    sent = request if level >= LEVEL_MAX else shrink(request, level)
    try:
        head = _encode((correlation_id, timeout_ms, sent))
    except (OverflowError, TypeError, ValueError) as error:
        kind = type(request).__struct_config__.tag
        raise RequestError(f"not done: the request {kind} cannot be sent: {error}", code="bad_value") from None
    check_payload = bool(parts) and not request.carries_batches
    if len(head) > HEAD_BYTES_MAX:
        body = _encode(sent)
        head, parts, check_payload = _encode((correlation_id, timeout_ms, None, len(body))), (body, *parts), True
    return encode_frame(FrameKind.REQUEST, head, parts, check_payload=check_payload)


def encode_response(
    correlation_id: int,
    request: AnyRequest,
    response: Response,
    parts: Sequence[Buffer] = (),
    *,
    level: int = LEVEL_MAX,
) -> list[Buffer]:
    """Return the buffers of the frame that answers `request`, for a program that knows `level`; as above."""
    sent = response if level >= LEVEL_MAX else shrink(response, level)
    head = _encode((correlation_id, sent))
    check_payload = bool(parts) and not request.carries_batches
    if len(head) > HEAD_BYTES_MAX:
        body = _encode(sent)
        head, parts, check_payload = _encode((correlation_id, None, None, len(body))), (body, *parts), True
    return encode_frame(FrameKind.RESPONSE, head, parts, check_payload=check_payload)


def encode_failure(correlation_id: int, failure: ErrorInfo) -> list[Buffer]:
    """Return the buffers of the frame that answers a request with an error."""
    return encode_frame(FrameKind.RESPONSE, _encode((correlation_id, None, failure)))


def encode_cancel(correlation_id: int) -> list[Buffer]:
    """Return the buffers of the frame that cancels a request: its caller no longer waits for the answer."""
    return encode_frame(FrameKind.CANCEL, _encode((correlation_id,)))


def decode_cancel(frame: Frame) -> int:
    """Return the correlation id of the request that a cancel frame names.

    Raises:
        DecodeError: it is not a valid cancel.
    """
    try:
        return _CANCEL_DECODER.decode(frame.head)[0]
    except _UNREADABLE as error:
        raise DecodeError(f"not a valid cancel: {error}") from None


def decode_request(frame: Frame) -> IncomingRequest:
    """Return the request in a request frame.

    Raises:
        DecodeError: not even its correlation id can be decoded.
    """
    try:
        head = _REQUEST_DECODER.decode(frame.head)
    except _UNREADABLE:
        return _decode_unknown(frame)
    if head.body is None:
        return _decode_unknown(frame)
    return IncomingRequest(head.correlation_id, head.timeout_ms, head.body, frame.payload)


def decode_response(frame: Frame) -> IncomingResponse:
    """Return the response in a response frame, its body not decoded yet.

    Raises:
        DecodeError: it is not a response.
    """
    try:
        head = _RESPONSE_DECODER.decode(frame.head)
    except _UNREADABLE as error:
        raise DecodeError(f"not a valid response: {error}") from None
    body, payload = _split(head.body, head.body_bytes, frame.payload)
    return IncomingResponse(head.correlation_id, body, head.failure, payload)


def decode_body(body: Buffer, of_type: type[_ResponseType]) -> _ResponseType:
    """Return a response's body.

    Raises:
        DecodeError: it is not a response of that type.
    """
    try:
        return cast("_ResponseType", _BODY_DECODERS[of_type].decode(body))
    except _UNREADABLE as error:
        raise DecodeError(f"not a valid {of_type.__name__}: {error}") from None


def _decode_unknown(frame: Frame) -> IncomingRequest:
    """Decode a request whose body is in the payload, or whose type this program does not know."""
    try:
        head = _UNKNOWN_DECODER.decode(frame.head)
    except _UNREADABLE as error:
        raise DecodeError(f"not a valid request: {error}") from None
    body, payload = _split(head.body, head.body_bytes, frame.payload)
    request: AnyRequest | RequestError
    try:
        request = _BODY_OF_REQUEST_DECODER.decode(body)
    except _UNREADABLE as error:
        request = _explain(body, str(error))
    return IncomingRequest(head.correlation_id, head.timeout_ms, request, payload)


def _explain(body: Buffer, reason: str) -> RequestError:
    try:
        name = _TAG_DECODER.decode(body).type
    except _UNREADABLE:
        return DecodeError(f"the request cannot be decoded: {reason}")
    if name not in _NAMES:
        return RequestError(
            f"this node does not support the request {name[:64]!r}; it may run an older version", code="unknown_request"
        )
    return DecodeError(f"the request {name} cannot be decoded: {reason}")


def _split(body: msgspec.Raw, body_bytes: int, payload: memoryview) -> tuple[memoryview, memoryview]:
    if not body_bytes:
        return memoryview(body), payload
    if body_bytes > len(payload):
        raise DecodeError(f"the body has {body_bytes} bytes, but its payload only {len(payload)}")
    return payload[:body_bytes], payload[body_bytes:]


def describe_error(error: QuiverError, *, outcome: Outcome | None = None) -> ErrorInfo:
    """Return an error in the form that is sent; `outcome` overrides the one of its class."""
    return ErrorInfo(
        kind=kind_of(error),
        code=error.code,
        message=error.message[:MESSAGE_LENGTH_MAX],
        outcome=outcome or error.outcome,
        leader=error.leader if isinstance(error, NotLeaderError) else None,
        retry_after_ms=error.retry_after_ms if isinstance(error, UnavailableError) else None,
    )


def restore_error(info: ErrorInfo) -> QuiverError:
    """Return the error that was sent."""
    kind = error_class(info.kind)
    if info.outcome == "unknown" and kind.outcome != "unknown":
        return OutcomeUnknownError(info.message, code=info.code)
    if issubclass(kind, NotLeaderError):
        return kind(info.message, code=info.code, retry_after_ms=info.retry_after_ms, leader=info.leader)
    if issubclass(kind, UnavailableError):
        return kind(info.message, code=info.code, retry_after_ms=info.retry_after_ms)
    return kind(info.message, code=info.code)


_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_NAMES = frozenset(str(kind.__struct_config__.tag) for kind in get_args(AnyRequest))
_encode = msgspec.msgpack.Encoder().encode
_REQUEST_DECODER = msgspec.msgpack.Decoder(_RequestHead)
_UNKNOWN_DECODER = msgspec.msgpack.Decoder(_UnknownHead)
_RESPONSE_DECODER = msgspec.msgpack.Decoder(_ResponseHead)
_CANCEL_DECODER = msgspec.msgpack.Decoder(tuple[_CorrelationId])
_TAG_DECODER = msgspec.msgpack.Decoder(_Tagged)
_BODY_OF_REQUEST_DECODER: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_BODY_DECODERS: Mapping[type[Response], msgspec.msgpack.Decoder[Response]] = {
    kind.response: msgspec.msgpack.Decoder(kind.response) for kind in get_args(AnyRequest)
}
