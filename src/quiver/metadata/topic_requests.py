"""The requests that created topics most recently, remembered beyond the purge of the topic.

A topic's row names the request that created it, so that a repeat creates no second topic. A purge deletes the row, and
with a short `purge_delay_ms` it may come before the repeat. Each node therefore remembers what it has seen itself; this
is no part of the replicated state, and only the primary asks. A node that was restarted after the purge has forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quiver.metadata.rows import TopicRow
from quiver.metadata.state import Change, Counters, LogPosition, View

REQUESTS_MAX = 10_000
"""How many are remembered: a few MB, more than a cluster creates within the timeout of a call."""


class TopicRequests:
    """A listener of the state machine that maps requests to the topics that they created."""

    def __init__(self, view: View) -> None:
        self._made: dict[tuple[str, str], TopicRow] = {}
        self.replace(view)

    def find(self, request_id: str, name: str) -> TopicRow | None:
        """Return the topic of that name, as it was created by a request."""
        return self._made.get((request_id, name))

    def add(self, changes: Sequence[Change], _counters: Counters, _position: LogPosition) -> None:
        """Remember the topics among the changes."""
        self._remember(change.row for change in changes if isinstance(change.row, TopicRow))

    def replace(self, view: View) -> None:
        """Remember the topics of a restored snapshot, too."""
        self._remember(topic for _, topic in sorted(view.topics.items()))

    def _remember(self, topics: Iterable[TopicRow]) -> None:
        for topic in topics:
            if topic.request_id:
                self._made.setdefault((topic.request_id, topic.name), topic)
        while len(self._made) > REQUESTS_MAX:
            del self._made[next(iter(self._made))]
