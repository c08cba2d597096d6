"""Touch memory before large writes: a virtual machine gets a page on first touch, and returns free pages after seconds.

Writing a file into untouched memory costs some 2 ns per byte where a copy takes 0.3, more than all the work of a node
with large batches. Servers that have run for a while have no such memory: their page cache is full of old files.
Therefore benches of large writes touch as much memory as they write, before each of their runs and each run of their
raw limits.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

BLOCK_BYTES: Final = 4 << 20


def touch_memory(size_bytes: int) -> None:
    """Fill this much of the page cache with a file on the repository's disk, and remove the file."""
    with tempfile.TemporaryFile(prefix="bench-", dir=Path(__file__).parents[1]) as file:
        block = bytes(BLOCK_BYTES)
        for _ in range(-(-size_bytes // BLOCK_BYTES)):
            file.write(block)
        file.flush()
        os.fdatasync(file.fileno())
