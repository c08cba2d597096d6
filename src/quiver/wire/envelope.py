"""The heads of requests and responses: which call they belong to, how much time is left, and the body. Pure.

A request's head is the array `[correlation id, remaining ms, body]`, a response's `[correlation id, body]` or
`[correlation id, nil, failure]`, a cancel's `[correlation id]`. A body that is too long for a head begins the payload
instead; then it is nil in the head and its length is the last item. `docs/protocol/wire.md` has the tables.

Payloads are under the frame's checksum, except those that are batches and nothing else, which carry their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar, cast, get_args

import msgspec
from msgspec import Meta

from quiver.errors import DecodeError, RequestError
from quiver.model import Buffer
from quiver.wire.failures import Failure
from quiver.wire.frames import HEAD_BYTES_MAX, Frame, Kind, encode_frame
from quiver.wire.messages import AnyRequest
from quiver.wire.requests import Request, Response

TIMEOUT_MS_MAX = 24 * 3_600_000
"""Longest time that a request may be given; what asks for more gets this."""

_CorrelationId = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_TimeoutMs = Annotated[int, Meta(ge=0, le=TIMEOUT_MS_MAX)]
_Length = Annotated[int, Meta(ge=0)]
_ResponseType = TypeVar("_ResponseType", bound=Response)


class _RequestHead(msgspec.Struct, frozen=True, array_like=True):
    correlation_id: _CorrelationId
    timeout_ms: _TimeoutMs
    body: AnyRequest | None
    body_bytes: _Length = 0


class _UnknownHead(msgspec.Struct, frozen=True, array_like=True):
    """A request's head as far as any version of this program can read it."""

    correlation_id: _CorrelationId
    timeout_ms: _TimeoutMs
    body: msgspec.Raw
    body_bytes: _Length = 0


class _ResponseHead(msgspec.Struct, frozen=True, array_like=True):
    correlation_id: _CorrelationId
    body: msgspec.Raw
    failure: Failure | None = None
    body_bytes: _Length = 0


class _Tagged(msgspec.Struct, frozen=True):
    type: str


class Asked(msgspec.Struct, frozen=True):
    """A request as it arrived; instead of one that cannot be read, the error that answers it."""

    correlation_id: int
    timeout_ms: int
    request: AnyRequest | RequestError
    payload: memoryview


class Answered(msgspec.Struct, frozen=True):
    """A response as it arrived; `body` can be read once it is known what was asked."""

    correlation_id: int
    body: memoryview
    failure: Failure | None
    payload: memoryview


def encode_request(
    correlation_id: int, timeout_ms: int, request: Request[Any], parts: Sequence[Buffer] = ()
) -> list[Buffer]:
    """Return the buffers of a request's frame; large parts are not copied and must not change until they are sent."""
    timeout_ms = min(timeout_ms, TIMEOUT_MS_MAX)
    head = _encode((correlation_id, timeout_ms, request))
    check_payload = bool(parts) and not request.carries_batches
    if len(head) > HEAD_BYTES_MAX:
        body = _encode(request)
        head, parts, check_payload = _encode((correlation_id, timeout_ms, None, len(body))), (body, *parts), True
    return encode_frame(Kind.REQUEST, head, parts, check_payload=check_payload)


def encode_response(
    correlation_id: int, request: AnyRequest, response: Response, parts: Sequence[Buffer] = ()
) -> list[Buffer]:
    """Return the buffers of the frame that answers `request`; large parts are not copied, as above."""
    head = _encode((correlation_id, response))
    check_payload = bool(parts) and not request.carries_batches
    if len(head) > HEAD_BYTES_MAX:
        body = _encode(response)
        head, parts, check_payload = _encode((correlation_id, None, None, len(body))), (body, *parts), True
    return encode_frame(Kind.RESPONSE, head, parts, check_payload=check_payload)


def encode_failure(correlation_id: int, failure: Failure) -> list[Buffer]:
    """Return the buffers of the frame that answers a request with an error."""
    return encode_frame(Kind.RESPONSE, _encode((correlation_id, None, failure)))


def encode_cancel(correlation_id: int) -> list[Buffer]:
    """Return the buffers of the frame that says that nobody waits for a request's answer any more."""
    return encode_frame(Kind.CANCEL, _encode((correlation_id,)))


def decode_cancel(frame: Frame) -> int:
    """Return the correlation id of the request that a frame of that kind cancels.

    Raises:
        DecodeError: it names none.
    """
    try:
        return _CANCEL_DECODER.decode(frame.head)[0]
    except _UNREADABLE as error:
        raise DecodeError(f"not a valid cancel: {error}") from None


def decode_request(frame: Frame) -> Asked:
    """Return the request that a frame of that kind carries.

    Raises:
        DecodeError: it does not even say to which call it belongs.
    """
    try:
        head = _REQUEST_DECODER.decode(frame.head)
    except _UNREADABLE:
        return _decode_unknown(frame)
    if head.body is None:
        return _decode_unknown(frame)
    return Asked(head.correlation_id, head.timeout_ms, head.body, frame.payload)


def decode_response(frame: Frame) -> Answered:
    """Return the response that a frame of that kind carries, its body still unread.

    Raises:
        DecodeError: it is not a response.
    """
    try:
        head = _RESPONSE_DECODER.decode(frame.head)
    except _UNREADABLE as error:
        raise DecodeError(f"not a valid response: {error}") from None
    body, payload = _split(head.body, head.body_bytes, frame.payload)
    return Answered(head.correlation_id, body, head.failure, payload)


def decode_body(body: Buffer, of_type: type[_ResponseType]) -> _ResponseType:
    """Return a response's body.

    Raises:
        DecodeError: it is not a response of that type.
    """
    try:
        return cast("_ResponseType", _BODY_DECODERS[of_type].decode(body))
    except _UNREADABLE as error:
        raise DecodeError(f"not a valid {of_type.__name__}: {error}") from None


def _decode_unknown(frame: Frame) -> Asked:
    """Read a request whose body is not in its head, or is none that this program knows."""
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
    return Asked(head.correlation_id, head.timeout_ms, request, payload)


def _explain(body: Buffer, reason: str) -> RequestError:
    try:
        name = _TAG_DECODER.decode(body).type
    except _UNREADABLE:
        return DecodeError(f"the request cannot be read: {reason}")
    if name not in _NAMES:
        return RequestError(f"this node knows no request {name[:64]!r}", code="unknown_request")
    return DecodeError(f"the request {name} cannot be read: {reason}")


def _split(body: msgspec.Raw, body_bytes: int, payload: memoryview) -> tuple[memoryview, memoryview]:
    if not body_bytes:
        return memoryview(body), payload
    if body_bytes > len(payload):
        raise DecodeError(f"body of {body_bytes} bytes in a payload of {len(payload)}")
    return payload[:body_bytes], payload[body_bytes:]


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
