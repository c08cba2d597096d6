"""The payload of the answer to `ConsumeMany`: the consumed records, without their batches. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quiver.errors import DecodeError
from quiver.model import Buffer
from quiver.record import Record

_encode = msgspec.msgpack.Encoder().encode
_record_decoder = msgspec.msgpack.Decoder(list[Record | None])


def encode_consumed(records: Sequence[Record | None]) -> bytes:
    """Return the payload of an answer."""
    return _encode(records)


def decode_consumed(payload: Buffer) -> list[Record | None]:
    """Return the records that `encode_consumed` encoded; raises `DecodeError`."""
    try:
        return _record_decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise DecodeError(f"not a valid payload of consumed records: {error}") from None
