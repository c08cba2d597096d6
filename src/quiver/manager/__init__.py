"""The managers' work: place replicas, track liveness, and reconcile the cluster with its desired state.

`AdminService` answers, on every node, what is asked about the cluster, and hands on to the primary what only that one
does. `Manager` runs on managers, and works on the primary: `liveness` hears heartbeats, `reconciler` does what
`repairs` finds. `placement` and `repairs` only compute.
"""

from quiver.manager.admin_service import AdminService
from quiver.manager.change_handler import HeartbeatHandler
from quiver.manager.manager import Manager, ManagerStatus
from quiver.manager.node_router import NodeRouter

__all__ = ["AdminService", "HeartbeatHandler", "Manager", "ManagerStatus", "NodeRouter"]
