"""How a work queue treats its records: the settings of a group that reads topics as queues. Pure.

They are replicated with the group, and the partition's leader applies them to everything that it does from then on; a
lease that was granted earlier keeps its deadline.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quiver.model import TOPIC_NAME_LENGTH_MAX, TOPIC_NAME_PATTERN

LEASE_MS_MAX = 12 * 3_600_000
"""Longest lease, also after it was extended: a record of a worker that is gone comes back within this time."""
DELAY_MS_MAX = 366 * 24 * 3_600_000
"""Longest delay of a retry."""
IN_FLIGHT_MAX = 100_000
"""Highest `in_flight_max`: the state of a partition has room for it whatever the order of acknowledgements is."""
MULTIPLIER_MAX = 100.0
ATTEMPTS_MAX = 1_000_000
DEAD_LETTERS_PREFIX = "quiver-dead/"
"""Before the id of a queue's group: begins the names of producers, and ids of requests, with which nodes move its dead
letters. Nobody else may use such names."""

_TOPIC_NAME = re.compile(TOPIC_NAME_PATTERN)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")

QueueOrder = Literal["offset", "key"]


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The settings of one work queue."""

    lease_ms: Annotated[int, Meta(ge=1, le=LEASE_MS_MAX)] = 30_000
    """How long a record belongs to the worker that received it; then it is delivered again."""
    max_attempts: Annotated[int, Meta(ge=0, le=ATTEMPTS_MAX)] = 5
    """Deliveries after which a record that is not acknowledged becomes a dead letter; 0: never."""
    backoff_ms: Annotated[int, Meta(ge=0, le=DELAY_MS_MAX)] = 1_000
    """Delay before the first retry of a record that a worker returned."""
    backoff_max_ms: Annotated[int, Meta(ge=0, le=DELAY_MS_MAX)] = 300_000
    """Longest delay before a retry."""
    backoff_multiplier: Annotated[float, Meta(ge=1.0, le=MULTIPLIER_MAX)] = 2.0
    """Factor by which the delay grows with each attempt."""
    in_flight_max: Annotated[int, Meta(ge=1, le=IN_FLIGHT_MAX)] = 10_000
    """Records per partition that are leased, waiting or dying; at this number no more are leased."""
    order: QueueOrder = "offset"
    """`key`: at most one record of a key is under way, and those of one key are delivered in their order."""
    dead_letter_topic: Annotated[str, Meta(max_length=300)] = ""
    """Topic for dead letters; empty: `dead_letter_topic_of` names it."""

    def retry_delay_ms(self, attempt: int) -> int:
        """Return the delay before the next delivery of a record that was delivered `attempt` times."""
        try:
            delay_ms = self.backoff_ms * self.backoff_multiplier ** (attempt - 1)
        except OverflowError:
            delay_ms = self.backoff_max_ms if self.backoff_ms else 0
        return int(min(delay_ms, self.backoff_max_ms))


def find_dead_letter_fault(settings: QueueSettings, topics: Iterable[str]) -> str:
    """Return why a queue of these topics cannot have its dead letters where its settings say; empty: it can."""
    name = settings.dead_letter_topic
    if name and not _TOPIC_NAME.fullmatch(name):
        return f"{name!r} is no name of a topic: those have letters, digits, '.', '_' and '-'"
    if name and name in topics:
        return f"{name!r} is a topic of the queue itself, which would receive its dead letters again"
    return ""


def dead_letter_topic_of(settings: QueueSettings, *, topic: str, group: str) -> str:
    """Return the topic that gets a queue's dead letters.

    By default it is `{topic}.{group}.dead`. Characters of the group's name that a topic's name cannot have become `_`,
    and a name that is too long is cut and gets a checksum.
    """
    if settings.dead_letter_topic:
        return settings.dead_letter_topic
    name = _NOT_IN_NAMES.sub("_", f"{topic}.{group}.dead")
    if len(name) > TOPIC_NAME_LENGTH_MAX:
        ending = f".{zlib.crc32(name.encode()):08x}.dead"
        name = name[: TOPIC_NAME_LENGTH_MAX - len(ending)] + ending
    return name
