"""Records as JSON lines: what `quiver consume --json` writes, `quiver produce --json` reads."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import msgspec

from quiver.errors import RequestError


class JsonRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One record of a JSON line; `offset` and `topic` are accepted and ignored, so that output is valid input."""

    value: Any
    key: Any = None
    headers: dict[str, Any] = {}
    timestamp: int | None = None
    partition: int | None = None
    offset: int | None = None
    topic: str | None = None


_DECODER = msgspec.json.Decoder(JsonRecord)


def parse_record(line: bytes, place: str) -> JsonRecord:
    """Return the record of one line, its value, key and headers as bytes or None.

    Text stands for its UTF-8 bytes, ``{"base64": …}`` for any bytes, null for null, and any other JSON for itself.

    Raises:
        RequestError: the line, named by `place`, is not such a record; it was not sent.
    """
    try:
        record = _DECODER.decode(line)
        return msgspec.structs.replace(
            record,
            value=_to_bytes(record.value),
            key=_to_bytes(record.key),
            headers={name: _to_bytes(value) for name, value in record.headers.items()},
        )
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise RequestError(f"not sent: {place} is not a record in JSON: {error}", code="bad_record") from None


def _to_bytes(given: Any) -> bytes | None:
    if given is None:
        return None
    if isinstance(given, str):
        return given.encode()
    if isinstance(given, dict) and given.keys() == {"base64"} and isinstance(given["base64"], str):
        return b64decode(given["base64"], validate=True)
    return msgspec.json.encode(given)
