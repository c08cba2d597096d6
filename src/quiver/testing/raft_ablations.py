"""Disable one safeguard of the Raft core at a time, to prove that tests and simulations notice.

A harness that stays green without a safeguard does not test it. The core has one function or method per safeguard and
no switch: this module replaces exactly that function while `disabled` is active, in every member of the process. Only
tests may import it. R-numbers refer to the table of rules in `docs/reliability.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum, unique
from typing import Any
from unittest.mock import patch

from quiver.model import Index, NodeId
from quiver.raft import (
    Append,
    AppendResponse,
    Entry,
    HeartbeatResponse,
    RaftMessage,
    ReadReady,
    SnapshotMetadata,
    VoteResponse,
    commitment,
    election,
    follower,
    leader,
    membership,
    sending,
    snapshots,
)
from quiver.raft.configuration import Configuration
from quiver.raft.core import Raft
from quiver.raft.leadership import Leadership
from quiver.raft.log import RaftLog
from quiver.raft.state import RaftState

Replacement = tuple[object, str, Any]
"""The module or class, the name of the function in it, and the function to put in its place."""


@unique
class Safeguard(StrEnum):
    """One rule of the core; the comment says what breaks without it."""

    VOTE_PERSISTENCE = "vote_persistence"
    # R2: a restarted member forgets its term and votes twice.
    COMMIT_OWN_TERM_ONLY = "commit_own_term_only"
    # R1: an entry of an earlier term counts as committed and is then overwritten (Figure 8).
    NOOP_ON_ELECTION = "noop_on_election"
    # R1, R10: a new leader cannot commit what it inherited until a client proposes something; reads hang.
    PRE_VOTE = "pre_vote"
    # R9: a member that was cut off comes back with a higher term and unseats a healthy leader.
    CHECK_QUORUM = "check_quorum"
    # R9: a leader that reaches no other member leads forever; its clients never look for another.
    LEADER_STICKINESS = "leader_stickiness"
    # R9, R14: removed and half-connected members win elections against a healthy leader.
    LOG_FRESHNESS_ON_VOTE = "log_freshness_on_vote"
    # R8: a member without committed entries wins and overwrites them.
    ACK_ONLY_DURABLE = "ack_only_durable"
    # R3: a follower acknowledges entries that a crash then removes.
    LEADER_COUNTS_ONLY_DURABLE = "leader_counts_only_durable"
    # R3: a leader commits by counting its own unsynced copy.
    TRUNCATE_ONLY_ON_CONFLICT = "truncate_only_on_conflict"
    # R6: a late or short append truncates acknowledged entries.
    MATCH_FROM_REQUEST = "match_from_request"
    # R7: a follower acknowledges a tail that the leader never sent.
    IGNORE_OLD_TERM_RESPONSES = "ignore_old_term_responses"
    # R7: an answer to an earlier term's leader counts for entries that the member has lost since.
    READ_INDEX_ROUND = "read_index_round"
    # R11: a leader that was replaced answers stale reads.
    READ_AFTER_OWN_TERM_COMMIT = "read_after_own_term_commit"
    # R10: a new leader answers reads before it knows what its predecessor committed.
    JOINT_QUORUM = "joint_quorum"
    # R13: old and new voters decide independently during a change.
    CONFIG_ON_APPEND = "config_on_append"
    # R13: members use the old configuration until they learn the commit; quorums no longer overlap.
    ONE_PENDING_CHANGE = "one_pending_change"
    # R13: two changes run at once and their quorums need not overlap.
    LEARNER_NOT_COUNTED = "learner_not_counted"
    # R13: entries count as committed by members that cannot elect.
    DURABLE_TERM_CHECK = "durable_term_check"
    # R7: the report of an overwritten write vouches for the entry that replaced it.
    APPEND_CONSISTENCY_CHECK = "append_consistency_check"
    # §5.3: logs differ before a common entry.
    TERM_STEP_DOWN = "term_step_down"
    # §5.1: a leader that was replaced keeps leading.
    SINGLE_VOTE_PER_TERM = "single_vote_per_term"
    # §5.2: two leaders in one term.
    SNAPSHOT_IGNORES_OLDER = "snapshot_ignores_older"
    # R16: a late snapshot rolls a member back.
    SNAPSHOT_CONFLICT_DROPS_LOG = "snapshot_conflict_drops_log"
    # R16: a diverged tail survives after a snapshot and is taken for the leader's.
    RECOVER_UNTIL_NO_VOTE = "recover_until_no_vote"
    # R18: a member that lost acknowledged entries helps to elect a leader without them.
    BLANK_MEMBER_NO_VOTE = "blank_member_no_vote"
    # R22: a wiped member votes as if it had never acknowledged anything.
    JOINING_MEMBER_NO_VOTE = "joining_member_no_vote"
    # R24: a node that is added again elects itself by a configuration of its earlier membership.
    COMMIT_NEVER_BEYOND_MATCHED = "commit_never_beyond_matched"
    # §5.3: a follower commits a tail that differs from the leader's.
    TRANSFER_STOPS_PROPOSALS = "transfer_stops_proposals"
    # R15: under load the target never catches up, so that a transfer never ends.
    STRANGERS_UNHEEDED = "strangers_unheeded"
    # R23: a node that is no member, and that nobody knows, unseats a healthy leader.


def _allow(*_: object, **__: object) -> bool:
    return True


def _deny(*_: object, **__: object) -> bool:
    return False


def _skip(*_: object, **__: object) -> None:
    pass


# -- elections -----------------------------------------------------------------------------------------


def _ask_votes_first(state: RaftState) -> None:
    election._ask_votes(state, transfer=False)


def _never_lose_quorum(state: RaftState, leadership: Leadership) -> bool:
    leadership.own.heard_ms = state.now_ms
    return True


def _vote_while_recovering(state: RaftState) -> bool:
    return not state.is_joining and state.is_named()


def _vote_while_blank(state: RaftState) -> bool:
    return state.recover_until is None


def _vote_while_joining(state: RaftState) -> bool:
    return state.recover_until is None and state.is_named()


def _campaign_while_joining(state: RaftState) -> bool:
    is_voter = state.is_voter or any(known.is_voter(state.id) for known in state.relevant_configurations())
    return state.is_electable and is_voter and _vote_while_joining(state)


def _lead_on_in_later_term(raft: Raft, from_: NodeId, message: RaftMessage) -> bool:
    return raft._state.leadership is None and _enter_later_term(raft, from_, message)


def _count_old_responses(raft: Raft, from_: NodeId, message: RaftMessage) -> bool:
    if isinstance(message, AppendResponse | HeartbeatResponse | VoteResponse):
        return True
    return _meet_earlier_term(raft, from_, message)


# -- leader --------------------------------------------------------------------------------------------


def _begin_term_without_noop(state: RaftState, leadership: Leadership) -> None:
    sending.broadcast_heartbeat(state, leadership)


def _count_own_copy_early(state: RaftState, entries: Sequence[Entry]) -> None:
    _propose(state, entries)
    leadership = leader.require_leadership(state)
    leadership.own.match = state.log.terms.last_index
    commitment.advance(state, leadership)


def _read_without_round(state: RaftState, leadership: Leadership, context: int) -> None:
    if commitment.is_ready(state, leadership):
        state.output.reads = (ReadReady(context, state.log.commit),)
    else:
        leadership.reads.hold(context)


def _read_before_own_commit(state: RaftState, leadership: Leadership, context: int) -> None:
    leadership.reads.add(context, index=state.log.commit, needed_round=state.round + 1)
    commitment.begin_read_round(state, leadership)


# -- followers -----------------------------------------------------------------------------------------


def _acknowledge_matched(state: RaftState) -> Index:
    return state.matched


def _acknowledge_early(state: RaftState, to: NodeId, appended: Sequence[Entry]) -> None:
    del appended
    follower.acknowledge(state, to)


def _truncate_always(state: RaftState, message: Append) -> Sequence[Entry]:
    entries = message.entries
    if message.prev_index == state.log.terms.last_index or not entries:
        return entries
    entries = entries[max(state.log.commit - message.prev_index, 0) :]
    state.truncate(Index(max(message.prev_index, state.log.commit) + 1))
    return entries


def _match_to_the_end(state: RaftState, index: Index) -> None:
    del index
    state.matched = max(state.matched, state.log.terms.last_index)


def _accept_any_previous_term(state: RaftState, message: Append) -> bool:
    return message.prev_index <= max(state.log.commit, state.log.terms.last_index)


def _commit_unmatched(state: RaftState, leader_commit: Index) -> None:
    if leader_commit > state.log.commit:
        state.commit_to(min(leader_commit, state.log.terms.last_index))


# -- snapshots -----------------------------------------------------------------------------------------


def _newer_and_in_log(log: RaftLog, snapshot: SnapshotMetadata) -> bool:
    return snapshot.last_index > log.commit and _is_in_log(log, snapshot)


def _index_in_log(log: RaftLog, snapshot: SnapshotMetadata) -> bool:
    return snapshot.last_index <= log.terms.last_index


# -- configurations ------------------------------------------------------------------------------------


def _new_voters_alone(state: RaftState) -> tuple[tuple[NodeId, ...], ...]:
    return (state.configuration.voters,)


def _committed_configuration(state: RaftState) -> Configuration:
    return state.log.configurations.at(state.log.commit)


def _commit_and_reconfigure(state: RaftState, index: Index) -> bool:
    if not _commit_to(state, index):
        return False
    state.refresh_configuration()
    return True


def _count_learners(state: RaftState, leadership: Leadership, *, next_index: Index) -> None:
    electorates = [(*voters, *state.configuration.learners) for voters in state.electorates()]
    leadership.reconfigure(state.configuration, electorates=electorates, next_index=next_index, now_ms=state.now_ms)


_enter_later_term = Raft._enter_later_term
_meet_earlier_term = Raft._meet_earlier_term
_commit_to = RaftState.commit_to
_propose = leader.propose
_is_in_log = snapshots._is_in_log

REPLACEMENTS: dict[Safeguard, tuple[Replacement, ...]] = {
    Safeguard.VOTE_PERSISTENCE: ((RaftState, "save_hard_state", _skip),),
    Safeguard.COMMIT_OWN_TERM_ONLY: ((commitment, "_is_of_own_term", _allow),),
    Safeguard.NOOP_ON_ELECTION: ((leader, "_begin_term", _begin_term_without_noop),),
    Safeguard.PRE_VOTE: ((election, "_ask_pre_votes", _ask_votes_first),),
    Safeguard.CHECK_QUORUM: ((leader, "_has_quorum", _never_lose_quorum),),
    Safeguard.LEADER_STICKINESS: ((RaftState, "leader_is_fresh", _deny),),
    Safeguard.LOG_FRESHNESS_ON_VOTE: ((election, "_is_up_to_date", _allow),),
    Safeguard.ACK_ONLY_DURABLE: (
        (RaftState, "acknowledgeable", _acknowledge_matched),
        (follower, "_answer_append", _acknowledge_early),
    ),
    Safeguard.LEADER_COUNTS_ONLY_DURABLE: ((leader, "propose", _count_own_copy_early),),
    Safeguard.TRUNCATE_ONLY_ON_CONFLICT: ((follower, "_unknown", _truncate_always),),
    Safeguard.MATCH_FROM_REQUEST: ((RaftState, "mark_matched", _match_to_the_end),),
    Safeguard.IGNORE_OLD_TERM_RESPONSES: ((Raft, "_meet_earlier_term", _count_old_responses),),
    Safeguard.READ_INDEX_ROUND: ((commitment, "read", _read_without_round),),
    Safeguard.READ_AFTER_OWN_TERM_COMMIT: ((commitment, "read", _read_before_own_commit),),
    Safeguard.JOINT_QUORUM: ((RaftState, "electorates", _new_voters_alone),),
    Safeguard.CONFIG_ON_APPEND: (
        (RaftState, "latest_configuration", _committed_configuration),
        (RaftState, "commit_to", _commit_and_reconfigure),
    ),
    Safeguard.ONE_PENDING_CHANGE: ((membership, "_is_change_pending", _deny),),
    Safeguard.LEARNER_NOT_COUNTED: ((RaftState, "reconfigure", _count_learners),),
    Safeguard.DURABLE_TERM_CHECK: ((RaftLog, "_may_be_overwritten", _deny),),
    Safeguard.APPEND_CONSISTENCY_CHECK: ((follower, "_is_consistent", _accept_any_previous_term),),
    Safeguard.TERM_STEP_DOWN: ((Raft, "_enter_later_term", _lead_on_in_later_term),),
    Safeguard.SINGLE_VOTE_PER_TERM: ((election, "_has_vote_for", _allow),),
    Safeguard.SNAPSHOT_IGNORES_OLDER: (
        (snapshots, "_is_old", _deny),
        (snapshots, "_is_in_log", _newer_and_in_log),
    ),
    Safeguard.SNAPSHOT_CONFLICT_DROPS_LOG: ((snapshots, "_is_in_log", _index_in_log),),
    Safeguard.RECOVER_UNTIL_NO_VOTE: ((RaftState, "may_vote", _vote_while_recovering),),
    Safeguard.BLANK_MEMBER_NO_VOTE: ((RaftState, "may_vote", _vote_while_blank),),
    Safeguard.JOINING_MEMBER_NO_VOTE: (
        (RaftState, "may_vote", _vote_while_joining),
        (RaftState, "may_campaign", _campaign_while_joining),
    ),
    Safeguard.COMMIT_NEVER_BEYOND_MATCHED: ((follower, "_follow_commit", _commit_unmatched),),
    Safeguard.TRANSFER_STOPS_PROPOSALS: ((leader, "_check_no_transfer", _skip),),
    Safeguard.STRANGERS_UNHEEDED: ((Raft, "_heeds", _allow),),
}


@contextmanager
def disabled(safeguard: Safeguard) -> Iterator[None]:
    """Run the core of every member in this process without one safeguard."""
    with ExitStack() as stack:
        for owner, name, replacement in REPLACEMENTS[safeguard]:
            stack.enter_context(patch.object(owner, name, replacement))
        yield
