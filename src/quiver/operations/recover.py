"""`quiver recover`: let the survivors of a lost majority go on without the nodes that are lost for good.

For each group that cannot elect a leader any more, the survivor with the best log (the highest last term, then the
longest) becomes its only voter. It has everything that any of the survivors knows to be committed. What only the lost
nodes had is lost: that may be acknowledged records, and nobody can say which. The plan says so for each partition.

The lost nodes are fenced on every survivor before anything else is written (`identity.json`), and for all other nodes
by the metadata (`RecoverCluster`): one that returns is refused by its identity, in both directions. Afterwards the
cluster heals by itself: other survivors become voters again, and new brokers get replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

import msgspec

from quiver.errors import ConfigError, ConflictError
from quiver.features import level_of
from quiver.metadata import METADATA_GROUP, Command, CommandDone, RecoverCluster
from quiver.metadata.commands import NodeLevel, RaiseLevel, RecoveredPartition, encode_command
from quiver.metadata.rows import BrokerState, PartitionRow
from quiver.metadata.state import View
from quiver.model import GroupId, NodeId, Offset, PartitionId, Term, TopicId
from quiver.operations.survivors import Copy, StoppedNodes, Survivor, best_copy
from quiver.raft import Configuration
from quiver.raft.configuration import majority_of
from quiver.replication.forcing import force_configuration
from quiver.storage import DirectoryLock, GroupFolders, save_identity
from quiver.storage.data_directory import replicas

FENCE_LEVEL = 2
"""The feature level from which on a data directory names lost nodes, and the metadata knows `RecoverCluster`."""

SKIPPED_INDEXES: Final = 10_000
"""Indexes of the metadata that are used up, so that it goes on beyond what lost managers may have had: clients and
partitions remember indexes that they have seen, and would wait until the metadata has reached them again (`behind`)."""


class PartitionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to a partition whose majority is lost."""

    topic: str
    topic_id: TopicId
    partition: PartitionId
    group: GroupId
    replicas: tuple[NodeId, ...]
    """The replicas that are left, the one with the best log first; of a lost partition, where it begins again."""
    best: Copy | None
    """The copy that the partition goes on with; None if none is left."""
    committed_offset: Offset = Offset(0)
    """The offset up to which some survivor knows its records to be acknowledged: nothing before it is lost."""
    epoch: int

    @property
    def may_lose(self) -> str:
        """Return what may be lost, in a sentence."""
        if self.best is None:
            return "ALL records: no survivor has a replica; the partition begins again, empty, at offset 0"
        text = f"acknowledged records from offset {self.best.end_offset} on, if the lost nodes had any"
        unsure = self.best.end_offset - self.committed_offset
        if unsure:
            text += (
                f"; kept: {unsure} records from offset {self.committed_offset} on that no survivor knows to be "
                "acknowledged; if the lost nodes had acknowledged others at these offsets, those are lost"
            )
        if self.best.is_damaged:
            text += "; this replica had lost acknowledged records to damage before"
        return text


class RecoveryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `quiver recover` would do."""

    cluster: str
    survivors: tuple[NodeId, ...]
    lost: tuple[NodeId, ...]
    """Every other node of the cluster: taken as lost for good."""
    manager: NodeId
    """The survivor with the best copy of the metadata: the only manager afterwards."""
    metadata: Copy
    has_managers: bool
    """Whether the survivors still have a majority of the managers."""
    partitions: tuple[PartitionPlan, ...]
    """The partitions that lost their majority."""
    feature_level: int
    kept: int
    """How many partitions still have a majority of their replicas, and lose nothing."""
    next_group: GroupId
    """Groups from this one on are unknown to the metadata: lost commands made them. Their files are set aside."""


def lock_directories(stack: ExitStack, directories: Iterable[str]) -> None:
    """Lock the data directories of stopped nodes.

    Raises:
        ConfigError: a node runs on one of them.
    """
    for data in dict.fromkeys(directories):
        stack.enter_context(DirectoryLock(data))


async def make_plan(nodes: StoppedNodes, directories: Sequence[str]) -> RecoveryPlan:
    """Return what a recovery of these survivors would do; every node that is not among them counts as lost.

    Raises:
        ConflictError: nothing is to be recovered: no group has lost its majority (`majority_present`).
        ConfigError: the directories are not those of one cluster's nodes.
    """
    found = await nodes.inspect(directories)
    best = best_copy([one.copies[METADATA_GROUP] for one in found])
    view = await nodes.read_metadata(best)
    survivors = tuple(one.node for one in found)
    registered = {node for node, row in view.brokers.items() if row.state is not BrokerState.REMOVED}
    lost = tuple(sorted({*registered, *best.configuration.members}.difference(survivors)))
    planned = [_plan_partition(view, row, found) for _, row in sorted(view.partitions.items())]
    partitions = tuple(one for one in planned if one is not None)
    has_managers = _has_majority(best.configuration, survivors)
    if has_managers and not partitions:
        raise ConflictError(
            f"not done: the survivors {list(survivors)} have a majority of the managers and of every partition; "
            "start them, and remove the lost nodes with `quiver broker remove`",
            code="majority_present",
        )
    return RecoveryPlan(
        cluster=found[0].identity.cluster,
        survivors=survivors,
        lost=lost,
        manager=best.node,
        metadata=best,
        has_managers=has_managers,
        partitions=_place_recreated(partitions, view, survivors),
        feature_level=view.feature_level,
        kept=len(planned) - len(partitions),
        next_group=view.counters.next_group_id,
    )


async def carry_out(nodes: StoppedNodes, plan: RecoveryPlan, directories: Sequence[str], *, now_ms: int) -> None:
    """Do what a plan says; after a crash, make the plan and do it again.

    Raises:
        StorageError: the disk failed; some groups may be forced already.
    """
    storage = nodes.storage
    found = await nodes.inspect(directories)
    for one in found:  # fence first: from here on none of the survivors talks to a lost node
        lost = tuple(sorted({*one.identity.lost, *plan.lost}))
        fenced = msgspec.structs.replace(one.identity, lost=lost, level=max(one.identity.level, FENCE_LEVEL))
        await storage.submit(partial(save_identity, nodes.disk, one.data, fenced))
    for one in found:  # before the metadata skips these ids: then they would count as purged, and be removed
        folders = GroupFolders(nodes.disk, replicas(one.data))
        for group in sorted(one.copies):
            if group >= plan.next_group:
                await storage.submit(partial(folders.set_aside, group))
    for partition in plan.partitions:
        if partition.best is not None:
            term = Term(1 + max(partition.epoch, *(copy.term for copy in _copies(found, partition.group))))
            await force_configuration(storage, partition.best.directory, voter=partition.best.node, term=term)
    command = RecoverCluster(
        now_ms=now_ms,
        lost=plan.lost,
        recovered=tuple(
            RecoveredPartition(
                topic_id=one.topic_id,
                partition_id=one.partition,
                replicas=one.replicas,
                is_recreated=one.best is None,
            )
            for one in plan.partitions
        ),
    )
    term = Term(1 + max(copy.term for copy in _copies(found, METADATA_GROUP)))
    commands: list[Command[CommandDone]] = [command]
    if (level := level_of(command)) > plan.feature_level:  # all survivors are started with this program next
        nodes_known = tuple(NodeLevel(node=node, level=level) for node in (*plan.survivors, *plan.lost))
        commands.insert(0, RaiseLevel(now_ms=now_ms, feature_level=level, nodes=nodes_known))
    directory, batches = plan.metadata.directory, [encode_command(one) for one in commands]
    await force_configuration(
        storage, directory, voter=plan.manager, term=term, skipped=SKIPPED_INDEXES, batches=batches
    )


def check_name(plan: RecoveryPlan, given: str) -> None:
    """Demand that the operator has typed the cluster's name.

    Raises:
        ConfigError: it is another name; nothing was done.
    """
    if given != plan.cluster:
        raise ConfigError(
            f"not done: --yes-lose-data names {given!r}, and these nodes belong to cluster {plan.cluster!r}"
        )


# -- decisions ---------------------------------------------------------------------------------------


def _plan_partition(view: View, row: PartitionRow, found: Sequence[Survivor]) -> PartitionPlan | None:
    """Return what to do about a partition; None if its replicas still have a majority, by its log and its row."""
    copies = _copies(found, row.group_id)
    left = [copy.node for copy in copies]
    voters = Configuration(voters=row.replicas)
    if not copies and not row.epoch and _has_majority(voters, [one.node for one in found]):
        return None  # nobody ever led it: its replicas make it when they start, as those of an earlier recovery do
    best = best_copy(copies) if copies else None
    if best is not None and _has_majority(best.configuration, left) and _has_majority(voters, left):
        return None
    nodes = (best.node, *(node for node in left if node in row.replicas and node != best.node)) if best else ()
    return PartitionPlan(
        topic=view.topics[row.topic_id].name,
        topic_id=row.topic_id,
        partition=row.partition_id,
        group=row.group_id,
        replicas=nodes,
        best=best,
        committed_offset=max((copy.committed_offset for copy in copies), default=Offset(0)),
        epoch=row.epoch,
    )


def _place_recreated(
    partitions: tuple[PartitionPlan, ...], view: View, survivors: tuple[NodeId, ...]
) -> tuple[PartitionPlan, ...]:
    """Spread the partitions of which nothing is left over the surviving brokers."""
    brokers = [node for node in survivors if node in view.brokers and "broker" in view.brokers[node].roles]
    load = Counter(node for one in partitions for node in one.replicas)
    placed = []
    for one in partitions:
        if one.best is None:
            node = min(brokers or survivors, key=lambda node: (load[node], node))
            load[node] += 1
            one = msgspec.structs.replace(one, replicas=(node,))
        placed.append(one)
    return tuple(placed)


def _copies(found: Sequence[Survivor], group: GroupId) -> list[Copy]:
    return [one.copies[group] for one in found if group in one.copies]


def _has_majority(configuration: Configuration, nodes: Sequence[NodeId]) -> bool:
    return all(majority_of(electorate, nodes) for electorate in configuration.electorates)
