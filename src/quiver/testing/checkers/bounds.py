"""Every queue has a bound, and keeps it (I16)."""

from __future__ import annotations

from quiver.replication import Member
from quiver.testing.finding import require

QUEUED_OUTPUTS_MAX = 2_000
"""Outputs that wait for one save or restore: a few seconds of messages at the most."""
FOLLOWER_PENDING_FACTOR = 4
"""A follower must take what its leaders send: the leader's own bound, and what earlier leaders had sent."""


def check_bounds(member: Member) -> None:
    """Fail if something that a member holds is larger than it may be."""
    settings = member._settings
    leadership = member.raft._state.leadership
    facts = {"group": member.group, "node": member.raft.id}
    if leadership is not None:
        # One proposal may be larger than the whole bound when nothing else waits.
        allowed = settings.uncommitted_bytes_max + settings.append_bytes_max
        require(leadership.uncommitted_bytes <= allowed, "I16", "too many uncommitted bytes", **facts)
        for progress in leadership.peers:
            require(
                len(progress.inflight) <= settings.inflight_messages_max,
                "I16",
                "too many messages in flight",
                **facts,
            )
    waiting = len(member._outputs)
    require(waiting <= QUEUED_OUTPUTS_MAX, "I16", "too many outputs wait", count=waiting, **facts)
