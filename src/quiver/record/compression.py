"""Compression of a batch's payload, with the size of the result known beforehand.

Both directions are one-shot. `decompress` must never write, nor let a library allocate, more than
the raw size that the batch's header states, which the caller has checked against its own bound:
- LZ4 is the bare *block* format: the header already carries both sizes and a checksum, so the
  frame format would only repeat them, and a block's output buffer is exactly as large as we say;
- Zstandard is one frame that states its content size. The library allocates what the frame
  states, whatever limit it is given, so the statement is checked before the library sees it.
"""

from __future__ import annotations

import enum
from typing import assert_never

import lz4.block
import zstandard

from quiver.errors import DecodeError
from quiver.model import Buffer

ZSTD_LEVEL = 1
"""On log lines level 1 is half as fast again as the library's default of 3, and no larger (ADR 0002)."""


class Compression(enum.IntEnum):
    """How a batch's payload is stored; the number is the header's byte."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


def compress(raw: bytes, compression: Compression) -> bytes:
    """Return `raw` compressed; `Compression.NONE` returns it as it is."""
    match compression:
        case Compression.NONE:
            return raw
        case Compression.LZ4:
            packed: bytes = lz4.block.compress(raw, store_size=False)
            return packed
        case Compression.ZSTD:
            return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(raw)
        case _:
            assert_never(compression)


def decompress(stored: Buffer, compression: Compression, *, raw_bytes: int) -> Buffer:
    """Return the `raw_bytes` bytes that `stored` holds, or raise `DecodeError` if it holds anything else.

    The caller bounds `raw_bytes`; uncompressed bytes come back as they are, without a copy.
    """
    match compression:
        case Compression.NONE:
            raw = stored
        case Compression.LZ4:
            raw = _decompress_lz4(stored, raw_bytes)
        case Compression.ZSTD:
            raw = _decompress_zstd(stored, raw_bytes)
        case _:
            assert_never(compression)
    if len(raw) != raw_bytes:
        raise DecodeError(f"the payload has {len(raw)} bytes where its header says {raw_bytes}")
    return raw


def _decompress_lz4(stored: Buffer, raw_bytes: int) -> bytes:
    try:
        raw: bytes = lz4.block.decompress(stored, uncompressed_size=raw_bytes)
    except lz4.block.LZ4BlockError as error:
        raise DecodeError(f"the payload is not an LZ4 block of {raw_bytes} bytes: {error}") from error
    return raw


def _decompress_zstd(stored: Buffer, raw_bytes: int) -> bytes:
    try:
        frame = zstandard.get_frame_parameters(stored)
        # Both numbers come from the frame: the library would allocate them before it reads any data.
        if frame.content_size != raw_bytes or frame.window_size > max(raw_bytes, _WINDOW_BYTES_MIN):
            raise DecodeError(f"the payload is not a Zstandard frame of {raw_bytes} bytes")
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DecodeError(f"the payload is not a Zstandard frame of {raw_bytes} bytes: {error}") from error


_WINDOW_BYTES_MIN = 8 << 20
"""A window that every decoder accepts (RFC 8878, 3.1.1.1.2), whatever the content's size."""
