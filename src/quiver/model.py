"""The value types of every layer: ids, offsets, indexes, terms.

`NewType` keeps them apart in the type checker at no cost at run time. Ranges are half-open
everywhere: `first_*` is inside, `end_*` is the first one outside.
"""

from __future__ import annotations

from typing import NewType

Buffer = bytes | bytearray | memoryview
"""Anything that exposes contiguous bytes; functions that take it never write to it unless they say so."""

NodeId = NewType("NodeId", int)
"""A process of the cluster; a node whose disk was lost must return under a new id."""

GroupId = NewType("GroupId", int)
"""A Raft group: the metadata or one partition."""

Offset = NewType("Offset", int)
"""0-based number of a record in its partition; dense."""

Index = NewType("Index", int)
"""1-based number of an entry in a Raft log; 0 is before the first."""

Term = NewType("Term", int)
"""Raft's term; outside `raft/` and `replication/` it is called the epoch."""

ProducerId = NewType("ProducerId", int)
"""A registered producer."""

NO_PRODUCER = ProducerId(-1)
"""The producer id of a batch that was built without a registered producer."""

TopicId = NewType("TopicId", int)
"""A topic, deleted ones included; an id is never reused."""

PartitionId = NewType("PartitionId", int)
"""0-based number of a partition in its topic."""

ConsumerId = NewType("ConsumerId", int)
"""A registered consumer."""
