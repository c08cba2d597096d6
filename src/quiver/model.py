"""The value types of every layer: ids, offsets, indexes, terms.

`NewType` keeps them apart in the type checker at no cost at run time. Ranges are half-open
everywhere: `first_*` is inside, `end_*` is the first one outside.

Most types carry their bounds, so that every decoder refuses a number outside of them. They leave so much room that no
number that was decoded overflows the 64 bits that it has on disk, however long the cluster then runs.
"""

from __future__ import annotations

from typing import Annotated, NewType

from msgspec import Meta

TOPIC_NAME_LENGTH_MAX = 200
TOPIC_NAME_PATTERN = rf"(?!\.{{1,2}}$)[A-Za-z0-9._-]{{1,{TOPIC_NAME_LENGTH_MAX}}}"
"""The names of topics; they are parts of paths, so `.` and `..` are none."""
LABEL_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""The names that people give to things in files of their own: contexts, keys of encryption."""

ID_MAX = 1 << 53
"""The highest id: the largest number that every JSON program reads exactly."""
POSITION_MAX = 1 << 62
"""The highest index and offset that is decoded; half of what the disk's format can hold."""
TERM_MAX = 1 << 53
"""The highest term that is decoded, and in which a member campaigns."""

Buffer = bytes | bytearray | memoryview
"""Anything that exposes contiguous bytes; functions that take it never write to it unless they say so."""

NodeId = NewType("NodeId", Annotated[int, Meta(ge=0, le=ID_MAX)])
"""A process of the cluster; a node whose disk was lost must return under a new id."""

GroupId = NewType("GroupId", Annotated[int, Meta(ge=0, le=ID_MAX)])
"""A Raft group: the metadata or one partition."""

Offset = NewType("Offset", Annotated[int, Meta(ge=0, le=POSITION_MAX)])
"""0-based number of a record in its partition; dense."""

Index = NewType("Index", Annotated[int, Meta(ge=0, le=POSITION_MAX)])
"""1-based number of an entry in a Raft log; 0 is before the first."""

Term = NewType("Term", Annotated[int, Meta(ge=0, le=TERM_MAX)])
"""Raft's term; outside `raft/` and `replication/` it is called the epoch."""

ProducerId = NewType("ProducerId", int)
"""A registered producer; its users bound it, because of `NO_PRODUCER`."""

NO_PRODUCER = ProducerId(-1)
"""The producer id of a batch that was built without a registered producer."""

TopicId = NewType("TopicId", Annotated[int, Meta(ge=0, le=ID_MAX)])
"""A topic, deleted ones included; an id is never reused."""

PartitionId = NewType("PartitionId", int)
"""0-based number of a partition in its topic; its users bound it, because rows of the metadata use -1 for all."""

ConsumerId = NewType("ConsumerId", Annotated[int, Meta(ge=0, le=ID_MAX)])
"""A registered consumer."""

SESSION_BITS = 20
"""The low bits of a consumer's session; the bits above them are an index of the metadata, so that later sessions are
higher. A plain consumer fills them at random: they order users of a name that registered at the same index. The epochs
of a group's assignments have zeros there."""
