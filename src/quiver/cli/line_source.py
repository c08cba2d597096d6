"""Lines of files and standard input, in blocks: as much as is there, never a whole file.

A line ends with a line feed, which is not part of it; every other byte is. The last line may lack it. What is in memory
is one block and the line that it ends in the middle of, and that line has a bound.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from io import BufferedReader
from typing import cast

from quiver.errors import TooLargeError
from quiver.record.header import PAYLOAD_BYTES_MAX

STANDARD_INPUT = "-"
BLOCK_BYTES = 1 << 20
"""Most bytes that are read at once: about a batch."""


def read_lines(stream: BufferedReader, name: str) -> Iterator[list[bytes]]:
    """Yield the lines of a stream as they come, several at a time.

    Raises:
        TooLargeError: a line is longer than any record can be.
    """
    begun: list[bytes] = []
    begun_bytes = 0
    number = 1
    while block := stream.read1(BLOCK_BYTES):
        first, *rest = block.split(b"\n")
        begun.append(first)
        begun_bytes += len(first)
        if begun_bytes > PAYLOAD_BYTES_MAX:
            raise TooLargeError(f"line {number} of {name} is longer than {PAYLOAD_BYTES_MAX} bytes")
        if rest:
            lines = [b"".join(begun), *rest]
            begun = [lines.pop()]
            begun_bytes = len(begun[0])
            number += len(lines)
            yield lines
    if begun_bytes:
        yield [b"".join(begun)]


def read_files(paths: Iterable[str]) -> Iterator[list[bytes]]:
    """Yield the lines of files, one file after the other; `-` is standard input."""
    for path in paths:
        if path == STANDARD_INPUT:
            yield from read_lines(cast("BufferedReader", sys.stdin.buffer), "standard input")
            continue
        with open(path, "rb") as file:
            yield from read_lines(file, path)


def total_bytes(paths: Iterable[str]) -> int | None:
    """Return how many bytes there are to read; None if that cannot be known."""
    paths = list(paths)
    if not all(path != STANDARD_INPUT and os.path.isfile(path) for path in paths):
        return None
    return sum(map(os.path.getsize, paths))
