"""What a member says of itself to people and metrics."""

from __future__ import annotations

import msgspec

from quiver.model import GroupId, Index
from quiver.raft import Status
from quiver.storage import LogStatus


class MemberStatus(msgspec.Struct, frozen=True):
    """A snapshot of one member."""

    group: GroupId
    raft: Status
    log: LogStatus
    applied_index: Index
    waiting: int
