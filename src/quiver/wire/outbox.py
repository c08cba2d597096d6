"""The send queue of one connection: frames in, chunks for the socket out.

It knows no socket: its owner asks for the next chunk when the socket accepts one. Small frames are joined into one
chunk, because a system call costs more than copying them; large frames are sliced, because a transport copies what the
socket does not accept immediately, and a slice bounds that copy.

Invariant: `bytes` and `messages` count exactly what was pushed and not completely returned by `next_chunk`. A withdrawn
frame counts no bytes, but keeps its position in `messages` until the frames before it are returned.
"""

from __future__ import annotations

from collections import deque

from quiver.model import Buffer

CHUNK_BYTES = 256 * 1024
"""Largest chunk; larger chunks gained nothing when measured (ADR 0008)."""

FLUSH_FRAMES = 16
"""Queued small frames at which a sender writes immediately instead of collecting more, so that the receiver starts."""


class Outbox:
    """Queue frames in order; its owner enforces a limit."""

    def __init__(self) -> None:
        self.bytes = 0
        # A frame is one buffer, or several if it has large parts.
        self._frames: deque[bytes | deque[memoryview]] = deque()
        self._pushed = 0
        # Whether a part of the first frame has been returned.
        self._is_begun = False

    @property
    def messages(self) -> int:
        """Return how many frames have not been completely returned."""
        return len(self._frames)

    def push(self, buffers: list[Buffer]) -> int:
        """Append one frame and return its number; its buffers are held, not copied, and must not change."""
        number = self._pushed
        self._pushed += 1
        first = buffers[0]
        if len(buffers) == 1 and isinstance(first, bytes) and len(first) <= CHUNK_BYTES:
            self._frames.append(first)
            self.bytes += len(first)
            return number
        views = deque(memoryview(buffer) for buffer in buffers)
        self._frames.append(views)
        self.bytes += sum(map(len, views))
        return number

    def holds(self, number: int) -> bool:
        """Whether a part of this frame has not been returned yet: the other side cannot have received it whole."""
        return number >= self._pushed - len(self._frames)

    def withdraw(self, number: int) -> bool:
        """Remove a frame of which nothing has been returned; return whether that was possible."""
        at = number - (self._pushed - len(self._frames))
        if at < 0 or (at == 0 and self._is_begun):
            return False
        frame = self._frames[at]
        self.bytes -= len(frame) if isinstance(frame, bytes) else sum(map(len, frame))
        # It keeps its position, so that the numbers of later frames stay valid.
        self._frames[at] = b""
        return True

    def next_chunk(self) -> memoryview:
        """Remove and return the next bytes to write; empty if there are none."""
        if not self._frames:
            return memoryview(b"")
        first = self._frames[0]
        if not isinstance(first, bytes):
            chunk = self._slice_large(first)
        elif len(self._frames) == 1:
            self._frames.clear()
            chunk = memoryview(first)
        else:
            chunk = self._join_small()
        self.bytes -= len(chunk)
        return chunk

    def clear(self) -> int:
        """Remove everything; return the number of frames dropped."""
        dropped = len(self._frames)
        self._frames.clear()
        self._is_begun = False
        self.bytes = 0
        return dropped

    def _join_small(self) -> memoryview:
        small: list[bytes] = []
        room_bytes = CHUNK_BYTES
        while self._frames:
            frame = self._frames[0]
            if not isinstance(frame, bytes) or len(frame) > room_bytes:
                break
            room_bytes -= len(frame)
            small.append(frame)
            self._frames.popleft()
        return memoryview(small[0] if len(small) == 1 else b"".join(small))

    def _slice_large(self, views: deque[memoryview]) -> memoryview:
        view = views.popleft()
        if len(view) > CHUNK_BYTES:
            views.appendleft(view[CHUNK_BYTES:])
        self._is_begun = bool(views)
        if not views:
            self._frames.popleft()
        return view[:CHUNK_BYTES]
