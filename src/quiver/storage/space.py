"""How much room a node's disk has left: asked now and then, so that appends are refused before it is full.

A full disk would stop the node; a nearly full one refuses new records and lets everything else go on: reads, cursors,
elections, and what must be written to let old records go. Between two looks it counts what it has let in.
"""

from __future__ import annotations

import asyncio
from functools import partial

from quiver.config import LogSettings
from quiver.errors import DiskFullError, StorageError
from quiver.storage.disk import Disk
from quiver.storage.executor import Executor


class DiskSpace:
    """The room on the disk that holds a directory; one per node. `run` keeps it up to date."""

    def __init__(self, disk: Disk, directory: str, *, executor: Executor, settings: LogSettings) -> None:
        self._disk = disk
        self._directory = directory
        self._executor = executor
        self._settings = settings
        self._free_bytes: int | None = None

    @property
    def free_bytes(self) -> int | None:
        """Return the room as far as known; None before the first look."""
        return self._free_bytes

    async def run(self) -> None:
        """Look at the disk every `free_check_interval_ms`, until cancelled.

        Raises:
            StorageError: the disk cannot be asked.
        """
        while True:
            await self.refresh()
            await asyncio.sleep(self._settings.free_check_interval_ms / 1000)

    async def refresh(self) -> None:
        """Look at the disk now.

        Raises:
            StorageError: the disk cannot be asked.
        """
        try:
            self._free_bytes = await self._executor.submit(partial(self._disk.free_bytes, self._directory))
        except OSError as error:
            raise StorageError(f"{self._directory}: cannot tell how much room is left: {error}") from error

    def admit(self, size_bytes: int) -> None:
        """Let in records of this size, or refuse them.

        Raises:
            DiskFullError: not done; less than `free_bytes_min` would be left.
        """
        if self._free_bytes is None:
            return
        if self._free_bytes - size_bytes < self._settings.free_bytes_min:
            raise DiskFullError(f"not done: the disk has {self._free_bytes} bytes left; reads and deletes go on")
        self._free_bytes -= size_bytes
