"""What managers do for the cluster: place replicas, watch who lives, and bring what is to what is meant to be.

`Administration` answers, on every node, what is asked about the cluster, and hands on to the primary what only that one
does. `placement` decides where replicas go and is pure.
"""

from quiver.manager.administration import Administration, AdministrativeRequest
from quiver.manager.changes import Heartbeats

__all__ = ["Administration", "AdministrativeRequest", "Heartbeats"]
