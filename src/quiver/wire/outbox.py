"""What waits to be sent on one connection, frame by frame, and how it is cut for the socket.

It knows no socket: it is asked for the next chunk when one can be written. Small frames leave many in one chunk,
because a system call costs more than copying them; large ones leave in slices of themselves, because a transport
copies what the socket did not take at once, and a slice bounds that copy.

Invariant: `bytes` and `messages` count exactly what `push` took and `next_chunk` has not wholly given out. What is
withdrawn leaves no byte behind, but keeps its place in the count of messages until those before it are given out.
"""

from __future__ import annotations

from collections import deque

from quiver.model import Buffer

CHUNK_BYTES = 256 * 1024
"""Most bytes given out at once: beyond it, larger chunks were measured to gain nothing (ADR 0008)."""

FLUSH_FRAMES = 16
"""Frames at which a sender of small ones writes at once instead of gathering more: the other side can begin."""


class Outbox:
    """Queue frames in order; its owner holds it to a bound."""

    def __init__(self) -> None:
        self.bytes = 0
        # A frame is one buffer, or several if it has large parts.
        self._frames: deque[bytes | deque[memoryview]] = deque()
        self._pushed = 0
        # Whether a part of the first frame has been given out.
        self._is_begun = False

    @property
    def messages(self) -> int:
        """Return how many frames have not wholly been given out."""
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
        """Tell whether a part of this frame has not been given out yet: nobody can have received it whole."""
        return number >= self._pushed - len(self._frames)

    def withdraw(self, number: int) -> bool:
        """Remove a frame of which nothing has been given out; return whether that was possible."""
        at = number - (self._pushed - len(self._frames))
        if at < 0 or (at == 0 and self._is_begun):
            return False
        frame = self._frames[at]
        self.bytes -= len(frame) if isinstance(frame, bytes) else sum(map(len, frame))
        # It keeps its place, so that the numbers of those behind it stay true.
        self._frames[at] = b""
        return True

    def next_chunk(self) -> memoryview:
        """Remove and return what is to be written next; empty if there is nothing."""
        if not self._frames:
            return memoryview(b"")
        first = self._frames[0]
        chunk = self._join_small() if isinstance(first, bytes) else self._slice_large(first)
        self.bytes -= len(chunk)
        return chunk

    def clear(self) -> int:
        """Remove everything and return how many frames that were."""
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
