"""Elections: requesting, granting and counting votes (§5.2, §5.4.1).

Departures from the paper, all in the dissertation: a pre-vote asks first, without raising the term (§9.6);
a member that hears a live leader refuses both kinds (§4.2.3), unless the leader itself asked for
the election (§3.10). A group's first election has no pre-votes: there is no leader to disturb.
"""

from __future__ import annotations

from quiver.model import TERM_MAX, NodeId, Term
from quiver.raft import hibernation
from quiver.raft.configuration import majority_of
from quiver.raft.leader import become_leader
from quiver.raft.messages import VoteRequest, VoteResponse
from quiver.raft.output import Role
from quiver.raft.state import Campaign, RaftState


def campaign(state: RaftState, *, transfer: bool = False) -> None:
    """Start an election if this member may: with pre-votes first, unless the leader asked for it or it is the first."""
    if not state.may_campaign() or state.term >= TERM_MAX:  # every term has been used up: nobody could answer
        return
    if transfer or not state.term:  # in term 0 there is no leader that an election could disturb
        _ask_votes(state, transfer=transfer)
    else:
        _ask_pre_votes(state)


def doubt_leader(state: RaftState) -> None:
    """Stop counting the leader as fresh, and campaign within half an election timeout if it stays silent.

    The wait is random, so that members that notice together do not campaign together (§5.2).
    """
    hibernation.wake(state)
    timeout_ms = state.config.election_timeout_ms
    state.leader_contact_ms = state.now_ms - timeout_ms
    deadline_ms = state.now_ms + int(state.rng.random() * timeout_ms / 2)
    state.election_deadline_ms = min(state.election_deadline_ms, deadline_ms)


def handle_vote_request(state: RaftState, from_: NodeId, message: VoteRequest) -> None:
    """Give or refuse a vote; a vote leaves only after it is durable (R2)."""
    granted = _is_grantable(state, from_, message)
    if granted and not message.pre:
        state.reset_election_timer()
        if state.vote != from_:
            state.vote = from_
            state.save_hard_state()
    if state.tracing:
        verb = "grants" if granted else "refuses"
        state.trace(f"{verb} n{from_} a {'pre-vote' if message.pre else 'vote'} for term {message.term}")
    term = message.term if granted else state.term
    state.send(from_, VoteResponse(term, granted=granted, pre=message.pre))


def handle_vote_response(state: RaftState, from_: NodeId, message: VoteResponse) -> None:
    """Count an answer, if it belongs to the current campaign."""
    current = state.campaign
    if current is None or current.pre != message.pre:
        return
    if message.pre and message.granted and message.term != state.term + 1:
        return  # an answer to a pre-vote for another term
    (current.granted if message.granted else current.refused).add(from_)
    _count(state, current)


def refuse_pre_vote(state: RaftState, to: NodeId) -> None:
    """Refuse a pre-vote because the leader is alive; the answer saves the candidate its timeout."""
    if state.tracing:
        state.trace(f"refuses n{to} a pre-vote: its leader is alive")
    state.send(to, VoteResponse(state.term, granted=False, pre=True))


def _is_grantable(state: RaftState, from_: NodeId, message: VoteRequest) -> bool:
    if not state.may_vote():
        return False
    return _has_vote_for(state, from_, message.term) and _is_up_to_date(state, message)


def _has_vote_for(state: RaftState, candidate: NodeId, term: Term) -> bool:
    """Return whether this member's one vote in a term is free or already the candidate's (§5.2)."""
    if term != state.term or state.vote == candidate:
        return True
    return state.vote is None and state.leader is None


def _is_up_to_date(state: RaftState, message: VoteRequest) -> bool:
    """Return whether the candidate's log is as up-to-date: the later last term wins, then the longer log (§5.4.1)."""
    terms = state.log.terms
    return (message.last_term, message.last_index) >= (terms.last_term, terms.last_index)


def _ask_pre_votes(state: RaftState) -> None:
    """Ask which members would vote. Nothing durable changes; the silent leader is forgotten (R9)."""
    state.role = Role.PRE_CANDIDATE
    _begin(state, Campaign(pre=True), term=Term(state.term + 1), transfer=False)


def _ask_votes(state: RaftState, *, transfer: bool) -> None:
    """Ask for votes in a new term, after voting for this member itself."""
    state.enter_term(Term(state.term + 1), vote=state.id)
    state.role = Role.CANDIDATE
    _begin(state, Campaign(pre=False), term=state.term, transfer=transfer)


def _begin(state: RaftState, current: Campaign, *, term: Term, transfer: bool) -> None:
    state.campaign = current
    state.leader = None
    state.reset_election_timer()
    state.announce()
    current.granted.add(state.id)
    terms = state.log.terms
    request = VoteRequest(term, terms.last_index, terms.last_term, current.pre, transfer)
    configuration = state.configuration
    for node in configuration.members:
        if node != state.id and configuration.is_voter(node):
            state.send(node, request)
    _count(state, current)


def _count(state: RaftState, current: Campaign) -> None:
    """Win with a majority of every electorate; stop when one is no longer possible."""
    electorates = state.electorates()
    if all(majority_of(voters, current.granted) for voters in electorates):
        if current.pre:
            _ask_votes(state, transfer=False)
        else:
            become_leader(state)
    elif any(_is_lost(voters, current) for voters in electorates):
        state.become_follower(state.term, None)


def _is_lost(voters: tuple[NodeId, ...], current: Campaign) -> bool:
    """Return whether the voters that have not refused are no longer a majority."""
    return 2 * sum(node not in current.refused for node in voters) <= len(voters)
