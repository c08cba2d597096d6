"""CRC-32C (Castagnoli), the one checksum of the batch format.

This module owns the choice of library, so that it can change in one place (ADR 0003). It must
never copy the data it is given: batches are large and are checked at every hop.
"""

from __future__ import annotations

from fastcrc import crc32

from quiver.model import Buffer


def crc32c(data: Buffer, initial: int = 0) -> int:
    """Return the CRC-32C of `data`, continuing from `initial`, the checksum of what comes before it.

    ``crc32c(b, crc32c(a)) == crc32c(a + b)``, and the checksum of nothing is 0.
    """
    return crc32.iscsi(data, initial)
