"""One process per data directory: a lock that the operating system takes back when its holder dies."""

from __future__ import annotations

import fcntl
import os
from types import TracebackType

from quiver.errors import ConfigError

LOCK_NAME = "lock"


class DirectoryLock:
    """Hold a data directory for this process as long as the ``with`` lasts; real disks only."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._descriptor = -1

    def __enter__(self) -> DirectoryLock:
        """Take the lock.

        Raises:
            ConfigError: another process has it.
        """
        os.makedirs(self._directory, exist_ok=True)
        descriptor = os.open(f"{self._directory}/{LOCK_NAME}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise ConfigError(
                f"{self._directory} is in use by another process (pid {holder}): "
                "stop it first, or give --data another directory"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the lock back."""
        os.close(self._descriptor)
