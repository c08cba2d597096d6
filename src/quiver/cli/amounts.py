"""Counts and sizes as people read them."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB")


def show_count(count: int, noun: str) -> str:
    """Return how many there are of something, with thousands apart: 1 record, 1,234,567 records."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def show_bytes(count: float) -> str:
    """Return a number of bytes in the largest unit that leaves something before the point: 1.5 MB."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == _UNITS[0] else f"{count:.1f} {unit}"
