"""The header of a record that asks for a later delivery: milliseconds since 1970-01-01 UTC, as decimal digits.

Work queues deliver such a record no earlier; consumers of streams do not look at the header. A header that is not a
number of at most `DIGITS_MAX` digits is ignored: any producer may write headers, and none of them may stop a queue.
"""

from __future__ import annotations

from typing import Final

from quiver.record.batch import Headers

DELIVER_AT_HEADER: Final = "quiver-deliver-at"
DIGITS_MAX: Final = 15
"""Enough for the year 33658."""
DELIVER_AT_MS_END: Final = 10**DIGITS_MAX


def encode_deliver_at(deliver_at_ms: int) -> bytes:
    """Return the value of the header; the time is in [0, DELIVER_AT_MS_END)."""
    return b"%d" % deliver_at_ms


def find_deliver_at(headers: Headers) -> int | None:
    """Return the time before which a record is not delivered; of several headers, the last valid one counts."""
    for name, value in reversed(headers):
        if name == DELIVER_AT_HEADER and value is not None and len(value) <= DIGITS_MAX and value.isdigit():
            return int(value)
    return None
