"""The record of what a simulation did: a running SHA-256 and the last events for people.

Two runs of one seed must give the same digest: that is how a simulation proves that nothing from
the host reached it. Facts are therefore limited to values whose text is the same everywhere; an
object whose `repr` shows an address, or a set, whose order depends on hashes, is refused.
"""

from __future__ import annotations

import hashlib
from collections import deque
from struct import Struct
from types import NoneType
from typing import Final

Fact = int | str | bytes | bool | float | None

_FACT_TYPES: Final = frozenset({int, str, bytes, bool, float, NoneType})
_STEP: Final = Struct("<QQ")
_BUFFER_BYTES: Final = 1 << 16
"""Hash in blocks of this size: a call per step would cost more than the step."""


class Trace:
    """Hash every recorded event in order and remember the last `tail_length` of them."""

    def __init__(self, *, tail_length: int = 50) -> None:
        self.event_count = 0
        self._hash = hashlib.sha256()
        self._buffer = bytearray()
        self._tail: deque[tuple[int, str, tuple[Fact, ...]]] = deque(maxlen=tail_length)

    def record(self, kind: str, *facts: Fact) -> None:
        """Add one event; its facts must be plain values."""
        for fact in facts:
            if type(fact) not in _FACT_TYPES:
                raise TypeError(f"a fact of {kind!r} must be a plain value, got {type(fact).__name__}")
        self.event_count += 1
        self._tail.append((self.event_count, kind, facts))
        self._buffer += repr((kind, facts)).encode()
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush()

    def record_step(self, sequence: int, now_ns: int) -> None:
        """Add one scheduler step: which callback ran, and when. Not kept for people."""
        buffer = self._buffer
        buffer += _STEP.pack(sequence, now_ns)
        if len(buffer) >= _BUFFER_BYTES:
            self._flush()

    def digest(self) -> str:
        """Return the digest of everything recorded so far, in hexadecimal."""
        self._flush()
        return self._hash.hexdigest()

    def tail(self) -> list[str]:
        """Return the last recorded events, oldest first, one line each."""
        return [f"{number} {kind} {' '.join(map(repr, facts))}".rstrip() for number, kind, facts in self._tail]

    def _flush(self) -> None:
        self._hash.update(self._buffer)
        self._buffer.clear()
