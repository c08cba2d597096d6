"""How long an incoming connection may keep this node waiting: for the rest of a frame, for a request, for reading.

A `Patience` is a connection's last progress in each of the three, as the listener's periodic check saw it. The check is
coarse on purpose: it costs nothing while bytes flow. The handshake has its own, exact deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quiver.config import WireSettings

if TYPE_CHECKING:
    from quiver.wire.connection import Connection

SENT_BYTES_MIN = 1024 * 1024
"""What a connection with unsent answers must read within the timeout of sends."""
CHECKS_PER_TIMEOUT = 4
CHECK_INTERVAL_MS_MAX = 1_000


def check_interval_s(settings: WireSettings) -> float:
    """Return how often connections are checked."""
    shortest_ms = min(settings.frame_timeout_ms, settings.send_timeout_ms, settings.silence_timeout_ms)
    return min(CHECK_INTERVAL_MS_MAX, shortest_ms / CHECKS_PER_TIMEOUT) / 1000


class Patience:
    """The last progress of one connection."""

    __slots__ = ("_blocked", "_partial", "_silent")

    def __init__(self, now_s: float) -> None:
        self._silent = (0, now_s)
        self._partial: tuple[int, float] | None = None
        self._blocked: tuple[int, float] | None = None

    def check(self, connection: Connection, now_s: float, *, is_busy: bool) -> str:
        """Return why the connection must be closed; empty if it may stay."""
        settings = connection.settings
        return (
            self._check_frame(connection, now_s, settings.frame_timeout_ms)
            or self._check_sends(connection, now_s, settings.send_timeout_ms)
            or self._check_silence(connection, now_s, settings.silence_timeout_ms, is_busy=is_busy)
        )

    def _check_frame(self, connection: Connection, now_s: float, timeout_ms: int) -> str:
        reader = connection.reader
        if connection.is_reading_paused or not reader.is_partial:
            self._partial = None
            return ""
        if self._partial is None or self._partial[0] != reader.frames:
            self._partial = (reader.frames, now_s)
        late = now_s - self._partial[1] >= timeout_ms / 1000
        return f"a frame did not arrive completely within {timeout_ms} ms" if late else ""

    def _check_sends(self, connection: Connection, now_s: float, timeout_ms: int) -> str:
        if not connection.is_paused:
            self._blocked = None
            return ""
        written_bytes = connection.written_bytes
        if self._blocked is None or written_bytes - self._blocked[0] >= SENT_BYTES_MIN:
            self._blocked = (written_bytes, now_s)
        late = now_s - self._blocked[1] >= timeout_ms / 1000
        return f"less than {SENT_BYTES_MIN} bytes of the responses were read within {timeout_ms} ms" if late else ""

    def _check_silence(self, connection: Connection, now_s: float, timeout_ms: int, *, is_busy: bool) -> str:
        frames = connection.reader.frames
        if is_busy or connection.reader.is_partial or self._silent[0] != frames:
            self._silent = (frames, now_s)
        late = now_s - self._silent[1] >= timeout_ms / 1000
        return f"no request within {timeout_ms} ms" if late else ""
