"""How long a client was silent at most, as far as the answers that it got tell."""

from __future__ import annotations


class SignsOfLife:
    """When one client surely showed life: at some time between the beginning of a request and its answer."""

    def __init__(self, began_ms: int) -> None:
        self._began_ms = began_ms
        self._longest_ms = 0

    def note(self, began_ms: int, ended_ms: int) -> None:
        """Add a request that was answered; of two at the same time, either may be answered first."""
        self._longest_ms = self.longest_silence_ms(ended_ms)
        self._began_ms = max(self._began_ms, began_ms)

    def longest_silence_ms(self, now_ms: int) -> int:
        """Return an upper bound of the longest silence so far.

        A removal that was decided may come into force after the next sign of life, so the last silence is not enough.
        """
        return max(self._longest_ms, now_ms - self._began_ms)
