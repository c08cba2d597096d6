"""Records as HTTP clients give and get them: text where it is text, base64 where it is not."""

from __future__ import annotations

import base64
import binascii
from typing import TypedDict

from quiver.errors import RequestError
from quiver.record import Record


class Shown(TypedDict, total=False):
    """A record's fields as answers have them."""

    offset: int
    timestamp: int
    message: str | None
    message_b64: str
    key: str
    key_b64: str


def read_value(text: str | None, encoded: str | None) -> bytes:
    """Return the bytes of a message that is given as text or as base64, one of them.

    Raises:
        RequestError: neither or both are given, or it is no base64.
    """
    if (text is None) == (encoded is None):
        raise RequestError("not done: give either message or message_b64")
    return text.encode() if text is not None else _decode(encoded or "")


def read_values(texts: list[str] | None, encoded: list[str] | None) -> list[bytes]:
    """Return the bytes of messages that are given as texts or as base64, one of them; raises as `read_value`."""
    if (texts is None) == (encoded is None):
        raise RequestError("not done: give either messages or messages_b64")
    return [text.encode() for text in texts] if texts is not None else [_decode(one) for one in encoded or ()]


def show_record(record: Record) -> Shown:
    """Return a record's fields as answers have them."""
    shown: Shown = {"offset": record.offset, "timestamp": record.timestamp}
    if record.value is None:
        shown["message"] = None
    elif (text := _text(record.value)) is not None:
        shown["message"] = text
    else:
        shown["message_b64"] = base64.b64encode(record.value).decode()
    if record.key is None:
        return shown
    if (text := _text(record.key)) is not None:
        shown["key"] = text
    else:
        shown["key_b64"] = base64.b64encode(record.key).decode()
    return shown


def _text(value: bytes) -> str | None:
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError:
        return None


def _decode(encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"not done: not base64: {error}") from None
