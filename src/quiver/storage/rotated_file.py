"""A file of lines for its owner alone, rotated by size: the audit log. Blocking: runs in the executor."""

from __future__ import annotations

import os
from contextlib import suppress

MODE = 0o600


class RotatedFile:
    """Append lines to a file; beyond `bytes_max`, rename it to `.1`, `.2` and so on, and begin another."""

    def __init__(self, path: str, *, bytes_max: int, files_max: int) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._files_max = files_max

    def append(self, lines: bytes) -> None:
        """Append whole lines; raises `OSError`."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, MODE)
        try:
            os.fchmod(descriptor, MODE)  # a file that was there before
            size = os.fstat(descriptor).st_size
            while lines:
                lines = lines[os.write(descriptor, lines) :]
        finally:
            os.close(descriptor)
        if size >= self._bytes_max:
            self._rotate()

    def _rotate(self) -> None:
        names = [self._path, *(f"{self._path}.{number}" for number in range(1, self._files_max))]
        if len(names) == 1:
            os.unlink(self._path)
            return
        for older, newer in zip(reversed(names), list(reversed(names))[1:], strict=False):
            with suppress(FileNotFoundError):
                os.replace(newer, older)
