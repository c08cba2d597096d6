"""File descriptors for the log: some are held in reserve, so that others who use up all descriptors do not stop it.

A log needs a descriptor at the worst moments: for a new segment, in the middle of a flush. Without one the write would
fail, and a failed write ends the node. So a few descriptors are held open for nothing; when the process or the system
has no more, one of them is given up for the file that is needed. If none is left, opening waits until there is one
again: it is not the disk that failed. Each shortage is logged once, when files begin to wait, and its end.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time

from quiver.logs import facts

logger = logging.getLogger(__name__)

SPARES = 64
"""How many descriptors a node holds in reserve."""
WAIT_S_MAX = 60.0
"""How long opening waits for a descriptor; longer than any burst of connections."""
_POLL_S = 0.02
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)


class SpareDescriptors:
    """Open files with a reserve of descriptors. Any thread may use it; `open` may block."""

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._spares: list[int] = []
        self._has_waited = False
        """Whether the present shortage made a file wait, and was logged."""
        self._refill()

    @property
    def left(self) -> int:
        """Return how many descriptors are in reserve."""
        return len(self._spares)

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Return a new descriptor of a file; raises `OSError` as `os.open` does, for lack of descriptors only late."""
        begun_s = time.monotonic()
        while True:
            try:
                descriptor = os.open(path, flags, mode)
            except OSError as error:
                if error.errno not in _NONE_LEFT:
                    raise
                if not self._give_up_one():
                    self._wait(path, error, begun_s)
            else:
                if len(self._spares) < self._count:
                    self._refill()
                if self._has_waited and len(self._spares) >= min(1, self._count):
                    self._end_shortage()
                return descriptor

    def close(self) -> None:
        """Close the reserve; idempotent."""
        with self._lock:
            self._count = 0
            while self._spares:
                os.close(self._spares.pop())

    def _give_up_one(self) -> bool:
        with self._lock:
            if not self._spares:
                return False
            os.close(self._spares.pop())
            left = len(self._spares)
        logger.warning("out of file descriptors, using the log's reserve", extra=facts(left=left))
        return True

    def _wait(self, path: str, error: OSError, begun_s: float) -> None:
        if time.monotonic() - begun_s > WAIT_S_MAX:
            raise error
        with self._lock:
            is_new, self._has_waited = not self._has_waited, True
        if is_new:
            logger.warning("out of file descriptors, files wait", extra=facts(file=os.path.basename(path)))
        time.sleep(_POLL_S)

    def _end_shortage(self) -> None:
        with self._lock:
            is_over, self._has_waited = self._has_waited, False
        if is_over:
            logger.info("file descriptors are available again")

    def _refill(self) -> None:
        """Take descriptors into reserve again, as far as there are any."""
        with self._lock:
            try:
                while len(self._spares) < self._count:
                    self._spares.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                if error.errno not in _NONE_LEFT:
                    raise
