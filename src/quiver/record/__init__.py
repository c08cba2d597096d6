"""Batches of records: bytes that stay the same from the producer to the consumer.

The package owns the batch format (`docs/protocol/batch.md`) and every way in and out of it:
`build_batch` from Python objects, `Batch` back to them, `quiver.record.arrow` for Arrow both ways.
`quiver.record.digest` tells whether two places hold the same records. It is pure: no clock, no
files, no network. It must never import numpy or pyarrow outside these two, which need the `arrow`
extra and are therefore not re-exported here.
"""

from __future__ import annotations

from quiver.record.batch import Batch, Headers, Record, Records, decode_batches
from quiver.record.builder import Value, build_batch, build_control_batch, reseal_batch, seal_control_batch
from quiver.record.checksum import crc32c
from quiver.record.compression import Compression
from quiver.record.header import (
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    BatchHeader,
    decode_header,
    stamp,
    verify_payload,
)

__all__ = [
    "HEADER_BYTES",
    "PAYLOAD_BYTES_MAX",
    "Batch",
    "BatchHeader",
    "Compression",
    "Headers",
    "Record",
    "Records",
    "Value",
    "build_batch",
    "build_control_batch",
    "crc32c",
    "decode_batches",
    "decode_header",
    "reseal_batch",
    "seal_control_batch",
    "stamp",
    "verify_payload",
]
