"""What commands do to holds: placed, renewed by being placed again, released by their owners, ended when over.

Pure; called by `apply` alone. A hold is over by the primary's clock and by nothing else: the command that ends it says
what time it is, so that every member agrees, and brokers honour a hold for as long as they know of it.
"""

from __future__ import annotations

from itertools import pairwise

from quiver.metadata.commands import ExpireHold, PlaceHoldCommand, ReleaseHoldCommand
from quiver.metadata.decision import CommandDecision, CommandRefusal, refuse
from quiver.metadata.rows import HoldRow, Table, TopicRow
from quiver.metadata.state import MetadataState, drop, put
from quiver.model import TopicId

HOLDS_MAX = 1_000
"""How many holds there may be: each is renewed several times before it is over."""
LASTING_MS_MIN = 1_000
LASTING_MS_MAX = 24 * 60 * 60 * 1000
"""Longest time for which a hold lasts without being renewed: a forgotten one must not fill disks for good."""


def place(state: MetadataState, command: PlaceHoldCommand) -> CommandDecision | CommandRefusal:
    """Keep records, or keep them for longer, or from further on."""
    holds: dict[tuple[TopicId, str], HoldRow] = state.tables[Table.HOLDS]
    known = holds.get((command.topic_id, command.name))
    topic: TopicRow | None = state.tables[Table.TOPICS].get(command.topic_id)
    if topic is None:
        return refuse("unknown_topic", f"not done: there is no topic with id {command.topic_id}")
    refusal = _check(command, topic)
    if refusal is not None:
        return refusal
    if known is None and len(holds) >= HOLDS_MAX:
        return refuse("too_many_holds", f"not done: there are {HOLDS_MAX} holds already; release some")
    hold = HoldRow(
        topic_id=command.topic_id,
        name=command.name,
        owner=command.owner,
        placed_ms=command.now_ms if known is None else known.placed_ms,
        expires_ms=command.now_ms + command.lasting_ms,
        positions=command.positions,
    )
    return CommandDecision([] if hold == known else [put(hold)])


def release(state: MetadataState, command: ReleaseHoldCommand) -> CommandDecision:
    """Let holds of a name go."""
    holds: dict[tuple[TopicId, str], HoldRow] = state.tables[Table.HOLDS]
    named = [key for key in sorted(holds) if key[1] == command.name]
    return CommandDecision([drop(holds[key]) for key in named if command.topic_id in (None, key[0])])


def expire(state: MetadataState, command: ExpireHold) -> CommandDecision | CommandRefusal:
    """Let a hold go that is over."""
    hold: HoldRow | None = state.tables[Table.HOLDS].get((command.topic_id, command.name))
    if hold is None:
        return CommandDecision()
    if command.now_ms < hold.expires_ms:
        return refuse("too_early", f"not done: hold {hold.name!r} lasts until {hold.expires_ms}")
    return CommandDecision([drop(hold)])


def _check(command: PlaceHoldCommand, topic: TopicRow) -> CommandRefusal | None:
    if not command.name:
        return refuse("bad_hold", "not done: a hold needs a name")
    if not LASTING_MS_MIN <= command.lasting_ms <= LASTING_MS_MAX:
        return refuse(
            "bad_hold", f"not done: a hold lasts {LASTING_MS_MIN} to {LASTING_MS_MAX} ms before it is renewed"
        )
    numbers = [position.partition_id for position in command.positions]
    if not numbers or any(first >= second for first, second in pairwise(numbers)):
        return refuse("bad_hold", "not done: a hold names at least one partition, each once, in order")
    if numbers[-1] >= topic.partitions:
        return refuse("unknown_partition", f"not done: topic {topic.name!r} has no partition {numbers[-1]}")
    return None
