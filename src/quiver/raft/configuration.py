"""Configurations of a group, their quorums, and which one is in force at which index.

A configuration is *simple* (one set of voters) or *joint* (two sets; every decision needs a majority
of each, §6). This module owns the counting and the history; when to change is `membership`'s.

Invariants: a history is never empty and its indexes grow; the last one is in force (§6: a member
uses the latest configuration in its log, committed or not).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from msgspec import Struct

from quiver.model import Index, NodeId


class Configuration(Struct, frozen=True, gc=False):
    """The members of a group; joint while `voters_outgoing` is not empty.

    While joint, a node in both `voters_outgoing` and `learners` is a voter that becomes a learner
    when the joint phase ends.
    """

    voters: tuple[NodeId, ...]
    voters_outgoing: tuple[NodeId, ...] = ()
    learners: tuple[NodeId, ...] = ()

    @property
    def is_joint(self) -> bool:
        """Return whether decisions need a majority of the outgoing voters too."""
        return bool(self.voters_outgoing)

    @property
    def electorates(self) -> tuple[tuple[NodeId, ...], ...]:
        """Return the sets of voters of which each must agree."""
        return (self.voters, self.voters_outgoing) if self.voters_outgoing else (self.voters,)

    @property
    def members(self) -> tuple[NodeId, ...]:
        """Return every node named, sorted, so that iteration is the same everywhere."""
        return tuple(sorted({*self.voters, *self.voters_outgoing, *self.learners}))

    def is_voter(self, node: NodeId) -> bool:
        """Return whether the node's vote counts in any electorate."""
        return node in self.voters or node in self.voters_outgoing

    def includes(self, node: NodeId) -> bool:
        """Return whether the node is a member, voting or not."""
        return self.is_voter(node) or node in self.learners

    def left(self) -> Configuration:
        """Return the simple configuration in which this joint one ends."""
        return Configuration(voters=self.voters, learners=self.learners)

    def __str__(self) -> str:
        text = f"voters={_names(self.voters)}"
        if self.voters_outgoing:
            text += f" outgoing={_names(self.voters_outgoing)}"
        if self.learners:
            text += f" learners={_names(self.learners)}"
        return text


NO_MEMBERS = Configuration(voters=())
"""The configuration of a blank member: without members there is never a quorum."""


def majority_of(electorate: Sequence[NodeId], chosen: Container[NodeId]) -> bool:
    """Return whether more than half of the electorate is in `chosen`; never for an empty one."""
    return sum(node in chosen for node in electorate) > len(electorate) // 2


def majority_value(values: list[int]) -> int:
    """Return the highest value that more than half of `values` have reached; sorts the list it is given."""
    if not values:
        return 0
    values.sort()
    return values[(len(values) - 1) // 2]


class ConfigurationHistory:
    """The configurations of a log by the index of the entry that brought them."""

    __slots__ = ("_history",)

    def __init__(self, history: Sequence[tuple[Index, Configuration]]) -> None:
        self._history = list(history) or [(Index(0), NO_MEMBERS)]

    @property
    def active(self) -> Configuration:
        """Return the one in force: the latest in the log."""
        return self._history[-1][1]

    @property
    def active_index(self) -> Index:
        """Return the index of the entry that brought the active one."""
        return self._history[-1][0]

    def at(self, index: Index) -> Configuration:
        """Return the configuration as of `index`, or the oldest known."""
        for first_index, configuration in reversed(self._history):
            if first_index <= index:
                return configuration
        return self._history[0][1]

    def since(self, index: Index) -> Iterator[Configuration]:
        """Return, latest first, the configurations that may still count for someone who knows `index` committed."""
        for first_index, configuration in reversed(self._history):
            yield configuration
            if first_index <= index:
                return

    def append(self, index: Index, configuration: Configuration) -> None:
        """Put a configuration in force."""
        self._history.append((index, configuration))

    def truncate(self, first_index: Index) -> None:
        """Revert to what was in force before `first_index`."""
        while len(self._history) > 1 and self._history[-1][0] >= first_index:
            self._history.pop()

    def compact(self, first_index: Index) -> None:
        """Forget the ones that were replaced before `first_index`."""
        while len(self._history) > 1 and self._history[1][0] < first_index:
            del self._history[0]


def _names(nodes: Sequence[NodeId]) -> str:
    return "(" + " ".join(f"n{node}" for node in nodes) + ")"
