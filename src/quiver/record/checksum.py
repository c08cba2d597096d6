"""CRC-32C (Castagnoli), the one checksum of the batch format.

This module owns the choice of library, so that it can change in one place (ADR 0003). It must
never copy the data it is given: batches are large and are checked at every hop.
"""

from __future__ import annotations

from typing import Final, Protocol, cast

from fastcrc import crc32

from quiver.model import Buffer


class Checksum(Protocol):
    """A checksum that can be continued."""

    def __call__(self, data: Buffer, initial: int = 0, /) -> int:
        """Return the checksum of `data`, continuing from `initial`, the checksum of what comes before it."""
        ...


crc32c: Final = cast("Checksum", crc32.iscsi)
"""Return the CRC-32C of data: ``crc32c(b, crc32c(a)) == crc32c(a + b)``, and the checksum of nothing is 0.

The library's own function, not one around it: it is called five times for every small batch.
"""
