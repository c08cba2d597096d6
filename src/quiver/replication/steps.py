"""Parts of encoding a large state in small steps: slices of rows as msgpack, and sorting. Pure.

A slice is encoded as an array and its header cut off, so that the joined slices are one array, byte for byte as if it
had been encoded at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import islice
from typing import Any

import msgspec

SLICE_ROWS = 256
"""Rows encoded or decoded in one step: about a millisecond."""
RUN_KEYS = 2_048
"""Keys sorted in one step."""

_encode = msgspec.msgpack.Encoder().encode


def encode_rows(rows: Iterable[object]) -> Iterator[bytes]:
    """Yield the encoded rows in slices, without the header of the array that they make up."""
    left = iter(rows)
    while part := list(islice(left, SLICE_ROWS)):
        yield _encode(part)[len(array_header(len(part))) :]


def array_header(count: int) -> bytes:
    """Return the header of a msgpack array."""
    if count < 16:
        return bytes((0x90 | count,))
    return b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big")


def map_header(count: int) -> bytes:
    """Return the header of a msgpack map."""
    if count < 16:
        return bytes((0x80 | count,))
    return b"\xde" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdf" + count.to_bytes(4, "big")


def encode_sorted(keys: Iterable[Any], make_row: Callable[[Any], object]) -> Iterator[bytes]:
    """Yield the encoded rows of these keys in slices, in the order of the keys; no bytes after a step of sorting."""
    left, runs = iter(keys), list[list[Any]]()
    while run := sorted(islice(left, RUN_KEYS)):
        runs.append(run)
        yield b""
    yield from encode_rows(map(make_row, merge(*runs)))
