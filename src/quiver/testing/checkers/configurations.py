"""Who belongs to a group, as its leaders change it (I15).

A leader's log never holds two configurations that are not committed, and any two that follow each other
there have quorums that meet: whoever decides under one shares a node with whoever decides under the other.
"""

from __future__ import annotations

from itertools import combinations, pairwise

from quiver.model import GroupId, NodeId
from quiver.raft import Configuration
from quiver.testing.finding import require


class ConfigurationChecker:
    """Watch the configurations of one group."""

    def __init__(self, group: GroupId) -> None:
        self._group = group
        self._judged: dict[tuple[Configuration, Configuration], bool] = {}
        self.change_count = 0

    def lead(self, node: NodeId, unsettled: list[Configuration]) -> None:
        """Take the newest committed configuration in a leader's log and those after it, newest first."""
        self.change_count += 1
        names = " <- ".join(map(str, unsettled))
        facts = {"group": self._group, "node": node, "configurations": names}
        require(len(unsettled) <= 2, "I15", "two membership changes are pending at once", **facts)
        for newer, older in pairwise(unsettled):
            meet = self._judged.get((newer, older))
            if meet is None:
                meet = self._judged[newer, older] = quorums_meet(newer, older)
            require(meet, "I15", "two configurations have quorums that do not meet", **facts)


def quorums_meet(first: Configuration, second: Configuration) -> bool:
    """Tell whether every set of nodes that can decide for one shares a node with every one of the other."""
    return all(one & other for one in _quorums(first) for other in _quorums(second))


def _quorums(configuration: Configuration) -> list[frozenset[NodeId]]:
    """Return the smallest sets of voters that hold a majority of every electorate."""
    voters = sorted({*configuration.voters, *configuration.voters_outgoing})
    smallest: list[frozenset[NodeId]] = []
    for size in range(1, len(voters) + 1):
        for chosen in combinations(voters, size):
            picked = frozenset(chosen)
            if any(smaller <= picked for smaller in smallest):
                continue
            if all(2 * len(picked.intersection(each)) > len(each) for each in configuration.electorates):
                smallest.append(picked)
    return smallest
