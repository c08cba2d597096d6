"""The 96 bytes that open every batch: decode, check, stamp.

This module owns the header's layout (`docs/protocol/batch.md`). The header has two parts. The
*stamped* part (bytes 8..40: term, index, base offset, append timestamp) belongs to the leader that
appends the batch and is zero before. The rest (40..96) belongs to the producer and is never
written again.

Invariants:
- `payload_crc` covers the producer's part and the stored payload. The producer computes it, every
  receiver verifies it, and it is never recomputed.
- `header_crc` covers everything after itself, and is recomputed by each stamp.
- A decoded header's numbers are within the bounds stated here, so that later code may allocate
  by them.
- A *sealed* batch exists only on the disk of one replica (`storage/sealing.py`): its payload is encrypted, and its
  `payload_crc` covers the encrypted bytes. No other reader accepts one.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from quiver.errors import DecodeError
from quiver.model import NO_PRODUCER, Buffer, Index, Offset, ProducerId, Term
from quiver.record.checksum import crc32c
from quiver.record.compression import Compression

HEADER_BYTES: Final = 96
MAGIC: Final = b"QVB1"
VERSION: Final = 1
ENCODING_COLUMNAR: Final = 0
ENCODING_SEALED: Final = 1
"""The payload is encrypted; on disks only."""
SEALED_EXTRA_BYTES: Final = 32
"""How much longer a sealed payload is: a nonce of 12 bytes, the producer's checksum, a tag of 16 bytes."""
KIND_DATA: Final = 0
KIND_CONTROL: Final = 1

PAYLOAD_BYTES_MAX: Final = 64 << 20
"""Most bytes of a payload, stored or decompressed.

A reader holds a whole batch in memory, so this bounds what one batch can cost it; 64 MiB is far above
the size where larger batches stop being faster (about 1 MiB), and keeps every sum of lengths inside the
31 bits of Arrow's offsets.
"""

PREAMBLE_BYTES: Final = 8
"""A data payload's fixed beginning: flags and the count of record headers."""

RECORD_BYTES_MIN: Final = 4
"""Bytes of the smallest record in a payload: its value's length."""

OFFSET_END_MAX: Final = (1 << 63) - 1

_HEADER = struct.Struct("<4sIQQqqBBBBIIIqqqIqI")
_CHECKSUM = struct.Struct("<I")
_STAMP = struct.Struct("<QQqq")
_HEADER_CRC_POSITION = 4
_STAMP_POSITION = 8
_PRODUCER_PART_POSITION = 40
_ENCODING_POSITION = 41
_PAYLOAD_BYTES_POSITION = 48
PAYLOAD_CRC_POSITION: Final = 92
"""The producer's checksum directly precedes the payload: both are sealed together."""
_COMPRESSION_LAST = int(Compression.ZSTD)


class BatchHeader(msgspec.Struct, frozen=True):
    """One batch's header as values, in the order of the bytes."""

    term: Term = Term(0)
    index: Index = Index(0)
    base_offset: Offset = Offset(0)
    append_timestamp: int = 0
    version: int = VERSION
    encoding: int = ENCODING_COLUMNAR
    compression: int = Compression.NONE
    kind: int = KIND_DATA
    record_count: int = 0
    payload_bytes: int = 0
    raw_bytes: int = 0
    first_timestamp: int = 0
    max_timestamp: int = 0
    producer_id: ProducerId = NO_PRODUCER
    producer_epoch: int = 0
    base_sequence: int = 0
    payload_crc: int = 0

    @property
    def end_offset(self) -> Offset:
        """The first offset after this batch; a control batch uses up none."""
        return Offset(self.base_offset + self.record_count)

    @property
    def batch_bytes(self) -> int:
        """The length of the whole batch, header and stored payload."""
        return HEADER_BYTES + self.payload_bytes

    @property
    def is_control(self) -> bool:
        """Whether the payload belongs to the layers above instead of holding records."""
        return self.kind == KIND_CONTROL


def decode_header(
    buffer: Buffer, position: int = 0, *, payload_bytes_max: int = PAYLOAD_BYTES_MAX, may_be_sealed: bool = False
) -> BatchHeader:
    """Return the header at `position`, checked; raise `DecodeError` if it is not one.

    Reads the header's bytes only: the payload may be absent, truncated or damaged (see `verify_payload`). A sealed
    batch is accepted with `may_be_sealed` alone.
    """
    if len(buffer) - position < HEADER_BYTES:
        raise DecodeError(f"{len(buffer) - position} bytes are too few for a batch header")
    fields = _HEADER.unpack_from(buffer, position)
    if fields[0] != MAGIC:
        raise DecodeError(f"a batch starts with {MAGIC!r}, not with {fields[0]!r}")
    if crc32c(buffer[position + _STAMP_POSITION : position + HEADER_BYTES]) != fields[1]:
        raise DecodeError("the batch header fails its checksum")
    header = BatchHeader(*fields[2:])
    is_sealed = may_be_sealed and header.encoding == ENCODING_SEALED
    if header.version != VERSION or (header.encoding != ENCODING_COLUMNAR and not is_sealed):
        raise DecodeError(f"a batch of unknown version {header.version}, encoding {header.encoding}")
    _check_sizes(header, payload_bytes_max, extra_bytes=SEALED_EXTRA_BYTES if is_sealed else 0)
    _check_numbers(header)
    return header


def read_header(buffer: Buffer) -> BatchHeader:
    """Return the header at the start of `buffer`, unchecked: for bytes that were checked before."""
    return BatchHeader(*_HEADER.unpack_from(buffer)[2:])


def encode_header(header: BatchHeader, payload: Buffer) -> bytes:
    """Return the 96 bytes for a new, unstamped batch with `payload`, computing both checksums.

    Only a batch's builder may call this: it is what makes `payload_crc`, so `header`'s own is ignored.
    Raises `struct.error` if a number does not fit its field.
    """
    encoded = _HEADER.pack(MAGIC, 0, *msgspec.structs.astuple(header)[:-1], 0)
    payload_crc = crc32c(payload, crc32c(encoded[_PRODUCER_PART_POSITION:PAYLOAD_CRC_POSITION]))
    checked = encoded[_STAMP_POSITION:PAYLOAD_CRC_POSITION] + _CHECKSUM.pack(payload_crc)
    return MAGIC + _CHECKSUM.pack(crc32c(checked)) + checked


def verify_payload(buffer: Buffer, header: BatchHeader, position: int = 0) -> None:
    """Raise `DecodeError` unless the batch at `position`, with this header, is whole and as its producer made it."""
    view = memoryview(buffer)
    end = position + HEADER_BYTES + header.payload_bytes
    if len(view) < end:
        raise DecodeError(f"the batch has {header.batch_bytes} bytes and {len(view) - position} are there")
    producer_part = view[position + _PRODUCER_PART_POSITION : position + PAYLOAD_CRC_POSITION]
    if crc32c(view[position + HEADER_BYTES : end], crc32c(producer_part)) != header.payload_crc:
        raise DecodeError("the batch payload fails its producer's checksum")


def stamp(buffer: Buffer, *, term: Term, index: Index, base_offset: Offset, append_timestamp: int) -> Buffer:
    """Return the batch in `buffer` with its stamped part and `header_crc` set.

    Writes in place and returns `buffer` itself when it is writable, else a `bytearray` copy. The caller has
    decoded the header before; the producer's part, with `payload_crc`, is never touched.
    """
    stamped = bytearray(buffer) if memoryview(buffer).readonly else buffer
    _STAMP.pack_into(stamped, _STAMP_POSITION, term, index, base_offset, append_timestamp)
    _CHECKSUM.pack_into(stamped, _HEADER_CRC_POSITION, crc32c(stamped[_STAMP_POSITION:HEADER_BYTES]))
    return stamped


def seal_header(data: Buffer) -> bytearray:
    """Return the first 92 bytes of the header of a batch's sealed form: all but the payload's checksum.

    `header_crc` is not set: `finish_sealed` does that, once the sealed payload is known.
    """
    head = bytearray(memoryview(data)[:PAYLOAD_CRC_POSITION])
    head[_ENCODING_POSITION] = ENCODING_SEALED
    _CHECKSUM.pack_into(head, _PAYLOAD_BYTES_POSITION, len(data) - HEADER_BYTES + SEALED_EXTRA_BYTES)
    return head


def finish_sealed(head: bytearray, nonce: bytes, sealed: bytes) -> bytes:
    """Return a whole sealed batch: the header with both checksums, the nonce, the encrypted bytes with their tag."""
    payload_crc = crc32c(sealed, crc32c(nonce, crc32c(head[_PRODUCER_PART_POSITION:])))
    head += _CHECKSUM.pack(payload_crc)
    _CHECKSUM.pack_into(head, _HEADER_CRC_POSITION, crc32c(head[_STAMP_POSITION:]))
    return b"".join((head, nonce, sealed))


def unseal(data: Buffer, opened: bytes) -> bytes:
    """Return the batch whose sealed form is `data`, from the bytes that were sealed: checksum and payload."""
    head = bytearray(memoryview(data)[:PAYLOAD_CRC_POSITION])
    head[_ENCODING_POSITION] = ENCODING_COLUMNAR
    _CHECKSUM.pack_into(head, _PAYLOAD_BYTES_POSITION, len(data) - HEADER_BYTES - SEALED_EXTRA_BYTES)
    checked = head[_STAMP_POSITION:] + opened[: _CHECKSUM.size]
    _CHECKSUM.pack_into(head, _HEADER_CRC_POSITION, crc32c(checked))
    return b"".join((head, opened))


def _check_sizes(header: BatchHeader, payload_bytes_max: int, *, extra_bytes: int) -> None:
    raw_bytes, record_count = header.raw_bytes, header.record_count
    payload_bytes = header.payload_bytes - extra_bytes
    if not 0 <= payload_bytes <= payload_bytes_max or raw_bytes > payload_bytes_max:
        raise DecodeError(f"a payload of {payload_bytes} bytes, {raw_bytes} raw, exceeds {payload_bytes_max}")
    if header.compression > _COMPRESSION_LAST or (not header.compression and payload_bytes != raw_bytes):
        raise DecodeError(f"compression {header.compression} from {raw_bytes} to {payload_bytes} bytes is impossible")
    if header.kind == KIND_DATA:
        if not 0 < record_count <= (raw_bytes - PREAMBLE_BYTES) // RECORD_BYTES_MIN:
            raise DecodeError(f"{record_count} records cannot be in a payload of {raw_bytes} bytes")
    elif header.kind != KIND_CONTROL or record_count or header.compression:
        raise DecodeError(
            f"a batch of kind {header.kind} with {record_count} records, compression {header.compression}"
        )


def _check_numbers(header: BatchHeader) -> None:
    if not 0 <= header.base_offset <= OFFSET_END_MAX - header.record_count:
        raise DecodeError(f"base offset {header.base_offset} with {header.record_count} records is out of range")
    if header.first_timestamp > header.max_timestamp:
        raise DecodeError("the first timestamp is after the greatest")
    if header.producer_id < NO_PRODUCER or header.base_sequence < 0:
        raise DecodeError(f"producer id {header.producer_id}, sequence {header.base_sequence} is out of range")
