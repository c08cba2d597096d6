"""Handing leadership to a chosen voter (dissertation §3.10, R15).

The leader takes no proposals meanwhile, waits until the target has everything, tells it to campaign at
once, and goes on leading if that has not happened within an election timeout.
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
        UnavailableError: not done; another transfer is under way, or the target lost its log.
    """
    if to == state.id or to not in state.configuration.voters:
        raise RequestError(f"leadership can only go to another voter, which node {to} is not")
    if leadership.transfer is not None:
        if leadership.transfer.to != to:
            raise UnavailableError(f"leadership is being transferred to node {leadership.transfer.to}")
        return
    progress = leadership.progress[to]
    if progress.state is LOST:
        raise UnavailableError(f"node {to} lost its log")
    leadership.transfer = Transfer(to, state.now_ms + state.config.election_timeout_ms)
    sending.maybe_send(state, progress)
    advance(state, leadership.transfer, progress)


def advance(state: RaftState, transfer: Transfer, progress: PeerProgress) -> None:
    """Tell the target to campaign once it has the whole log."""
    if transfer.told or progress.node != transfer.to or progress.match < state.log.terms.last_index:
        return
    transfer.told = True
    state.send(transfer.to, TimeoutNow(state.term))


def expire(state: RaftState, leadership: Leadership, transfer: Transfer) -> None:
    """Give a transfer up that took too long, and take proposals again."""
    if state.now_ms < transfer.deadline_ms:
        return
    leadership.transfer = None
    if state.tracing:
        state.trace(f"transfer to n{transfer.to} aborted")
