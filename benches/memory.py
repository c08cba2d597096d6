"""Memory that is there: a virtual machine gets a page when it first touches it, and gives free ones back after seconds.

Whoever writes a file into such memory pays for that: some 2 ns a byte where a copy takes 0.3, which is more than all
that a node does with large batches. Servers that run for a while have no such memory: theirs is full of old files. So
benches of large writes touch as much as they are going to write, before each of their runs and of their raw limits'.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

BLOCK_BYTES: Final = 4 << 20


def touch_memory(size_bytes: int) -> None:
    """Fill so much of the page cache, on the repository's own disk, and let it go."""
    with tempfile.TemporaryFile(prefix="bench-", dir=Path(__file__).parents[1]) as file:
        block = bytes(BLOCK_BYTES)
        for _ in range(-(-size_bytes // BLOCK_BYTES)):
            file.write(block)
        file.flush()
        os.fdatasync(file.fileno())
