"""The managers' work: place replicas, track liveness, and reconcile the cluster with its desired state.

`AdminService` runs on every node: it answers questions about the cluster and forwards changes to the primary. `Manager`
runs on managers and works on the primary: `Liveness` handles heartbeats, `Reconciler` submits the commands that
`repairs` plans, `GroupCoordinator` gives partitions to the members of consumer groups. `placement`, `repairs` and
`group_plan` only compute.
"""

from quiver.manager.admin_service import AdminService
from quiver.manager.change_handler import HeartbeatHandler
from quiver.manager.group_coordinator import GroupsStatus, GroupStatus
from quiver.manager.manager import Manager, ManagerStatus
from quiver.manager.node_router import NodeRouter

__all__ = ["AdminService", "GroupStatus", "GroupsStatus", "HeartbeatHandler", "Manager", "ManagerStatus", "NodeRouter"]
