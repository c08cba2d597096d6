"""What waits to be sent on one connection, frame by frame, and how it is cut for the socket.

It knows no socket: it is asked for the next chunk when one can be written. Small frames leave many in one chunk,
because a system call costs more than copying them; large ones leave in slices of themselves, because a transport
copies what the socket did not take at once, and a slice bounds that copy.

Invariant: `bytes` and `messages` count exactly what `push` took and `next_chunk` has not wholly given out.
"""

from __future__ import annotations

from collections import deque

from quiver.model import Buffer

CHUNK_BYTES = 256 * 1024
"""Most bytes given out at once: beyond it, larger chunks were measured to gain nothing (ADR 0008)."""


class Outbox:
    """Queue frames in order; its owner holds it to a bound."""

    def __init__(self) -> None:
        self.bytes = 0
        # A frame is one buffer, or several if it has large parts.
        self._frames: deque[bytes | deque[memoryview]] = deque()

    @property
    def messages(self) -> int:
        """Return how many frames have not wholly been given out."""
        return len(self._frames)

    def push(self, buffers: list[Buffer]) -> None:
        """Append one frame; its buffers are held, not copied, and must not change."""
        first = buffers[0]
        if len(buffers) == 1 and isinstance(first, bytes) and len(first) <= CHUNK_BYTES:
            self._frames.append(first)
            self.bytes += len(first)
            return
        views = deque(memoryview(buffer) for buffer in buffers)
        self._frames.append(views)
        self.bytes += sum(map(len, views))

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
        elif not views:
            self._frames.popleft()
        return view[:CHUNK_BYTES]
