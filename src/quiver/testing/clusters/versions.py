"""Programs of several feature levels in one simulated cluster, and what must hold of them.

In some seeds the cluster is formed by programs of the lowest level. Operators then replace the program of nodes by
newer and older ones, and try to raise the cluster's level at any time. A node of a lower level is the same code that
does not decode what is above its level: where the code writes something too early, such a node stops.

V1: nothing in a log has a version above the cluster's level when it was written.
V2: the level is raised only when every node knows it.
V3: a node stops because its program is too old only if the level was raised above what it knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quiver.errors import DecodeError, QuiverError
from quiver.features import LEVEL_MIN
from quiver.metadata.commands import InitCluster, RaiseLevel, decode_command
from quiver.model import Index
from quiver.record import Batch
from quiver.replication import CONTROL_STATE
from quiver.testing.simulator.report import require

if TYPE_CHECKING:
    from quiver.testing.clusters.host import SimulatedHost
    from quiver.testing.clusters.world import ClusterWorld

TOO_OLD_CODES = frozenset(("unknown_version", "unknown_command", "program_too_old", "bad_config"))
"""With what a program ends that is too old for its data or its cluster."""


def is_too_old(error: BaseException) -> bool:
    """Return whether a node ended because its program is too old."""
    return isinstance(error, QuiverError) and error.code in TOO_OLD_CODES


def list_old_nodes(world: ClusterWorld, level: int) -> dict[SimulatedHost, int]:
    """Return the nodes in use whose process does not know a level, with the number of their present life.

    None counts once the cluster has the level: to raise it again changes nothing, whatever runs.
    """
    view = world.view()
    if view is not None and view.counters.feature_level >= level:
        return {}
    return {host: host.lives for host in world.live_nodes() if host.is_up and host.running_level < level}


def require_raised_by_all(world: ClusterWorld, old: dict[SimulatedHost, int], level: int) -> None:
    """V2: if the level was raised, no node that is registered ran an older program all the time."""
    view = world.view()
    if view is None or view.counters.feature_level < level:
        return  # the primary's own program does not know it
    for host, life in old.items():
        is_old = host.lives == life and host.is_running and host.id in view.brokers
        require(not is_old, "V2", "the level was raised although a node does not know it", node=host.id)


def require_raised_above(world: ClusterWorld) -> None:
    """V3: every node that ended as too old was below the cluster's level."""
    view = world.view()
    level = LEVEL_MIN if view is None else view.counters.feature_level
    for node, known in world.too_old:
        require(known < level, "V3", "a node ended as too old for what it knows", node=node, knows=known, level=level)


def require_versions(batches: list[Batch], level: int) -> None:
    """V1, of a partition: no entry is above the level that the cluster has reached."""
    for batch in batches:
        payload = bytes(batch.payload()[:2]) if batch.header.is_control else b""
        if payload[:1] == CONTROL_STATE:
            require(payload[1] <= level, "V1", "an entry is above the level", index=batch.header.index, level=level)


def require_metadata_versions(batches: list[Batch], level: int) -> None:
    """V1, of the metadata: no command is above the level at its index, unless it sets the level itself."""
    if batches and batches[0].header.index == Index(1):
        level = LEVEL_MIN
    for batch in batches:
        try:
            command = decode_command(batch)
        except DecodeError:
            continue  # a fault of the schedule put it there
        if isinstance(command, InitCluster | RaiseLevel):
            level = max(level, command.feature_level)
        elif command is not None:
            version = batch.payload()[1]
            require(version <= level, "V1", "a command is above the level", index=batch.header.index, level=level)
