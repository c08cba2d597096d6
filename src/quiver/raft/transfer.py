"""Transfer of leadership to a chosen voter (dissertation §3.10, R15).

Meanwhile the leader refuses proposals. It waits until the target has the whole log, then asks it to campaign
immediately. If the target has not won within an election timeout, the leader aborts the transfer and keeps leading.
"""

from __future__ import annotations

from quiver.errors import RequestError, UnavailableError
from quiver.model import NodeId
from quiver.raft import sending
from quiver.raft.leadership import Leadership, Transfer
from quiver.raft.messages import TimeoutNow
from quiver.raft.progress import LOST, PeerProgress
from quiver.raft.state import RaftState


def begin(state: RaftState, leadership: Leadership, to: NodeId) -> None:
    """Start a transfer; asking again for the same target changes nothing.

    Raises:
        RequestError: not done; the target is not another voter.
        UnavailableError: not done; another transfer is running, or the target lost its log.
    """
    if to == state.id or to not in state.configuration.voters:
        raise RequestError(f"leadership can only be transferred to another voter; node {to} is not one")
    if leadership.transfer is not None:
        if leadership.transfer.to != to:
            raise UnavailableError(f"leadership is being transferred to node {leadership.transfer.to}")
        return
    progress = leadership.progress[to]
    if progress.state is LOST:
        raise UnavailableError(f"node {to} lost acknowledged entries; choose another voter")
    leadership.transfer = Transfer(to, state.now_ms + state.config.election_timeout_ms)
    sending.maybe_send(state, progress)
    advance(state, leadership.transfer, progress)


def advance(state: RaftState, transfer: Transfer, progress: PeerProgress) -> None:
    """Ask the target to campaign, once it has the whole log."""
    if transfer.is_target_notified or progress.node != transfer.to or progress.match < state.log.terms.last_index:
        return
    transfer.is_target_notified = True
    state.send(transfer.to, TimeoutNow(state.term))


def expire(state: RaftState, leadership: Leadership, transfer: Transfer) -> None:
    """Abort a transfer that took too long, and accept proposals again."""
    if state.now_ms < transfer.deadline_ms:
        return
    leadership.transfer = None
    if state.tracing:
        state.trace(f"transfer to n{transfer.to} aborted")
