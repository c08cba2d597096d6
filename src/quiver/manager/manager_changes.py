"""Changes of the set of managers at run time: the primary adds or removes a voter of the metadata group.

The group's Raft configuration is the only record of who is a manager, so there is nothing else to keep in step with it,
and a change that has begun ends under any later primary. Every node is a learner of the group already; one that is
added has caught up before it votes. Nothing here happens by itself: a node with the role `manager` that is no voter is
a *standby* until an operator adds it.

A change that cannot end well is refused, not tried: a node that is not alive would count for majorities without
voting, and a removal must leave a majority of managers that are alive and that the primary has just heard from. A
change that lacks the majority of its new voters would neither end nor could it be taken back.
"""

from __future__ import annotations

from quiver.errors import ConflictError, NotFoundError, UnavailableError
from quiver.metadata import BrokerState, MetadataStore, NotPrimaryError, View
from quiver.model import NodeId
from quiver.raft import Configuration

HEARD_WITHIN_MS = 1_000
"""A manager counts as alive if the primary has heard from it within this time: several of its heartbeats."""
TRANSFER_TIMEOUT_MS = 1_000
"""Time for a primary that is to be removed to transfer its leadership."""


async def add_manager(store: MetadataStore, node: NodeId) -> None:
    """Make a node a manager; return when a majority of the managers has it in its configuration.

    Raises:
        NotFoundError: not done; no such node is registered (`unknown_broker`).
        ConflictError: not done; the node does not have the role (`no_manager_role`) or was removed (`broker_removed`).
        UnavailableError: not done; the node is not alive, has not caught up, or another change is pending.
        OutcomeUnknownError: the change has begun, and this node no longer leads.
    """
    view = await store.read(linearizable=True)
    _check_addable(view, node)
    members = _settled(store)
    if node not in members.voters:
        voters = (*members.voters, node)
        store.change_members(voters=voters, learners=tuple(one for one in members.learners if one != node))
        await store.wait_voter(node, is_voter=True)


async def remove_manager(store: MetadataStore, node: NodeId) -> None:
    """Take a node's vote; it stays in the cluster with its other roles. Return when the change is committed.

    Raises:
        NotFoundError: not done; the node is no manager (`not_a_manager`).
        ConflictError: not done; it is the last manager (`last_manager`), or too few of the others are alive
            (`no_majority`).
        UnavailableError: not done; another change is pending, too few of the others have been heard from just now, or
            the primary, to be removed itself, has no successor.
        OutcomeUnknownError: the change has begun, and this node no longer leads.
    """
    view = await store.read(linearizable=True)
    members = _settled(store)
    _check_removable(view, members, node)
    _check_heard(store, [one for one in members.voters if one != node])
    if node == store.primary:
        await store.transfer_primary(timeout_ms=TRANSFER_TIMEOUT_MS)
        raise NotPrimaryError("not done: this manager is to be removed and leads no longer", leader=store.primary)
    voters = tuple(one for one in members.voters if one != node)
    stays = (node,) if node in view.brokers and view.brokers[node].state is not BrokerState.REMOVED else ()
    store.change_members(voters=voters, learners=(*members.learners, *stays))
    await store.wait_voter(node, is_voter=False)


def _settled(store: MetadataStore) -> Configuration:
    """Return the committed members, unless a change is pending."""
    if store.members != store.committed_members or store.members.is_joint:
        raise UnavailableError("not done: another change of the managers is pending; retry when it is done")
    return store.members


def _check_addable(view: View, node: NodeId) -> None:
    broker = view.brokers.get(node)
    if broker is None:
        raise NotFoundError(f"not done: node {node} is not registered; start it first", code="unknown_broker")
    if broker.state is BrokerState.REMOVED:
        raise ConflictError(f"not done: node {node} was removed; its id is never reused", code="broker_removed")
    if "manager" not in broker.roles:
        raise ConflictError(
            f"not done: node {node} has the roles {','.join(broker.roles)}; restart it with the role manager as well",
            code="no_manager_role",
        )
    if not _is_up(view, node):
        raise UnavailableError(f"not done: node {node} is {broker.state.value}; start it first", code="node_down")


def _check_removable(view: View, members: Configuration, node: NodeId) -> None:
    if node not in members.voters:
        raise NotFoundError(f"not done: node {node} is not a manager", code="not_a_manager")
    staying = [one for one in members.voters if one != node]
    if not staying:
        raise ConflictError(f"not done: node {node} is the last manager; add another one first", code="last_manager")
    up = [one for one in staying if _is_up(view, one)]
    if len(up) <= len(staying) // 2:
        raise ConflictError(
            f"not done: of the managers that would stay, {staying}, only {up} are alive, which is no majority",
            code="no_majority",
        )


def _check_heard(store: MetadataStore, staying: list[NodeId]) -> None:
    heard = [one for one in staying if store.silence_ms(one) <= HEARD_WITHIN_MS]
    if len(heard) <= len(staying) // 2:
        raise UnavailableError(
            f"not done: of the managers that would stay, {staying}, the primary hears only {heard}", code="no_majority"
        )


def _is_up(view: View, node: NodeId) -> bool:
    broker = view.brokers.get(node)
    return broker is not None and broker.state not in (BrokerState.DEAD, BrokerState.SUSPECT, BrokerState.REMOVED)
