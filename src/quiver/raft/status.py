"""Status of a member, for people, metrics and tests."""

from __future__ import annotations

from msgspec import Struct

from quiver.model import Index, NodeId, Term
from quiver.raft.configuration import Configuration
from quiver.raft.output import Role
from quiver.raft.progress import RaftPeerStatus
from quiver.raft.state import RaftState


class RaftStatus(Struct, frozen=True, kw_only=True):
    """A member at one moment; `peers` is empty unless it leads."""

    id: NodeId
    role: Role
    term: Term
    vote: NodeId | None
    leader: NodeId | None
    first_index: Index
    last_index: Index
    durable_index: Index
    commit_index: Index
    applied_index: Index
    configuration: Configuration
    peers: tuple[RaftPeerStatus, ...]
    transfer_to: NodeId | None
    uncommitted_bytes: int
    reads_pending: int
    hibernating: bool
    recovering: bool


def describe(state: RaftState) -> RaftStatus:
    """Return a member's status."""
    log, leadership = state.log, state.leadership
    transfer = leadership.transfer if leadership is not None else None
    return RaftStatus(
        id=state.id,
        role=state.role,
        term=state.term,
        vote=state.vote,
        leader=state.leader,
        first_index=log.terms.first_index,
        last_index=log.terms.last_index,
        durable_index=log.durable,
        commit_index=log.commit,
        applied_index=log.applied,
        configuration=state.configuration,
        peers=tuple(peer.status() for peer in leadership.peers) if leadership is not None else (),
        transfer_to=transfer.to if transfer is not None else None,
        uncommitted_bytes=leadership.uncommitted_bytes if leadership is not None else 0,
        reads_pending=len(leadership.reads) if leadership is not None else 0,
        hibernating=state.hibernating,
        recovering=state.recover_until is not None,
    )
