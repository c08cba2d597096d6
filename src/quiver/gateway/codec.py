"""Decode HTTP parameters and message values; encode records and errors as responses.

Parameters may come in the path, the query or a JSON body, on any method. Decoding is lenient where old clients need it
(digits for numbers, null for an absent value, any content type) and strict where two readers could disagree: a
parameter that is given twice is refused, also within the body, and so is an unknown one, since a typo must not be
dropped in silence. A value
of the wrong type is malformed (`bad_request`); a value of the right type outside its bounds is `out_of_range`.

An error becomes a status by what the caller should do, a `code` for programs and a message for people. 503 and 507 say
*not done*, 504 says *unknown*. No internals are exposed.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import UNSET

from quiver.client.batching import StoredHeaders, delayed_headers
from quiver.errors import (
    ConflictError,
    DiskFullError,
    NotAllowedError,
    NotFoundError,
    Outcome,
    OutOfRangeError,
    QuiverError,
    RequestError,
    TooLargeError,
    TrimmedError,
    UnavailableError,
)
from quiver.gateway.contract import BatchRecord, FailureAnswer, Parameters, ProduceBatchBody
from quiver.gateway.http import HttpResponse
from quiver.record import Record
from quiver.security.quotas import QUOTA_EXCEEDED

P = TypeVar("P", bound=Parameters)
T = TypeVar("T")

QUERY_FIELDS_MAX = 50
CACHED_QUERIES_MAX = 4_096
"""Decoded queries in a route's cache: a consumer repeats the same query."""
CACHED_QUERY_BYTES_MAX = 256
"""A longer query is not cached."""
RETRY_AFTER_S = 1
"""Default of `Retry-After`: a new leader is usually elected within it."""

_OUT_OF_BOUNDS = re.compile(r"Expected `\w+` (?:>|<|of length|matching)|out of range|Invalid enum value")
"""msgspec's complaints about a value of the right type."""
_UNKNOWN_FIELD = re.compile(r"contains unknown field `(?P<name>.*?)`")
_LOCATION = re.compile(r" - at `\$\.?(?P<location>.*)`$")

SCANNED_BYTES_MAX = 4_096
"""A longer body is searched for repeated keys without its longest list."""

_any_decoder = msgspec.json.Decoder(dict[str, Any])
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


# -- parameters --------------------------------------------------------------------------------------


class ParameterDecoder(Generic[P]):
    """Decode the parameters of one route."""

    def __init__(self, parameters_type: type[P]) -> None:
        self._type = parameters_type
        self._decoder = msgspec.json.Decoder(parameters_type, strict=False)
        self._cache: dict[bytes, P] = {}

    def decode(self, path_values: Mapping[str, str], query: bytes, body: bytes | bytearray) -> P:
        """Return the parameters.

        Raises:
            RequestError: they cannot be decoded, one is missing, or one is given twice.
            OutOfRangeError: one has a value that is never valid.
        """
        try:
            if not self._type.__struct_fields__:
                return self._decode_nothing(body)
            if not path_values and not query:
                decoded = self._decoder.decode(body or b"{}")
                check_keys(body)
                return decoded
            if not path_values and not body:
                return self._cache.get(query) or self._decode_query(query)
            given = _any_decoder.decode(body) if body else {}
            check_keys(body)
            return self._convert(given, (*path_values.items(), *_split_query(query)))
        except msgspec.ValidationError as error:
            raise _explain(str(error), self._type) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"not done: the body is not JSON: {error}") from None

    def _decode_nothing(self, body: bytes | bytearray) -> P:
        """Ignore the parameters of a call that takes none: a typo cannot change what it does, and probes add some."""
        if body:
            _any_decoder.decode(body)
        return self._type()

    def _decode_query(self, query: bytes) -> P:
        """Decode a query without a body, and cache the result, which is immutable."""
        decoded = self._convert({}, _split_query(query))
        if len(query) <= CACHED_QUERY_BYTES_MAX:
            if len(self._cache) >= CACHED_QUERIES_MAX:
                self._cache.clear()
            self._cache[query] = decoded
        return decoded

    def _convert(self, given: dict[str, Any], fields: Iterable[tuple[str, str]]) -> P:
        for name, value in fields:
            if name in given:
                raise RequestError(f"not done: {name!r} is given twice", code="given_twice")
            given[name] = value
        return msgspec.convert(given, self._type, strict=False)


def check_keys(body: bytes | bytearray) -> None:
    """Refuse a body in which an object has the same key twice; `body` is valid JSON, or empty.

    msgspec takes the last value, other readers take the first. A large body is a list of messages and little else: a
    list of texts is replaced by null first, since it has no keys and reading it again costs as much as decoding it.

    Raises:
        RequestError: a key is given twice.
    """
    if len(body) > SCANNED_BYTES_MAX:
        body = _without_longest(body)
    text = body.decode().lstrip()
    if text:
        _scan(text, 0)


def _without_longest(body: bytes | bytearray) -> bytes:
    longest = max(map(bytes, _raw_decoder.decode(body).values()), key=len, default=b"")
    first = body.find(longest)
    has_keys = longest[:1] != b"[" or longest[1:64].lstrip()[:1] in (b"{", b"[", b"")
    return bytes(body) if has_keys else bytes(body[:first]) + b"null" + bytes(body[first + len(longest) :])


def _refuse_repeated(pairs: list[tuple[str, object]]) -> None:
    if len(dict(pairs)) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"not done: {twice!r} is given twice", code="given_twice")


_scan: Callable[[str, int], object] = json.JSONDecoder(  # type: ignore[attr-defined] # public, but not in the stubs
    object_pairs_hook=_refuse_repeated, parse_int=str, parse_float=str, strict=False
).scan_once
"""Read a JSON value from an index on. Numbers stay text: converting one of many digits could fail."""


def _split_query(query: bytes) -> list[tuple[str, str]]:
    fields = [field for field in query.split(b"&") if field]
    if len(fields) > QUERY_FIELDS_MAX:
        raise RequestError(f"not done: more than {QUERY_FIELDS_MAX} parameters in the query")
    pairs = (field.partition(b"=")[::2] for field in fields)
    return [(_unquote(name), _unquote(value)) for name, value in pairs]


def _unquote(text: bytes) -> str:
    try:
        return unquote_to_bytes(text.replace(b"+", b" ")).decode()
    except UnicodeDecodeError:
        raise RequestError("not done: the query is not UTF-8") from None


def _explain(complaint: str, parameters_type: type[Parameters]) -> RequestError:
    """Return the error for a complaint of msgspec, in words that name the parameter."""
    if unknown := _UNKNOWN_FIELD.search(complaint):
        known = ", ".join(parameters_type.__struct_encode_fields__)
        message = f"not done: unknown parameter {unknown['name']!r}; known are: {known}"
        return RequestError(message, code="unknown_field")
    found = _LOCATION.search(complaint)
    where = f"{found['location']}: " if found and found["location"] else ""
    sentence = f"not done: {where}{_LOCATION.sub('', complaint)}"
    return OutOfRangeError(sentence) if _OUT_OF_BOUNDS.search(complaint) else RequestError(sentence)


# -- records -----------------------------------------------------------------------------------------


class RecordFields(TypedDict, total=False):
    """A record's fields in an answer: text as text, other bytes as base64."""

    offset: int
    timestamp: int
    message: str | None
    message_b64: str
    key: str
    key_b64: str
    headers: dict[str, str | None]
    headers_b64: dict[str, str]


def decode_value(text: str | None, encoded: str | None) -> bytes:
    """Return the bytes of a message that is given as text or as base64, exactly one of them.

    Raises:
        RequestError: neither or both are given, or it is not base64.
    """
    if (text is None) == (encoded is None):
        raise RequestError("not done: give either message or message_b64")
    return text.encode() if text is not None else _decode_base64(encoded or "")


def decode_key(text: str | None, encoded: str | None) -> bytes | None:
    """Return the bytes of a key that is given as text, as base64, or not at all.

    Raises:
        RequestError: both are given, or it is not base64.
    """
    if text is not None and encoded is not None:
        raise RequestError("not done: give either key or key_b64", code="given_twice")
    if text is not None:
        return text.encode()
    return None if encoded is None else _decode_base64(encoded)


class BatchColumns(NamedTuple):
    """The columns of a batch: its values, and what messages have beside them; None if none of them has it."""

    values: list[bytes | None]
    keys: list[bytes | None] | None = None
    timestamps: list[int | None] | None = None
    headers: list[StoredHeaders | None] | None = None


def decode_batch(given: ProduceBatchBody, now_ms: int) -> BatchColumns:
    """Return the messages of a batch, which are given in one of three ways; delays count from now.

    Raises:
        RequestError: none or several of the ways are used, something is given twice, or it is not base64.
    """
    if sum(one is not None for one in (given.messages, given.messages_b64, given.records)) != 1:
        raise RequestError("not done: give either messages or messages_b64 or records")
    key, headers = decode_key(given.key, given.key_b64), decode_headers(given.headers, given.headers_b64)
    due_ms = decode_delay(given.deliver_at, given.delay_ms, now_ms)
    if given.records is None:
        headers = delay_headers(headers, due_ms)
        values: list[bytes | None] = [*decode_values(given.messages, given.messages_b64)]
        count = len(values)
        return BatchColumns(
            values,
            None if key is None else [key] * count,
            None,  # that of the batch
            None if headers is None else [headers] * count,
        )
    own_keys = [decode_key(one.key, one.key_b64) for one in given.records]
    own_headers = [decode_headers(one.headers, one.headers_b64) for one in given.records]
    own_due_ms = [decode_delay(one.deliver_at, one.delay_ms, now_ms) for one in given.records]
    timestamps = [one.timestamp for one in given.records]
    return BatchColumns(
        [_decode_record_value(one) for one in given.records],
        _fill(own_keys, key),
        timestamps if any(one is not None for one in timestamps) else None,
        _delay_each(_fill(own_headers, headers), [due_ms if one is None else one for one in own_due_ms]),
    )


def _fill(own: list[T | None], default: T | None) -> list[T | None] | None:
    """Return a column with the default where a message has nothing of its own; None if it would be empty."""
    filled = [default if one is None else one for one in own]
    return filled if any(one is not None for one in filled) else None


def _delay_each(
    headers: list[StoredHeaders | None] | None, due_ms: list[int | None]
) -> list[StoredHeaders | None] | None:
    """Return a column of headers with the times at which messages are due."""
    if all(one is None for one in due_ms):
        return headers
    given = headers or [None] * len(due_ms)
    return [delay_headers(one, due) for one, due in zip(given, due_ms, strict=True)]


def _decode_record_value(one: BatchRecord) -> bytes | None:
    if one.message is None and one.message_b64 is UNSET:
        return None
    text = None if one.message is UNSET else one.message
    return decode_value(text, None if one.message_b64 is UNSET else one.message_b64)


def decode_values(texts: list[str] | None, encoded: list[str] | None) -> list[bytes]:
    """Return the bytes of messages that are given as texts or as base64, exactly one of them; raises as above."""
    if (texts is None) == (encoded is None):
        raise RequestError("not done: give either messages or messages_b64")
    return [text.encode() for text in texts] if texts is not None else [_decode_base64(one) for one in encoded or ()]


def decode_headers(texts: Mapping[str, str | None] | None, encoded: Mapping[str, str] | None) -> StoredHeaders | None:
    """Return headers that are given as text and as base64; None if there are none.

    Raises:
        RequestError: one is not base64, or a name is given in both.
    """
    if not texts and not encoded:
        return None
    texts, encoded = texts or {}, encoded or {}
    if twice := texts.keys() & encoded.keys():
        raise RequestError(f"not done: header {min(twice)!r} is in headers and in headers_b64", code="given_twice")
    stored = [(name, None if text is None else text.encode()) for name, text in texts.items()]
    return (*stored, *((name, _decode_base64(one)) for name, one in encoded.items()))


def decode_delay(deliver_at: int | None, delay_ms: int | None, now_ms: int) -> int | None:
    """Return when a message is due for work queues, in milliseconds since 1970; None: at once.

    Raises:
        RequestError: both are given.
    """
    if deliver_at is not None and delay_ms is not None:
        raise RequestError("not done: give either deliver_at or delay_ms", code="given_twice")
    return deliver_at if delay_ms is None else now_ms + delay_ms


def delay_headers(headers: StoredHeaders | None, due_ms: int | None) -> StoredHeaders | None:
    """Return the headers of a message that is due at a time."""
    return headers if due_ms is None else delayed_headers(headers or (), due_ms)


def record_fields(record: Record) -> RecordFields:
    """Return a record's fields for an answer."""
    fields: RecordFields = {"offset": record.offset, "timestamp": record.timestamp}
    if record.value is None:
        fields["message"] = None
    elif (text := _as_text(record.value)) is not None:
        fields["message"] = text
    else:
        fields["message_b64"] = base64.b64encode(record.value).decode()
    if record.headers:
        _add_headers(fields, dict(record.headers))
    if record.key is None:
        return fields
    if (text := _as_text(record.key)) is not None:
        fields["key"] = text
    else:
        fields["key_b64"] = base64.b64encode(record.key).decode()
    return fields


def _add_headers(fields: RecordFields, headers: Mapping[str, bytes | None]) -> None:
    texts = {name: None if value is None else _as_text(value) for name, value in headers.items()}
    encoded = {
        name: base64.b64encode(value).decode()
        for name, value in headers.items()
        if value is not None and texts[name] is None
    }
    if shown := {name: text for name, text in texts.items() if name not in encoded}:
        fields["headers"] = shown
    if encoded:
        fields["headers_b64"] = encoded


def _as_text(value: bytes) -> str | None:
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError:
        return None


def _decode_base64(encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"not done: not base64: {error}") from None


# -- errors ------------------------------------------------------------------------------------------

_STATUSES: tuple[tuple[type[QuiverError], int], ...] = (
    (NotFoundError, 404),
    (TrimmedError, 404),
    (ConflictError, 409),
    (OutOfRangeError, 422),
    (NotAllowedError, 403),
    (TooLargeError, 413),
    (RequestError, 400),
    (DiskFullError, 507),
    (UnavailableError, 503),
)
"""By class, subclasses before their base; any other error is 503 or 504 by its outcome."""

_WITH_OUTCOME = (429, 503, 504, 507)
_WITH_RETRY_AFTER = (429, 503)


_STATUS_BY_CODE = {"unauthenticated": 401, "too_many_failures": 429, QUOTA_EXCEEDED: 429}
"""Codes whose status differs from that of their class."""


def status_of(error: QuiverError) -> int:
    """Return the HTTP status of an error."""
    if error.code in _STATUS_BY_CODE:
        return _STATUS_BY_CODE[error.code]
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return status
    return HTTPStatus.GATEWAY_TIMEOUT if error.outcome == "unknown" else HTTPStatus.SERVICE_UNAVAILABLE


def error_response(error: QuiverError) -> HttpResponse:
    """Return the response to a request that ended in an error."""
    retry_after_ms = (error.retry_after_ms or 0) if isinstance(error, UnavailableError) else 0
    return failure_response(status_of(error), error.code, error.message, retry_after_s=-(-retry_after_ms // 1000))


def failure_response(status: int, code: str, message: str, *, retry_after_s: int = 0) -> HttpResponse:
    """Return a response with a failure in the contract's form."""
    outcome: Outcome | msgspec.UnsetType = UNSET
    headers: tuple[tuple[str, str], ...] = ()
    if status in _WITH_OUTCOME:
        outcome = "unknown" if status == HTTPStatus.GATEWAY_TIMEOUT else "not_done"
    if status in _WITH_RETRY_AFTER:
        headers = (("Retry-After", str(retry_after_s or RETRY_AFTER_S)),)
    if status == HTTPStatus.UNAUTHORIZED:
        headers = (("WWW-Authenticate", 'Bearer realm="quiver"'),)
    body = msgspec.json.encode(FailureAnswer(code=code, message=message, outcome=outcome))
    return HttpResponse(status=status, body=body, headers=headers, error_code=code)
