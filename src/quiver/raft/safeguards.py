"""The rules that keep Raft safe, by name, so that tests can switch them off one at a time.

A harness that stays green without a safeguard does not test it. In production the set of disabled
safeguards is empty and nothing else may ever be configured. Each is checked at the one place that
it protects. R-numbers refer to the rules' table in the documentation of the tests.
"""

from __future__ import annotations

from enum import StrEnum, unique

from msgspec import Struct


@unique
class Safeguard(StrEnum):
    """One rule; the comment says what breaks without it."""

    VOTE_PERSISTENCE = "vote_persistence"
    # R2: a restarted member forgets its term and votes twice. A driver that saves on its own honours this too.
    COMMIT_OWN_TERM_ONLY = "commit_own_term_only"
    # R1: an entry of an earlier term counts as committed and is then overwritten (Figure 8).
    NOOP_ON_ELECTION = "noop_on_election"
    # R1, R10: a new leader cannot commit what it inherited until somebody writes; reads hang.
    PRE_VOTE = "pre_vote"
    # R9: a member that was cut off comes back with a higher term and unseats a healthy leader.
    CHECK_QUORUM = "check_quorum"
    # R9: a leader that reaches nobody goes on for ever; its clients never look for the next one.
    LEADER_STICKINESS = "leader_stickiness"
    # R9, R14: removed and half-connected members win elections against a leader that is well.
    LOG_FRESHNESS_ON_VOTE = "log_freshness_on_vote"
    # R8: a member without committed entries wins and overwrites them.
    ACK_ONLY_DURABLE = "ack_only_durable"
    # R3: a follower acknowledges what a crash then takes from it.
    LEADER_COUNTS_ONLY_DURABLE = "leader_counts_only_durable"
    # R3: a leader commits by counting its own unsynced copy.
    TRUNCATE_ONLY_ON_CONFLICT = "truncate_only_on_conflict"
    # R6: a late or short append cuts acknowledged entries off.
    MATCH_FROM_REQUEST = "match_from_request"
    # R7: a follower acknowledges a tail that the leader never sent.
    IGNORE_OLD_TERM_RESPONSES = "ignore_old_term_responses"
    # R7: an answer to an earlier term's leader counts for entries that the member has lost since.
    READ_INDEX_ROUND = "read_index_round"
    # R11: a leader that was replaced answers reads from the past.
    READ_AFTER_OWN_TERM_COMMIT = "read_after_own_term_commit"
    # R10: a new leader answers reads before it knows what its predecessor committed.
    JOINT_QUORUM = "joint_quorum"
    # R13: old and new voters decide apart from each other during a change.
    CONFIG_ON_APPEND = "config_on_append"
    # R13: members go by the old configuration until they learn the commit; quorums no longer meet.
    ONE_PENDING_CHANGE = "one_pending_change"
    # R13: two changes overlap and their quorums need not meet.
    LEARNER_NOT_COUNTED = "learner_not_counted"
    # R13: entries count as committed by members that cannot elect.
    DURABLE_TERM_CHECK = "durable_term_check"
    # R7: the report of an overwritten write vouches for the entry that replaced it.
    APPEND_CONSISTENCY_CHECK = "append_consistency_check"
    # §5.3: logs grow holes and differ below a common entry.
    TERM_STEP_DOWN = "term_step_down"
    # §5.1: a leader that was replaced goes on leading.
    SINGLE_VOTE_PER_TERM = "single_vote_per_term"
    # §5.2: two leaders in one term.
    SNAPSHOT_IGNORES_OLDER = "snapshot_ignores_older"
    # R16: a late snapshot rolls a member back.
    SNAPSHOT_CONFLICT_DROPS_LOG = "snapshot_conflict_drops_log"
    # R16: a diverged tail survives behind a snapshot and passes for the leader's.
    RECOVER_UNTIL_NO_VOTE = "recover_until_no_vote"
    # R18: a member that lost acknowledged entries helps to elect a leader without them.
    BLANK_MEMBER_NO_VOTE = "blank_member_no_vote"
    # R22: a wiped member votes as if it had never acknowledged anything.
    COMMIT_NEVER_BEYOND_MATCHED = "commit_never_beyond_matched"
    # §5.3: a follower commits a tail that differs from the leader's.
    TRANSFER_STOPS_PROPOSALS = "transfer_stops_proposals"
    # R15: under load the target never catches up, so that a transfer never ends.


class Guards(Struct, frozen=True, kw_only=True):
    """Which safeguards are on, one field each, so that asking costs no more than reading an attribute."""

    vote_persistence: bool
    commit_own_term_only: bool
    noop_on_election: bool
    pre_vote: bool
    check_quorum: bool
    leader_stickiness: bool
    log_freshness_on_vote: bool
    ack_only_durable: bool
    leader_counts_only_durable: bool
    truncate_only_on_conflict: bool
    match_from_request: bool
    ignore_old_term_responses: bool
    read_index_round: bool
    read_after_own_term_commit: bool
    joint_quorum: bool
    config_on_append: bool
    one_pending_change: bool
    learner_not_counted: bool
    durable_term_check: bool
    append_consistency_check: bool
    term_step_down: bool
    single_vote_per_term: bool
    snapshot_ignores_older: bool
    snapshot_conflict_drops_log: bool
    recover_until_no_vote: bool
    blank_member_no_vote: bool
    commit_never_beyond_matched: bool
    transfer_stops_proposals: bool

    @classmethod
    def without(cls, disabled: frozenset[Safeguard]) -> Guards:
        """Return all safeguards but the disabled ones."""
        return cls(**{safeguard.value: safeguard not in disabled for safeguard in Safeguard})
