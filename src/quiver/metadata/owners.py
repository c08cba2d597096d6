"""The command that gives a topic, producer or consumer to another user. Pure; called only by `apply`.

What is made belongs to the principal that made it. A restored cluster, or a user who leaves, needs another owner: an
administrator names it. The owner need not exist: identity providers have users that the metadata does not know. Quotas
of the new owner count what it got, and refuse only what it makes itself afterwards.
"""

from __future__ import annotations

import msgspec

from quiver.metadata.commands import ChangeOwnerCommand
from quiver.metadata.decision import CommandDecision, CommandRefusal, refuse
from quiver.metadata.rows import ConsumerRow, OwnedKind, ProducerRow, Table, TopicRow
from quiver.metadata.state import MetadataState, put
from quiver.security.permissions import USER_PREFIX

_TABLES = {
    OwnedKind.TOPIC: Table.TOPICS,
    OwnedKind.PRODUCER: Table.PRODUCERS,
    OwnedKind.CONSUMER: Table.CONSUMERS,
}


def change_owner(state: MetadataState, command: ChangeOwnerCommand) -> CommandDecision | CommandRefusal:
    """Change the owner of a topic, producer or consumer."""
    owner = command.owner
    if owner and (not owner.startswith(USER_PREFIX) or owner == USER_PREFIX):
        return refuse("bad_name", f"not done: {owner!r} cannot own anything; give user:<name>, or nobody")
    row: TopicRow | ProducerRow | ConsumerRow | None = state.tables[_TABLES[command.owned]].get(command.id)
    if row is None:
        return refuse(f"unknown_{command.owned.value}", f"not done: unknown {command.owned.value} {command.id}")
    if row.owner == owner:
        return CommandDecision()
    return CommandDecision([put(msgspec.structs.replace(row, owner=owner))])
