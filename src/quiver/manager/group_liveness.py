"""When the primary last heard of the members of groups, and who is silent for too long.

In memory only, by the monotonic clock: a new primary knows no times, so every member gets a full session timeout
(`first_heard_ms`), and a failover expires nobody. Time in which this process itself was stalled does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from quiver.clock import Clock
from quiver.metadata import GroupMemberRow
from quiver.model import ConsumerId

MemberKey = tuple[ConsumerId, str]
RETRY_MS = 500
"""Time after which a silent member that could not be removed is reported again."""


def first_heard_ms(now_ms: int) -> int:
    """Return when a member that this primary has not heard of yet counts as heard: grace after a failover."""
    return now_ms


class GroupLiveness:
    """The times of members that the metadata has; `keep` them in step with it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stalled_ms = 0
        self._heard_ms: dict[MemberKey, int] = {}
        self._timeouts_ms: dict[MemberKey, int] = {}
        self._deadlines: list[tuple[int, MemberKey]] = []
        """A heap with the next check of every member; entries that `_checks_ms` does not have are outdated."""
        self._checks_ms: dict[MemberKey, int] = {}

    def keep(self, key: MemberKey, member: GroupMemberRow | None) -> None:
        """Begin to watch a member, or a changed timeout of one; None ends it."""
        if member is None:
            self._heard_ms.pop(key, None)
            self._timeouts_ms.pop(key, None)
            self._checks_ms.pop(key, None)
        elif self._timeouts_ms.get(key) != member.session_timeout_ms:
            self._timeouts_ms[key] = member.session_timeout_ms
            heard_ms = self._heard_ms.setdefault(key, first_heard_ms(self._now_ms()))
            self._schedule(key, heard_ms + member.session_timeout_ms)

    def keep_all(self, members: Mapping[MemberKey, GroupMemberRow]) -> None:
        """Watch exactly these members."""
        for key in sorted(self._heard_ms.keys() - members.keys()):
            self.keep(key, None)
        for key in sorted(members):
            self.keep(key, members[key])

    def hear(self, key: MemberKey) -> None:
        """Record a sign of life."""
        self._heard_ms[key] = self._now_ms()

    def ignore_stall(self, stalled_ms: int) -> None:
        """Do not count time in which this process itself was stalled as silence of the members."""
        self._stalled_ms += stalled_ms

    def find_silent(self) -> list[MemberKey]:
        """Return the members whose session timeout has passed; those that stay are reported again later."""
        now_ms, silent = self._now_ms(), []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            due_ms, key = heappop(self._deadlines)
            if self._checks_ms.get(key) != due_ms:
                continue
            deadline_ms = self._heard_ms[key] + self._timeouts_ms[key]
            if deadline_ms <= now_ms:
                silent.append(key)
                deadline_ms = now_ms + RETRY_MS
            self._schedule(key, deadline_ms)
        return sorted(silent)

    def _schedule(self, key: MemberKey, due_ms: int) -> None:
        self._checks_ms[key] = due_ms
        heappush(self._deadlines, (due_ms, key))

    def _now_ms(self) -> int:
        return self._clock.monotonic_ms() - self._stalled_ms
