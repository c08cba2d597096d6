"""Commands on holds: place, renew by placing again, release, and expire.

Pure; called only by `apply`. A hold expires only by the primary's clock: `ExpireHold` carries the time, so that every
member decides alike. Brokers honour a hold as long as it is in the metadata.
"""

from __future__ import annotations

from itertools import pairwise

from quiver.metadata.commands import ExpireHold, PlaceHoldCommand, ReleaseHoldCommand
from quiver.metadata.decision import CommandDecision, CommandRefusal, refuse
from quiver.metadata.rows import HoldRow, Table, TopicRow
from quiver.metadata.state import MetadataState, drop, put
from quiver.model import TopicId

HOLDS_MAX = 1_000
"""Maximum number of holds in the cluster: each of them is renewed several times before it expires."""
LASTING_MS_MIN = 1_000
LASTING_MS_MAX = 24 * 60 * 60 * 1000
"""Longest time that a hold lasts without renewal: a forgotten hold must not fill disks permanently."""


def place(state: MetadataState, command: PlaceHoldCommand) -> CommandDecision | CommandRefusal:
    """Place a hold, or renew or advance the one of that name."""
    holds: dict[tuple[TopicId, str], HoldRow] = state.tables[Table.HOLDS]
    known = holds.get((command.topic_id, command.name))
    topic: TopicRow | None = state.tables[Table.TOPICS].get(command.topic_id)
    if topic is None:
        return refuse("unknown_topic", f"not done: unknown topic id {command.topic_id}")
    refusal = _check(command, topic)
    if refusal is not None:
        return refusal
    if known is None and len(holds) >= HOLDS_MAX:
        return refuse("too_many_holds", f"not done: the cluster has {HOLDS_MAX} holds, the maximum; release some")
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
    """Delete the holds of a name, on one topic or on all."""
    holds: dict[tuple[TopicId, str], HoldRow] = state.tables[Table.HOLDS]
    named = [key for key in sorted(holds) if key[1] == command.name]
    return CommandDecision([drop(holds[key]) for key in named if command.topic_id in (None, key[0])])


def expire(state: MetadataState, command: ExpireHold) -> CommandDecision | CommandRefusal:
    """Delete an expired hold; one that was renewed in the meantime stays."""
    hold: HoldRow | None = state.tables[Table.HOLDS].get((command.topic_id, command.name))
    if hold is None:
        return CommandDecision()
    if command.now_ms < hold.expires_ms:
        return refuse(
            "too_early", f"not done: hold {hold.name!r} expires at {hold.expires_ms} ms, not yet at {command.now_ms} ms"
        )
    return CommandDecision([drop(hold)])


def _check(command: PlaceHoldCommand, topic: TopicRow) -> CommandRefusal | None:
    if not command.name:
        return refuse("bad_hold", "not done: the hold has no name; give one")
    if not LASTING_MS_MIN <= command.lasting_ms <= LASTING_MS_MAX:
        return refuse(
            "bad_hold",
            f"not done: a hold lasts {LASTING_MS_MIN} to {LASTING_MS_MAX} ms, not {command.lasting_ms} ms; renew it "
            "to hold for longer",
        )
    numbers = [position.partition_id for position in command.positions]
    if not numbers or any(first >= second for first, second in pairwise(numbers)):
        return refuse(
            "bad_hold", "not done: the positions of a hold name at least one partition, each once, in ascending order"
        )
    if numbers[-1] >= topic.partitions:
        message = f"not done: topic {topic.name!r} has {topic.partitions} partitions and no partition {numbers[-1]}"
        return refuse("unknown_partition", message)
    return None
