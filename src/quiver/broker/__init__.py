"""Brokers: hold the replicas that the metadata puts on a node, and answer what clients ask of partitions.

`Broker` is the way in; `Reporter` is there for every node, also for one that holds no replicas.
"""

from quiver.broker.broker import Broker, BrokerStatus
from quiver.broker.nodes import Nodes
from quiver.broker.reporter import Introduction, Reporter

__all__ = ["Broker", "BrokerStatus", "Introduction", "Nodes", "Reporter"]
